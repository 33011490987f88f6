//! Pages of a packet, read by one call to where each of them belongs.
//!
//! **Law: the places are guest memory, so no reference to them is made**; the kernel is given their addresses, and they
//! stay mapped because the memory that vouches for them is borrowed until the call returns.
#![allow(unsafe_code, reason = "has the kernel write to guest memory")]

use libc::iovec;
use limosa_channel::Channel;
use limosa_page::{PAGE_SIZE, PageNumber, PageRange};

use super::page_writer::DirectMemory;
use crate::control::MovedPages;
use crate::error::MigrateError;

/// The lists of one channel, kept for the next packet.
#[derive(Debug, Default)]
pub(super) struct Scatter {
    /// Runs in the order of the payload.
    runs: Vec<PageRange>,
    sorted: Vec<PageRange>,
    list: Vec<iovec>,
}

// SAFETY: the list is empty between two calls of `take`.
unsafe impl Send for Scatter {}

impl Scatter {
    /// Reads the pages of `block` at these byte offsets, which lie inside it, in this order.
    pub(super) fn take(
        &mut self,
        channel: &Channel,
        direct: DirectMemory<'_>,
        block: usize,
        offsets: &[u64],
    ) -> Result<(), MigrateError> {
        let DirectMemory { memory, counts } = direct;
        if offsets.is_empty() {
            return Ok(());
        }
        runs_of(offsets, &mut self.runs);
        self.sorted.clone_from(&self.runs);
        self.sorted.sort_unstable_by_key(|run| run.start);
        self.sorted.dedup_by(|next, run| {
            let follows = run.end == next.start;
            if follows {
                run.end = next.end;
            }
            follows
        });
        memory.prepare(block, &self.sorted).map_err(MigrateError::Sink)?;
        self.list.clear();
        for run in &self.runs {
            self.list.push(memory.iovec(block, *run).map_err(MigrateError::Sink)?);
        }
        // SAFETY: `PageMemory` promises that its places are mapped, writable and without references while it is
        // borrowed.
        let got = unsafe { channel.read_exact_raw(&self.list) };
        self.list.clear();
        got?;
        let resent = self.runs.iter().map(|run| memory.mark_filled(block, *run)).sum();
        counts.count(MovedPages { normal: self.runs.iter().map(PageRange::len).sum(), zero: 0, resent });
        Ok(())
    }
}

/// Pages that follow each other, as runs, in their order.
fn runs_of(offsets: &[u64], runs: &mut Vec<PageRange>) {
    runs.clear();
    for offset in offsets {
        let page = PageNumber(offset / PAGE_SIZE);
        match runs.last_mut() {
            Some(run) if run.end == page => run.end = page.saturating_add(1),
            _ => runs.push(PageRange::starting_at(page, 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_keep_the_order_of_the_payload() {
        let mut runs = Vec::new();
        runs_of(&[0x3000, 0x4000, 0x1000, 0x2000, 0x2000].map(|offset: u64| offset), &mut runs);
        let wanted = [(3, 5), (1, 3), (2, 3)].map(|(start, end)| PageRange::new(PageNumber(start), PageNumber(end)));
        assert_eq!(runs, wanted);
    }
}
