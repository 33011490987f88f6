//! A guest with limosa's own balloon: the device over its rings, the model of Linux's driver, and programs that
//! allocate, write and free what the driver lists, inflates and reports.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use limosa_balloon::{Balloon, Features, GuestRam, Options, Strategy};
use limosa_balloon_driver::{Blocks, Driver, Machine, Mutex, MutexGuard, Pages, RINGS, Shrinker, Worker};
use limosa_memory::dirty::{
    DirtyLog, DirtyLogs, SoftwareDirtyBitmap, SoftwareDirtyLog, UffdWpAsyncLog, UffdWpSyncLog, Writers,
};
use limosa_memory::{BlockOptions, FreePageHinting, FreePageSink, FreePagesError};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageNumber, PageRange};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::live::{TestVm, random};

const MIB: u64 = 1 << 20;
/// All of its memory: the lowest 4 MiB are not the heap's.
pub const RAM: u64 = 48 * MIB;
const HEAP: u64 = 4 * MIB;
const PROGRAMS: usize = 2;
/// The most that a program has.
const MOST: u64 = RAM / 8;
const RINGS_AT: u64 = 1 << 40;

type Rings = GuestMemoryMmap<()>;

/// Memory that a program has, and what it has written there.
#[derive(Debug, Clone)]
struct Piece {
    range: Range<u64>,
    generation: u64,
}

/// The guest.
pub struct Ballooned {
    pub vm: TestVm,
    pub balloon: Arc<Balloon>,
    free: Arc<Mutex<Blocks>>,
    shrinker: Shrinker,
    driver: Mutex<Driver<Rings, Blocks>>,
    _worker: Worker<Rings>,
    marker: SoftwareDirtyBitmap,
    programs: Vec<Mutex<Vec<Piece>>>,
    /// Blocks that were taken back from the driver without a word.
    pub taken_back: AtomicU64,
}

impl Ballooned {
    /// One with this memory, all with contents.
    pub fn new(ram: BlockOptions) -> Self {
        let vm = TestVm::of(vec![ram]);
        vm.fill(0, |_| true);
        let balloon = Arc::new(Balloon::new(Options::default()));
        balloon.set_memory(Arc::new(GuestRam::new(Arc::clone(&vm.memory), Strategy::Auto)));
        let rings = Rings::from_ranges(&[(GuestAddress(RINGS_AT), RINGS)]).unwrap();
        let machine = Machine::new(Arc::clone(&balloon), Arc::new(rings), RINGS_AT);
        let free = Arc::new(Mutex::new(Blocks::new(HEAP..RAM)));
        let worker = machine.worker().unwrap();
        let driver = Driver::probe(machine, Arc::clone(&free), Features::ALL).unwrap();
        let marker = SoftwareDirtyLog::new(&vm.memory, Writers::VCPUS).bitmap();
        Self {
            vm,
            balloon,
            free,
            shrinker: driver.shrinker(),
            driver: Mutex::new(driver),
            _worker: worker,
            marker,
            programs: (0..PROGRAMS).map(|_| Mutex::default()).collect(),
            taken_back: AtomicU64::new(0),
        }
    }

    /// Logs that see what the guest does, of one kind or another.
    pub fn logs(&self, kind: u64) -> DirtyLogs {
        let memory = || Arc::clone(&self.vm.memory);
        let log: Box<dyn DirtyLog> = match kind % 3 {
            0 => Box::new(self.marker.new_log(Writers::VCPUS)),
            1 => Box::new(UffdWpAsyncLog::new(memory()).unwrap()),
            _ => Box::new(UffdWpSyncLog::new(memory()).unwrap()),
        };
        DirtyLogs::new(Writers::VCPUS, vec![log]).unwrap()
    }

    /// Runs programs and driver until the VM is over.
    pub fn live<'s>(&'s self, scope: &'s Scope<'s, '_>, seed: u64) {
        for program in 0..PROGRAMS {
            let mut seed = seed.wrapping_mul(program as u64 * 2 + 3) | 1;
            scope.spawn(move || {
                while !self.vm.over.load(Ordering::Relaxed) {
                    seed = random(seed);
                    let stopped = self.vm.stopped.read().unwrap();
                    if !*stopped {
                        self.act(program, seed);
                    }
                    drop(stopped);
                    thread::sleep(Duration::from_micros(30 + seed % 100));
                }
            });
        }
        scope.spawn(move || {
            let (mut driver, mut turns) = (self.driver.lock(), 0_u64);
            while !self.vm.over.load(Ordering::Relaxed) {
                turns += 1;
                let stopped = self.vm.stopped.read().unwrap();
                let busy = !*stopped && driver.poll().unwrap();
                if !*stopped && turns.is_multiple_of(64) {
                    driver.report(MIB).unwrap();
                }
                drop(stopped);
                if !busy {
                    driver.wait(Duration::from_micros(200));
                }
            }
        });
    }

    fn free(&self) -> MutexGuard<'_, Blocks> {
        self.free.lock()
    }

    /// A program's next action: it writes a page that it has, takes memory, or gives some back.
    fn act(&self, program: usize, seed: u64) {
        let mut pieces = self.programs[program].lock();
        let has: u64 = pieces.iter().map(|piece| piece.range.end - piece.range.start).sum();
        let index = usize::try_from(seed >> 30).unwrap() % pieces.len().max(1);
        match (seed >> 8) % 8 {
            0 | 1 if has < MOST => {
                let length = PAGE_SIZE << ((seed >> 13) % 10);
                let Some(start) = self.allocate(length, seed) else { return };
                let piece = Piece { range: start..start + length, generation: seed >> 3 };
                self.write(&piece, piece.range.clone());
                pieces.push(piece);
            }
            2 | 3 if !pieces.is_empty() => {
                let piece = pieces.swap_remove(index);
                if let Some(page) = self.wrong(&piece, |offset, bytes| self.read(offset, bytes)) {
                    panic!("a program finds page {page} of {piece:x?} changed");
                }
                self.free().free(piece.range);
            }
            _ => {
                let Some(piece) = pieces.get_mut(index) else { return };
                // All of it again, if it is small.
                if piece.range.end - piece.range.start <= 16 * PAGE_SIZE {
                    piece.generation += 1;
                }
                self.write(piece, piece.range.clone());
            }
        }
    }

    fn allocate(&self, length: u64, seed: u64) -> Option<u64> {
        // Memory is short, every now and then: what the driver holds is taken back, without a word, and written at
        // once.
        let back = if seed.is_multiple_of(4) { self.shrinker.take_back(1) } else { Vec::new() };
        let Some(block) = back.into_iter().next() else { return self.free().allocate(length) };
        self.taken_back.fetch_add(1, Ordering::Relaxed);
        self.free().free(block.start + length..block.end);
        Some(block.start)
    }

    fn write(&self, piece: &Piece, range: Range<u64>) {
        for at in range.clone().step_by(PAGE_LEN) {
            self.vm.memory.block(0).unwrap().write(at, &contents(piece, at)).unwrap();
        }
        self.marker.mark(0, PageRange::covering(&range));
        self.vm.writes.fetch_add(1, Ordering::Relaxed);
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) {
        self.vm.memory.block(0).unwrap().read(offset, bytes).unwrap();
    }

    /// A page of a piece that does not read as it was written.
    fn wrong(&self, piece: &Piece, read: impl Fn(u64, &mut [u8])) -> Option<PageNumber> {
        let mut bytes = [0; PAGE_LEN];
        piece.range.clone().step_by(PAGE_LEN).find_map(|at| {
            read(at, &mut bytes);
            (bytes != contents(piece, at)).then_some(PageNumber::containing(at))
        })
    }

    /// Pages that programs have, or that must not be touched, and that `read` does not find as they were written; the
    /// VM is paused. And how many pages that were looked at.
    pub fn compare(&self, read: impl Fn(u64, &mut [u8])) -> (Vec<PageNumber>, u64) {
        let pieces: Vec<Piece> = self.programs.iter().flat_map(|pieces| pieces.lock().clone()).collect();
        let pages = pieces.iter().map(|piece| (piece.range.end - piece.range.start) / PAGE_SIZE).sum::<u64>();
        let below = (0..HEAP).step_by(PAGE_LEN).filter_map(|at| {
            let (mut here, mut there) = ([0; PAGE_LEN], [0; PAGE_LEN]);
            self.read(at, &mut here);
            read(at, &mut there);
            (here != there).then_some(PageNumber::containing(at))
        });
        let wrong = pieces.iter().filter_map(|piece| self.wrong(piece, &read));
        (below.chain(wrong).collect(), pages + HEAP / PAGE_SIZE)
    }

    /// Waits until the driver holds nothing back, which it does as soon as the guest runs.
    pub fn wait_given_back(&self) {
        let until = Instant::now() + Duration::from_secs(30);
        while self.shrinker.held() > 0 {
            assert!(Instant::now() < until, "the driver holds {} blocks", self.shrinker.held());
            thread::sleep(Duration::from_micros(200));
        }
    }
}

/// The balloon, on whose way to who asked every range takes up to so long.
pub struct Slow {
    pub balloon: Arc<Balloon>,
    pub most: Duration,
}

struct SlowList {
    to: Arc<dyn FreePageSink>,
    most: Duration,
    seed: AtomicU64,
}

impl FreePageHinting for Slow {
    fn request_list(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError> {
        let to: Arc<dyn FreePageSink> = match self.most.is_zero() {
            true => to,
            false => Arc::new(SlowList { to, most: self.most, seed: AtomicU64::new(0x51_0e) }),
        };
        self.balloon.request_list(to)
    }

    fn stop_list(&self) {
        self.balloon.stop_list();
    }

    fn return_pages(&self) {
        self.balloon.return_pages();
    }
}

impl FreePageSink for SlowList {
    fn add_range(&self, range: Range<u64>) {
        let seed = random(self.seed.load(Ordering::Relaxed));
        self.seed.store(seed, Ordering::Relaxed);
        thread::sleep(self.most * u32::try_from(seed % 8).unwrap() / 8);
        self.to.add_range(range);
    }

    fn complete(&self) {
        self.to.complete();
    }
}

/// Returns the contents of a page of a piece. Some are zero.
fn contents(piece: &Piece, at: u64) -> [u8; PAGE_LEN] {
    let number = random(at / PAGE_SIZE + 1).wrapping_add(piece.generation.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    if number.is_multiple_of(7) {
        return [0; PAGE_LEN];
    }
    let mut bytes = [number.to_le_bytes()[3]; PAGE_LEN];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}
