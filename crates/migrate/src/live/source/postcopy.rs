//! From precopy to postcopy: the VM stops here, runs there, and the rest follows.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use limosa_channel::Channel;
use limosa_page::{BrokenInvariant, PageBitmap, PageRange, broken, invariant};
use limosa_stream::RamBlock;

use super::guest::GuestSource;
use super::link::{Link, Terms};
use super::outcome::{Ended, Recoverable};
use super::owned::Owned;
use super::phase::Phase;
use super::run::Attempt;
use super::switch::{self, Known, Plan};
use crate::control::Control;
use crate::error::MigrateError;
use crate::live::LiveVm;
use crate::pages::PageSource;
use crate::progress::Progress;
use crate::source::host_pages::{pages_of, with_page_sizes};
use crate::source::postcopy::{OpenPreempt, PackageSent, PostcopyOptions, PostcopySource, PostcopyStats};

/// Whether a live migration goes on in postcopy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Postcopy {
    /// Never.
    #[default]
    Off,
    /// When it is [asked for](Control::start_postcopy), or if precopy is given up for it. The destination has to expect it.
    Allowed,
    /// At once: the VM stops, and all of its memory follows. A guest that is [asked for its free
    /// pages](super::LiveSource::with_free_pages) runs until it has told them, and those do not follow.
    AtOnce,
}

/// What postcopy needs to know of precopy: one bitmap a block each.
#[derive(Debug)]
pub(super) struct SentBitmap {
    /// Pages sent at least once.
    pub(super) sent: Vec<PageBitmap>,
    /// Pages left out because they are zero, or free in the end, and not sent since.
    pub(super) zero: Vec<PageBitmap>,
}

impl SentBitmap {
    pub(super) fn new<S: PageSource>(source: &S) -> Self {
        let none = || source.start().blocks.iter().map(|block| PageBitmap::new(block.pages())).collect();
        Self { sent: none(), zero: none() }
    }

    /// Notes that pages of a block were sent.
    pub(super) fn sent(&mut self, block: usize, runs: &[PageRange]) -> Result<(), BrokenInvariant> {
        let (sent, zero) = self.of(block)?;
        for run in runs {
            sent.set_range(*run);
            zero.clear_range(*run);
        }
        Ok(())
    }

    /// Notes that pages of a block are zero, and were not sent.
    pub(super) fn left_out(&mut self, block: usize, run: PageRange) -> Result<(), BrokenInvariant> {
        let (sent, zero) = self.of(block)?;
        sent.clear_range(run);
        zero.set_range(run);
        Ok(())
    }

    fn of(&mut self, block: usize) -> Result<(&mut PageBitmap, &mut PageBitmap), BrokenInvariant> {
        let of_block = self.sent.get_mut(block).zip(self.zero.get_mut(block));
        of_block.ok_or_else(|| broken("pages that were sent belong to blocks of the stream"))
    }
}

/// Memory that the destination of a postcopy does not have.
pub(super) struct Unmoved {
    /// Pages that were written and not sent.
    pub(super) dirty: Vec<PageBitmap>,
    pub(super) sent: SentBitmap,
}

/// Whether the destination has loaded the devices of a postcopy: shared with the thread that reads the return path.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    /// The package is about to go out: an answer to its PING that came before is none.
    asked: AtomicBool,
    at: OnceLock<Instant>,
}

impl Loaded {
    /// Notes the answer to the package's PING; false if that is none.
    pub(super) fn answered(&self) -> bool {
        self.asked.load(Ordering::Acquire) && {
            let _ = self.at.set(Instant::now());
            true
        }
    }

    /// When the answer came: the VM runs there since.
    pub(super) fn at(&self) -> Option<Instant> {
        self.at.get().copied()
    }
}

/// A VM that stands still here, ready to run there without its memory.
pub(super) struct Switch<'v> {
    /// The memory that follows, and the devices.
    guest: GuestSource<'v>,
    /// Pages that the destination has, by block.
    already: Vec<PageBitmap>,
    /// The commands that discard all others.
    discards: Vec<u8>,
}

impl<'e, 'v, V: LiveVm + ?Sized> Attempt<'_, 'e, 'v, V> {
    /// Plans what follows when the VM, which stands still here, runs there.
    pub(super) fn switch(&mut self, unmoved: Unmoved) -> Result<Phase<'e, 'v>, MigrateError> {
        let Unmoved { dirty, sent: SentBitmap { sent, mut zero } } = unmoved;
        let mut guest = GuestSource::new(self.vm.vm());
        guest.devices = self.device_sections()?.bytes().to_vec();
        let blocks = with_page_sizes(&guest.start().blocks, self.terms.page_sizes)?;
        let each: Vec<u64> = blocks.iter().map(pages_of).collect();
        // What is free, and was not sent since nor written, is as good as zero: a request for it is answered at once.
        zero.iter_mut().zip(self.link.windows.take_free()).for_each(|(zero, free)| zero.union_with(&free));
        let known = dirty.iter().zip(&sent).zip(&zero);
        let known = known.map(|((dirty, sent), zero)| Known { dirty, sent, zero });
        let mut plans: Vec<Plan> = known.zip(&each).map(|(known, each)| switch::plan(&known, *each)).collect();
        switch::discard_something(&mut plans, &each);
        check_none_stale(&dirty, &plans, blocks.len())?;
        let mut discards = Vec::new();
        switch::encode_discards(&blocks, &plans, &mut discards)?;
        let already: Vec<PageBitmap>;
        (guest.stored, already) = plans.into_iter().map(|plan| (plan.stored, plan.already)).unzip();
        Ok(Phase::Postcopy(Switch { guest, already, discards }))
    }
}

/// Makes sure that no page is kept at the destination that was written since it was sent there, and that every block is planned.
fn check_none_stale(dirty: &[PageBitmap], plans: &[Plan], blocks: usize) -> Result<(), BrokenInvariant> {
    invariant(plans.len() == blocks && dirty.len() == blocks, "a postcopy plans every block of the stream")?;
    let stale = dirty.iter().zip(plans).any(|(dirty, plan)| {
        let mut stale = plan.already.clone();
        stale.intersect_with(dirty);
        stale.count() != 0
    });
    invariant(!stale, "no dirty page counts as sent when postcopy begins")
}

impl<'v> Switch<'v> {
    /// Lets the VM run there, and sends what it does not have.
    pub(super) fn hand_over<'e, V: LiveVm + ?Sized>(
        self,
        (link, terms): (&'e Link<'e, 'v>, &'e Terms<'e>),
        vm: Owned<'v, V>,
        open_preempt: Option<OpenPreempt<'e>>,
    ) -> Ended<'v, V> {
        let Self { guest, already, discards } = self;
        if let Err(error) = vm.check_ready() {
            return Ended::Kept { vm, error: error.into() };
        }
        // What was said of the speed of precopy is over with it.
        link.control.set_max_bandwidth(terms.params.max_postcopy_bandwidth);
        terms.loaded.asked.store(true, Ordering::Release);
        let options = options(terms.params.patience, terms.page_sizes);
        let source = PostcopySource::over(&guest, Arc::clone(link.channel), link.control, link.progress);
        let mut source = preempted(source.with_options(options), open_preempt);
        let (sent, prepared) = match source.prepare(&already) {
            Ok(prepared) => (source.send_package(link.inbox, &discards), prepared),
            Err(error) => return Ended::Kept { vm, error },
        };
        match sent {
            PackageSent::Cut(error) => Ended::Kept { vm, error },
            PackageSent::Taken(sent) => {
                // From here on the VM may run there, whatever happens here.
                let vm = vm.hand_over();
                let followed = sent.and_then(|preempt| source.follow(prepared, link.inbox, preempt));
                Ended::HandedOver { vm, result: followed.map(|stats| Some(Box::new(stats))), guest: Some(guest) }
            }
        }
    }
}

fn options(patience: std::time::Duration, page_sizes: &BTreeMap<String, u64>) -> PostcopyOptions {
    PostcopyOptions { patience, page_sizes: page_sizes.clone(), ..PostcopyOptions::default() }
}

/// The same, with a preempt channel if there is one.
fn preempted<'s, 'v>(
    source: PostcopySource<'s, GuestSource<'v>>,
    open_preempt: Option<OpenPreempt<'s>>,
) -> PostcopySource<'s, GuestSource<'v>> {
    match open_preempt {
        Some(open) => source.with_preempt(open),
        None => source,
    }
}

impl<V: LiveVm + ?Sized> Recoverable<'_, V> {
    /// Goes on over `channel` with the destination, which waits for recovery there.
    pub(super) fn go_on(
        &self,
        channel: Channel,
        open_preempt: Option<OpenPreempt<'_>>,
        control: &Control,
        progress: &Progress,
    ) -> Result<PostcopyStats, MigrateError> {
        channel.set_timeouts(None, Some(self.patience))?;
        control.set_max_bandwidth(self.max_bandwidth);
        let options = options(self.patience, &self.page_sizes);
        let source = PostcopySource::new(&self.guest, channel, control, progress).with_options(options);
        preempted(source, open_preempt).recover()
    }
}

/// The blocks as a stream lists them that may go on in postcopy: page sizes are named where they are above 4096.
pub(super) fn listed(blocks: &[RamBlock], page_sizes: &BTreeMap<String, u64>) -> Result<Vec<RamBlock>, MigrateError> {
    let mut blocks = with_page_sizes(blocks, page_sizes)?;
    for block in &mut blocks {
        block.page_size = block.page_size.filter(|size| *size > limosa_page::PAGE_SIZE);
    }
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use limosa_page::PageNumber;

    use super::*;
    use crate::error::is_noticed;

    #[test]
    fn a_dirty_page_that_counts_as_sent_is_noticed_before_the_vm_is_handed_over() {
        let mut dirty = PageBitmap::new(8);
        dirty.set(PageNumber(5));
        let known = Known { dirty: &dirty, sent: &PageBitmap::full(8), zero: &PageBitmap::new(8) };
        let mut plans = [switch::plan(&known, 1)];
        check_none_stale(std::slice::from_ref(&dirty), &plans, 1).unwrap();
        assert!(is_noticed(|| check_none_stale(std::slice::from_ref(&dirty), &plans, 2)));
        plans[0].already.set(PageNumber(5));
        assert!(is_noticed(|| check_none_stale(std::slice::from_ref(&dirty), &plans, 1)));
    }

    #[test]
    fn pages_of_a_block_that_is_not_of_the_stream_are_noticed() {
        let mut bitmap = SentBitmap { sent: vec![PageBitmap::new(8)], zero: vec![PageBitmap::new(8)] };
        bitmap.left_out(0, PageRange::first(2)).unwrap();
        bitmap.sent(0, &[PageRange::first(1)]).unwrap();
        assert_eq!((bitmap.sent[0].count(), bitmap.zero[0].count()), (1, 1));
        assert!(is_noticed(|| bitmap.sent(1, &[])));
        assert!(is_noticed(|| bitmap.left_out(1, PageRange::first(1))));
    }
}
