//! The guard of a VM whose checkpoints are made: it is never left standing still.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use limosa_migrate::Handle;
use limosa_migrate::control::DeferredStop;
use limosa_migrate::output::OutputSignal;
use limosa_qemu::Heartbeat;
use limosa_qemu::monitor::{MigrationStatus, Monitor, Settings};
use limosa_qemu::qmp::{Event, QmpError};
use serde_json::Value;

use crate::convergence::{BasePause, DOWNTIME_LIMIT, LONGEST};
use crate::options::OnLoss;
use crate::primary::LocalVm;
use crate::remote::Farewell;

/// How often the VM is looked at. Events end the wait at once.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The events that say how the VM and its checkpoints are.
const EVENTS: [&str; 6] = ["STOP", "RESUME", "COLO_EXIT", "SHUTDOWN", "MIGRATION", "MIGRATION_PASS"];

/// State that the thread of a series and its guard share.
#[derive(Debug)]
pub(crate) struct Pulse {
    /// Whether the VM may stand still because of the keeper: set by the thread of the series.
    pausing: AtomicBool,
    /// Whether the guard has let the VM go.
    let_go: AtomicBool,
    /// Bytes that were passed on to a keeper elsewhere.
    bytes: AtomicU64,
    /// The end of QEMU, as the guard sees it: 0 none, 1 it said so, 2 it did not.
    end: AtomicU8,
}

impl Pulse {
    /// From the end of the base on the VM waits for its answer.
    pub(crate) const fn new() -> Self {
        let (pausing, let_go) = (AtomicBool::new(true), AtomicBool::new(false));
        Self { pausing, let_go, bytes: AtomicU64::new(0), end: AtomicU8::new(0) }
    }

    pub(crate) fn add_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::AcqRel);
    }

    /// How QEMU has ended, if it has.
    pub(crate) fn end(&self) -> Option<Farewell> {
        match self.end.load(Ordering::Acquire) {
            0 => None,
            1 => Some(Farewell::VmEnded),
            _ => Some(Farewell::VmLost),
        }
    }

    fn set_end(&self, seen: &Seen) {
        let end = if seen.shutdown { 1 } else { 2 };
        if seen.shutdown || seen.gone {
            self.end.store(end, Ordering::Release);
        }
    }

    pub(crate) fn set_pausing(&self, pausing: bool) {
        self.pausing.store(pausing, Ordering::Release);
    }

    fn is_pausing(&self) -> bool {
        self.pausing.load(Ordering::Acquire)
    }

    /// Whether the VM may run although its checkpoint was not answered: what is sealed now may have later writes.
    pub(crate) fn is_let_go(&self) -> bool {
        self.let_go.load(Ordering::SeqCst)
    }

    /// Notes that, before the VM is let go.
    fn let_go(&self) {
        self.let_go.store(true, Ordering::SeqCst);
    }
}

/// The guard's findings when the series ended.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// The job was told to stop.
    pub(crate) asked: bool,
    /// A checkpoint made no progress.
    pub(crate) stalled: bool,
    /// The guest powered off, or QEMU was told to quit.
    pub(crate) shutdown: bool,
    /// QEMU does not answer any more.
    pub(crate) gone: bool,
    /// QEMU's reason for leaving COLO.
    pub(crate) exit_reason: Option<String>,
}

/// Watches a VM from QEMU's command to migrate on.
pub(crate) struct Guard<'a> {
    monitor: &'a Monitor,
    handle: &'a Handle,
    pulse: &'a Pulse,
    /// Ends a wait for the next checkpoint.
    signal: &'a OutputSignal,
    stall_timeout: Duration,
    on_loss: OnLoss,
    notice: &'a (dyn Fn(&str) + Sync),
    /// Until the base is there.
    base_pause: Option<BasePause>,
    /// Whether it was said that the guest outruns its base.
    is_outrun: bool,
    /// Without it this process is ended, as it could leave the VM standing still.
    heartbeat: Option<Heartbeat>,
    /// Ends the thread of the series, when COLO has been ended.
    let_go: &'a dyn Fn(),
    /// How long the series may take to end by itself when the job is told to stop.
    leave_within: Duration,
    /// When the job was told to stop.
    asked: Option<Instant>,
    /// The channel is not shut down by a stop before COLO has been ended: the VM may wait for an answer on it.
    deferred: Option<DeferredStop>,
    /// The VM stands still since then.
    stopped: Option<Instant>,
    /// Bytes that had come at the last progress, and when that was.
    progress: (u64, Instant),
    seen: Seen,
}

impl<'a> Guard<'a> {
    /// A guard of a VM that runs. `let_go` ends the thread of the series, and is called when COLO has been ended; a
    /// series that is told to stop may take `leave_within` before that.
    pub(crate) fn new(
        vm: &LocalVm<'a>,
        leave_within: Duration,
        let_go: &'a dyn Fn(),
        heartbeat: Option<Heartbeat>,
    ) -> Self {
        let LocalVm { monitor, handle, notice, pulse, options, outputs, base_pause, .. } = *vm;
        Self {
            monitor,
            handle,
            pulse,
            signal: outputs.signal(),
            stall_timeout: options.stall_timeout,
            on_loss: options.on_loss,
            notice,
            base_pause,
            is_outrun: false,
            heartbeat,
            let_go,
            leave_within,
            asked: None,
            deferred: Some(handle.control.defer_stop()),
            stopped: None,
            progress: (0, Instant::now()),
            seen: Seen::default(),
        }
    }

    /// Watches until `is_over`.
    pub(crate) fn watch(mut self, is_over: impl Fn() -> bool) -> Seen {
        while !is_over() && !self.seen.gone {
            if let Some(heartbeat) = &self.heartbeat {
                heartbeat.beat();
            }
            match self.monitor.qmp().wait_event(&EVENTS, LOOK_EVERY) {
                Ok(Some(event)) => self.note(&event),
                Ok(None) => {}
                // The thread that receives sees it as well.
                Err(_) => self.seen.gone = true,
            }
            self.pulse.set_end(&self.seen);
            if self.deferred.is_some() {
                self.look();
            }
        }
        self.pulse.set_end(&self.seen);
        // A QEMU that does not answer obeys no command either, and its channel must end.
        self.deferred = None;
        self.signal.close();
        self.seen
    }

    /// Reads the events that came with the end of the series.
    pub(crate) fn note_rest(monitor: &Monitor, seen: &mut Seen) {
        match monitor.qmp().take_events() {
            Ok(events) => events.iter().for_each(|event| note_end(event, seen)),
            Err(_) => seen.gone = true,
        }
    }

    fn note(&mut self, event: &Event) {
        match event.name.as_str() {
            "STOP" => self.stopped = Some(Instant::now()),
            "RESUME" => self.stopped = None,
            "MIGRATION_PASS" => self.begin_round(event),
            _ => note_end(event, &mut self.seen),
        }
    }

    /// Lets QEMU stop the VM for longer if the guest writes faster than its base is sent.
    fn begin_round(&mut self, event: &Event) {
        let Some(round) = event.data.get("pass").and_then(Value::as_u64) else { return };
        if self.stopped.is_some() {
            return;
        }
        let Some(limit) = self.base_pause.as_mut().and_then(|pause| pause.begin_round(round)) else { return };
        let raise = || {
            // Checkpoints are rounds as well.
            if self.monitor.migration()?.status != MigrationStatus::Active {
                return Ok(false);
            }
            self.monitor.apply_settings(&Settings::new().parameter(DOWNTIME_LIMIT, limit))?;
            Ok::<_, QmpError>(true)
        };
        match raise() {
            Ok(true) => {
                tracing::info!("round {round} of the base: {DOWNTIME_LIMIT} is {limit} ms");
                if !std::mem::replace(&mut self.is_outrun, true) {
                    let longest = Duration::from_millis(LONGEST).as_secs();
                    (self.notice)(&format!(
                        "the guest writes faster than its memory is sent: the base may end with a pause of up to \
                         {longest} s"
                    ));
                }
            }
            Ok(false) => self.base_pause = None,
            // A connection that has failed is noticed by the next look.
            Err(error) => tracing::debug!("{DOWNTIME_LIMIT} stays: {error}"),
        }
    }

    /// Ends COLO if the job was told to stop, or if the VM stands still and nothing comes.
    fn look(&mut self) {
        let came = self.handle.progress.read().bytes.saturating_add(self.pulse.bytes.load(Ordering::Acquire));
        if came != self.progress.0 {
            self.progress = (came, Instant::now());
        }
        let idle = self.stopped.map(|stopped| stopped.max(self.progress.1).elapsed());
        if self.handle.control.stop_requested().is_some() {
            self.seen.asked = true;
            let asked = *self.asked.get_or_insert_with(Instant::now);
            if asked.elapsed() < self.leave_within {
                self.signal.close();
                return;
            }
        } else if self.pulse.is_pausing() && idle.is_some_and(|idle| idle >= self.stall_timeout) {
            self.seen.stalled = true;
        } else {
            return;
        }
        self.pulse.let_go();
        // QEMU may hang, and leave the command without an answer.
        self.heartbeat = None;
        let stands_still = self.seen.stalled && self.on_loss == OnLoss::Pause;
        match if stands_still { Ok(()) } else { self.monitor.end_colo() } {
            Ok(()) => {}
            // The base is still coming: its migration fails when the channel is shut down.
            Err(error) if error.is_refusal() => tracing::debug!("{error}"),
            Err(QmpError::NoReply { .. }) => {}
            Err(_) => self.seen.gone = true,
        }
        (self.let_go)();
        self.deferred = None;
        self.signal.close();
    }
}

pub(crate) fn note_end(event: &Event, seen: &mut Seen) {
    match event.name.as_str() {
        "SHUTDOWN" => seen.shutdown = true,
        "COLO_EXIT" => {
            seen.exit_reason = event.data.get("reason").and_then(|reason| reason.as_str()).map(str::to_owned);
        }
        _ => {}
    }
}
