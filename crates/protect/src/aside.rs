//! Pages of a checkpoint that wait in memory until the VM continues.
//!
//! The VM stands still while its pages are received, so writing them, and reading those that they are compared with,
//! comes later. Law: they reach the store in the order in which they came. More than there is room for goes to the
//! store at once, behind what waits.

use std::io::IoSlice;

use limosa_migrate::stored::{PageError, PageSink, StreamSetup};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageNumber, PageRange, to_u64, to_usize};

/// Pages that are put into the store at once.
const STRIDE: usize = 256;
/// Runs that may wait, for each page that there is room for.
const RUNS_A_PAGE: usize = 2;

/// Pages and zeros that have come and are not stored.
#[derive(Debug)]
pub(crate) struct Waiting {
    contents: Vec<u8>,
    runs: Vec<Run>,
    room: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    block: usize,
    pages: PageRange,
    is_zero: bool,
}

/// A sink that stores nothing before it has to.
#[derive(Debug)]
pub(crate) struct Aside<'s, S> {
    store: &'s mut S,
    waiting: &'s mut Waiting,
}

impl Waiting {
    /// Room for this many bytes of pages. Memory is taken when they come, and kept for the next checkpoint.
    pub(crate) fn new(bytes: u64) -> Self {
        let room = to_usize(bytes / PAGE_SIZE * PAGE_SIZE);
        Self { contents: Vec::with_capacity(room), runs: Vec::new(), room }
    }

    /// Forgets them: the checkpoint does not count.
    pub(crate) fn forget(&mut self) {
        self.contents.clear();
        self.runs.clear();
    }

    /// Stores them.
    pub(crate) fn store<S: PageSink>(&mut self, store: &mut S) -> Result<(), PageError> {
        let mut contents = self.contents.chunks_exact(PAGE_LEN);
        let stored = self.runs.iter().try_for_each(|run| {
            if run.is_zero {
                return store.put_zero(run.block, run.pages);
            }
            run.pages.chunks(to_u64(STRIDE)).try_for_each(|pages| {
                let slices: Vec<_> = contents.by_ref().take(to_usize(pages.len())).map(IoSlice::new).collect();
                store.put_pages(run.block, pages.start, &slices)
            })
        });
        self.forget();
        stored
    }

    /// Whether there is room for another run, with contents of `bytes`.
    fn has_room(&self, bytes: usize) -> bool {
        let runs = (self.room / PAGE_LEN).saturating_mul(RUNS_A_PAGE);
        self.room - self.contents.len() >= bytes && self.runs.len() < runs
    }

    /// Notes a run, as a part of the one before if it continues that.
    fn note(&mut self, run: Run) {
        match self.runs.last_mut() {
            Some(last) if (last.block, last.is_zero, last.pages.end) == (run.block, run.is_zero, run.pages.start) => {
                last.pages.end = run.pages.end;
            }
            _ => self.runs.push(run),
        }
    }
}

impl<'s, S: PageSink> Aside<'s, S> {
    pub(crate) fn new(store: &'s mut S, waiting: &'s mut Waiting) -> Self {
        Self { store, waiting }
    }
}

impl<S: PageSink> PageSink for Aside<'_, S> {
    fn begin(&mut self, start: &StreamSetup) -> Result<(), PageError> {
        self.store.begin(start)
    }

    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<(), PageError> {
        if !self.waiting.has_room(pages.len().saturating_mul(PAGE_LEN)) {
            self.waiting.store(self.store)?;
            return self.store.put_pages(block, first, pages);
        }
        pages.iter().for_each(|page| self.waiting.contents.extend_from_slice(page));
        self.waiting.note(Run { block, pages: PageRange::starting_at(first, to_u64(pages.len())), is_zero: false });
        Ok(())
    }

    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<(), PageError> {
        if !self.waiting.has_room(0) {
            self.waiting.store(self.store)?;
            return self.store.put_zero(block, pages);
        }
        self.waiting.note(Run { block, pages, is_zero: true });
        Ok(())
    }

    fn read_back(&mut self, block: usize, page: PageNumber, into: &mut [u8; PAGE_LEN]) -> Result<(), PageError> {
        self.waiting.store(self.store)?;
        self.store.read_back(block, page, into)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A store of one block, and how often it was written to.
    #[derive(Debug, Default, PartialEq, Eq)]
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

    fn put(sink: &mut impl PageSink, (first, count, fill): (u64, u64, u8)) {
        let count = count.min(PAGES - first);
        let range = PageRange::starting_at(PageNumber(first), count);
        if fill == 0 {
            return sink.put_zero(0, range).unwrap();
        }
        // Each of its own, so that pages that change places are noticed.
        let pages: Vec<_> = (0..count).map(|at| vec![fill.wrapping_add(u8::try_from(at).unwrap()); PAGE_LEN]).collect();
        let slices: Vec<_> = pages.iter().map(|page| IoSlice::new(page)).collect();
        sink.put_pages(0, PageNumber(first), &slices).unwrap();
    }

    proptest! {
        #[test]
        fn the_store_is_as_if_nothing_had_waited(
            writes in prop::collection::vec((0..PAGES, 1u64..9, 0u8..4), 1..60),
            room in 0u64..30,
            read in 0..PAGES,
        ) {
            let mut plain = Kept { pages: vec![0; to_usize(PAGES)], calls: 0 };
            let mut store = Kept { pages: vec![0; to_usize(PAGES)], calls: 0 };
            let mut waiting = Waiting::new(room * PAGE_SIZE + 100);
            for (at, write) in writes.iter().enumerate() {
                put(&mut plain, *write);
                let mut aside = Aside::new(&mut store, &mut waiting);
                put(&mut aside, *write);
                prop_assert!(to_u64(waiting.contents.len()) <= room * PAGE_SIZE && to_u64(waiting.runs.len()) <= 2 * room);
                if at == writes.len() / 2 {
                    let mut page = [0; PAGE_LEN];
                    Aside::new(&mut store, &mut waiting).read_back(0, PageNumber(read), &mut page).unwrap();
                    prop_assert_eq!(page[0], plain.pages[to_usize(read)]);
                }
            }
            waiting.store(&mut store).unwrap();
            prop_assert_eq!(&store.pages, &plain.pages);
            prop_assert!(waiting.contents.is_empty() && waiting.runs.is_empty());
        }
    }

    #[test]
    fn nothing_is_stored_before_the_room_is_full_and_what_is_forgotten_never_is() {
        let mut store = Kept { pages: vec![0; to_usize(PAGES)], calls: 0 };
        let mut waiting = Waiting::new(8 * PAGE_SIZE);
        (0..8).for_each(|page| put(&mut Aside::new(&mut store, &mut waiting), (page, 1, 7)));
        assert_eq!((store.calls, waiting.runs.len()), (0, 1), "runs that continue each other are one");
        put(&mut Aside::new(&mut store, &mut waiting), (9, 1, 7));
        assert_eq!((store.calls, store.pages[9]), (2, 7), "in one call, and the one behind");
        put(&mut Aside::new(&mut store, &mut waiting), (9, 1, 8));
        waiting.forget();
        waiting.store(&mut store).unwrap();
        assert_eq!((store.calls, store.pages[9]), (2, 7));
    }
}
