//! From precopy to postcopy: the VM stops here, runs there, and the rest follows.

use std::collections::BTreeMap;
use std::sync::Arc;

use limosa_channel::Channel;
use limosa_page::{BrokenInvariant, PageBitmap, invariant};
use limosa_stream::postcopy::PING_LOADED;

use super::attempt::Attempt;
use super::guest::GuestSource;
use super::link::{Link, Terms};
use super::outcome::{Ended, PostcopyPausedSource};
use super::owned::{Deciding, Owned, Settled};
use super::phase::{Phase, Switch, Unmoved};
use super::sent_bitmap::SentBitmap;
use super::switch::{self, Known, Plan};
use crate::control::Handle;
use crate::error::MigrateError;
use crate::live::LiveVm;
use crate::pages::PageSource;
use crate::source::host_pages::{pages_of, with_page_sizes};
use crate::source::postcopy::{OpenPreempt, Package, PostcopyOptions, PostcopySource, PostcopyStats};

impl<'e, 'v, V: LiveVm + ?Sized> Attempt<'_, 'e, 'v, V> {
    /// Plans what follows when the VM, which stands still here, runs there.
    pub(super) fn switch(&mut self, unmoved: Unmoved) -> Result<Phase<'e, 'v>, MigrateError> {
        let Unmoved { dirty, sent: SentBitmap { sent, mut zero } } = unmoved;
        let mut guest = GuestSource::new(self.vm.vm());
        guest.devices = self.vm.device_sections()?.bytes().to_vec();
        let blocks = with_page_sizes(&guest.setup().blocks, self.terms.page_sizes)?;
        let each: Vec<u64> = blocks.iter().map(pages_of).collect();
        // What is free, and was not sent since nor written, is as good as zero: a request for it is answered at once.
        zero.iter_mut().zip(self.link.queue.take_free()).for_each(|(zero, free)| zero.union_with(&free));
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

/// Makes sure that no page is kept at the destination that was written since it was sent there, and that every block is
/// planned.
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
        link: &'e Link<'e, 'v>,
        terms: &'e Terms<'e>,
        vm: Owned<'v, V>,
        open_preempt: Option<OpenPreempt<'e>>,
    ) -> Ended<'v, V> {
        let Self { guest, already, discards } = self;
        if let Err(error) = vm.check_ready() {
            return Ended::Kept { vm, error: error.into() };
        }
        // What was said of the speed of precopy is over with it.
        link.control.set_max_bandwidth(terms.params.max_postcopy_bandwidth);
        let options = options(terms.params.answer_timeout, terms.page_sizes);
        let source = PostcopySource::over(&guest, Arc::clone(link.channel), link.control, link.progress);
        let mut source = preempted(source.options(options), open_preempt);
        let ready = source.prepare(&already).and_then(|prepared| {
            let package = source.ready_package(link.return_path, &discards, &prepared)?;
            Ok((package, prepared))
        });
        let (Package { bytes, decisive, preempt }, prepared) = match ready {
            Ok(ready) => ready,
            Err(error) => return Ended::Kept { vm, error },
        };
        // Once the kernel has taken the package, the destination may run the VM.
        let deciding = Deciding::new(vm, link.channel, decisive);
        // An answer that came before the package is not one to it.
        link.return_path.forget_pong(PING_LOADED, || terms.loaded.ask());
        let written = link.channel.write_all(&bytes);
        match deciding.settle(written) {
            Settled::Kept(vm, error) => Ended::Kept { vm, error: error.into() },
            Settled::HandedOver(vm, written) => {
                let written = written.map_err(|error| link.control.explain(error.into()));
                let followed = written.and_then(|()| source.follow(prepared, link.return_path, preempt));
                Ended::HandedOver { vm, result: followed.map(|stats| Some(Box::new(stats))), guest: Some(guest) }
            }
        }
    }
}

fn options(answer_timeout: std::time::Duration, page_sizes: &BTreeMap<String, u64>) -> PostcopyOptions {
    PostcopyOptions { answer_timeout, page_sizes: page_sizes.clone(), ..PostcopyOptions::default() }
}

/// The same, with a preempt channel if there is one.
fn preempted<'s, 'v>(
    source: PostcopySource<'s, GuestSource<'v>>,
    open_preempt: Option<OpenPreempt<'s>>,
) -> PostcopySource<'s, GuestSource<'v>> {
    match open_preempt {
        Some(open) => source.preempt(open),
        None => source,
    }
}

impl<V: LiveVm + ?Sized> PostcopyPausedSource<'_, V> {
    /// Sends the rest over `channel` to the destination, which waits for recovery there.
    pub(super) fn send_rest(
        &self,
        channel: Channel,
        open_preempt: Option<OpenPreempt<'_>>,
        handle: &Handle,
    ) -> Result<PostcopyStats, MigrateError> {
        channel.set_timeouts(None, Some(self.answer_timeout))?;
        handle.control.set_max_bandwidth(self.max_bandwidth);
        let options = options(self.answer_timeout, &self.page_sizes);
        let source = PostcopySource::new(&self.guest, channel, handle).options(options);
        preempted(source, open_preempt).recover()
    }
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
}
