//! The cells about vectors, and the memory that each group of them sends.

use std::cell::RefCell;
use std::fs::File;

use anyhow::{Context, Result};
use limosa_page::PAGE_LEN;

use super::ends::Neighbour;
use super::records::{self, Cell, Contents};
use super::stage::Stage;
use super::{headers, neighbour};
use crate::content::random_memory;
use crate::frame::{Frame, Series, interleave};
use crate::namespaces::Cable;
use crate::options::Options;
use crate::process::first_core;
use crate::raw::Mapping;
use crate::report::{Report, gib_or_mib};

/// The published size of the guest, and one that no cache holds.
const SIZES: [u64; 2] = [512 << 20, 4 << 30];

/// Cells that send the same memory.
struct Group {
    memory: u64,
    contents: Contents,
    cells: Vec<Cell>,
}

impl Group {
    fn new(memory: u64, contents: Contents, large: bool) -> Self {
        let memory = memory.next_multiple_of(2 << 20);
        Self { memory, contents, cells: Cell::of(memory, contents, large) }
    }

    fn has_wanted(&self, options: &Options) -> bool {
        self.cells.iter().any(|cell| cell.wanted(options).next().is_some())
    }
}

/// The cells, and the network between the ends of some of them.
pub(super) struct Vectors {
    /// Each interleaved separately, since the memory of all at once would be too much. The first one's is that of
    /// headers and the neighbour, too.
    groups: Vec<Group>,
    /// Or the reason why it is missing.
    cable: Result<Cable, String>,
}

impl Vectors {
    /// Lays the cable, where that can be done. With `--size` there is that size alone.
    pub(super) fn new(options: &Options) -> Self {
        let [published, large] = SIZES;
        let size = options.size.unwrap_or(published);
        let mut groups = vec![Group::new(size, Contents::Full, false), Group::new(size, Contents::Half, false)];
        if options.size.is_none() {
            groups.push(Group::new(large, Contents::Full, true));
        }
        let why = |error| format!("no network namespaces, which take root or `unshare -r`: {error:#}");
        Self { groups, cable: Cable::lay().map_err(why) }
    }

    /// Whether records are wanted, over any link.
    pub(super) fn has_wanted(&self, options: &Options) -> bool {
        self.groups.iter().any(|group| group.has_wanted(options))
    }

    /// Runs those that are wanted.
    pub(super) fn rounds(&self, options: &Options) -> Result<Vec<Series>> {
        let mut all = Vec::new();
        for (number, group) in self.groups.iter().enumerate() {
            let (first, memory) = (number == 0, group.memory);
            let chased = first && neighbour::wanted(options, memory);
            let by_header = first && headers::wanted(options, memory);
            if !chased && !by_header && !group.has_wanted(options) {
                continue;
            }
            options.tell(&format!("filling {}", gib_or_mib(memory)));
            let content = content(memory, group.contents)?;
            let stage = Stage::new(options, &content, memory, self.cable.as_ref().ok())?;
            let neighbour = chased.then(|| Neighbour::start(first_core()?)).transpose()?.map(RefCell::new);
            let mut contestants = records::contestants(options, &stage, &group.cells);
            if by_header {
                contestants.extend(headers::contestants(options, &stage, memory));
            }
            if let Some(neighbour) = &neighbour {
                contestants.extend(neighbour::contestants(options, &stage, neighbour, memory));
            }
            let mut tell = |line: &str| options.tell(line);
            all.extend(interleave(&mut contestants, options.rounds, &Frame { touch: 0 }, &mut tell)?);
        }
        Ok(all)
    }

    pub(super) fn judge(&self, report: &mut Report, all: &[Series]) {
        let no_cable = self.cable.as_ref().err().map(String::as_str);
        for Group { cells, .. } in &self.groups {
            records::judge(report, all, cells, no_cable);
        }
        if let Some(Group { memory, cells, .. }) = self.groups.first() {
            records::judge_fastest(report, all, cells);
            headers::compare(report, all, *memory);
            neighbour::compare(report, all, *memory);
        }
    }
}

fn content(memory: u64, contents: Contents) -> Result<File> {
    let file = random_memory(memory)?;
    if contents == Contents::Half {
        let len = usize::try_from(memory).context("--size")?;
        let mut mapping = Mapping::of_file(&file, len).with_context(|| format!("mapping {memory} bytes"))?;
        mapping.bytes_mut().chunks_mut(PAGE_LEN).step_by(2).for_each(|page| page.fill(0));
    }
    Ok(file)
}
