//! From precopy to postcopy: the VM stops here, runs there, and the rest follows.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use limosa_channel::Channel;
use limosa_page::{PageBitmap, PageRange};
use limosa_stream::RamBlock;

use super::engine::Engine;
use super::guest::GuestSource;
use super::outcome::Recoverable;
use super::switch::{self, Known, Plan};
use crate::control::Control;
use crate::error::MigrateError;
use crate::live::LiveVm;
use crate::pages::PageSource;
use crate::progress::Progress;
use crate::source::host_pages::{pages_of, with_page_sizes};
use crate::source::postcopy::{OpenPreempt, PostcopyOptions, PostcopySource, PostcopyStats, Switch};

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
pub(super) struct Track {
    /// Pages sent at least once.
    pub(super) sent: Vec<PageBitmap>,
    /// Pages left out because they are zero, or free in the end, and not sent since.
    pub(super) zero: Vec<PageBitmap>,
}

impl Track {
    pub(super) fn new<S: PageSource>(source: &S) -> Self {
        let none = || source.start().blocks.iter().map(|block| PageBitmap::new(block.pages())).collect();
        Self { sent: none(), zero: none() }
    }

    /// Pages of a block were sent.
    pub(super) fn sent(&mut self, block: usize, runs: &[PageRange]) {
        if let (Some(sent), Some(zero)) = (self.sent.get_mut(block), self.zero.get_mut(block)) {
            for run in runs {
                sent.set_range(*run);
                zero.clear_range(*run);
            }
        }
    }

    /// Pages of a block are zero, and were not sent.
    pub(super) fn left_out(&mut self, block: usize, run: PageRange) {
        if let (Some(sent), Some(zero)) = (self.sent.get_mut(block), self.zero.get_mut(block)) {
            sent.clear_range(run);
            zero.set_range(run);
        }
    }
}

/// What the switch to postcopy is made with.
pub(super) struct SwitchTo<'e> {
    /// The blocks, with the page sizes of the destination.
    pub(super) page_sizes: &'e BTreeMap<String, u64>,
    pub(super) open_preempt: Option<OpenPreempt<'e>>,
    /// Set when the package is about to go out: an answer to its PING that came before is none.
    pub(super) switching: &'e AtomicBool,
}

impl<'v, V: LiveVm + ?Sized> Engine<'_, 'v, V> {
    /// Lets the VM, which is stopped here, run there, and sends what it does not have. `dirty` is what was written and not
    /// sent.
    pub(super) fn switch_to_postcopy(&mut self, dirty: &[PageBitmap]) -> Result<(), MigrateError> {
        let mut guest = GuestSource::new(self.vm);
        guest.devices = self.device_sections()?.bytes().to_vec();
        let blocks = with_page_sizes(&guest.start().blocks, self.switch.page_sizes)?;
        let each: Vec<u64> = blocks.iter().map(pages_of).collect();
        let Some(mut track) = self.track.take() else {
            return Err(MigrateError::Protocol("postcopy was not announced to the destination".into()));
        };
        // What is free, and was not sent since nor written, is as good as zero: a request for it is answered at once.
        track.zero.iter_mut().zip(self.windows.take_free()).for_each(|(zero, free)| zero.union_with(&free));
        let known = dirty.iter().zip(&track.sent).zip(&track.zero);
        let known = known.map(|((dirty, sent), zero)| Known { dirty, sent, zero });
        let mut plans: Vec<Plan> = known.zip(&each).map(|(known, each)| switch::plan(&known, *each)).collect();
        switch::discard_something(&mut plans, &each);
        let mut discards = Vec::new();
        switch::encode_discards(&blocks, &plans, &mut discards)?;
        let already: Vec<PageBitmap>;
        (guest.stored, already) = plans.into_iter().map(|plan| (plan.stored, plan.already)).unzip();
        let guest = self.guest.insert(guest);
        // What was said of the speed of precopy is over with it.
        self.control.set_max_bandwidth(self.params.max_postcopy_bandwidth);
        self.switch.switching.store(true, Ordering::Release);
        let handed = self.guard.given_flag();
        let switch = Switch { inbox: self.inbox, already: &already, discards, handed: &handed };
        let options = options(self.params.patience, self.switch.page_sizes);
        let source = PostcopySource::over(guest, Arc::clone(self.channel), self.control, self.progress);
        let done = preempted(source.with_options(options), self.switch.open_preempt.take()).switch(switch)?;
        self.stats.postcopy = Some(done);
        Ok(())
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
