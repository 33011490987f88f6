//! The guard of a VM whose checkpoints are made: it is never left standing still.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use limosa_migrate::Handle;
use limosa_migrate::control::{DeferredStop, Stop};
use limosa_migrate::output::OutputSignal;
use limosa_qemu::Heartbeat;
use limosa_qemu::monitor::Monitor;
use limosa_qemu::qmp::{Event, QmpError};

/// How often the VM is looked at. Events end the wait at once.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The events that say how the VM and its checkpoints are.
const EVENTS: [&str; 5] = ["STOP", "RESUME", "COLO_EXIT", "SHUTDOWN", "MIGRATION"];

/// Whether the VM may stand still because of the keeper, which the thread that receives says; and whether the guard has
/// let it go.
#[derive(Debug)]
pub(crate) struct Pulse {
    pausing: AtomicBool,
    let_go: AtomicBool,
}

impl Pulse {
    /// From the end of the base on the VM waits for its answer.
    pub(crate) const fn new() -> Self {
        Self { pausing: AtomicBool::new(true), let_go: AtomicBool::new(false) }
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
    /// Without it this process is ended, as it could leave the VM standing still.
    heartbeat: Option<Heartbeat>,
    /// The channel is not shut down by a stop before COLO has been ended: the VM may wait for an answer on it.
    deferred: Option<DeferredStop>,
    /// The VM stands still since then.
    stopped: Option<Instant>,
    /// Bytes that had come at the last progress, and when that was.
    progress: (u64, Instant),
    seen: Seen,
}

impl<'a> Guard<'a> {
    /// A guard of a VM that runs.
    pub(crate) fn new(
        monitor: &'a Monitor,
        handle: &'a Handle,
        pulse: &'a Pulse,
        signal: &'a OutputSignal,
        (stall_timeout, heartbeat): (Duration, Option<Heartbeat>),
    ) -> Self {
        let deferred = Some(handle.control.defer_stop());
        let progress = (0, Instant::now());
        let (stopped, seen) = (None, Seen::default());
        Self { monitor, handle, pulse, signal, stall_timeout, heartbeat, deferred, stopped, progress, seen }
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
            if self.deferred.is_some() {
                self.look();
            }
        }
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
            _ => note_end(event, &mut self.seen),
        }
    }

    /// Ends COLO if the job was told to stop, or if the VM stands still and nothing comes.
    fn look(&mut self) {
        let came = self.handle.progress.read().bytes;
        if came != self.progress.0 {
            self.progress = (came, Instant::now());
        }
        let idle = self.stopped.map(|stopped| stopped.max(self.progress.1).elapsed());
        if self.handle.control.stop_requested().is_some() {
            self.seen.asked = true;
        } else if self.pulse.is_pausing() && idle.is_some_and(|idle| idle >= self.stall_timeout) {
            self.seen.stalled = true;
            self.handle.control.stop(Stop::Cancel);
        } else {
            return;
        }
        self.pulse.let_go();
        // QEMU may hang, and leave the command without an answer.
        self.heartbeat = None;
        match self.monitor.end_colo() {
            Ok(()) => {}
            // The base is still coming: its migration fails when the channel is shut down.
            Err(error) if error.is_refusal() => tracing::debug!("{error}"),
            Err(QmpError::NoReply { .. }) => {}
            Err(_) => self.seen.gone = true,
        }
        self.deferred = None;
        self.signal.close();
    }
}

/// Notes an event that says how checkpoints ended.
pub(crate) fn note_end(event: &Event, seen: &mut Seen) {
    match event.name.as_str() {
        "SHUTDOWN" => seen.shutdown = true,
        "COLO_EXIT" => {
            seen.exit_reason = event.data.get("reason").and_then(|reason| reason.as_str()).map(str::to_owned);
        }
        _ => {}
    }
}
