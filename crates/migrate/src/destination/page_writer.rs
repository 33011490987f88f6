//! From the receive buffers to the sink, on its own thread.
//!
//! A thread that reads notes what is to become of a buffer's pages, in order, and hands the buffer over when it is
//! full; another carries the orders out while the next buffer fills. So the kernel's two copies, out of the socket and
//! into the file, run side by side. Measured, that is the fastest of the ways to land pages (docs/benchmarks, landing).
//!
//! Each reading thread has its own buffers and a [`WriterHandle`], so that one that is held up holds up no other. The
//! law: orders are carried out in the order in which their buffers were handed over, from whichever thread, because the
//! last contents of a page count.
//!
//! Pages that are stored later ([`Aside`](super::Aside)) need no such thread: their buffers are kept.
//!
//! A sink that is [memory](PageMemory) has no such thread: every reader carries out its own orders, before its buffer
//! fills again and before each synchronization point. A page of the main channel goes through the buffer there too,
//! because the eight bytes between two pages say where the second one belongs: they would have to be read by a call of
//! their own, and a call for each page costs more than copying it out of a buffer that is in the cache.

use std::io::IoSlice;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, Scope, ScopedJoinHandle};

use limosa_page::{PAGE_LEN, PageBitmap, PageNumber, PageRange, broken_invariant, invariant, to_u64};
use limosa_stream::xbzrle;

use super::aside::{Keep, Keeping};
use crate::control::{MovedPages, Progress};
use crate::error::MigrateError;
use crate::pages::{PageError, PageMemory, PageSink, StreamSetup};

/// Buffers of a reading thread: one fills, one is emptied, one is ready for whichever is done first.
const BUFFERS: usize = 3;
/// Notes of an emptied buffer that stay allocated: those of a buffer full of pages.
const NOTES_KEPT: usize = 1024;

#[derive(Debug)]
enum PageWrite {
    /// This number of consecutive pages. The place of each in the buffer is the next of [`PageWrites::places`].
    Pages { block: usize, first: PageNumber, count: usize },
    /// A device section that comes before the pages.
    EarlySection(Vec<u8>),
    /// Pages that are zero.
    Zero { block: usize, pages: PageRange },
    /// The changes of a page: the delta's place in the buffer, and its offset in the stream.
    Delta { block: usize, page: PageNumber, place: Range<usize>, offset: u64 },
}

/// The writes that a buffer's records ask for.
#[derive(Debug, Default)]
pub(super) struct PageWrites {
    list: Vec<PageWrite>,
    places: Vec<usize>,
}

impl PageWrites {
    /// A page whose contents begin at `place` in the buffer.
    pub(super) fn page(&mut self, block: usize, page: PageNumber, place: usize) {
        self.places.push(place);
        if let Some(PageWrite::Pages { block: same, first, count }) = self.list.last_mut()
            && *same == block
            && u64::try_from(*count).is_ok_and(|count| first.0 + count == page.0)
        {
            *count += 1;
        } else {
            self.list.push(PageWrite::Pages { block, first: page, count: 1 });
        }
    }

    /// A device section that comes before the pages.
    pub(super) fn early_section(&mut self, section: Vec<u8>) {
        self.list.push(PageWrite::EarlySection(section));
    }

    /// A page that is zero.
    pub(super) fn zero(&mut self, block: usize, page: PageNumber) {
        let next = PageNumber(page.0 + 1);
        match self.list.last_mut() {
            Some(PageWrite::Zero { block: same, pages }) if *same == block && pages.end == page => pages.end = next,
            _ => self.list.push(PageWrite::Zero { block, pages: PageRange::new(page, next) }),
        }
    }

    /// A page that changes: the delta is at `place` in the buffer and at `offset` in the stream.
    pub(super) fn delta(&mut self, block: usize, page: PageNumber, place: Range<usize>, offset: u64) {
        self.list.push(PageWrite::Delta { block, page, place, offset });
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Forgets everything.
    pub(super) fn forget(&mut self) {
        self.list.clear();
        self.places.clear();
    }

    /// Gives memory back that a buffer full of pages does not need.
    pub(super) fn shrink(&mut self) {
        self.list.shrink_to(NOTES_KEPT);
    }

    /// Bytes of memory that the notes take.
    fn memory(&self) -> usize {
        let sections = self.list.iter().map(|order| match order {
            PageWrite::EarlySection(section) => section.capacity(),
            _ => 0,
        });
        let notes = self.list.capacity().saturating_mul(size_of::<PageWrite>());
        notes.saturating_add(self.places.capacity().saturating_mul(size_of::<usize>())).saturating_add(sections.sum())
    }

    /// The pages, which are noted in `seen`.
    pub(super) fn moved(&self, seen: &mut [PageBitmap]) -> MovedPages {
        let mut moved = MovedPages::default();
        for order in &self.list {
            let (block, pages) = match order {
                PageWrite::EarlySection(_) => continue,
                PageWrite::Zero { block, pages } => {
                    moved.zero += pages.len();
                    (*block, *pages)
                }
                PageWrite::Pages { block, first, count } => {
                    moved.normal += to_u64(*count);
                    (*block, PageRange::starting_at(*first, to_u64(*count)))
                }
                PageWrite::Delta { block, page, .. } => {
                    moved.normal += 1;
                    (*block, PageRange::starting_at(*page, 1))
                }
            };
            moved.resent += see(seen, block, pages);
        }
        moved
    }

    /// Hands everything to `target`, and forgets it.
    pub(super) fn carry_out(
        &mut self,
        bytes: &[u8],
        target: &mut impl PageTarget,
        batch: &mut MovedPages,
    ) -> Result<(), MigrateError> {
        let mut places = self.places.iter();
        let mut slices = Vec::new();
        for order in self.list.drain(..) {
            match order {
                PageWrite::Zero { block, pages } => {
                    batch.resent += target.put_zero(block, pages).map_err(MigrateError::Sink)?;
                    batch.zero += pages.len();
                }
                PageWrite::EarlySection(section) => target.put_early_sections(&section).map_err(MigrateError::Sink)?,
                PageWrite::Pages { block, first, count } => {
                    slices.clear();
                    for &place in places.by_ref().take(count) {
                        let page = bytes.get(place..place + PAGE_LEN);
                        slices.push(IoSlice::new(
                            page.ok_or_else(|| broken_invariant("pages are in the buffer they arrived in"))?,
                        ));
                    }
                    invariant(slices.len() == count, "each page of an order has its place in the buffer")?;
                    batch.resent += target.put_pages(block, first, &slices).map_err(MigrateError::Sink)?;
                    batch.normal += to_u64(count);
                }
                PageWrite::Delta { block, page, place, offset } => {
                    let mut contents = [0; PAGE_LEN];
                    target.read_back(block, page, &mut contents).map_err(MigrateError::Sink)?;
                    let delta =
                        bytes.get(place).ok_or_else(|| broken_invariant("a delta is in the buffer it arrived in"))?;
                    xbzrle::decode(&mut contents, delta, offset)?;
                    let page = target.put_pages(block, page, &[IoSlice::new(&contents)]);
                    batch.resent += page.map_err(MigrateError::Sink)?;
                    batch.normal += 1;
                }
            }
        }
        self.places.clear();
        Ok(())
    }
}

/// Notes that pages are mentioned; the number of those that had been before.
fn see(seen: &mut [PageBitmap], block: usize, pages: PageRange) -> u64 {
    let Some(seen) = seen.get_mut(block) else { return 0 };
    let again = seen.count_in(pages);
    seen.set_range(pages);
    again
}

/// The receiver of pages. Each method returns the number of pages that had been mentioned before, if it counts them.
pub(super) trait PageTarget {
    fn put_early_sections(&mut self, sections: &[u8]) -> Result<(), PageError>;
    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<u64, PageError>;
    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<u64, PageError>;
    fn read_back(&mut self, block: usize, page: PageNumber, into: &mut [u8; PAGE_LEN]) -> Result<(), PageError>;
}

/// A sink, and the pages of each block that were mentioned.
struct SinkTarget<'a, S: ?Sized> {
    sink: &'a mut S,
    seen: Vec<PageBitmap>,
}

impl<S: PageSink + ?Sized> PageTarget for SinkTarget<'_, S> {
    fn put_early_sections(&mut self, sections: &[u8]) -> Result<(), PageError> {
        self.sink.put_early_sections(sections)
    }

    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<u64, PageError> {
        self.sink.put_pages(block, first, pages)?;
        Ok(see(&mut self.seen, block, PageRange::starting_at(first, u64::try_from(pages.len())?)))
    }

    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<u64, PageError> {
        self.sink.put_zero(block, pages)?;
        Ok(see(&mut self.seen, block, pages))
    }

    fn read_back(&mut self, block: usize, page: PageNumber, into: &mut [u8; PAGE_LEN]) -> Result<(), PageError> {
        self.sink.read_back(block, page, into)
    }
}

impl PageTarget for &dyn PageMemory {
    fn put_early_sections(&mut self, _sections: &[u8]) -> Result<(), PageError> {
        Err("the source's VM has a virtio-mem device, whose state comes before its pages; the VM here has none".into())
    }

    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<u64, PageError> {
        PageMemory::put_pages(*self, block, first, pages)
    }

    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<u64, PageError> {
        PageMemory::put_zero(*self, block, pages)
    }

    fn read_back(&mut self, block: usize, page: PageNumber, into: &mut [u8; PAGE_LEN]) -> Result<(), PageError> {
        PageMemory::read_back(*self, block, page, into)
    }
}

/// Pages taken by all threads together.
#[derive(Debug)]
pub(super) struct PageCounts<'a> {
    normal: AtomicU64,
    zero: AtomicU64,
    resent: AtomicU64,
    progress: &'a Progress,
}

impl<'a> PageCounts<'a> {
    pub(super) fn new(progress: &'a Progress) -> Self {
        Self { normal: AtomicU64::new(0), zero: AtomicU64::new(0), resent: AtomicU64::new(0), progress }
    }

    pub(super) fn count(&self, batch: MovedPages) {
        self.normal.fetch_add(batch.normal, Relaxed);
        self.zero.fetch_add(batch.zero, Relaxed);
        self.resent.fetch_add(batch.resent, Relaxed);
        self.progress.add_moved(batch);
    }

    pub(super) fn total(&self) -> MovedPages {
        let read = |count: &AtomicU64| count.load(Relaxed);
        MovedPages { normal: read(&self.normal), zero: read(&self.zero), resent: read(&self.resent) }
    }
}

/// A buffer and the writes that its records ask for.
#[derive(Debug)]
pub(super) struct Filled {
    pub(super) bytes: Box<[u8]>,
    pub(super) orders: PageWrites,
}

impl Filled {
    /// A buffer in which nothing has come.
    pub(super) fn empty(length: usize) -> Self {
        Self { bytes: vec![0; length].into_boxed_slice(), orders: PageWrites::default() }
    }

    /// Bytes of memory that it takes.
    pub(super) fn memory(&self) -> usize {
        self.bytes.len().saturating_add(self.orders.memory())
    }
}

/// Where pages go.
pub(super) enum Target<'a, S: ?Sized> {
    /// To the sink, as they come.
    Sink(&'a mut S),
    /// Kept in their buffers, and to the sink if there is no room for these.
    Aside(Keeping<'a, S>),
}

/// A buffer on its way, and the way back.
#[derive(Debug)]
pub(super) struct FullBuffer {
    filled: Filled,
    home: Sender<FullBuffer>,
}

/// Memory that pages are read straight into, and where they are counted.
#[derive(Clone, Copy)]
pub(super) struct DirectMemory<'a> {
    pub(super) memory: &'a dyn PageMemory,
    pub(super) counts: &'a PageCounts<'a>,
}

/// A reading thread's access to the writer.
pub(super) enum WriterHandle<'a> {
    /// Gives it to the writer thread.
    Handed {
        queue: Sender<FullBuffer>,
        emptied: Receiver<FullBuffer>,
        /// The way back for the buffer that is in the reader's hands. A buffer that is away has it with it: when the
        /// last of them is lost with the thread that empties them, waiting for one ends.
        home: Option<Sender<FullBuffer>>,
    },
    /// Carries it out.
    Placed(DirectMemory<'a>),
    /// Keeps it.
    Kept(&'a dyn Keep, &'a PageCounts<'a>),
}

impl<'a> WriterHandle<'a> {
    /// Gives a full buffer away and gets an empty one.
    ///
    /// # Errors
    /// What memory failed with; if the writer thread has failed, that it has: [`PageWriter::finish`] says why.
    pub(super) fn exchange(&mut self, filled: Filled) -> Result<Filled, MigrateError> {
        match self {
            Self::Handed { queue, emptied, home } => {
                let gone = || MigrateError::Protocol("pages cannot be stored any more".into());
                let empty = home.take().and_then(|home| {
                    queue.send(FullBuffer { filled, home }).ok()?;
                    emptied.recv().ok()
                });
                let FullBuffer { filled, home: way } = empty.ok_or_else(gone)?;
                *home = Some(way);
                Ok(filled)
            }
            Self::Placed(DirectMemory { memory, counts }) => {
                let Filled { bytes, mut orders } = filled;
                let mut batch = MovedPages::default();
                orders.carry_out(&bytes, memory, &mut batch)?;
                counts.count(batch);
                Ok(Filled { bytes, orders })
            }
            Self::Kept(keep, counts) => keep.keep(filled, counts),
        }
    }

    /// The memory that pages can be read straight into.
    pub(super) fn memory(&self) -> Option<DirectMemory<'a>> {
        match self {
            Self::Handed { .. } | Self::Kept(..) => None,
            Self::Placed(direct) => Some(*direct),
        }
    }
}

/// Where everything that was read goes.
pub(super) enum PageWriter<'scope> {
    /// To the thread that empties buffers.
    Thread { queue: Sender<FullBuffer>, thread: ScopedJoinHandle<'scope, Result<(), MigrateError>> },
    /// To memory, by the thread that has read it.
    Memory(DirectMemory<'scope>),
    /// Nowhere yet.
    Kept(&'scope dyn Keep, &'scope PageCounts<'scope>),
}

impl<'scope> PageWriter<'scope> {
    /// Starts the thread over a sink, which has accepted the layout; none if it is memory, or pages are kept.
    pub(super) fn start<S: PageSink + Send + ?Sized>(
        scope: &'scope Scope<'scope, '_>,
        target: &'scope mut Target<'_, S>,
        start: &StreamSetup,
        counts: &'scope PageCounts<'scope>,
    ) -> Result<Self, MigrateError> {
        let sink = match target {
            Target::Sink(sink) => &mut **sink,
            Target::Aside(keeping) => return Ok(Self::Kept(&*keeping, counts)),
        };
        if sink.memory().is_some() {
            let sink: &'scope S = sink;
            let gone = || MigrateError::Protocol("a sink that is memory at times".into());
            return Ok(Self::Memory(DirectMemory { memory: sink.memory().ok_or_else(gone)?, counts }));
        }
        let seen = start.blocks.iter().map(|block| PageBitmap::new(block.pages())).collect();
        let mut target = SinkTarget { sink, seen };
        // Not bounded by itself: the number of buffers bounds it.
        let (queue, to_empty) = channel::<FullBuffer>();
        let thread = Builder::new().name("land".into()).spawn_scoped(scope, move || {
            for FullBuffer { filled: Filled { bytes, mut orders }, home } in to_empty {
                let mut batch = MovedPages::default();
                orders.carry_out(&bytes, &mut target, &mut batch)?;
                counts.count(batch);
                // Its reader takes none back once it has given its last buffer away; there may be others to empty all
                // the same.
                let _ = home.send(FullBuffer { filled: Filled { bytes, orders }, home: home.clone() });
            }
            Ok(())
        });
        let thread = thread.map_err(|error| MigrateError::Protocol(format!("cannot start a thread: {error}")))?;
        Ok(Self::Thread { queue, thread })
    }

    /// The handle of another reader, with empty buffers of `length` bytes in addition to the one that the reader has.
    pub(super) fn handle(&self, length: usize) -> WriterHandle<'scope> {
        match self {
            Self::Thread { queue, .. } => {
                let (home, emptied) = channel();
                for _ in 1..BUFFERS {
                    let _ = home.send(FullBuffer { filled: Filled::empty(length), home: home.clone() });
                }
                WriterHandle::Handed { queue: queue.clone(), emptied, home: Some(home) }
            }
            Self::Memory(direct) => WriterHandle::Placed(*direct),
            Self::Kept(keep, counts) => WriterHandle::Kept(*keep, counts),
        }
    }

    /// Waits until everything has gone to the sink. All handoffs must have been dropped.
    pub(super) fn finish(self) -> Result<(), MigrateError> {
        match self {
            Self::Thread { queue, thread } => {
                drop(queue);
                thread.join().unwrap_or_else(|_| Err(MigrateError::Protocol("the sink panicked".into())))
            }
            Self::Memory(_) => Ok(()),
            Self::Kept(keep, _) => keep.finish(),
        }
    }
}
