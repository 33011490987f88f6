//! The model of Linux's driver, on a thread beside the device's: arrays of 256 page numbers as Linux sends them, and of 16,384.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use limosa_balloon::driver::{Blocks, Driver, Machine, Pages, RINGS};
use limosa_balloon::{Balloon, Features, GuestRam, Options as DeviceOptions, Strategy};
use limosa_memory::{BlockOptions, GuestMemory};
use rustix::fs::{FallocateFlags, fallocate};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::discards::{Discards, Pieces, Timed};
use super::taken;
use crate::Options;
use crate::frame::{Contestant, Frame, Series, interleave};
use crate::measure::{Measured, Stopwatch, millis};
use crate::report::{Report, ratio};
use crate::stream::words;

/// Page numbers of an array.
const ARRAYS: [usize; 2] = [256, 16_384];
const LIMIT: Duration = Duration::from_secs(300);

fn case(memory: u64) -> String {
    format!("{} resident, a model of the driver", words(taken(memory)))
}

fn variant(array: usize, pieces: Pieces) -> String {
    let pieces = if pieces == Pieces::Runs { "run" } else { "page" };
    format!("inflate, arrays of {array}, a discard for each {pieces}")
}

pub(super) fn rounds(options: &Options, memory: u64) -> Result<Vec<Series>> {
    let mut contestants = Vec::new();
    for pieces in [Pieces::Runs, Pieces::Pages] {
        for array in ARRAYS {
            let (case, variant) = (case(memory), variant(array, pieces));
            if options.wants(&case, &variant) {
                let run = Box::new(move |_: &Frame| inflate(memory, array, pieces));
                contestants.push(Contestant { case, variant, run });
            }
        }
    }
    if contestants.is_empty() {
        return Ok(Vec::new());
    }
    interleave(&mut contestants, options.rounds, &Frame { touch: 0 }, &mut |line| options.tell(line))
}

pub(super) fn judge(report: &mut Report, all: &[Series], memory: u64) {
    let [short, long] = ARRAYS;
    for pieces in [Pieces::Runs, Pieces::Pages] {
        for figure in ["wall", "cpu"] {
            report.ratios.extend(ratio(all, &case(memory), &variant(long, pieces), &variant(short, pieces), figure));
        }
    }
}

fn inflate(memory: u64, array: usize, pieces: Pieces) -> Result<Measured> {
    let length = taken(memory);
    let ram = Arc::new(GuestMemory::new(vec![BlockOptions::memfd("pc.ram", memory).map()?])?);
    let block = ram.block(0)?;
    let (file, _) = block.file().context("a memfd")?;
    fallocate(file, FallocateFlags::empty(), 0, length).context("so much memory for the guest")?;
    let discards = Arc::new(Discards::default());
    discards.begin(pieces);
    let balloon = Arc::new(Balloon::new(DeviceOptions::default()));
    let timed = Timed { ram: GuestRam::new(ram.clone(), Strategy::Auto), discards: discards.clone() };
    balloon.memory(Arc::new(timed));
    let rings = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(1 << 40), RINGS)])?;
    let machine = Machine::new(balloon.clone(), Arc::new(rings), 1 << 40);
    let _worker = machine.worker()?;
    let pages = Arc::new(Mutex::new(Allocator { blocks: Blocks::new(0..length), took: Duration::ZERO }));
    let mut driver = Driver::probe(machine, pages.clone(), Features::NONE)?.with_arrays_of(array);
    let watch = Stopwatch::start(&[])?;
    balloon.set_target(memory - length)?;
    let end = Instant::now() + LIMIT;
    while balloon.size().actual > memory - length {
        ensure!(Instant::now() < end, "the model's balloon is not inflated");
        if !driver.poll()? {
            thread::yield_now();
        }
    }
    let measured = discards.end(watch.stop()?);
    let took = pages.lock().map_or(Duration::ZERO, |pages| pages.took);
    Ok(measured.with("allocating_ms", millis(took)))
}

/// The guest's allocator, which looks at the clock.
struct Allocator {
    blocks: Blocks,
    took: Duration,
}

impl Pages for Allocator {
    fn allocate(&mut self, length: u64) -> Option<u64> {
        let began = Instant::now();
        let block = self.blocks.allocate(length);
        self.took += began.elapsed();
        block
    }

    fn free(&mut self, block: Range<u64>) {
        self.blocks.free(block);
    }
}
