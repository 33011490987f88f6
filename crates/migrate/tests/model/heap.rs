//! A guest's heap, and the driver of a balloon that tells which of it is free: as Linux's does, it holds back what it
//! has told, and gives it back without a word when memory is short.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, Scope};
use std::time::Duration;

use limosa_memory::dirty::SoftwareDirtyBitmap;
use limosa_memory::{FreePageSink, FreePages, FreePagesError};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageNumber, PageRange};

use super::live::{TestVm, random};

/// Who has a piece of the heap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// A program, to whom the contents matter.
    Program,
    Allocator,
    /// The driver, which has told it.
    Driver,
}

/// What the driver has told, on its way through the device.
enum QueuedHint {
    Free(Arc<dyn FreePageSink>, std::ops::Range<u64>),
    All(Arc<dyn FreePageSink>),
}

struct State {
    owner: Vec<Owner>,
    /// The list that the driver works for, and where in the heap it is.
    list: Option<(Arc<dyn FreePageSink>, usize)>,
    /// Pieces that it goes on telling after it was stopped.
    late: u32,
    under_way: Vec<QueuedHint>,
}

/// A heap of pieces of some pages each, in one block of a VM.
pub struct Heap {
    vm: Arc<TestVm>,
    marker: SoftwareDirtyBitmap,
    block: usize,
    /// Where the guest sees the block.
    address: u64,
    /// Pages of a piece.
    each: u64,
    state: Mutex<State>,
    pub requests: AtomicU64,
    /// Pieces that were taken back from the driver.
    pub taken_back: AtomicU64,
}

impl Heap {
    pub fn new(vm: &Arc<TestVm>, marker: SoftwareDirtyBitmap, block: usize, each: u64) -> Arc<Self> {
        let region = vm.memory.regions().iter().find(|region| region.block == block).unwrap();
        let pieces = usize::try_from(region.pages.len() / each).unwrap();
        let owner = (0..pieces).map(|piece| if piece % 3 == 0 { Owner::Program } else { Owner::Allocator }).collect();
        Arc::new(Self {
            vm: Arc::clone(vm),
            marker,
            block,
            address: region.guest_address,
            each,
            state: Mutex::new(State { owner, list: None, late: 0, under_way: Vec::new() }),
            requests: AtomicU64::new(0),
            taken_back: AtomicU64::new(0),
        })
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

    fn pages(&self, piece: usize) -> PageRange {
        PageRange::starting_at(PageNumber(piece as u64 * self.each), self.each)
    }

    fn write(&self, pages: PageRange, fill: u8) {
        for page in pages.iter() {
            self.vm.memory.block(self.block).unwrap().write(page.offset(), &[fill; PAGE_LEN]).unwrap();
        }
        self.marker.mark(self.block, pages);
        self.vm.writes.fetch_add(1, Ordering::Relaxed);
    }

    /// What a program does with a piece; whether it could.
    fn use_it(&self, seed: u64) -> bool {
        let stopped = self.vm.stopped.read().unwrap();
        if *stopped {
            return false;
        }
        let fill = u8::try_from(seed >> 8 & 0xff).unwrap();
        let mut state = self.state.lock().unwrap();
        let piece = usize::try_from(seed >> 24).unwrap() % state.owner.len();
        let pages = self.pages(piece);
        match state.owner[piece] {
            // It writes a page of it, or gives it back.
            Owner::Program if seed % 4 < 2 => {
                let page = PageNumber(pages.start.0 + (seed >> 17) % self.each);
                self.write(PageRange::starting_at(page, 1), fill);
            }
            Owner::Program => state.owner[piece] = Owner::Allocator,
            Owner::Driver if !seed.is_multiple_of(3) => {}
            before => {
                if before == Owner::Driver {
                    self.taken_back.fetch_add(1, Ordering::Relaxed);
                }
                state.owner[piece] = Owner::Program;
                self.write(pages, fill);
            }
        }
        true
    }

    /// The driver takes the next free piece; whether it had one.
    fn drive(&self, seed: u64) -> bool {
        let stopped = self.vm.stopped.read().unwrap();
        let mut state = self.state.lock().unwrap();
        let state = &mut *state;
        if *stopped {
            return false;
        }
        let Some((list, at)) = &mut state.list else { return false };
        if state.late > 0 {
            state.late -= 1;
            if state.late == 0 {
                state.list = None;
                return false;
            }
        }
        let from = *at;
        match state.owner.iter().skip(from).position(|owner| *owner == Owner::Allocator) {
            Some(behind) => {
                let piece = from + behind;
                *at = piece + 1;
                state.owner[piece] = Owner::Driver;
                let begin = self.address + self.pages(piece).start.offset();
                let range = begin..begin + self.each * PAGE_SIZE;
                state.under_way.push(QueuedHint::Free(Arc::clone(list), range));
            }
            None => {
                state.under_way.push(QueuedHint::All(Arc::clone(list)));
                state.list = None;
            }
        }
        !seed.is_multiple_of(8)
    }

    /// The device passes something on, in any order, now or later; whether it did.
    fn pass_on(&self, seed: u64) -> bool {
        let told = {
            let mut state = self.state.lock().unwrap();
            let count = state.under_way.len();
            if count == 0 || seed.is_multiple_of(5) {
                return false;
            }
            state.under_way.swap_remove(usize::try_from(seed >> 33).unwrap() % count)
        };
        match told {
            QueuedHint::Free(list, range) => list.free(range),
            QueuedHint::All(list) => list.complete(),
        }
        true
    }

    /// Pieces whose contents matter, as pages.
    pub fn owned(&self) -> Vec<PageRange> {
        let state = self.state.lock().unwrap();
        let owned = state.owner.iter().enumerate().filter(|(_, owner)| **owner == Owner::Program);
        owned.map(|(piece, _)| self.pages(piece)).collect()
    }

    /// Pieces that the driver holds back.
    pub fn held(&self) -> usize {
        self.state.lock().unwrap().owner.iter().filter(|owner| **owner == Owner::Driver).count()
    }
}

impl FreePages for Heap {
    fn request(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError> {
        let mut state = self.state.lock().unwrap();
        (state.list, state.late) = (Some((to, 0)), 0);
        self.requests.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn stop(&self) {
        let mut state = self.state.lock().unwrap();
        if state.list.is_some() && state.late == 0 {
            // The driver notices only after it has told some more.
            state.late = 6;
        }
    }

    fn done(&self) {
        let mut state = self.state.lock().unwrap();
        state.list = None;
        for owner in state.owner.iter_mut().filter(|owner| **owner == Owner::Driver) {
            *owner = Owner::Allocator;
        }
    }
}
