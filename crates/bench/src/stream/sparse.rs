//! Memory that is mostly empty, in three sizes: what a page costs must not depend on how much memory is around it.
//!
//! One page of sixteen has contents, scattered, so that every word of a bitmap and every part of a mapping is visited.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};
use limosa_page::{PAGE_LEN, to_u64};
use rustix::fs::{MemfdFlags, memfd_create};

use super::ends::Source;
use super::send_options::SendOptions;
use super::transport::{PER_PAGE, Transport};
use crate::content::fill_random;
use crate::frame::{Contestant, Frame, Series, interleave};
use crate::options::Options;
use crate::report::{Bound, NOT_RUN, Report, Target, figure, gib_or_mib};

/// How often the size of the full memory.
const TIMES: [u64; 3] = [1, 4, 16];
/// One page of this number has contents.
const EVERY: u64 = 16;
const VARIANT: &str = "limosa, 2 channels";
const CHANNELS: u8 = 2;

/// Measured: of the same size twice, in one run, a page's cost differs by up to a tenth.
const FLAT: f64 = 1.2;

fn case(memory: u64) -> String {
    format!("{}, one page of {EVERY}", gib_or_mib(memory))
}

pub(super) fn rounds(options: &Options, memory: u64) -> Result<Vec<Series>> {
    let sizes = TIMES.map(|times| memory.saturating_mul(times));
    let mut sources = Vec::new();
    for size in sizes.into_iter().filter(|size| options.wants(&case(*size), VARIANT)) {
        options.tell(&format!("filling one page of {EVERY} of {}", gib_or_mib(size)));
        sources.push((size, RefCell::new(Source::start(&sparse(size)?, size, None)?)));
    }
    let run = |size: u64, source: &RefCell<Source<'_>>| {
        let frame = Frame { touch: options.touch.unwrap_or(size / EVERY) };
        source.borrow_mut().send(Transport::Tcp, SendOptions::multifd(CHANNELS), || frame.touch())
    };
    let mut contestants: Vec<_> = sources
        .iter()
        .map(|(size, source)| Contestant {
            case: case(*size),
            variant: VARIANT.into(),
            run: Box::new(move |_: &Frame| run(*size, source)),
        })
        .collect();
    if contestants.is_empty() {
        return Ok(Vec::new());
    }
    interleave(&mut contestants, options.rounds, &Frame { touch: 0 }, &mut |line| options.tell(line))
}

/// A file in memory in which one page of [`EVERY`] was ever written.
fn sparse(bytes: u64) -> Result<File> {
    let fd: OwnedFd = memfd_create("limosa-bench", MemfdFlags::CLOEXEC).context("memfd_create")?;
    let file = File::from(fd);
    file.set_len(bytes).with_context(|| format!("a memfd of {bytes} bytes"))?;
    let mut page = vec![0; PAGE_LEN];
    fill_random(&mut page);
    let page_len = to_u64(PAGE_LEN);
    for number in 0..bytes / page_len / EVERY {
        // Not the same page of every group: strides meet the same sets of a cache.
        let at = number * EVERY + number % EVERY;
        file.write_all_at(&page, at * page_len).with_context(|| format!("not enough memory for {bytes} bytes"))?;
    }
    Ok(file)
}

pub(super) fn judge(report: &mut Report, all: &[Series], memory: u64) {
    let cost = |times: u64| Some(figure(all, &case(memory.saturating_mul(times)), VARIANT, PER_PAGE)?.median);
    for times in TIMES.into_iter().skip(1) {
        let got = cost(times).zip(cost(1)).map(|(large, small)| large / small);
        let (large, small) = (gib_or_mib(memory.saturating_mul(times)), gib_or_mib(memory));
        let name = format!("sparse: CPU for a page of {large} / of {small}");
        report.targets.push(Target::new(name, Bound::AtMost(FLAT), got, NOT_RUN));
    }
}
