//! The memory that postcopy has to send: a pure function of the pages that precopy has sent.
//!
//! The law: **a page is at the destination, or it is sent, or it is zero at both ends, or the guest has no use for it
//! and it becomes zero; and what is not there is discarded there.** A destination places whole host pages and each of
//! them once, so a host page that it has in part counts as missing.

use limosa_page::{PageBitmap, PageNumber, PageRange};
use limosa_stream::{Command, DISCARD_LIMIT, EncodeError, RamBlock};

/// The state of a block's pages when the VM has stopped.
#[derive(Debug)]
pub(super) struct Known<'a> {
    /// Written since they were sent.
    pub(super) dirty: &'a PageBitmap,
    /// Sent at least once, as contents or as zero.
    pub(super) sent: &'a PageBitmap,
    /// Never sent, because they were zero, or because the guest has said that they are free.
    pub(super) zero: &'a PageBitmap,
}

/// The plan for the block.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Pages that are not known to be zero, and not known to be free.
    pub(super) stored: PageBitmap,
    /// Of them, those that the destination has. All other pages of the block are discarded there.
    pub(super) already: PageBitmap,
}

/// The plan of a block whose host pages have `each` pages at the destination.
pub(super) fn plan(known: &Known<'_>, each: u64) -> Plan {
    let mut already = known.sent.clone();
    already.subtract(known.dirty);
    let mut stored = known.zero.clone();
    stored.subtract(known.sent);
    stored.subtract(known.dirty);
    stored.invert();
    if each > 1 {
        // A host page is there as a whole, or zero as a whole, or sent as a whole.
        let pages = PageRange::whole_block(stored.len());
        for host_page in pages.chunks(each) {
            if already.count_in(host_page) < host_page.len() {
                already.clear_range(host_page);
                if stored.count_in(host_page) > 0 {
                    stored.set_range(host_page);
                }
            }
        }
    }
    Plan { stored, already }
}

/// A destination that was sent no discard would wait for ever on its own memory: so one host page at least is taken for
/// missing.
pub(super) fn discard_something(plans: &mut [Plan], each: &[u64]) {
    let whole = |plan: &Plan| plan.already.count() == plan.already.len();
    if plans.iter().all(whole)
        && let Some((plan, each)) = plans.iter_mut().zip(each).find(|(plan, _)| !plan.already.is_empty())
    {
        plan.already.clear_range(PageRange::starting_at(PageNumber(0), *each));
    }
}

/// Appends the commands that discard what the destination does not have.
pub(super) fn encode_discards(blocks: &[RamBlock], plans: &[Plan], out: &mut Vec<u8>) -> Result<(), EncodeError> {
    for (block, plan) in blocks.iter().zip(plans) {
        let mut runs = plan.already.gaps().peekable();
        while runs.peek().is_some() {
            let ranges = runs.by_ref().take(DISCARD_LIMIT).map(|run| run.bytes()).collect();
            Command::RamDiscard { block: block.name.clone(), ranges }.encode(out)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bitmap(pages: &[bool]) -> PageBitmap {
        let mut bitmap = PageBitmap::new(pages.len() as u64);
        for (page, _) in (0..).zip(pages).filter(|(_, set)| **set) {
            bitmap.set(PageNumber(page));
        }
        bitmap
    }

    #[test]
    fn if_all_is_there_something_is_sent_again() {
        let none = PageBitmap::new(8);
        let known = Known { dirty: &none, sent: &PageBitmap::full(8), zero: &none };
        let mut plans = [plan(&known, 4), plan(&known, 1)];
        discard_something(&mut plans, &[4, 1]);
        assert_eq!((plans[0].already.count(), plans[1].already.count()), (4, 8));
        let mut out = Vec::new();
        encode_discards(&[RamBlock::new("a", 8 * 4096), RamBlock::new("b", 8 * 4096)], &plans, &mut out).unwrap();
        let (command, length) = Command::decode(&out).unwrap().unwrap();
        let ranges = std::iter::once(0..0x4000).collect();
        assert_eq!(command, Command::RamDiscard { block: "a".into(), ranges });
        assert_eq!(length, out.len());
    }

    #[test]
    fn scattered_pages_take_as_many_commands_as_they_need() {
        let pages: Vec<bool> = (0..20_000).map(|page| page % 2 == 0).collect();
        let none = PageBitmap::new(20_000);
        let plan = plan(&Known { dirty: &none, sent: &bitmap(&pages), zero: &none }, 1);
        let mut out = Vec::new();
        encode_discards(&[RamBlock::new("a", 20_000 * 4096)], std::slice::from_ref(&plan), &mut out).unwrap();
        let (mut at, mut found) = (0, PageBitmap::new(20_000));
        while let Some((Command::RamDiscard { ranges, .. }, length)) = Command::decode(&out[at..]).unwrap() {
            ranges.iter().for_each(|range| found.set_range(PageRange::inside_bytes(range)));
            at += length;
        }
        found.invert();
        assert_eq!((at, found), (out.len(), plan.already));
    }

    proptest! {
        #[test]
        fn every_page_is_there_or_sent_or_zero(
            pages in prop::collection::vec((any::<bool>(), any::<bool>(), any::<bool>()), 1..20), each in 1u64..5,
        ) {
            // Whole host pages, as a block has them.
            let pages: Vec<_> = pages.iter().flat_map(|page| vec![*page; 1]).collect();
            let whole = pages.len().next_multiple_of(usize::try_from(each).unwrap());
            let at = |index: usize| *pages.get(index).unwrap_or(&(false, false, true));
            let dirty = bitmap(&(0..whole).map(|index| at(index).0).collect::<Vec<_>>());
            let sent = bitmap(&(0..whole).map(|index| at(index).1).collect::<Vec<_>>());
            let zero = bitmap(&(0..whole).map(|index| at(index).2 && !at(index).1).collect::<Vec<_>>());
            let plan = plan(&Known { dirty: &dirty, sent: &sent, zero: &zero }, each);
            for page in 0..whole {
                let number = PageNumber(page as u64);
                let (stored, already) = (plan.stored.get(number), plan.already.get(number));
                prop_assert!(!already || (stored && sent.get(number) && !dirty.get(number)));
                prop_assert!(stored || (zero.get(number) && !dirty.get(number)));
                let host_page = PageRange::starting_at(PageNumber(number.0 / each * each), each);
                for other in host_page.iter() {
                    prop_assert_eq!((plan.stored.get(other), plan.already.get(other)), (stored, already));
                }
                if each == 1 {
                    prop_assert_eq!(already, sent.get(number) && !dirty.get(number));
                }
            }
        }
    }
}
