//! Checkpoints without COLO: QEMU's background snapshots, one after the other.
//!
//! QEMU stops the VM for its devices alone, protects its memory against writing and sends all of it while the VM
//! continues. So a snapshot is of the instant at which it began, and is seconds old when it is here. Pages that the
//! checkpoint before has as well are not written.
//!
//! Law: **output is sealed before QEMU begins the snapshot.** QEMU does not ask before the VM continues, so nothing can
//! be sealed at the instant itself. A seal before it is safe: all that it lets out was sent before the instant, and is
//! known to the survivor. What the VM sends between the two waits for the next checkpoint; a failover to this one loses
//! it, as networks do.
//!
//! The checkpoints are kept here, or sent to a keeper elsewhere.

use std::io::IoSlice;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::Listener;
use limosa_migrate::output::CheckpointCause;
use limosa_migrate::stored::{Destination, PageError, PageSink, ReceivedStream, StreamSetup};
use limosa_page::{PAGE_LEN, PageNumber, PageRange};
use limosa_qemu::explain_background_refusal;
use limosa_qemu::monitor::MigrationStatus;
use limosa_qemu::qmp::Event;
use limosa_snapshot::{CheckpointBase, CheckpointPair, Manifest};

use crate::error::ProtectError;
use crate::guard::{Seen, note_end};
use crate::keeper::{accept, is_cut};
use crate::preflight::Preflight;
use crate::primary::{LOOK_EVERY, LocalVm, Tell, Teller, is_running};
use crate::remote::{Farewell, Forward, Greeted, KeptNotes};
use crate::report::{KeptBase, KeptCheckpoint};
use crate::series::{CATCH_UP_PAGES, Kept};

/// How long QEMU may take to finish with a snapshot that is here.
const COMPLETED_WITHIN: Duration = Duration::from_secs(60);
/// How often it is looked at.
const LOOK_SOON: Duration = Duration::from_millis(2);
/// The byte behind the last device section.
const END_OF_SECTIONS: u8 = 0;

/// Background snapshots that become checkpoints.
pub(crate) struct Background<'a> {
    vm: LocalVm<'a>,
    /// The VM as it was when its protection began.
    found: &'a Preflight,
    listener: &'a Listener,
    began: &'a (dyn Fn(&KeptBase) + Sync),
    kept: &'a (dyn Fn(&KeptCheckpoint) + Sync),
    seen: Seen,
}

/// Reports of a base and of checkpoints that count.
type Reports<'a> = (&'a (dyn Fn(&KeptBase) + Sync), &'a (dyn Fn(&KeptCheckpoint) + Sync));

/// A snapshot that has come.
struct Snapshot {
    stream: ReceivedStream,
    /// When QEMU was told to make it.
    begun: Instant,
    /// How long the VM stood still.
    pause: Duration,
}

/// A sink of the pages of a snapshot behind the base, whose layout it must have.
struct Onto<'p> {
    pair: &'p mut CheckpointPair,
    setup: &'p StreamSetup,
}

impl<'a> Background<'a> {
    /// Snapshots that QEMU sends to `listener`.
    pub(crate) fn new(
        vm: LocalVm<'a>,
        found: &'a Preflight,
        listener: &'a Listener,
        (began, kept): Reports<'a>,
    ) -> Self {
        Self { vm, found, listener, began, kept, seen: Seen::default() }
    }

    /// Makes checkpoints until something ends them.
    pub(crate) fn keep(mut self, base: CheckpointBase, manifest: Manifest) -> (Kept, Seen) {
        self.announce();
        let mut kept = Kept::nothing();
        kept.end = self.run(base, manifest, &mut kept);
        self.note_end();
        (kept, self.seen)
    }

    /// Makes checkpoints for a keeper elsewhere until something ends them.
    pub(crate) fn send(mut self, keeper: Greeted) -> (Kept, Seen) {
        self.announce();
        let mut kept = Kept::nothing();
        let mut keeper = Forward::new(keeper.channel, self.vm.options.lost_after);
        kept.end = self.run_elsewhere(&mut keeper, &mut kept);
        self.note_end();
        if !matches!(kept.end, Err(ProtectError::LineLost { .. })) {
            keeper.leave(match self.seen {
                Seen { shutdown: true, .. } => Farewell::VmEnded,
                Seen { gone: true, .. } => Farewell::VmLost,
                _ => Farewell::Unprotected,
            });
        }
        (kept, self.seen)
    }

    /// Waits until the VM runs, and looks whether it has the same devices: QEMU plugs some between snapshots, and they
    /// are held back and fenced by nobody.
    fn wait_running(&self, tell: Option<Tell<'_>>) -> Result<(), ProtectError> {
        self.vm.wait_running(tell)?;
        self.found.expect_same_devices(self.vm.monitor)
    }

    fn announce(&self) {
        let every = self.vm.options.every.longest().as_secs_f64();
        (self.vm.notice)(&format!(
            "checkpoints are background snapshots, one every {every} s: each has all of the VM as it was when it began"
        ));
    }

    fn note_end(&mut self) {
        self.note_events();
        self.seen.asked = self.vm.handle.control.stop_requested().is_some();
    }

    fn run(&mut self, mut base: CheckpointBase, mut manifest: Manifest, kept: &mut Kept) -> Result<(), ProtectError> {
        let (LocalVm { outputs, .. }, began) = (self.vm, self.began);
        outputs.seal(0).map_err(ProtectError::Gate)?;
        let Snapshot { stream, begun, .. } = self.snapshot(&mut base)?;
        manifest.pages.resent = stream.stats.resent_pages;
        let mut pair = base.finish(&stream.tail, manifest)?;
        kept.newest = Some(pair.newest().path.clone());
        outputs.commit(0).map_err(ProtectError::Gate)?;
        let bytes = self.vm.handle.progress.read().bytes;
        began(&KeptBase { path: pair.newest().path.clone(), bytes, elapsed: begun.elapsed() });
        let mut before = begun;
        loop {
            let (one, released) = self.checkpoint((&mut pair, &stream.setup), &mut before)?;
            kept.tally.add(&one);
            (self.kept)(&one);
            released?;
        }
    }

    fn run_elsewhere(&mut self, keeper: &mut Forward, kept: &mut Kept) -> Result<(), ProtectError> {
        let LocalVm { outputs, handle, .. } = self.vm;
        outputs.seal(0).map_err(ProtectError::Gate)?;
        let Snapshot { begun, .. } = self.forward(keeper)?;
        keeper.request()?;
        let notes = keeper.wait_kept(0)?;
        let path: PathBuf = keeper.peer().into();
        kept.newest = Some(path.clone());
        if let Some(time) = notes.fails_over {
            outputs.hold_when_lost(time).map_err(ProtectError::Gate)?;
        }
        outputs.commit(0).map_err(ProtectError::Gate)?;
        (self.began)(&KeptBase { path, bytes: handle.progress.read().bytes, elapsed: begun.elapsed() });
        let (mut before, mut number) = (begun, 0);
        loop {
            number += 1;
            keeper.wait_reply()?;
            let tell = |runs| keeper.tell(runs);
            self.wait_due(before, Some(&tell))?;
            self.wait_running(Some(&tell))?;
            outputs.seal(number).map_err(ProtectError::Gate)?;
            let Snapshot { stream, begun, pause } = self.forward(keeper)?;
            keeper.request()?;
            let KeptNotes { stored, catch_up, .. } = keeper.wait_kept(number)?;
            let commit = begun.elapsed().saturating_sub(pause);
            let released = outputs.commit(number).map_err(ProtectError::Gate);
            let period = Some(begun.saturating_duration_since(std::mem::replace(&mut before, begun)));
            let (bytes, output) = (stream.stats.channel.bytes_in, outputs.counters());
            let one = KeptCheckpoint { number, pause, commit, catch_up, period, bytes, stored, output };
            kept.tally.add(&one);
            (self.kept)(&one);
            released?;
        }
    }

    /// Has QEMU make a snapshot, and sends it to the keeper.
    fn forward(&mut self, keeper: &mut Forward) -> Result<Snapshot, ProtectError> {
        let snapshot = keeper.while_telling(|keeper| self.snapshot(keeper))?.and_then(|snapshot| {
            let sections = device_sections(&snapshot.stream)?;
            Ok((snapshot, sections))
        });
        let (snapshot, sections) = snapshot.map_err(|error| keeper.take_lost().unwrap_or(error))?;
        keeper.end_snapshot(&snapshot.stream.tail, &sections)?;
        Ok(snapshot)
    }

    /// Makes one. Returns it when it counts, and whether its output was let out.
    fn checkpoint(
        &mut self,
        (pair, setup): (&mut CheckpointPair, &StreamSetup),
        before: &mut Instant,
    ) -> Result<(KeptCheckpoint, Result<(), ProtectError>), ProtectError> {
        let outputs = self.vm.outputs;
        let catching_up = Instant::now();
        while pair.catch_up(CATCH_UP_PAGES)? > 0 {
            self.vm.check_stop()?;
        }
        let catch_up = catching_up.elapsed();
        self.wait_due(*before, None)?;
        self.wait_running(None)?;
        let number = pair.number() + 1;
        outputs.seal(number).map_err(ProtectError::Gate)?;
        let snapshot = self.snapshot(&mut Onto { pair: &mut *pair, setup }).and_then(|snapshot| {
            let sections = device_sections(&snapshot.stream)?;
            Ok((snapshot, sections))
        });
        let (Snapshot { stream, begun, pause }, sections) = snapshot.inspect_err(|_| pair.abort())?;
        let stored = pair.commit(&sections)?;
        let commit = begun.elapsed().saturating_sub(pause);
        let released = outputs.commit(number).map_err(ProtectError::Gate);
        let period = Some(begun.saturating_duration_since(std::mem::replace(before, begun)));
        let (bytes, output) = (stream.stats.channel.bytes_in, outputs.counters());
        Ok((KeptCheckpoint { number, pause, commit, catch_up, period, bytes, stored, output }, released))
    }

    /// Has QEMU make a snapshot, and receives it.
    fn snapshot<S: PageSink + Send>(&mut self, sink: &mut S) -> Result<Snapshot, ProtectError> {
        let LocalVm { monitor, handle, .. } = self.vm;
        if !monitor.wait_migration_released(COMPLETED_WITHIN)? {
            return Err(unfinished());
        }
        self.note_events();
        let begun = Instant::now();
        monitor.migrate(&self.listener.local_uri().to_string(), false).map_err(explain_background_refusal)?;
        let channel = accept(monitor, handle, self.listener, 0)?.main;
        let received = Destination::new(sink, channel, handle).run();
        let received = received.and_then(|stream| stream.acknowledge().map(|()| stream));
        let stream = received.map_err(|error| self.reason(error.into()))?;
        self.wait_completed()?;
        stream.confirm_end()?;
        let events = self.note_events();
        let pause = pause(events.iter().map(|event| (event.name.as_str(), event.at)));
        Ok(Snapshot { stream, begun, pause })
    }

    /// Waits until the next checkpoint is due, or a gate is nearly full. A keeper elsewhere is told meanwhile that the
    /// VM is there.
    fn wait_due(&mut self, before: Instant, tell: Option<Tell<'_>>) -> Result<(), ProtectError> {
        let LocalVm { options, outputs, .. } = self.vm;
        // A time that does not fit has no end.
        let due = before.checked_add(options.every.longest());
        let mut teller = Teller::new(tell);
        loop {
            self.vm.check_stop()?;
            self.note_events();
            if self.seen.gone || self.seen.shutdown {
                return Err(ProtectError::Ended { reason: "with QEMU".into() });
            }
            teller.tell(|| Ok(is_running(&self.vm.monitor.status()?.state)))?;
            let look = Instant::now() + LOOK_EVERY;
            let until = due.map_or(look, |due| due.min(look));
            if outputs.signal().wait(Some(until), false) == CheckpointCause::Full || due.is_some_and(|due| due <= until)
            {
                return self.vm.check_stop();
            }
        }
    }

    /// Waits until QEMU says that its snapshot is complete: it has sent all of it.
    fn wait_completed(&mut self) -> Result<(), ProtectError> {
        let begun = Instant::now();
        while begun.elapsed() < COMPLETED_WITHIN {
            let info = self.vm.monitor.migration()?;
            match info.status {
                MigrationStatus::Completed => return Ok(()),
                MigrationStatus::Failed | MigrationStatus::Cancelled => return Err(ProtectError::gave_up(info.error)),
                _ => self.vm.check_stop()?,
            }
            thread::sleep(LOOK_SOON);
        }
        Err(unfinished())
    }

    /// The reason for a snapshot that has not come: QEMU's, where this side only saw its channel end.
    fn reason(&mut self, error: ProtectError) -> ProtectError {
        let is_cut = matches!(&error, ProtectError::Migrate(error) if is_cut(error));
        if !is_cut || self.vm.handle.control.stop_requested().is_some() {
            return error;
        }
        self.note_events();
        match self.vm.monitor.migration() {
            Ok(info) if matches!(info.status, MigrationStatus::Failed | MigrationStatus::Cancelled) => {
                ProtectError::gave_up(info.error)
            }
            Ok(_) => error,
            Err(_) => {
                self.seen.gone = true;
                error
            }
        }
    }

    /// Takes the events that have come.
    fn note_events(&mut self) -> Vec<Event> {
        let events = self.vm.monitor.qmp().take_events().unwrap_or_else(|_| {
            self.seen.gone = true;
            Vec::new()
        });
        events.iter().for_each(|event| note_end(event, &mut self.seen));
        events
    }
}

/// The device sections of a snapshot, as those of a checkpoint: without a description.
fn device_sections(stream: &ReceivedStream) -> Result<Vec<u8>, ProtectError> {
    let sections = stream.tail.get(stream.devices.sections_range.clone());
    let sections = sections.ok_or_else(|| ProtectError::gave_up(Some("the device sections are cut off".into())))?;
    Ok([sections, &[END_OF_SECTIONS]].concat())
}

/// How long QEMU stopped the VM for its snapshot, by the names and times of its events.
fn pause<'e>(events: impl IntoIterator<Item = (&'e str, Option<Duration>)>) -> Duration {
    let mut behind_stop = events.into_iter().skip_while(|(name, _)| *name != "STOP");
    let stop = behind_stop.next();
    let resume = behind_stop.find(|(name, _)| *name == "RESUME");
    let times = stop.zip(resume);
    times.and_then(|((_, stop), (_, resume))| resume?.checked_sub(stop?)).unwrap_or_default()
}

fn unfinished() -> ProtectError {
    let limit = COMPLETED_WITHIN.as_secs();
    ProtectError::Failed { reason: format!("its snapshot was not complete within {limit} s") }
}

impl PageSink for Onto<'_> {
    fn begin(&mut self, start: &StreamSetup) -> Result<(), PageError> {
        if start == self.setup {
            return Ok(());
        }
        Err("the VM's memory has another layout than when its protection began".into())
    }

    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<(), PageError> {
        self.pair.put_pages(block, first, pages)
    }

    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<(), PageError> {
        self.pair.put_zero(block, pages)
    }

    fn read_back(&mut self, block: usize, page: PageNumber, into: &mut [u8; PAGE_LEN]) -> Result<(), PageError> {
        self.pair.read_back(block, page, into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_from_the_first_stop_to_the_resume_behind_it() {
        let millis = |events: &[(&str, u64)]| {
            pause(events.iter().map(|(name, at)| (*name, Some(Duration::from_millis(*at))))).as_millis()
        };
        assert_eq!(millis(&[("RESUME", 1), ("STOP", 5), ("MIGRATION", 6), ("RESUME", 9), ("STOP", 20)]), 4);
        assert_eq!(millis(&[("STOP", 5)]), 0);
        assert_eq!(millis(&[]), 0);
        assert_eq!(pause([("STOP", None), ("RESUME", Some(Duration::MAX))]), Duration::ZERO);
    }
}
