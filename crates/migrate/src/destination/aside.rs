//! Pages that stay in the buffers in which they came, until there is time for them.
//!
//! A VM stands still while a checkpoint of it is received. Copying its pages, comparing them and writing them comes
//! later: the buffers are kept with the writes that their records ask for, and used again for the next checkpoint, so
//! that the pause allocates nothing either. The law: writes are carried out in the order in which their buffers were
//! handed over. What there is no room for goes to the sink at once, behind everything that waits.

use std::io::IoSlice;
use std::mem;

use limosa_page::{PAGE_LEN, PageBitmap, PageNumber, PageRange, to_usize};
use limosa_stream::RamBlock;
use parking_lot::Mutex;

use super::page_writer::{Filled, PageCounts, PageTarget};
use crate::control::MovedPages;
use crate::error::MigrateError;
use crate::pages::{PageError, PageSink, StreamSetup};

/// Pages of a checkpoint that have come and are not stored: see
/// [`Checkpoints::receive_aside`](super::Checkpoints::receive_aside).
#[derive(Debug)]
pub struct Aside {
    /// Buffers whose writes wait, in the order in which they were handed over.
    waiting: Vec<Filled>,
    /// Emptied ones.
    spare: Vec<Filled>,
    /// Bytes that both may take, and that they take.
    room: usize,
    taken: usize,
    /// The pages of each block that were mentioned in this checkpoint.
    seen: Vec<PageBitmap>,
}

impl Aside {
    /// Room for this many bytes of buffers and of notes on what they hold. Memory is taken when pages come, and kept
    /// for the next checkpoint.
    pub fn new(bytes: u64) -> Self {
        Self { waiting: Vec::new(), spare: Vec::new(), room: to_usize(bytes), taken: 0, seen: Vec::new() }
    }

    /// Forgets the pages: their checkpoint does not count.
    pub fn forget(&mut self) {
        for filled in mem::take(&mut self.waiting) {
            let before = filled.memory();
            self.spare(filled, before);
        }
        for seen in &mut self.seen {
            seen.clear_range(PageRange::starting_at(PageNumber(0), seen.len()));
        }
    }

    /// Stores the pages.
    ///
    /// # Errors
    /// The sink failed, or the changes of a page (XBZRLE) do not fit the page. The pages are forgotten.
    pub fn store<S: PageSink + ?Sized>(&mut self, sink: &mut S) -> Result<(), MigrateError> {
        let stored = self.empty(sink);
        self.forget();
        stored
    }

    fn empty<S: PageSink + ?Sized>(&mut self, sink: &mut S) -> Result<(), MigrateError> {
        let (mut target, mut done) = (Stored(sink), Ok(()));
        for mut filled in mem::take(&mut self.waiting) {
            let before = filled.memory();
            done = done.and_then(|()| filled.orders.carry_out(&filled.bytes, &mut target, &mut MovedPages::default()));
            self.spare(filled, before);
        }
        done
    }

    /// Keeps a buffer for the next pages that took `before` bytes, but for the notes of a stream that has few pages and
    /// many zeros.
    fn spare(&mut self, mut filled: Filled, before: usize) {
        filled.orders.forget();
        filled.orders.shrink();
        self.taken = self.taken.saturating_sub(before.saturating_sub(filled.memory()));
        self.spare.push(filled);
    }

    /// Takes an emptied buffer of this length, the one that was emptied last.
    fn take_spare(&mut self, length: usize) -> Option<Filled> {
        let at = self.spare.iter().rposition(|filled| filled.bytes.len() == length)?;
        let next = self.spare.remove(at);
        self.taken = self.taken.saturating_sub(next.memory());
        Some(next)
    }

    /// Expects a checkpoint of this layout.
    fn begin(&mut self, setup: &StreamSetup) {
        let pages = setup.blocks.iter().map(RamBlock::pages);
        if !pages.clone().eq(self.seen.iter().map(PageBitmap::len)) {
            self.seen = pages.map(PageBitmap::new).collect();
        }
    }

    /// Takes a buffer, and returns an empty one of its length.
    fn keep<S: PageSink + ?Sized>(&mut self, filled: Filled, sink: &mut S) -> Result<Filled, MigrateError> {
        let length = filled.bytes.len();
        self.taken = self.taken.saturating_add(filled.memory());
        self.waiting.push(filled);
        let mut next = self.take_spare(length);
        let more = if next.is_none() { length } else { 0 };
        if self.taken.saturating_add(more) > self.room {
            self.empty(sink)?;
            next = next.or_else(|| self.take_spare(length));
            // Notes have grown, or the buffers are those of another channel.
            while self.taken > self.room
                && let Some(dropped) = self.spare.pop()
            {
                self.taken = self.taken.saturating_sub(dropped.memory());
            }
        }
        Ok(next.unwrap_or_else(|| Filled::empty(length)))
    }
}

/// Buffers that are kept for a checkpoint, by the threads that read its channels.
pub(super) struct Keeping<'a, S: ?Sized> {
    shared: Mutex<Shared<'a, S>>,
}

struct Shared<'a, S: ?Sized> {
    aside: &'a mut Aside,
    sink: &'a mut S,
    /// The failure of the sink: what waits is not whole.
    failure: Option<MigrateError>,
}

impl<'a, S: PageSink + Send + ?Sized> Keeping<'a, S> {
    pub(super) fn new(aside: &'a mut Aside, sink: &'a mut S, setup: &StreamSetup) -> Self {
        aside.begin(setup);
        Self { shared: Mutex::new(Shared { aside, sink, failure: None }) }
    }
}

/// See [`Keeping`], whose sink does not matter to a thread that reads.
pub(super) trait Keep: Sync {
    /// Takes a buffer with its writes, and returns an empty one.
    fn keep(&self, filled: Filled, counts: &PageCounts<'_>) -> Result<Filled, MigrateError>;

    /// Returns the failure of the sink, if it has failed.
    fn finish(&self) -> Result<(), MigrateError>;
}

impl<S: PageSink + Send + ?Sized> Keep for Keeping<'_, S> {
    fn keep(&self, filled: Filled, counts: &PageCounts<'_>) -> Result<Filled, MigrateError> {
        let mut shared = self.shared.lock();
        let Shared { aside, sink, failure } = &mut *shared;
        if failure.is_none() {
            counts.count(filled.orders.moved(&mut aside.seen));
            match aside.keep(filled, *sink) {
                Ok(empty) => return Ok(empty),
                Err(error) => *failure = Some(error),
            }
        }
        Err(MigrateError::Protocol("pages cannot be stored any more".into()))
    }

    fn finish(&self) -> Result<(), MigrateError> {
        self.shared.lock().failure.take().map_or(Ok(()), Err)
    }
}

/// A sink whose pages were counted before.
struct Stored<'a, S: ?Sized>(&'a mut S);

impl<S: PageSink + ?Sized> PageTarget for Stored<'_, S> {
    fn put_early_sections(&mut self, sections: &[u8]) -> Result<(), PageError> {
        self.0.put_early_sections(sections)
    }

    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<u64, PageError> {
        self.0.put_pages(block, first, pages).map(|()| 0)
    }

    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<u64, PageError> {
        self.0.put_zero(block, pages).map(|()| 0)
    }

    fn read_back(&mut self, block: usize, page: PageNumber, into: &mut [u8; PAGE_LEN]) -> Result<(), PageError> {
        self.0.read_back(block, page, into)
    }
}

#[cfg(test)]
mod tests {
    use limosa_page::to_u64;
    use proptest::prelude::*;

    use super::*;
    use crate::control::Handle;

    /// A store of one block, and how often it was written to.
    #[derive(Debug, PartialEq, Eq)]
    struct Kept {
        pages: Vec<u8>,
        calls: usize,
    }

    impl PageSink for Kept {
        fn begin(&mut self, _: &StreamSetup) -> Result<(), PageError> {
            Ok(())
        }

        fn put_pages(&mut self, _: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<(), PageError> {
            self.calls += 1;
            for (at, page) in pages.iter().enumerate() {
                assert_eq!(page.len(), PAGE_LEN);
                self.pages[to_usize(first.0) + at] = page[0];
            }
            Ok(())
        }

        fn put_early_sections(&mut self, _: &[u8]) -> Result<(), PageError> {
            Ok(())
        }

        fn put_zero(&mut self, _: usize, pages: PageRange) -> Result<(), PageError> {
            self.calls += 1;
            pages.iter().for_each(|page| self.pages[to_usize(page.0)] = 0);
            Ok(())
        }

        fn read_back(&mut self, _: usize, page: PageNumber, into: &mut [u8; PAGE_LEN]) -> Result<(), PageError> {
            into.fill(self.pages[to_usize(page.0)]);
            Ok(())
        }
    }

    const PAGES: u64 = 40;
    /// Bytes of a buffer.
    const LENGTH: usize = 4 * PAGE_LEN;

    fn kept() -> Kept {
        Kept { pages: vec![0; to_usize(PAGES)], calls: 0 }
    }

    /// The writes of a buffer: pages from `first` on, each of its own contents, or zeros.
    fn filled(first: u64, count: u64, fill: u8) -> Filled {
        let mut filled = Filled::empty(LENGTH);
        for (place, page) in (first..(first + count).min(PAGES)).enumerate() {
            if fill == 0 {
                filled.orders.zero(0, PageNumber(page));
            } else {
                filled.bytes[place * PAGE_LEN..][..PAGE_LEN].fill(fill + u8::try_from(place).unwrap());
                filled.orders.page(0, PageNumber(page), place * PAGE_LEN);
            }
        }
        filled
    }

    fn keep(aside: &mut Aside, sink: &mut Kept, writes: Filled) -> MovedPages {
        aside.seen.resize_with(1, || PageBitmap::new(PAGES));
        let handle = Handle::new();
        let counts = PageCounts::new(&handle.progress);
        let keeping = Keeping { shared: Mutex::new(Shared { aside, sink, failure: None }) };
        let empty = keeping.keep(writes, &counts).unwrap();
        keeping.finish().unwrap();
        assert!(empty.bytes.len() == LENGTH && empty.orders.is_empty());
        counts.total()
    }

    proptest! {
        #[test]
        fn the_store_is_as_if_nothing_had_waited(
            writes in prop::collection::vec((0..PAGES, 1u64..5, 0u8..4), 1..60),
            room in 0u64..12,
        ) {
            let (mut plain, mut store) = (kept(), kept());
            let mut aside = Aside::new(room * to_u64(LENGTH));
            for checkpoint in writes.chunks(20) {
                for &(first, count, fill) in checkpoint {
                    let mut writes = filled(first, count, fill);
                    let bytes = writes.bytes.clone();
                    writes.orders.carry_out(&bytes, &mut Stored(&mut plain), &mut MovedPages::default()).unwrap();
                    keep(&mut aside, &mut store, filled(first, count, fill));
                    let held: usize = aside.waiting.iter().chain(&aside.spare).map(Filled::memory).sum();
                    prop_assert_eq!(held, aside.taken);
                    // One buffer is in the hands of its reader.
                    prop_assert!(held <= to_usize(room.max(1)) * LENGTH + LENGTH);
                }
                aside.store(&mut store).unwrap();
                prop_assert_eq!(&store.pages, &plain.pages);
                prop_assert!(aside.waiting.is_empty() && aside.seen[0].is_empty());
            }
        }
    }

    #[test]
    fn nothing_is_stored_before_the_room_is_full_and_what_is_forgotten_never_is() {
        let (mut aside, mut store) = (Aside::new(to_u64(4 * LENGTH)), kept());
        let counts = keep(&mut aside, &mut store, filled(0, 2, 7));
        assert_eq!((counts.normal, counts.zero, counts.resent), (2, 0, 0));
        let counts = keep(&mut aside, &mut store, filled(1, 3, 0));
        assert_eq!((counts.normal, counts.zero, counts.resent), (0, 3, 1));
        assert_eq!(store.calls, 0);
        keep(&mut aside, &mut store, filled(8, 1, 5));
        assert!(store.calls > 0 && store.pages[..4] == [7, 0, 0, 0], "{store:?}");
        let calls = store.calls;
        keep(&mut aside, &mut store, filled(20, 1, 9));
        assert_eq!(store.calls, calls, "emptied buffers are used again");
        aside.forget();
        aside.store(&mut store).unwrap();
        assert_eq!(store.pages[20], 0);
    }

    #[test]
    fn a_stream_of_scattered_zeros_is_kept_within_the_room() {
        let (mut aside, mut store) = (Aside::new(to_u64(64 * LENGTH)), kept());
        for _ in 0..200 {
            let mut scattered = Filled::empty(LENGTH);
            scattered.orders.early_section(vec![0; 3 * LENGTH]);
            // As many records as fit a buffer.
            for at in 0..to_u64(LENGTH / 8) {
                scattered.orders.zero(0, PageNumber(at * 2 % PAGES));
            }
            keep(&mut aside, &mut store, scattered);
            assert!(aside.taken <= 70 * LENGTH, "{}", aside.taken);
        }
        assert!(store.calls > 0);
        aside.forget();
        assert_eq!(aside.taken, aside.spare.iter().map(Filled::memory).sum::<usize>());
    }
}
