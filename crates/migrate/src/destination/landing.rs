//! From the receive buffer to the sink, on a thread of its own.
//!
//! The thread that reads notes what is to become of a buffer's pages, in order, and hands the buffer over when it is full;
//! another carries the orders out while the next buffer fills. So the kernel's two copies, out of the socket and into the
//! file, run side by side. Measured, that is the fastest of the ways to land pages (docs/benchmarks, landing).
//!
//! The law: orders are carried out in the order in which their records came, because the last word about a page counts.

use std::io::IoSlice;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, Scope, ScopedJoinHandle};

use limosa_page::{PAGE_LEN, PageNumber, PageRange};

use crate::error::MigrateError;
use crate::pages::PageSink;

/// Buffers in use: one fills, one is emptied, one is ready for whichever is done first.
const BUFFERS: usize = 3;

#[derive(Debug)]
enum Order {
    /// So many consecutive pages; where each lies in the buffer is the next of [`Orders::places`].
    Pages { block: usize, first: PageNumber, count: usize },
    /// Pages that are zero.
    Zero { block: usize, pages: PageRange },
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

    /// A page that is zero.
    pub(super) fn zero(&mut self, block: usize, page: PageNumber) {
        let next = PageNumber(page.0 + 1);
        match self.list.last_mut() {
            Some(Order::Zero { block: same, pages }) if *same == block && pages.end == page => pages.end = next,
            _ => self.list.push(Order::Zero { block, pages: PageRange::new(page, next) }),
        }
    }

    /// Hands everything to the sink, and forgets it.
    fn carry_out<S: PageSink + ?Sized>(&mut self, bytes: &[u8], sink: &mut S) -> Result<(), MigrateError> {
        let mut places = self.places.iter();
        let mut slices = Vec::new();
        for order in self.list.drain(..) {
            match order {
                Order::Zero { block, pages } => sink.put_zero(block, pages),
                Order::Pages { block, first, count } => {
                    let whole = |&place: &usize| IoSlice::new(bytes.get(place..place + PAGE_LEN).unwrap_or_default());
                    slices.clear();
                    slices.extend(places.by_ref().take(count).map(whole));
                    sink.put_pages(block, first, &slices)
                }
            }
            .map_err(MigrateError::Sink)?;
        }
        self.places.clear();
        Ok(())
    }
}

/// A buffer and what is to become of it.
pub(super) type Filled = (Box<[u8]>, Orders);

/// The thread that empties buffers.
#[derive(Debug)]
pub(super) struct Landing<'scope> {
    filled: SyncSender<Filled>,
    emptied: Receiver<Filled>,
    thread: ScopedJoinHandle<'scope, Result<(), MigrateError>>,
}

impl<'scope> Landing<'scope> {
    /// Starts the thread over `sink`, which has accepted the layout. `length` is a buffer's, in bytes.
    pub(super) fn start<S: PageSink + Send + ?Sized>(
        scope: &'scope Scope<'scope, '_>,
        sink: &'scope mut S,
        length: usize,
    ) -> Result<Self, MigrateError> {
        let (filled, to_empty) = sync_channel::<Filled>(BUFFERS);
        let (empty, emptied) = sync_channel(BUFFERS);
        for _ in 1..BUFFERS {
            // There is room for all buffers there are.
            let _ = empty.try_send((vec![0; length].into_boxed_slice(), Orders::default()));
        }
        let thread = Builder::new().name("land".into()).spawn_scoped(scope, move || {
            for (bytes, mut orders) in to_empty {
                orders.carry_out(&bytes, sink)?;
                // Nobody takes it back once the last buffer has been given away; there may be others to empty all the same.
                let _ = empty.send((bytes, orders));
            }
            Ok(())
        });
        let thread = thread.map_err(|error| MigrateError::Protocol(format!("cannot start a thread: {error}")))?;
        Ok(Self { filled, emptied, thread })
    }

    /// Gives a full buffer away and gets an empty one. `None` if the thread has failed: [`finish`](Self::finish) says why.
    pub(super) fn exchange(&self, full: Filled) -> Option<Filled> {
        self.filled.send(full).ok()?;
        self.emptied.recv().ok()
    }

    /// Waits until everything has gone to the sink.
    pub(super) fn finish(self) -> Result<(), MigrateError> {
        let Self { filled, emptied, thread } = self;
        drop((filled, emptied));
        thread.join().unwrap_or_else(|_| Err(MigrateError::Protocol("the sink panicked".into())))
    }
}
