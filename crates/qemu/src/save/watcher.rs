//! Watching QEMU while it saves: events, progress, a changed rate, a time-out, a cancellation.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use limosa_migrate::MigrateError;
use limosa_migrate::control::{DeferredStop, Phase, ProgressReading};

use super::background;
use super::hints::{self, HintWait};
use super::job::{SETTLES_WITHIN, SaveJob};
use super::options::{OnTimeout, SaveTimeout};
use super::rounds::Rounds;
use super::unseen_writes;
use crate::job::{JobError, NotConverging};
use crate::monitor::{MigrationInfo, MigrationStatus, RamProgress, RunState, Settings};
use crate::qmp::Event;
use crate::takeover::SAVE_SETUP_PATIENCE;

/// How often QEMU is asked how far it is. Events end the wait at once.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// The events that end the wait: among them the beginning of a round, at which the most of it remains.
const EVENTS: [&str; 6] = ["STOP", "RESUME", "SHUTDOWN", "GUEST_PANICKED", "MIGRATION", "MIGRATION_PASS"];

/// How long several channels are still read after a cancel. A thread of QEMU's that waits in vain ends when they break;
/// one that is only slow must not lose them.
const CANCEL_WITHIN: Duration = Duration::from_secs(5);

/// The longest `downtime-limit` that QEMU takes, in milliseconds.
const LONGEST_DOWNTIME: u64 = 2_000_000;

/// The watch over one migration of the source QEMU.
pub(super) struct Watcher<'a> {
    job: &'a SaveJob<'a>,
    applied_bandwidth: Option<NonZeroU64>,
    /// Memory is sent slowly until this wait is over.
    hints: Option<HintWait>,
    rounds: Rounds,
    deadline: Option<Instant>,
    stopped: Option<Event>,
    resumed: Option<Event>,
    /// A VM that had to stand still was continued.
    ran_unseen: bool,
    /// The guest has ended by itself.
    end: Option<RunState>,
    /// When a VM that is saved in the background continued, counted from the beginning of the save.
    ran_after: Duration,
    last: Option<MigrationInfo>,
    cancelling: Option<JobError>,
    completed: bool,
    committed: bool,
    /// The disks are frozen.
    frozen: bool,
    /// The VM's last state but those of the migration itself.
    state: RunState,
    /// Whether QEMU writes the file itself, so that its numbers are the job's.
    writes: bool,
    /// There are several channels.
    channels: Option<Channels>,
}

/// Several channels, which must not break while QEMU waits for one of them
/// ([`HeldConnections`](crate::watchdog::HeldConnections)): QEMU carries a cancel out, and they are read until it
/// has.
#[derive(Debug)]
struct Channels {
    _deferred: DeferredStop,
    /// QEMU sets them up: nothing is cancelled until that is done, or this moment has come.
    made_by: Option<Instant>,
    /// It was ordered to cancel, and has until then.
    cancelled_by: Option<Instant>,
}

impl<'a> Watcher<'a> {
    /// To be called before QEMU's command to migrate: its events from here on are about this migration.
    pub(super) fn new(job: &'a SaveJob<'a>, writes: bool) -> Result<Self, JobError> {
        job.monitor.qmp().take_events()?;
        let state = job.before.manifest.run_state.as_deref().map_or(RunState::Running, RunState::from);
        let bandwidth = job.watch.handle.control.max_bandwidth();
        let wait = job.options.hint_wait.filter(|_| job.before.waits_for_hints);
        Ok(Self {
            job,
            applied_bandwidth: if wait.is_some() { hints::slow(bandwidth) } else { bandwidth },
            hints: wait.map(|longest| HintWait::begin(Instant::now(), longest)),
            rounds: Rounds::default(),
            deadline: job.options.timeout.map(|timeout| job.begun + timeout.limit),
            stopped: None,
            resumed: None,
            ran_unseen: false,
            end: None,
            ran_after: Duration::ZERO,
            last: None,
            cancelling: None,
            completed: false,
            committed: false,
            frozen: false,
            state,
            writes,
            channels: None,
        })
    }

    /// QEMU is about to make several channels.
    pub(super) fn channels_begin(&mut self) {
        let made_by = Some(Instant::now() + SAVE_SETUP_PATIENCE);
        self.channels =
            Some(Channels { _deferred: self.job.watch.handle.control.defer_stop(), made_by, cancelled_by: None });
    }

    /// The readers of the channels may close them.
    pub(super) fn channels_end(&mut self) {
        self.channels = None;
    }

    /// Waits for an event or a little while, then checks the migration and takes the next step.
    ///
    /// # Errors
    /// The migration failed or was cancelled; it is over then.
    pub(super) fn look(&mut self) -> Result<MigrationStatus, JobError> {
        let monitor = self.job.monitor;
        if self.completed {
            return Ok(MigrationStatus::Completed);
        }
        let tick = if self.hints.is_some() { hints::ASK_EVERY } else { ASK_EVERY };
        let event = monitor.qmp().wait_event(&EVENTS, tick)?;
        let mut status = None;
        if let Some(event) = event {
            match event.name.as_str() {
                "STOP" => {
                    self.stopped.get_or_insert(event);
                }
                "RESUME" if self.job.options.background => self.note_resumed(event),
                "RESUME" if self.job.before.stands_still => self.ran_unseen = true,
                // Another client stopped and continued it: that is no part of the downtime.
                "RESUME" => self.stopped = None,
                "SHUTDOWN" => self.note_end(RunState::Shutdown),
                "GUEST_PANICKED" => self.note_end(RunState::GuestPanicked),
                _ => status = event.data.get("status").and_then(|name| name.as_str()).map(MigrationStatus::from),
            }
        }
        if self.channels.as_ref().is_none_or(|channels| channels.made_by.is_none()) {
            self.steer()?;
        }
        if status != Some(MigrationStatus::Completed) {
            match monitor.status()?.state {
                RunState::FinishMigrate | RunState::Postmigrate => {}
                other => self.state = other,
            }
            let info = monitor.migration()?;
            if let (Some(ram), true) = (&info.ram, self.writes) {
                self.job.watch.handle.progress.set_reading(&reading(&info.status, ram));
            }
            if self.hints.as_mut().is_some_and(|wait| !wait.goes_on(Instant::now(), info.ram.as_ref())) {
                self.hints = None;
                self.steer()?;
            }
            if let (Some(ram), MigrationStatus::Active) = (&info.ram, &info.status) {
                self.note_round(ram)?;
            }
            status = Some(info.status.clone());
            self.last = Some(info);
        }
        if let Some(channels) = &mut self.channels {
            // (It says `setup` from the moment of the command to migrate.)
            let made = status != Some(MigrationStatus::Setup);
            channels.made_by = channels.made_by.filter(|by| !made && Instant::now() < *by);
            if self.cancelling.is_some() {
                let by = *channels.cancelled_by.get_or_insert_with(|| Instant::now() + CANCEL_WITHIN);
                if Instant::now() >= by {
                    self.channels = None;
                }
            }
        }
        match status.unwrap_or(MigrationStatus::None) {
            MigrationStatus::Failed | MigrationStatus::Cancelled => Err(self.failure()),
            MigrationStatus::Completed => {
                // Its threads have ended. A receiver that has failed waits for that.
                self.channels = None;
                match self.cancelling.take() {
                    Some(reason) => Err(reason),
                    None => {
                        self.completed = true;
                        Ok(MigrationStatus::Completed)
                    }
                }
            }
            MigrationStatus::PreSwitchover => {
                self.switch_over()?;
                Ok(MigrationStatus::PreSwitchover)
            }
            other => Ok(other),
        }
    }

    /// Reports a save that would never end: once, and not one that ends by a time-out, or goes over the memory only
    /// once.
    fn note_round(&mut self, ram: &RamProgress) -> Result<(), JobError> {
        let SaveJob { monitor, watch, options, .. } = self.job;
        let ends = options.background || options.timeout.is_some() || self.stopped.is_some();
        if ends || self.hints.is_some() || !self.rounds.note(ram) {
            return Ok(());
        }
        if let Some(report) = watch.not_converging {
            let background = options.allows_background() && background::check(monitor, &monitor.settings()?).is_ok();
            report(&NotConverging { rounds: ram.dirty_sync_count, remaining: ram.remaining, background });
        }
        Ok(())
    }

    /// QEMU has stopped the VM and waits: freezes the disks, unless the save is to end, and lets it continue.
    fn switch_over(&mut self) -> Result<(), JobError> {
        if self.cancelling.is_some() {
            // It may have come here after it was too late to cancel it.
            return self.cancel();
        }
        if !self.frozen {
            if let Err(error) = self.job.before.put_overlays(self.job.monitor) {
                // QEMU's own disks are as they were. Served ones that have overlays are brought back when the VM runs.
                self.cancelling = Some(error);
                return self.cancel();
            }
            self.frozen = true;
        }
        match self.job.monitor.migrate_continue(&MigrationStatus::PreSwitchover) {
            // It has gone on, or has ended.
            Err(error) if error.is_refusal() => Ok(()),
            other => Ok(other?),
        }
    }

    /// Returns the reason why the migration ended early.
    fn failure(&mut self) -> JobError {
        if let Some(reason) = self.cancelling.take() {
            return reason;
        }
        if self.job.watch.handle.control.stop_requested().is_some() {
            // The channel was shut down, and QEMU noticed before the command came.
            return MigrateError::Cancelled.into();
        }
        let said = self.last.as_ref().and_then(|info| info.error.clone());
        JobError::Failed { reason: said.unwrap_or_else(|| "it does not say why; its own log does".into()) }
    }

    /// Applies the requests to this job: a new rate, a cancel.
    fn steer(&mut self) -> Result<(), JobError> {
        let SaveJob { monitor, watch, options, .. } = self.job;
        if self.cancelling.is_some() || self.committed {
            return Ok(());
        }
        if watch.handle.control.stop_requested().is_some() || watch.handle.control.has_failed() {
            self.cancelling = Some(MigrateError::Cancelled.into());
            return self.cancel();
        }
        if self.ran_unseen {
            self.cancelling = Some(unseen_writes::continued());
            return self.cancel();
        }
        let bandwidth = watch.handle.control.max_bandwidth();
        let bandwidth = if self.hints.is_some() { hints::slow(bandwidth) } else { bandwidth };
        if bandwidth != self.applied_bandwidth {
            monitor
                .apply_settings(&Settings::new().parameter("max-bandwidth", bandwidth.map_or(0, NonZeroU64::get)))?;
            self.applied_bandwidth = bandwidth;
        }
        let stands_still = self.job.before.stands_still;
        if (self.stopped.is_none() || options.background || stands_still)
            && self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
            && let Some(SaveTimeout { limit, action }) = options.timeout
        {
            self.deadline = None;
            match action {
                // It is stopped.
                OnTimeout::Pause if stands_still => {}
                OnTimeout::Pause => {
                    (watch.notice)(&format!("not done after {} s: stopping the VM", limit.as_secs_f64()));
                    // Not `stop`: the snapshot would come back stopped. A QEMU that may take its time stops the VM
                    // itself.
                    monitor.apply_settings(&Settings::new().parameter("downtime-limit", LONGEST_DOWNTIME))?;
                }
                OnTimeout::Cancel => {
                    self.cancelling = Some(JobError::TimedOut { after: limit });
                    self.cancel()?;
                }
            }
        }
        Ok(())
    }

    /// Makes QEMU give up. If it was too late for that the migration completes, and [`Self::look`] fails all the same.
    fn cancel(&self) -> Result<(), JobError> {
        let monitor = self.job.monitor;
        if self.writes {
            monitor.cancel_file_migration()?
        } else {
            monitor.migrate_cancel().map(|()| true)?
        };
        Ok(())
    }

    /// Rules a cancel out from here on: the snapshot has its name.
    pub(super) fn commit(&mut self) {
        self.committed = true;
    }

    fn note_end(&mut self, state: RunState) {
        self.state = state.clone();
        self.end = Some(state);
    }

    /// How the guest has ended by itself meanwhile, if it has.
    pub(super) const fn end(&self) -> Option<&RunState> {
        self.end.as_ref()
    }

    /// Expects that a VM that had to stand still has done so until now.
    pub(super) fn expect_still(&mut self) -> Result<(), JobError> {
        if !self.job.before.stands_still {
            return Ok(());
        }
        // Events from before the answer are here with it.
        self.job.monitor.status()?;
        let resumed = self.job.monitor.qmp().wait_event(&["RESUME"], Duration::ZERO)?;
        if self.ran_unseen || resumed.is_some() { Err(unseen_writes::continued()) } else { Ok(()) }
    }

    /// Returns the state in which the VM was when it was stopped for the save, if QEMU reported it.
    pub(super) fn state(&self) -> &RunState {
        &self.state
    }

    /// Watches until the migration is completed.
    pub(super) fn wait_completed(&mut self) -> Result<(), JobError> {
        while self.look()? != MigrationStatus::Completed {}
        Ok(())
    }

    /// Lets the VM run and waits until it does; returns how long it stood still.
    pub(super) fn continue_vm(&mut self) -> Result<Option<Duration>, JobError> {
        let monitor = self.job.monitor;
        let limit = Instant::now() + SETTLES_WITHIN;
        // QEMU says `completed` a moment before it leaves `finish-migrate`, and until then refuses `cont`.
        let mut finishing = true;
        loop {
            match monitor.cont() {
                Err(error) if error.is_refusal() && finishing && Instant::now() < limit => {
                    finishing = monitor.status()?.state == RunState::FinishMigrate;
                    std::thread::sleep(Duration::from_millis(1));
                }
                other => break other?,
            }
        }
        while self.resumed.is_none() && Instant::now() < limit {
            if let Some(event) = monitor.qmp().wait_event(&["RESUME", "STOP"], ASK_EVERY)? {
                match event.name.as_str() {
                    "RESUME" => self.resumed = Some(event),
                    _ => {
                        self.stopped.get_or_insert(event);
                    }
                }
            } else if monitor.status()?.state == RunState::Suspended {
                // A guest that sleeps does not run, and QEMU says nothing of it.
                return Ok(None);
            }
        }
        Ok(match (&self.stopped, &self.resumed) {
            (Some(stopped), Some(resumed)) => resumed.since(stopped),
            _ => None,
        })
    }

    /// Returns the end of the freeze at the beginning of a background save: the first RESUME after its first STOP.
    fn note_resumed(&mut self, event: Event) {
        if self.stopped.is_some() && self.resumed.is_none() {
            self.resumed = Some(event);
            self.ran_after = self.job.begun.elapsed();
        }
    }

    /// How long the VM stood still at the beginning of a background save, and how long after the save's beginning it
    /// ran on.
    pub(super) fn freeze(&mut self) -> Result<(Option<Duration>, Duration), JobError> {
        // `completed` may have been seen before them.
        while let Some(event) = self.job.monitor.qmp().wait_event(&["STOP", "RESUME"], Duration::ZERO)? {
            match event.name.as_str() {
                "STOP" => {
                    self.stopped.get_or_insert(event);
                }
                _ => self.note_resumed(event),
            }
        }
        let stood = match (&self.stopped, &self.resumed) {
            (Some(stopped), Some(resumed)) => resumed.since(stopped),
            _ => None,
        };
        Ok((stood, self.ran_after))
    }

    /// Rounds over the dirty log and pages by kind, as QEMU counts when it is done.
    pub(super) fn totals(&self) -> Result<Option<RamProgress>, JobError> {
        Ok(self.job.monitor.migration()?.ram)
    }
}

/// Converts QEMU's numbers.
fn reading(status: &MigrationStatus, ram: &RamProgress) -> ProgressReading {
    let page = ram.page_size.max(1);
    ProgressReading {
        phase: match status {
            MigrationStatus::None | MigrationStatus::Setup => Phase::Setup,
            MigrationStatus::Device | MigrationStatus::PreSwitchover => Phase::Device,
            MigrationStatus::Completed => Phase::Completing,
            _ => Phase::Active,
        },
        total_pages: ram.total / page,
        normal_pages: ram.normal,
        zero_pages: ram.duplicate,
        resent_pages: (ram.normal + ram.duplicate).saturating_sub(ram.total.saturating_sub(ram.remaining) / page),
        hinted_pages: 0,
        requests: 0,
        bytes: ram.transferred,
    }
}
