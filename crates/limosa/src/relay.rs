//! Forwards signals to the QEMU that limosa runs.
//!
//! A terminal sends signals to every process of its foreground group, so QEMU has had those already: only what a
//! process sent to limosa is handed on.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use limosa_qemu::monitor::Monitor;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::iterator::{Handle, SignalsInfo};
use signal_hook::low_level::siginfo::{Cause, Origin};

/// Signals that are passed on: those that a QEMU started directly would receive.
const SIGNALS: [i32; 8] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGCONT, SIGWINCH];

/// Signals that make QEMU end in good order.
const ENDS: [Signal; 3] = [Signal::HUP, Signal::INT, Signal::TERM];

/// How long no command is sent to a QEMU that may be ending. One that has not reported its end by then keeps running.
const HELD: Duration = Duration::from_secs(2);

/// How long a signal waits for answers that are under way, which may hang on memory that is still to come.
const ANSWERS: Duration = Duration::from_millis(500);

/// Receives this process's signals until it is dropped.
pub(crate) struct Relay {
    handle: Handle,
    thread: Option<thread::JoinHandle<()>>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// The process that the signals are for.
    target: Option<Pid>,
    /// Its monitor, for further commands; not used while it ends.
    monitor: Weak<Monitor>,
    /// Signals that arrived before it was known.
    early: Vec<Signal>,
    /// Whether QEMU has been asked to end, in any way.
    end_asked: bool,
}

impl Relay {
    /// Takes signals from now on; they are kept until [`Relay::aim`].
    pub(crate) fn start() -> anyhow::Result<Self> {
        let mut signals = SignalsInfo::<WithOrigin>::new(SIGNALS).context("cannot handle signals")?;
        let handle = signals.handle();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        let thread = thread::Builder::new().name("signals".into()).spawn(move || {
            for origin in &mut signals {
                handle_signal(&origin, &shared);
            }
        });
        Ok(Self { handle, thread: Some(thread.context("cannot start a thread for signals")?), state })
    }

    /// Forwards signals to this process, which must not be reaped before [`Relay::rest`].
    pub(crate) fn aim(&self, pid: u32) {
        let mut state = self.state.lock();
        state.target = i32::try_from(pid).ok().and_then(Pid::from_raw);
        for signal in std::mem::take(&mut state.early) {
            send(&state, signal);
        }
    }

    /// Sends no command to this monitor while QEMU ends by a signal.
    pub(crate) fn quiet(&self, monitor: &Arc<Monitor>) {
        self.state.lock().monitor = Arc::downgrade(monitor);
    }

    /// Forwards nothing any more: the number may become another process's.
    pub(crate) fn rest(&self) {
        self.state.lock().target = None;
    }

    /// Whether a signal has asked QEMU to end.
    pub(crate) fn end_was_asked(&self) -> bool {
        self.state.lock().end_asked
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn handle_signal(origin: &Origin, state: &Mutex<State>) {
    let mut state = state.lock();
    state.end_asked |= ![SIGCONT, SIGWINCH].contains(&origin.signal);
    let Some(signal) = Signal::from_named_raw(origin.signal) else { return };
    if origin.cause == Cause::Kernel {
        return;
    }
    if state.target.is_some() {
        send(&state, signal);
    } else {
        state.early.push(signal);
    }
}

fn send(state: &State, signal: Signal) {
    if let Some(pid) = state.target {
        if let Some(monitor) = state.monitor.upgrade().filter(|_| ENDS.contains(&signal)) {
            monitor.qmp().quiesce(HELD, ANSWERS);
        }
        // The only failures left are that it has just ended, or has become another user's: then it is not ours to
        // signal.
        let _ = kill_process(pid, signal);
    }
}
