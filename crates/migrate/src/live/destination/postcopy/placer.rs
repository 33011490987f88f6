//! Pages of one channel, placed while the guest runs.
//!
//! The law: **what the guest may have changed is never overwritten.** The kernel fills only what is missing, whole host
//! pages at once; a page that comes again is dropped and counted, on whichever channel. A host page is noted as
//! received behind its placement, so what is told to a source in a recovery is there.
//!
//! A page that is present although none of the channels has brought it was accessed without waiting for it, by another
//! process that maps the memory or by a write to the file: that access has read zeros, and the contents cannot be put
//! in their place any more. That is an error, and stays one.

use limosa_page::{PAGE_LEN, PageNumber, PageRange, broken_invariant, invariant, to_usize};

use super::vm::PostcopyVm;
use crate::control::MovedPages;
use crate::error::MigrateError;

const INSIDE_HUGE_PAGE: &str = "pages that are collected are inside their huge page";
const KNOWN_BLOCK: &str = "pages are placed in blocks of the stream";

/// A huge page that is being collected from its pages of 4 KiB, which follow each other.
#[derive(Debug)]
struct Open {
    block: usize,
    pages: PageRange,
    /// The next one.
    next: PageNumber,
    contents: bool,
}

/// Places the pages of one channel.
pub(super) struct Placer<'l, 'a> {
    live: &'l PostcopyVm<'a>,
    open: Option<Open>,
    collected: Vec<u8>,
}

impl<'l, 'a> Placer<'l, 'a> {
    pub(super) fn new(live: &'l PostcopyVm<'a>) -> Self {
        Self { live, open: None, collected: Vec::new() }
    }

    /// Takes a page of the stream; `None`: it is zero.
    pub(super) fn page(&mut self, block: usize, page: PageNumber, contents: Option<&[u8]>) -> Result<(), MigrateError> {
        let known = self.live.ram.blocks().get(block);
        let known = known.ok_or_else(|| MigrateError::Protocol(format!("a page of block {block}")))?;
        let each = known.host_pages();
        if each == 1 {
            return self.place(block, PageRange::starting_at(page, 1), contents);
        }
        let wrong = |expected: PageNumber| {
            MigrateError::Protocol(format!(
                "page {} of RAM block {} where page {} of the same huge page has to follow",
                page.0,
                known.memory.name(),
                expected.0
            ))
        };
        let mut open = match self.open.take() {
            Some(open) if open.block == block && open.next == page => open,
            Some(open) => return Err(wrong(open.next)),
            None if !page.0.is_multiple_of(each) => return Err(wrong(PageNumber(page.0 / each * each))),
            None => Open { block, pages: PageRange::starting_at(page, each), next: page, contents: false },
        };
        let at = to_usize(page.0 - open.pages.start.0).saturating_mul(PAGE_LEN);
        let whole = to_usize(each).saturating_mul(PAGE_LEN);
        if self.collected.len() < whole {
            self.collected.resize(whole, 0);
        }
        let place = self
            .collected
            .get_mut(at..at.saturating_add(PAGE_LEN))
            .ok_or_else(|| broken_invariant(INSIDE_HUGE_PAGE))?;
        match contents {
            Some(contents) => place.copy_from_slice(contents),
            None => place.fill(0),
        }
        open.contents |= contents.is_some();
        open.next = open.next.saturating_add(1);
        if open.next < open.pages.end {
            self.open = Some(open);
            return Ok(());
        }
        let collected = std::mem::take(&mut self.collected);
        let contents = collected.get(..whole).ok_or_else(|| broken_invariant(INSIDE_HUGE_PAGE))?;
        let placed = self.place(block, open.pages, open.contents.then_some(contents));
        self.collected = collected;
        placed
    }

    /// Places a host page.
    fn place(&self, block: usize, pages: PageRange, contents: Option<&[u8]>) -> Result<(), MigrateError> {
        let live = self.live;
        let known = live.ram.blocks().get(block).ok_or_else(|| broken_invariant(KNOWN_BLOCK))?;
        if known.received.get(pages.start) {
            live.counts.repeated(pages.len());
            return Ok(());
        }
        let claimed = live.claimed.get(block).ok_or_else(|| broken_invariant(KNOWN_BLOCK))?;
        if claimed.set(pages.start) {
            // The other channel has it in hand. If that fails the connection ends, and the page is requested again.
            live.counts.repeated(pages.len());
            return Ok(());
        }
        let placement = match contents {
            Some(contents) => live.faults.copy(known.index, pages.start, contents),
            None => live.faults.zero(known.index, pages),
        };
        let placed = placement.map_err(|error| MigrateError::Sink(error.into())).and_then(|placement| {
            let touched = || {
                format!(
                    "page {} of RAM block {} is present but was never received: a user of the memory that does not wait \
                     for pages has touched it (a vhost back end, another process that maps the memory) and has read zeros",
                    pages.start.0,
                    known.memory.name()
                )
            };
            placement.present.map_or(Ok(()), |_| Err(MigrateError::Sink(touched().into())))
        });
        if let Err(error) = placed {
            claimed.clear(pages.start);
            return Err(error);
        }
        invariant(!known.received.get(pages.start), "a page is placed once")?;
        let count = pages.len();
        let (normal, zero) = if contents.is_some() { (count, 0) } else { (0, count) };
        live.counts.moved(normal, zero);
        live.progress.add_moved(MovedPages { normal, zero, resent: 0 });
        known.received.set_range(pages);
        live.requests.placed(block, pages.start);
        Ok(())
    }

    /// Whether the channel may end here: not in the middle of a huge page.
    pub(super) fn is_between_host_pages(&self) -> bool {
        self.open.is_none()
    }
}
