//! A guest with a heap whose programs take, write and free pieces, and a balloon whose driver hints the free ones.
//!
//! The driver holds what it has hinted, and its shrinker takes it back without notifying the device when memory is
//! short. The device passes hints on late and in any order ([`limosa_balloon_driver::Heap`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, Scope};
use std::time::Duration;

use limosa_balloon_driver::{Heap as Pieces, Owner};
use limosa_memory::dirty::SoftwareDirtyBitmap;
use limosa_memory::{FreePageHinting, FreePageSink, FreePagesError};
use limosa_page::{PAGE_LEN, PageNumber, PageRange};

use super::live::{TestVm, random};

/// A heap of pieces of some pages each, in one block of a VM.
pub struct Heap {
    vm: Arc<TestVm>,
    marker: SoftwareDirtyBitmap,
    pieces: Pieces,
    pub requests: AtomicU64,
    /// Pieces that were taken back from the driver.
    pub taken_back: AtomicU64,
}

impl Heap {
    pub fn new(vm: &Arc<TestVm>, marker: SoftwareDirtyBitmap, block: usize, each: u64) -> Arc<Self> {
        let pieces = Pieces::new(&vm.memory, block, each).unwrap();
        for piece in (0..pieces.pieces()).step_by(3) {
            pieces.take(piece, false);
        }
        let (requests, taken_back) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { vm: Arc::clone(vm), marker, pieces, requests, taken_back })
    }

    /// Runs the programs, the driver and the device, until the VM is over.
    pub fn live<'s>(self: &Arc<Self>, scope: &'s Scope<'s, '_>, seed: u64, pause: Duration) {
        for (number, role) in [Self::use_it, Self::drive, Self::pass_on].into_iter().enumerate() {
            let (heap, mut seed) = (Arc::clone(self), seed.wrapping_mul(number as u64 * 2 + 3) | 1);
            scope.spawn(move || {
                while !heap.vm.over.load(Ordering::Relaxed) {
                    seed = random(seed);
                    if !role(&heap, seed) || (number == 0 && !pause.is_zero()) {
                        thread::sleep(pause.max(Duration::from_micros(20)));
                    }
                    let percent = heap.vm.throttled.load(Ordering::SeqCst).min(99);
                    if number == 0 && percent > 0 {
                        thread::sleep(
                            Duration::from_micros(10) * u32::try_from(percent / (100 - percent) + 1).unwrap(),
                        );
                    }
                }
            });
        }
    }

    fn write(&self, pages: PageRange, fill: u8) {
        for page in pages.iter() {
            self.vm.memory.block(self.pieces.block()).unwrap().write(page.offset(), &[fill; PAGE_LEN]).unwrap();
        }
        self.marker.mark(self.pieces.block(), pages);
        self.vm.writes.fetch_add(1, Ordering::Relaxed);
    }

    /// A program uses a piece. Returns whether it could.
    fn use_it(&self, seed: u64) -> bool {
        let stopped = self.vm.stopped.read().unwrap();
        if *stopped {
            return false;
        }
        let fill = u8::try_from(seed >> 8 & 0xff).unwrap();
        let piece = usize::try_from(seed >> 24).unwrap() % self.pieces.pieces();
        let pages = self.pieces.pages(piece);
        // Half of the time it frees a piece that it has.
        if seed % 4 >= 2 && self.pieces.free(piece) {
            return true;
        }
        match self.pieces.take(piece, seed.is_multiple_of(3)) {
            Some(Owner::Program) => {
                let page = PageNumber(pages.start.0 + (seed >> 17) % pages.len());
                self.write(PageRange::starting_at(page, 1), fill);
            }
            Some(before) => {
                self.taken_back.fetch_add(u64::from(before == Owner::Driver), Ordering::Relaxed);
                self.write(pages, fill);
            }
            None => {}
        }
        true
    }

    /// The driver works, if the guest runs. Returns whether it did something.
    fn drive(&self, _seed: u64) -> bool {
        let stopped = self.vm.stopped.read().unwrap();
        !*stopped && self.pieces.poll().unwrap()
    }

    /// The device passes a hint on, or does so later. Returns whether it did.
    fn pass_on(&self, seed: u64) -> bool {
        !seed.is_multiple_of(5) && self.pieces.hints().pass_on(seed >> 33)
    }

    /// The pages of pieces whose contents matter.
    pub fn owned(&self) -> Vec<PageRange> {
        let owners = self.pieces.owners().into_iter().enumerate();
        owners.filter(|(_, owner)| *owner == Owner::Program).map(|(piece, _)| self.pieces.pages(piece)).collect()
    }

    /// Lets the driver continue, as it does where the VM runs now. Returns the number of pieces that it still holds.
    pub fn held_when_resumed(&self) -> usize {
        while self.pieces.poll().unwrap() {}
        self.pieces.held()
    }
}

impl FreePageHinting for Heap {
    fn request_list(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.pieces.hints().request_list(to)
    }

    fn stop_list(&self) {
        self.pieces.hints().stop_list();
    }

    fn return_pages(&self) {
        self.pieces.hints().return_pages();
    }
}
