//! A guest of 64 MiB with a balloon and the model of the driver.

use std::ops::Range;
use std::sync::Arc;

use limosa_balloon::{Balloon, Features, GuestRam, Options, Reclaim, Strategy};
use limosa_balloon_driver::{Blocks, Driver, Machine, RINGS};
use limosa_memory::{BlockOptions, FreePageSink, GuestMemory};
use parking_lot::Mutex;
use vm_memory::{GuestAddress, GuestMemoryMmap};

pub(crate) const MIB: u64 = 1 << 20;
/// All of its memory.
pub(crate) const RAM: u64 = 64 * MIB;
/// The start of free memory; below, it is used.
pub(crate) const USED: u64 = 16 * MIB;
const RINGS_AT: u64 = 1 << 40;

pub(crate) type Rings = GuestMemoryMmap<()>;
pub(crate) type TestDriver = Driver<Rings, Blocks>;

pub(crate) struct Guest {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) balloon: Arc<Balloon>,
    pub(crate) machine: Arc<Machine<Rings>>,
    pub(crate) free: Arc<Mutex<Blocks>>,
}

impl Guest {
    pub(crate) fn new() -> Self {
        Self::with(Options::default(), |memory| Arc::new(GuestRam::new(memory, Strategy::Auto)))
    }

    pub(crate) fn with(options: Options, reclaim: impl FnOnce(Arc<GuestMemory>) -> Arc<dyn Reclaim>) -> Self {
        let block = BlockOptions::memfd("pc.ram", RAM).map().unwrap();
        for at in 0..RAM / MIB {
            block.write(at * MIB, &vec![7; 1 << 20]).unwrap();
        }
        let memory = Arc::new(GuestMemory::new(vec![block]).unwrap());
        let balloon = Arc::new(Balloon::new(options));
        balloon.set_memory(reclaim(Arc::clone(&memory)));
        let rings = Rings::from_ranges(&[(GuestAddress(RINGS_AT), RINGS)]).unwrap();
        let machine = Machine::new(Arc::clone(&balloon), Arc::new(rings), RINGS_AT);
        Self { memory, balloon, machine, free: Arc::new(Mutex::new(Blocks::new(USED..RAM))) }
    }

    pub(crate) fn probe(&self) -> TestDriver {
        self.probe_with(Features::ALL)
    }

    pub(crate) fn probe_with(&self, features: Features) -> TestDriver {
        Driver::probe(Arc::clone(&self.machine), Arc::clone(&self.free), features).unwrap()
    }

    /// Whether the pages of `range` read as they were filled.
    pub(crate) fn is_intact(&self, range: Range<u64>) -> bool {
        range.step_by(4096).all(|at| self.byte(at) == 7)
    }

    /// Whether they read as zero.
    pub(crate) fn is_gone(&self, range: Range<u64>) -> bool {
        range.step_by(4096).all(|at| self.byte(at) == 0)
    }

    fn byte(&self, at: u64) -> u8 {
        let mut byte = [1];
        self.memory.block(0).unwrap().read(at, &mut byte).unwrap();
        byte[0]
    }

    pub(crate) fn free_ranges(&self) -> Vec<Range<u64>> {
        self.free.lock().free_ranges().collect()
    }
}

/// Polls the driver until it has nothing left to do.
pub(crate) fn poll_until_idle(driver: &mut TestDriver) {
    while driver.poll().unwrap() {}
}

/// A sink that keeps the list of free pages that it received.
#[derive(Debug, Default)]
pub(crate) struct ReceivedList {
    pub(crate) ranges: Mutex<Vec<Range<u64>>>,
    pub(crate) complete: Mutex<bool>,
}

impl ReceivedList {
    /// The ranges, ascending and merged.
    pub(crate) fn joined(&self) -> Vec<Range<u64>> {
        let mut ranges = self.ranges.lock().clone();
        ranges.sort_by_key(|range| range.start);
        let mut joined: Vec<Range<u64>> = Vec::new();
        for range in ranges {
            match joined.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => joined.push(range),
            }
        }
        joined
    }

    pub(crate) fn is_complete(&self) -> bool {
        *self.complete.lock()
    }
}

impl FreePageSink for ReceivedList {
    fn add_range(&self, range: Range<u64>) {
        self.ranges.lock().push(range);
    }

    fn complete(&self) {
        *self.complete.lock() = true;
    }
}
