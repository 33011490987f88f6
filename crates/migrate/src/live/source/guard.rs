//! Who has the VM, and what was done to it: so that it can be undone on every way out.
//!
//! **The ownership law.** Until the VM is given away, whatever ends the migration lets it go on here as it was: not
//! paused, not slowed down, not logged, with all of its memory; even a panic does. From then on nothing here touches it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use limosa_channel::{Channel, How};
use limosa_memory::dirty::{DirtyLogs, DirtyPages, Writers};

use super::hints::Hints;
use super::stats::HintStats;
use crate::error::MigrateError;
use crate::live::{LiveVm, SharedMemory, VmError};

/// A VM in migration: what was done to it is undone when this is dropped, unless the VM was given away.
pub(super) struct VmGuard<'a, V: LiveVm + ?Sized> {
    vm: &'a V,
    /// Until they are handed back.
    logs: Option<DirtyLogs>,
    /// What the stream goes through: it is cut before the VM goes on.
    channels: Vec<Arc<Channel>>,
    /// What of its memory is not sent.
    shared: SharedMemory,
    /// What is asked for free pages, if the guest is to be asked.
    hints: Option<Hints>,
    logging: bool,
    throttled: bool,
    paused: Option<Instant>,
    downtime: Duration,
    given: Arc<AtomicBool>,
}

impl<'a, V: LiveVm + ?Sized> VmGuard<'a, V> {
    pub(super) fn new(vm: &'a V, logs: DirtyLogs, channels: Vec<Arc<Channel>>) -> Self {
        let downtime = Duration::ZERO;
        Self {
            vm,
            logs: Some(logs),
            channels,
            shared: SharedMemory::Sent,
            hints: None,
            logging: false,
            throttled: false,
            paused: None,
            downtime,
            given: Arc::default(),
        }
    }

    /// The same, with memory that the destination may have too.
    pub(super) fn with_shared(mut self, shared: SharedMemory) -> Self {
        self.shared = shared;
        self
    }

    /// The same, of a guest that is asked for its free pages.
    pub(super) fn with_hints(mut self, hints: Option<Hints>) -> Self {
        self.hints = hints;
        self
    }

    /// Makes sure that every writer of the VM's memory is seen by one of the logs; if the guest is to be asked for free pages,
    /// that it is seen itself, even if the VMM says that it writes nothing.
    pub(super) fn check_covered(&self) -> Result<(), MigrateError> {
        let Some(logs) = &self.logs else { return Ok(()) };
        logs.check_covered(self.vm.writers())?;
        if self.hints.is_some() && logs.check_covered(Writers::VCPUS).is_err() {
            return Err(MigrateError::Hints("no dirty log sees what the guest's vCPUs write"));
        }
        Ok(())
    }

    /// Asks the guest for its free pages, if that is wanted: whether it is. The log is on, and the round's pages are in the
    /// windows.
    pub(super) fn ask_for_free_pages(&mut self) -> bool {
        debug_assert!(self.logging, "what is written behind a hint has to be seen");
        self.hints.as_mut().map(Hints::ask).is_some()
    }

    /// Waits until the guest has told all its free pages, but not after `until`, if that is a time, nor longer than `tick`; whether
    /// that is worth another look.
    pub(super) fn wait_for_free_pages(&self, until: Option<Instant>, tick: Duration) -> bool {
        self.hints.as_ref().is_some_and(|hints| hints.wait(until, tick))
    }

    /// Whether the guest is asked for free pages at all.
    pub(super) fn has_hints(&self) -> bool {
        self.hints.is_some()
    }

    /// What came of asking.
    pub(super) fn hint_stats(&self) -> Option<HintStats> {
        self.hints.as_ref().map(Hints::stats)
    }

    /// The guest is not asked any more, and gets back what it holds.
    pub(super) fn give_pages_back(&mut self) {
        if let Some(hints) = &mut self.hints {
            hints.end();
        }
    }

    /// From here on every write is seen.
    pub(super) fn start_logs(&mut self) -> Result<(), MigrateError> {
        if let Some(logs) = &mut self.logs {
            logs.start()?;
            self.logging = true;
        }
        Ok(())
    }

    /// Adds what was written since the last time, but of blocks that the destination has.
    pub(super) fn fetch(&mut self, into: &mut DirtyPages) -> Result<(), MigrateError> {
        // First of all: a hint that came behind it could take out what was written behind the hint.
        if let Some(hints) = &self.hints {
            hints.close();
        }
        self.logs.as_mut().map_or(Ok(()), |logs| logs.fetch(into))?;
        for (index, block) in self.vm.memory().blocks().iter().enumerate() {
            if self.shared.leaves_out(block)
                && let Some(pages) = into.block_mut(index)
            {
                pages.clear_range(block.pages());
            }
        }
        Ok(())
    }

    /// Slows the vCPUs down. A VMM that cannot is left alone: the migration goes on without.
    pub(super) fn throttle(&mut self, percent: u8) -> bool {
        self.throttled = true;
        self.vm.throttle(percent).is_ok()
    }

    /// Stops the VM; the throttle is lifted, for it would only hold up what the VM does next.
    pub(super) fn pause(&mut self) -> Result<(), MigrateError> {
        self.paused = Some(Instant::now());
        self.vm.pause().map_err(|source| MigrateError::Vm { what: "be stopped", source })?;
        self.lift_throttle();
        Ok(())
    }

    /// The VM is the destination's, or may be: nothing is undone any more.
    pub(super) fn give_away(&mut self) {
        self.given.store(true, Ordering::Release);
    }

    /// For those who give it away deep inside: to be set when it is.
    pub(super) fn given_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.given)
    }

    /// The destination has said, at that moment, that the VM runs there.
    pub(super) fn end_downtime(&mut self, at: Instant) {
        self.downtime = self.paused.take().map_or(self.downtime, |since| at.saturating_duration_since(since));
    }

    /// Whether the VM was given away.
    pub(super) fn is_given(&self) -> bool {
        self.given.load(Ordering::Acquire)
    }

    /// How long it stood still, or has so far.
    pub(super) fn downtime(&self) -> Duration {
        self.paused.map_or(self.downtime, |since| since.elapsed())
    }

    /// Lets the VM go on here. The stream is cut first: nothing is put any more. What the kernel has by then may still leave, and
    /// its pages may change on the way; no destination runs a VM of a stream that ends so.
    pub(super) fn take_back(&mut self) -> Result<(), VmError> {
        for channel in &self.channels {
            let _ = channel.shutdown(How::Both);
        }
        self.lift_throttle();
        self.give_pages_back();
        self.stop_logs();
        match self.paused.take() {
            Some(since) => {
                let resumed = self.vm.resume();
                self.downtime = since.elapsed();
                resumed
            }
            None => Ok(()),
        }
    }

    /// There is nothing left to log.
    pub(super) fn stop_logs(&mut self) {
        if let Some(logs) = self.logs.as_mut().filter(|_| std::mem::take(&mut self.logging)) {
            // A log that cannot be stopped is over all the same.
            let _ = logs.stop();
        }
    }

    fn lift_throttle(&mut self) {
        if std::mem::take(&mut self.throttled) {
            let _ = self.vm.throttle(0);
        }
    }

    /// The VM, and its logs, which are off.
    pub(super) fn into_parts(mut self) -> (&'a V, Option<DirtyLogs>) {
        self.given.store(true, Ordering::Release);
        (self.vm, self.logs.take())
    }
}

impl<V: LiveVm + ?Sized> Drop for VmGuard<'_, V> {
    fn drop(&mut self) {
        self.give_pages_back();
        if !self.is_given() {
            // On the way out of a panic: the error cannot be reported.
            let _ = self.take_back();
        }
    }
}
