//! `limosa inspect --changed`: the pages that a VM which maps a snapshot has made its own.

use std::fmt;
use std::process::ExitCode;

use comfy_table::Cell;
use limosa_console::{check_stdout, print_out, quantity};
use limosa_page::{PAGE_SIZE, PageRange};
use limosa_qemu::{BlockPages, MappedVm, ProcessIdentity};
use limosa_snapshot::Snapshot;
use serde_json::Value;

use crate::args::{InspectArgs, MappedVmArgs};
use crate::inspect::{number, plain, table};
use crate::job;
use crate::packed;

/// Ranges that people are shown.
const LARGEST: usize = 10;

pub(crate) fn run(args: &InspectArgs) -> anyhow::Result<ExitCode> {
    let snapshot = packed::open(&args.file)?;
    let vm = find(&args.vm, &snapshot)?;
    let changed = Changed { pid: vm.pid(), name: name_of(vm.pid()), blocks: vm.changed()? };
    if args.json {
        print_out!("{changed}");
    } else {
        show(&changed, &args.file.display());
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

/// Finds the VM that maps a snapshot.
pub(crate) fn find(args: &MappedVmArgs, snapshot: &Snapshot) -> anyhow::Result<MappedVm> {
    match (&args.qmp, args.pid) {
        (Some(monitor), _) => Ok(MappedVm::of_monitor(&job::connect(monitor)?, snapshot)?),
        (None, Some(pid)) => Ok(MappedVm::of_process(pid, snapshot)?),
        // The command line asks for one of the two.
        (None, None) => Err(anyhow::anyhow!("no VM given: name its monitor with --qmp, or its process with --pid")),
    }
}

fn name_of(pid: u32) -> String {
    ProcessIdentity::of(pid).map_or_else(String::new, |process| process.name)
}

/// The pages that a VM has made its own. Its `Display` is the object for programs, which is written piece by piece:
/// the ranges of a large VM would be many times as long in memory as its bitmap.
struct Changed {
    pid: u32,
    name: String,
    blocks: Vec<BlockPages>,
}

impl Changed {
    fn pages(&self) -> u64 {
        self.blocks.iter().map(|block| block.pages.count()).sum()
    }

    /// The largest ranges, with the block of each.
    fn largest(&self) -> Vec<(&BlockPages, PageRange)> {
        let mut largest: Vec<(&BlockPages, PageRange)> = Vec::new();
        for (block, run) in self.blocks.iter().flat_map(|block| block.pages.runs().map(move |run| (block, run))) {
            let place = largest.partition_point(|(_, other)| other.len() >= run.len());
            if place < LARGEST {
                largest.insert(place, (block, run));
                largest.truncate(LARGEST);
            }
        }
        largest
    }
}

impl fmt::Display for Changed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, name, blocks } = self;
        write!(f, r#"{{"pid":{pid},"name":{},"changed":{},"blocks":["#, Value::from(name.as_str()), self.pages())?;
        for (index, BlockPages { name, pages, .. }) in blocks.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, r#"{comma}{{"name":{},"pages":{}"#, Value::from(name.as_str()), pages.len())?;
            write!(f, r#","changed":{},"ranges":["#, pages.count())?;
            for (index, run) in pages.runs().enumerate() {
                let comma = if index > 0 { "," } else { "" };
                write!(f, "{comma}[{},{}]", run.start.0, run.end.0)?;
            }
            write!(f, "]}}")?;
        }
        write!(f, "]}}")
    }
}

fn show(changed: &Changed, file: &dyn fmt::Display) {
    let pages = changed.pages();
    print_out!(
        "{} (pid {}) has made {} pages ({}) of {file} its own",
        plain(&changed.name),
        changed.pid,
        quantity::count(pages),
        quantity::bytes(pages.saturating_mul(PAGE_SIZE))
    );
    let mut blocks = table(&["RAM block", "pages", "changed", "ranges"], 1);
    for block in &changed.blocks {
        let ranges = block.pages.runs().count();
        blocks.add_row([
            Cell::new(&block.name),
            number(block.pages.len()),
            number(block.pages.count()),
            number(limosa_page::to_u64(ranges)),
        ]);
    }
    print_out!("\n{blocks}");
    let largest = changed.largest();
    if largest.is_empty() {
        return;
    }
    let mut ranges = table(&["largest ranges", "first byte", "pages"], 1);
    for (block, run) in largest {
        ranges.add_row([Cell::new(&block.name), Cell::new(format!("{:#x}", run.start.offset())), number(run.len())]);
    }
    print_out!("\n{ranges}");
}
