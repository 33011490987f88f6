//! Memory that was never populated: holes are asked for first, or read like everything else.
//!
//! The guest's memory is shared, in a memfd, as a VMM has it whose devices run in other processes. Reading a hole of it
//! makes the kernel fill the hole.

use std::os::fd::AsFd;

use anyhow::{Context, Result, ensure};
use limosa_memory::{BlockOptions, MemoryBlock};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageKind, PageRange, ScanRanges, ZeroMethod};
use rustix::fs::fstat;

use crate::content::fill_random;
use crate::frame::{Contestant, Frame, Series, interleave};
use crate::measure::{Measured, Stopwatch};
use crate::options::Options;
use crate::report::{Report, ratio};

/// Bytes of the guest, if nothing was said of cold pages: half of those.
const MEMORY: u64 = 1 << 30;
/// One page of this number is populated.
const EVERY: [u64; 3] = [64, 16, 1];

const ASKED: &str = "holes asked for first";
const READ: &str = "every page read";

fn case(every: u64) -> String {
    if every == 1 { "holes, none".into() } else { format!("holes, one page of {every} populated") }
}

pub(super) fn rounds(options: &Options) -> Result<Vec<Series>> {
    let memory = options.size.map_or(MEMORY, |cold| cold / 2).next_multiple_of(2 << 20);
    let mut contestants = Vec::new();
    for every in EVERY {
        for (variant, asks) in [(ASKED, true), (READ, false)] {
            if options.wants(&case(every), variant) {
                contestants.push(Contestant {
                    case: case(every),
                    variant: variant.into(),
                    run: Box::new(move |_: &Frame| run(memory, every, asks)),
                });
            }
        }
    }
    if contestants.is_empty() {
        return Ok(Vec::new());
    }
    interleave(&mut contestants, options.rounds, &Frame { touch: 0 }, &mut |line| options.tell(line))
}

/// Finds the pages with contents of a fresh guest, and says what it takes afterwards.
fn run(memory: u64, every: u64, asks: bool) -> Result<Measured> {
    let block = BlockOptions::memfd("ram", memory).map()?;
    let mut page = vec![0; PAGE_LEN];
    fill_random(&mut page);
    let populated = block.pages().len() / every;
    for number in 0..populated {
        block
            .write(number * every * PAGE_SIZE, &page)
            .with_context(|| format!("not enough memory for {memory} bytes"))?;
    }
    let before = allocated(&block)?;
    let watch = Stopwatch::start(&[])?;
    let found = if asks {
        let runs: Vec<PageRange> = block.populated(block.pages())?.runs().collect();
        pages_with_contents(&block, &runs)
    } else {
        pages_with_contents(&block, &[block.pages()])
    };
    let measured = watch.stop()?;
    ensure!(found == populated, "{found} pages have contents, expected {populated}");
    let more = allocated(&block)?.saturating_sub(before);
    Ok(measured.with("pages", block.pages().len()).with("mib_allocated", more >> 20))
}

fn pages_with_contents(block: &MemoryBlock, ranges: &[PageRange]) -> u64 {
    let runs = ScanRanges::new(block.guest_pages(), ranges, ZeroMethod::best());
    runs.filter(|run| run.kind == PageKind::Data).map(|run| run.pages.len()).sum()
}

/// Bytes that the memory takes.
fn allocated(block: &MemoryBlock) -> Result<u64> {
    let (file, _) = block.file().context("memory in a memfd")?;
    Ok(u64::try_from(fstat(file.as_fd()).context("fstat")?.st_blocks)?.saturating_mul(512))
}

pub(super) fn judge(report: &mut Report, all: &[Series]) {
    report.ratios.extend(EVERY.into_iter().filter_map(|every| ratio(all, &case(every), ASKED, READ, "wall")));
}
