//! `limosa run`: starts a QEMU, restores a VM into it, and relays for it until it ends.
//!
//! Law: to its caller, limosa looks like that QEMU. QEMU has the terminal, the standard streams and the process group,
//! signals are forwarded ([`Relay`]), its exit status is limosa's. QEMU does not end with limosa: a pager that is
//! killed stalls the guest, which can be recovered, and does not end it. A QEMU that could not be given its VM is
//! ended.

mod start;

use std::cell::Cell;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ExitCode, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use limosa_control::JobKind;
use limosa_migrate::Handle;
use limosa_migrate::control::Phase;
use limosa_qemu::monitor::Monitor;
use limosa_qemu::qmp::QmpError;
use limosa_qemu::{
    CommandLineProperties, JobContext, RestoreReport, RestoreRequest, RunChoice, Watchdog, bring_overlays,
    check_command_line, check_program, restore,
};
use limosa_snapshot::Snapshot;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use serde_json::Value;

use crate::args::{DisksArg, RunArgs, SetClockArg};
use crate::clock::{self, ClockOutcome, RestoredClock};
use crate::detach::Reporter;
use crate::job;
use crate::packed;
use crate::relay::Relay;
use crate::remote;
use crate::restore::{Observer, begin_recording, check_recording, options, tell};
use crate::usage::misused;
use crate::working_set::{Recording, WorkingSetUse};
use limosa_console::say;

/// How long a QEMU may take to end, once it has been asked to.
const END_WITHIN: Duration = Duration::from_secs(5);

/// How long a QEMU that has closed its ends of everything may take until the kernel says that it has ended.
const GONE_WITHIN: Duration = Duration::from_secs(2);

/// Who has a VM run, and what that means to it.
pub(crate) struct Caller<'a> {
    /// Is called once QEMU has been started, and before it gets its VM. If it fails, the VM does not run.
    pub(crate) started: &'a dyn Fn() -> anyhow::Result<()>,
    /// Whether QEMU had its VM: it may have run.
    pub(crate) had_guest: &'a Cell<bool>,
}

pub(crate) fn run(args: &RunArgs, verbose: u8) -> anyhow::Result<ExitCode> {
    packed::define_key(&args.key)?;
    run_for(&Caller { started: &|| Ok(()), had_guest: &Cell::new(false) }, args, verbose)
}

/// Checks everything that can be known before anything has begun.
///
/// # Errors
/// The VM would not run.
pub(crate) fn check(args: &RunArgs) -> anyhow::Result<(CommandLineProperties, Snapshot)> {
    let line = check_command_line(&args.command)?;
    check_program(&args.command)?;
    job::check_listen(args.how.listen.as_ref())?;
    check_recording(&args.how);
    if args.how.set_clock == SetClockArg::On && args.how.state.choice_for(line) == RunChoice::Paused {
        misused("--set-clock on cannot be used for a VM that stays paused");
    }
    let snapshot = packed::open(&args.snapshot)?;
    start::check(args, &snapshot)?;
    Ok((line, snapshot))
}

/// Runs the VM for a command that has more to do for it.
pub(crate) fn run_for(caller: &Caller<'_>, args: &RunArgs, verbose: u8) -> anyhow::Result<ExitCode> {
    let (line, snapshot) = check(args)?;
    if args.how.disks == DisksArg::Check
        && let Some(manifest) = snapshot.manifest()
    {
        bring_overlays(&manifest.overlaid_disks, manifest.checkpoint.unwrap_or(0))?;
    }
    let relay = Relay::start()?;
    let notice = Notice { shown: verbose > 0 };
    let working_set = WorkingSetUse::prepare(&args.how.working_set, &snapshot, &|line| notice.tell(line))?;
    let (mut qemu, greeted) = start::start(args, &snapshot, relay, caller, &notice)?;
    let attempt = match greeted {
        Ok(qmp) => {
            let monitor = Arc::new(Monitor::new(qmp));
            qemu.relay.quiet(&monitor);
            attempt(args, line, StoredVm { snapshot: &snapshot, working_set }, monitor, &notice)
        }
        Err(error) => {
            let result = Err(not_greeted(error, args, &qemu));
            Attempt { result, clock: None, lazy_guest: false, loaded: false, recording: Ok(None), monitor: None }
        }
    };
    // The restore has read all of this file, or has failed.
    drop(snapshot);
    let has_guest = attempt.has_guest();
    caller.had_guest.set(has_guest);
    let status = match attempt.result {
        Ok(report) => {
            if verbose > 0 {
                tell(&report);
                remote::tell_cost();
                clock::tell(&attempt.clock, "");
            }
            // The guest runs, so the exit status is QEMU's all the same.
            if let Some(why) = clock::failure(&attempt.clock, args.how.set_clock) {
                say!("limosa: {why}");
            }
            let recording = BackgroundRecording::start(attempt.recording, &notice);
            // QEMU keeps what it has to say for a monitor that does not listen; one that has gone costs nothing.
            drop(attempt.monitor);
            let status = qemu.wait();
            recording.end();
            // It is read ahead for as long as there is a guest.
            drop(report.read_ahead);
            status?
        }
        Err(error) if qemu.is_ending(attempt.monitor.as_deref(), has_guest) => {
            let greeted = attempt.monitor.is_some();
            drop(attempt.monitor);
            let status = qemu.wait()?;
            if has_guest || qemu.relay.end_was_asked() {
                // It had its VM, or was asked to end: that is no failure of the restore.
                tracing::info!("{}", limosa_console::anyhow_error_line(&error));
                status
            } else if greeted {
                // A QEMU that cannot load a VM may crash over it (found with QEMU 10.0.2); why it could not says more.
                return Err(error.context(format!("{} ended ({status})", qemu.program)));
            } else {
                say!("limosa: {} ended ({status}) before its VM was restored; the snapshot is unchanged", qemu.program);
                return Ok(failed(status));
            }
        }
        Err(error) if attempt.lazy_guest => {
            drop(attempt.monitor);
            say!("limosa: {}", limosa_console::anyhow_error_line(&stalled(error, args)));
            return Ok(failed(qemu.wait()?));
        }
        Err(error) => {
            qemu.end(attempt.monitor)?;
            return Err(error);
        }
    };
    drop(qemu);
    Ok(like(status))
}

/// Relays for a QEMU, or a limosa that runs one, that has its VM already, until it ends.
pub(crate) fn outlive(child: Child, command: &[OsString]) -> anyhow::Result<ExitStatus> {
    let relay = Relay::start()?;
    relay.aim(child.id());
    Qemu { child, relay, program: program(command) }.wait()
}

/// The VM that is restored, and the part that working sets have in it.
struct StoredVm<'a> {
    snapshot: &'a Snapshot,
    working_set: WorkingSetUse,
}

/// Notices shown with `-v` only.
struct Notice {
    shown: bool,
}

impl Notice {
    fn tell(&self, line: &str) {
        if self.shown {
            say!("limosa: {line}");
        }
    }
}

/// The outcome of the restore.
struct Attempt {
    result: anyhow::Result<RestoreReport>,
    clock: ClockOutcome,
    /// Whether there was a guest before all of its memory was there.
    lazy_guest: bool,
    /// Whether QEMU has reported that it has all of its VM: the guest may run, and end, before the next message.
    loaded: bool,
    /// The recording of the guest's working set, if it was asked for.
    recording: anyhow::Result<Option<Recording>>,
    monitor: Option<Arc<Monitor>>,
}

/// A recording that is finished while this program waits for QEMU.
struct BackgroundRecording {
    is_ended: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl BackgroundRecording {
    fn start(recording: anyhow::Result<Option<Recording>>, notice: &Notice) -> Self {
        let (is_ended, shown) = (Arc::new(AtomicBool::new(false)), notice.shown);
        let ended = Arc::clone(&is_ended);
        let finish = move |recording: Recording| match recording.finish(&ended) {
            Ok(recorded) if shown => recorded.tell(),
            Ok(_) => {}
            Err(error) => not_recorded(&error),
        };
        let thread = match recording {
            Ok(None) => None,
            Ok(Some(recording)) => {
                let thread = thread::Builder::new().name("recording".into()).spawn(move || finish(recording));
                thread.inspect_err(|error| say!("limosa: the working set is not recorded: {error}")).ok()
            }
            Err(error) => {
                not_recorded(&error);
                None
            }
        };
        Self { is_ended, thread }
    }

    /// Ends it with its QEMU.
    fn end(self) {
        self.is_ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread {
            let _ = thread.join();
        }
    }
}

fn not_recorded(error: &anyhow::Error) {
    say!("limosa: the working set is not recorded: {}", limosa_console::anyhow_error_line(error));
}

impl Attempt {
    /// Whether QEMU had its VM, so that its end is not a failure of the restore.
    fn has_guest(&self) -> bool {
        self.lazy_guest || self.loaded
    }
}

fn attempt(
    args: &RunArgs,
    line: CommandLineProperties,
    vm: StoredVm<'_>,
    monitor: Arc<Monitor>,
    notice: &Notice,
) -> Attempt {
    let StoredVm { snapshot, working_set } = vm;
    let handle = Handle::new();
    handle.control.set_max_bandwidth(args.steer.max_bandwidth);
    let mut options = options(&args.how, false, &working_set);
    options.run = args.how.state.choice_for(line);
    let paused = options.run == RunChoice::Paused;
    let reporter = Reporter::new(false);
    let clock = RestoredClock::new(&monitor, args.how.set_clock);
    let observer = Observer::new(&reporter, !notice.shown, paused, clock);
    let tell = |line: &str| notice.tell(line);
    let watch = JobContext::new(&handle, &tell);
    let watchdog = || {
        let arguments = ["watchdog", "--"];
        Ok(Some(Watchdog::spawn_without_waiting(
            job::THIS_PROGRAM.as_ref(),
            arguments,
            monitor.qmp(),
            Stdio::inherit(),
        )?))
    };
    let listen = |path: &Path| job::listen(path, JobKind::Restore, &handle);
    let result = args.steer.control.as_deref().map(listen).transpose().and_then(|_socket| {
        let (monitor, path, options) = (&monitor, &args.snapshot, &options);
        Ok(restore(RestoreRequest {
            monitor,
            snapshot,
            path,
            options,
            watch,
            observer: &observer,
            start_watchdog: &watchdog,
        })?)
    });
    let lazy_guest = observer.has_lazy_guest();
    let loaded = observer.has_loaded() || handle.progress.read().phase == Phase::Completed;
    let result = if lazy_guest { result } else { result.context("not restored; the snapshot is unchanged") };
    let (result, recording) = match result {
        Ok(mut report) => {
            let recording = begin_recording(working_set, &mut report, &monitor, snapshot);
            (Ok(report), recording)
        }
        Err(error) => (Err(error), Ok(None)),
    };
    let clock = observer.clock.outcome();
    drop(observer);
    Attempt { result, clock, lazy_guest, loaded, recording, monitor: Some(monitor) }
}

/// Returns the error for a QEMU whose monitor does not answer.
fn not_greeted(error: QmpError, args: &RunArgs, qemu: &Qemu) -> anyhow::Error {
    match error {
        QmpError::Busy { waited, .. } => anyhow::anyhow!(
            "{} opened no monitor within {} s: is it QEMU? If it needs longer to start, use --start-within",
            qemu.program,
            waited.as_secs_f64()
        ),
        other => anyhow::Error::from(other).context(format!(
            "cannot restore {} into {}",
            args.snapshot.display(),
            qemu.program
        )),
    }
}

fn stalled(error: anyhow::Error, args: &RunArgs) -> anyhow::Error {
    error.context(format!(
        "the guest stalls where it accesses missing memory; if its QEMU has another monitor, recover with: limosa restore \
         --recover {} --qmp SOCK; otherwise end it",
        args.snapshot.display()
    ))
}

fn program(command: &[OsString]) -> String {
    command.first().map(|program| program.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The QEMU process that limosa relays for.
struct Qemu {
    child: Child,
    relay: Relay,
    program: String,
}

impl Qemu {
    /// Waits for its end.
    fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        self.seen_ended(WaitIdOptions::empty())?;
        self.reap()
    }

    /// Whether it has ended. It stays unreaped, so that its number stays its own.
    fn seen_ended(&self, how: WaitIdOptions) -> anyhow::Result<bool> {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("the process has no id")?;
        loop {
            match waitid(WaitId::Pid(id), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | how) {
                Err(rustix::io::Errno::INTR) => {}
                seen => return Ok(seen.with_context(|| format!("cannot wait for {}", self.program))?.is_some()),
            }
        }
    }

    fn ended_within(&self, limit: Duration) -> anyhow::Result<bool> {
        let end = Instant::now() + limit;
        while !self.seen_ended(WaitIdOptions::NOHANG)? {
            if Instant::now() >= end {
                return Ok(false);
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(true)
    }

    fn reap(&mut self) -> anyhow::Result<ExitStatus> {
        self.relay.rest();
        self.child.wait().with_context(|| format!("cannot wait for {}", self.program))
    }

    /// Whether it has ended or is about to, so that a failure is a consequence of that.
    fn is_ending(&self, monitor: Option<&Monitor>, has_guest: bool) -> bool {
        // One that goes takes its channel down before its monitor, and says before that it goes.
        let expected = has_guest || self.relay.end_was_asked();
        let timeout = if expected { GONE_WITHIN } else { Duration::ZERO };
        let end = Instant::now() + timeout;
        loop {
            let events = monitor.map(|monitor| monitor.qmp().take_events());
            match events {
                Some(Ok(events)) if events.iter().any(|event| event.name == "SHUTDOWN") => return true,
                Some(Ok(_)) if Instant::now() < end => thread::sleep(Duration::from_millis(20)),
                Some(Ok(_)) => return false,
                Some(Err(_)) | None => return self.ended_within(GONE_WITHIN).unwrap_or(false),
            }
        }
    }

    /// Ends it: by its monitor, so that it leaves the terminal as it found it, or else by signals.
    fn end(&mut self, monitor: Option<Arc<Monitor>>) -> anyhow::Result<ExitStatus> {
        if let Some(monitor) = monitor {
            let _ = monitor.qmp().execute_within("quit", Value::Null, END_WITHIN);
            if self.ended_within(END_WITHIN)? {
                return self.reap();
            }
        }
        for signal in [Signal::TERM, Signal::KILL] {
            if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, signal);
            }
            if self.ended_within(END_WITHIN)? {
                break;
            }
        }
        self.wait()
    }
}

/// Returns QEMU's status, but never success.
fn failed(status: ExitStatus) -> ExitCode {
    if status.success() { ExitCode::FAILURE } else { like(status) }
}

/// Ends as QEMU has: by the same signal, or with the same status.
pub(crate) fn like(status: ExitStatus) -> ExitCode {
    if let Some(signal) = status.signal() {
        // Returns only for a signal that ends nothing.
        let _ = signal_hook::low_level::emulate_default_handler(signal);
        return ExitCode::from(u8::try_from(signal.saturating_add(128)).unwrap_or(u8::MAX));
    }
    ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
}
