//! From the receive buffers to the sink, on a thread of its own.
//!
//! A thread that reads notes what is to become of a buffer's pages, in order, and hands the buffer over when it is full;
//! another carries the orders out while the next buffer fills. So the kernel's two copies, out of the socket and into the
//! file, run side by side. Measured, that is the fastest of the ways to land pages (docs/benchmarks, landing).
//!
//! Each reading thread has a [`Lane`]: buffers of its own, so that one that is held up holds up no other. The law: orders
//! are carried out in the order in which their buffers were handed over, whichever lane they came on, because the last
//! word about a page counts.

use std::io::IoSlice;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, Scope, ScopedJoinHandle};

use limosa_page::{PAGE_LEN, PageBitmap, PageNumber, PageRange};
use limosa_stream::xbzrle;

use crate::error::MigrateError;
use crate::pages::{PageSink, StreamStart};
use crate::progress::{Moved, Progress};

/// Buffers of a lane: one fills, one is emptied, one is ready for whichever is done first.
const BUFFERS: usize = 3;

#[derive(Debug)]
enum Order {
    /// So many consecutive pages; where each lies in the buffer is the next of [`Orders::places`].
    Pages { block: usize, first: PageNumber, count: usize },
    /// A device section that comes before the pages.
    EarlySection(Vec<u8>),
    /// Pages that are zero.
    Zero { block: usize, pages: PageRange },
    /// What changed in a page: the delta's place in the buffer, and its offset in the stream.
    Delta { block: usize, page: PageNumber, place: Range<usize>, offset: u64 },
}

/// What is to become of a buffer's records.
#[derive(Debug, Default)]
pub(super) struct Orders {
    list: Vec<Order>,
    places: Vec<usize>,
}

impl Orders {
    /// A page whose contents begin at `place` in the buffer.
    pub(super) fn page(&mut self, block: usize, page: PageNumber, place: usize) {
        self.places.push(place);
        if let Some(Order::Pages { block: same, first, count }) = self.list.last_mut()
            && *same == block
            && u64::try_from(*count).is_ok_and(|count| first.0 + count == page.0)
        {
            *count += 1;
        } else {
            self.list.push(Order::Pages { block, first: page, count: 1 });
        }
    }

    /// A device section that comes before the pages.
    pub(super) fn early_section(&mut self, section: Vec<u8>) {
        self.list.push(Order::EarlySection(section));
    }

    /// A page that is zero.
    pub(super) fn zero(&mut self, block: usize, page: PageNumber) {
        let next = PageNumber(page.0 + 1);
        match self.list.last_mut() {
            Some(Order::Zero { block: same, pages }) if *same == block && pages.end == page => pages.end = next,
            _ => self.list.push(Order::Zero { block, pages: PageRange::new(page, next) }),
        }
    }

    /// A page that changes: the delta lies at `place` in the buffer and stands at `offset` in the stream.
    pub(super) fn delta(&mut self, block: usize, page: PageNumber, place: Range<usize>, offset: u64) {
        self.list.push(Order::Delta { block, page, place, offset });
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Hands everything to the sink, and forgets it.
    fn carry_out<S: PageSink + ?Sized>(
        &mut self,
        bytes: &[u8],
        sink: &mut S,
        tally: &mut Tally<'_>,
    ) -> Result<(), MigrateError> {
        let mut places = self.places.iter();
        let mut slices = Vec::new();
        for order in self.list.drain(..) {
            match order {
                Order::Zero { block, pages } => {
                    sink.put_zero(block, pages).map_err(MigrateError::Sink)?;
                    tally.batch.zero += tally.see(block, pages);
                }
                Order::EarlySection(section) => sink.put_early_sections(&section).map_err(MigrateError::Sink)?,
                Order::Pages { block, first, count } => {
                    let whole = |&place: &usize| IoSlice::new(bytes.get(place..place + PAGE_LEN).unwrap_or_default());
                    slices.clear();
                    slices.extend(places.by_ref().take(count).map(whole));
                    sink.put_pages(block, first, &slices).map_err(MigrateError::Sink)?;
                    let pages = u64::try_from(count).unwrap_or(u64::MAX);
                    tally.batch.normal += tally.see(block, PageRange::starting_at(first, pages));
                }
                Order::Delta { block, page, place, offset } => {
                    let mut contents = [0; PAGE_LEN];
                    sink.read_back(block, page, &mut contents).map_err(MigrateError::Sink)?;
                    xbzrle::decode(&mut contents, bytes.get(place).unwrap_or_default(), offset)?;
                    sink.put_pages(block, page, &[IoSlice::new(&contents)]).map_err(MigrateError::Sink)?;
                    tally.batch.normal += tally.see(block, PageRange::starting_at(page, 1));
                }
            }
        }
        self.places.clear();
        Ok(())
    }
}

/// What has gone to the sink.
struct Tally<'a> {
    /// Pages of each block that were mentioned.
    seen: Vec<PageBitmap>,
    batch: Moved,
    total: Moved,
    progress: &'a Progress,
}

impl Tally<'_> {
    /// Notes that pages were mentioned; how many they are.
    fn see(&mut self, block: usize, pages: PageRange) -> u64 {
        if let Some(seen) = self.seen.get_mut(block) {
            self.batch.resent += seen.count_in(pages);
            seen.set_range(pages);
        }
        pages.len()
    }

    fn count(&mut self) {
        let batch = std::mem::take(&mut self.batch);
        self.total.normal += batch.normal;
        self.total.zero += batch.zero;
        self.total.resent += batch.resent;
        self.progress.moved(batch);
    }
}

/// A buffer and what is to become of it.
pub(super) type Filled = (Box<[u8]>, Orders);

/// A buffer on its way, and the way back.
struct Delivery {
    filled: Filled,
    home: Sender<Delivery>,
}

/// One reading thread's buffers.
pub(super) struct Lane {
    queue: Sender<Delivery>,
    emptied: Receiver<Delivery>,
    /// The way back for the buffer that is in the reader's hands. A buffer that is away has it with it: when the last of them
    /// is lost with the thread that empties them, waiting for one ends.
    home: Option<Sender<Delivery>>,
}

impl Lane {
    /// Gives a full buffer away and gets an empty one. `None` if the thread has failed: [`Landing::finish`] says why.
    pub(super) fn exchange(&mut self, filled: Filled) -> Option<Filled> {
        let home = self.home.take()?;
        self.queue.send(Delivery { filled, home }).ok()?;
        let empty = self.emptied.recv().ok()?;
        self.home = Some(empty.home);
        Some(empty.filled)
    }
}

/// The thread that empties buffers.
pub(super) struct Landing<'scope> {
    queue: Sender<Delivery>,
    thread: ScopedJoinHandle<'scope, Result<Moved, MigrateError>>,
}

impl<'scope> Landing<'scope> {
    /// Starts the thread over `sink`, which has accepted the layout.
    pub(super) fn start<S: PageSink + Send + ?Sized>(
        scope: &'scope Scope<'scope, '_>,
        sink: &'scope mut S,
        start: &StreamStart,
        progress: &'scope Progress,
    ) -> Result<Self, MigrateError> {
        let seen = start.blocks.iter().map(|block| PageBitmap::new(block.pages())).collect();
        let mut tally = Tally { seen, batch: Moved::default(), total: Moved::default(), progress };
        // Not bounded by itself: the number of buffers bounds it.
        let (queue, to_empty) = channel::<Delivery>();
        let thread = Builder::new().name("land".into()).spawn_scoped(scope, move || {
            for Delivery { filled: (bytes, mut orders), home } in to_empty {
                orders.carry_out(&bytes, sink, &mut tally)?;
                tally.count();
                // Nobody takes it back once the last buffer has been given away; there may be others to empty all the same.
                let _ = home.send(Delivery { filled: (bytes, orders), home: home.clone() });
            }
            Ok(tally.total)
        });
        let thread = thread.map_err(|error| MigrateError::Protocol(format!("cannot start a thread: {error}")))?;
        Ok(Self { queue, thread })
    }

    /// Another lane, with empty buffers of `length` bytes beside the one that its reader has.
    pub(super) fn lane(&self, length: usize) -> Lane {
        let (home, emptied) = channel();
        for _ in 1..BUFFERS {
            let filled = (vec![0; length].into_boxed_slice(), Orders::default());
            let _ = home.send(Delivery { filled, home: home.clone() });
        }
        Lane { queue: self.queue.clone(), emptied, home: Some(home) }
    }

    /// Waits until everything has gone to the sink: what that was. All lanes must have been dropped.
    pub(super) fn finish(self) -> Result<Moved, MigrateError> {
        let Self { queue, thread } = self;
        drop(queue);
        thread.join().unwrap_or_else(|_| Err(MigrateError::Protocol("the sink panicked".into())))
    }
}
