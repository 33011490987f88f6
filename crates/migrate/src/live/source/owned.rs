//! Who has the VM, as a type: [`Owned`] is a VM that still runs here or can, [`HandedOver`] one that the destination
//! may run.
//!
//! **The ownership law.** Until the VM is handed over, every end of the migration lets it continue here as it was: not
//! paused, not slowed down, not logged, with all of its memory; even a panic does. From then on nothing here touches
//! it: a [`HandedOver`] cannot resume it. Between the two is [`Deciding`], for the write whose bytes give the VM away.

use std::sync::Arc;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, ChannelError, Shutdown};
use limosa_memory::dirty::{DirtyLogs, DirtyPages, Writers};
use limosa_page::{BrokenInvariant, invariant};
use limosa_stream::DeviceSections;

use super::hints::Hints;
use super::stats::HintStats;
use crate::error::MigrateError;
use crate::live::{LiveVm, SharedMemoryMode, VmError};

/// A VM in migration that this side has. What was done to it is undone when this is dropped.
pub(super) struct Owned<'a, V: LiveVm + ?Sized> {
    vm: &'a V,
    /// Until they are handed back.
    logs: Option<DirtyLogs>,
    /// The channels of the stream, which are cut before the VM continues.
    channels: Vec<Arc<Channel>>,
    /// The treatment of shared memory.
    shared: SharedMemoryMode,
    /// The requests for free pages, if the guest is asked.
    hints: Option<Hints>,
    logging: bool,
    throttled: bool,
    paused: Option<Instant>,
}

/// A VM whose deciding bytes are being written: with the last of them the destination may run it.
///
/// Until it is [settled](Self::settle) the number of bytes that have left decides, also if the write panics. As long as
/// too few have left, dropping it resumes the VM. From then on it is in doubt who has it: dropping it leaves the VM
/// stopped.
pub(super) struct Deciding<'a, 'c, V: LiveVm + ?Sized> {
    vm: Owned<'a, V>,
    channel: &'c Channel,
    /// Bytes that had left before the write.
    before: u64,
    /// Bytes of the write that let the VM run there.
    decisive: u64,
}

/// The side that has a VM after its deciding bytes were written.
pub(super) enum Settled<'a, V: LiveVm + ?Sized> {
    /// This one: the write failed before the deciding bytes had left.
    Kept(Owned<'a, V>, ChannelError),
    /// The destination, or it may. The result is the write's.
    HandedOver(HandedOver<'a, V>, Result<(), ChannelError>),
}

/// A VM that was given away: it stands still here, whole, and nothing here resumes it.
pub(super) struct HandedOver<'a, V: LiveVm + ?Sized> {
    vm: &'a V,
    logs: Option<DirtyLogs>,
    hints: Option<Hints>,
    paused: Option<Instant>,
}

/// A VM that was resumed here, or could not be.
pub(super) struct TakenBack {
    /// The VMM's answer.
    pub(super) resumed: Result<(), VmError>,
    /// The dirty logs, which are off.
    pub(super) logs: Option<DirtyLogs>,
    /// How long the VM stood still.
    pub(super) downtime: Duration,
    pub(super) hints: Option<HintStats>,
}

impl<'a, V: LiveVm + ?Sized> Owned<'a, V> {
    /// A VM that runs, and what sees its writes. `channels`: all of the migration.
    pub(super) fn new(vm: &'a V, logs: DirtyLogs, channels: Vec<Arc<Channel>>) -> Self {
        Self {
            vm,
            logs: Some(logs),
            channels,
            shared: SharedMemoryMode::Sent,
            hints: None,
            logging: false,
            throttled: false,
            paused: None,
        }
    }

    /// The VM.
    pub(super) fn vm(&self) -> &'a V {
        self.vm
    }

    /// With memory that the destination may have too.
    pub(super) fn with_shared(mut self, shared: SharedMemoryMode) -> Self {
        self.shared = shared;
        self
    }

    /// Of a guest that is asked for its free pages.
    pub(super) fn with_hints(mut self, hints: Option<Hints>) -> Self {
        self.hints = hints;
        self
    }

    /// Makes sure that every writer of the VM's memory is seen by one of the logs; if the guest is asked for free
    /// pages, that it is seen itself, even if the VMM says that it writes nothing.
    pub(super) fn check_covered(&self) -> Result<(), MigrateError> {
        let Some(logs) = &self.logs else { return Ok(()) };
        logs.check_covered(self.vm.writers())?;
        if self.hints.is_some() && logs.check_covered(Writers::VCPUS).is_err() {
            return Err(MigrateError::Hints("no dirty log sees what the guest's vCPUs write"));
        }
        Ok(())
    }

    /// Asks the guest for its free pages, if that is wanted: whether it is. The log is on, and the round's pages are in
    /// the queue.
    pub(super) fn ask_for_free_pages(&mut self) -> Result<bool, BrokenInvariant> {
        invariant(self.logging, "what is written behind a hint is seen by a dirty log")?;
        Ok(self.hints.as_mut().map(Hints::ask).is_some())
    }

    /// Waits until the guest has told all its free pages, but not after `until`, if that is a time, nor longer than
    /// `tick`; whether that is worth another look.
    pub(super) fn wait_for_free_pages(&self, until: Option<Instant>, tick: Duration) -> bool {
        self.hints.as_ref().is_some_and(|hints| hints.wait(until, tick))
    }

    /// Whether the guest is asked for free pages at all.
    pub(super) fn has_hints(&self) -> bool {
        self.hints.is_some()
    }

    /// Ends the requests, and gives the guest back the pages that it holds.
    pub(super) fn give_pages_back(&mut self) {
        if let Some(hints) = &mut self.hints {
            hints.end();
        }
    }

    /// Starts the logs: every write is seen from here on.
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

    /// Slows the vCPUs down. A VMM that cannot is left alone: the migration continues without.
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

    /// The state of the devices of the VM, which is stopped.
    pub(super) fn device_sections(&self) -> Result<DeviceSections, MigrateError> {
        let sections = self.vm.device_sections();
        sections.map_err(|source| MigrateError::Vm { what: "tell the state of its devices", source })
    }

    /// Lets the VM continue in the middle of the job; its writes are logged all the while.
    pub(super) fn continue_here(&mut self) -> Result<(), MigrateError> {
        invariant(self.logging, "what a VM writes that continues here is seen by a dirty log")?;
        self.vm.resume().map_err(|source| MigrateError::Vm { what: "continue", source })?;
        self.paused = None;
        Ok(())
    }

    /// When the VM stopped, if it stands still.
    pub(super) fn paused_since(&self) -> Option<Instant> {
        self.paused
    }

    /// Makes sure that the VM may be given away: it stands still, and its last write was read from the dirty logs.
    pub(super) fn check_ready(&self) -> Result<(), BrokenInvariant> {
        invariant(self.paused.is_some(), "a VM that is handed over stands still")?;
        invariant(!self.logging, "the dirty logs were read for the last time before a VM is handed over")
    }

    /// The VM is the destination's, or may be: nothing is undone any more.
    pub(super) fn hand_over(mut self) -> HandedOver<'a, V> {
        // What would be undone goes along, so that nothing is left to be undone when this is dropped.
        self.channels.clear();
        (self.logging, self.throttled) = (false, false);
        let (logs, hints, paused) = (self.logs.take(), self.hints.take(), self.paused.take());
        HandedOver { vm: self.vm, logs, hints, paused }
    }

    /// Moves the VM out. Dropping what is left undoes nothing.
    fn take(&mut self) -> Self {
        Self {
            vm: self.vm,
            logs: self.logs.take(),
            channels: std::mem::take(&mut self.channels),
            shared: self.shared,
            hints: self.hints.take(),
            logging: std::mem::take(&mut self.logging),
            throttled: std::mem::take(&mut self.throttled),
            paused: self.paused.take(),
        }
    }

    /// Resumes the VM here. The stream is cut first: nothing is written any more. Bytes that the kernel has may still
    /// leave, and its pages may change on the way; no destination runs a VM of a stream that ends so.
    pub(super) fn take_back(mut self) -> TakenBack {
        let (resumed, downtime) = self.undo();
        TakenBack { resumed, downtime, logs: self.logs.take(), hints: self.hints.as_ref().map(Hints::stats) }
    }

    /// Undoes what was done to the VM. Done again it does nothing.
    fn undo(&mut self) -> (Result<(), VmError>, Duration) {
        for channel in self.channels.drain(..) {
            let _ = channel.shutdown(Shutdown::Both);
        }
        self.lift_throttle();
        self.give_pages_back();
        self.stop_logs();
        match self.paused.take() {
            Some(since) => (self.vm.resume(), since.elapsed()),
            None => (Ok(()), Duration::ZERO),
        }
    }

    /// Ends logging, if it is on.
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
}

impl<V: LiveVm + ?Sized> Drop for Owned<'_, V> {
    fn drop(&mut self) {
        // On the way out of a panic the error cannot be reported.
        let _ = self.undo();
    }
}

impl<'a, 'c, V: LiveVm + ?Sized> Deciding<'a, 'c, V> {
    /// Begins a write on `channel` whose first `decisive` bytes let the VM run there.
    pub(super) fn new(vm: Owned<'a, V>, channel: &'c Channel, decisive: u64) -> Self {
        Self { vm, channel, before: channel.counters().bytes_out, decisive }
    }

    /// Takes the result of the write, and returns the side that has the VM.
    pub(super) fn settle(mut self, written: Result<(), ChannelError>) -> Settled<'a, V> {
        let decided = self.is_decided();
        let vm = self.vm.take();
        match written {
            Err(error) if !decided => Settled::Kept(vm, error),
            written => Settled::HandedOver(vm.hand_over(), written),
        }
    }

    /// Whether the destination may run the VM: all deciding bytes have left.
    fn is_decided(&self) -> bool {
        self.channel.counters().bytes_out.wrapping_sub(self.before) >= self.decisive
    }
}

impl<V: LiveVm + ?Sized> Drop for Deciding<'_, '_, V> {
    fn drop(&mut self) {
        if self.is_decided() {
            // Dropped as it is, it would resume a VM that may run at the destination.
            drop(self.vm.take().hand_over());
        }
    }
}

impl<'a, V: LiveVm + ?Sized> HandedOver<'a, V> {
    /// How long the VM stood still until the destination said, at that moment, that it runs there.
    pub(super) fn downtime(&self, until: Instant) -> Duration {
        self.paused.map_or(Duration::ZERO, |since| until.saturating_duration_since(since))
    }

    /// Counters of the requests for free pages.
    pub(super) fn hint_stats(&self) -> Option<HintStats> {
        self.hints.as_ref().map(Hints::stats)
    }

    /// The VM, and its logs, which are off.
    pub(super) fn into_parts(self) -> (&'a V, Option<DirtyLogs>) {
        (self.vm, self.logs)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use limosa_memory::dirty::SoftwareDirtyLog;
    use limosa_memory::{BlockOptions, GuestMemory};
    use limosa_stream::{Configuration, DeviceSections};

    use super::*;
    use crate::error::is_noticed;

    /// A VM that notes whether it runs.
    struct Machine(GuestMemory, Mutex<bool>);

    impl LiveVm for Machine {
        fn configuration(&self) -> Configuration {
            Configuration::new("none")
        }

        fn memory(&self) -> &GuestMemory {
            &self.0
        }

        fn writers(&self) -> Writers {
            Writers::VCPUS
        }

        fn pause(&self) -> Result<(), VmError> {
            *self.1.lock().unwrap() = false;
            Ok(())
        }

        fn resume(&self) -> Result<(), VmError> {
            *self.1.lock().unwrap() = true;
            Ok(())
        }

        fn device_sections(&self) -> Result<DeviceSections, VmError> {
            Ok(DeviceSections::new())
        }
    }

    impl Machine {
        fn new() -> Self {
            let block = BlockOptions::anonymous("ram", 4096).map().unwrap();
            Self(GuestMemory::new(vec![block]).unwrap(), Mutex::new(true))
        }

        fn owned(&self) -> Owned<'_, Self> {
            let log = SoftwareDirtyLog::new(&self.0, Writers::VCPUS);
            Owned::new(self, DirtyLogs::new(Writers::VCPUS, vec![Box::new(log)]).unwrap(), Vec::new())
        }

        fn runs(&self) -> bool {
            *self.1.lock().unwrap()
        }
    }

    #[test]
    fn a_vm_that_is_dropped_or_taken_back_goes_on_here_and_one_that_was_handed_over_never_does() {
        let machine = Machine::new();
        let mut owned = machine.owned();
        owned.pause().unwrap();
        assert!(!machine.runs());
        drop(owned);
        assert!(machine.runs(), "dropped");
        let mut owned = machine.owned();
        owned.pause().unwrap();
        let taken_back = owned.take_back();
        assert!(machine.runs() && taken_back.resumed.is_ok() && taken_back.logs.is_some());
        let mut owned = machine.owned();
        owned.pause().unwrap();
        let handed_over = owned.hand_over();
        assert!(!machine.runs());
        let (_, logs) = handed_over.into_parts();
        assert!(!machine.runs() && logs.is_some());
    }

    #[test]
    fn a_vm_that_runs_or_whose_writes_are_still_logged_is_noticed_before_it_is_handed_over() {
        let machine = Machine::new();
        let mut owned = machine.owned();
        assert!(is_noticed(|| owned.check_ready()), "it runs");
        assert!(is_noticed(|| owned.ask_for_free_pages()), "no log sees what is written behind a hint");
        owned.start_logs().unwrap();
        owned.pause().unwrap();
        assert!(is_noticed(|| owned.check_ready()), "its last write was not read");
        owned.stop_logs();
        owned.check_ready().unwrap();
    }
}
