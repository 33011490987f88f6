//! Signals to a running job.
//!
//! Before a guest runs, SIGINT, SIGTERM and SIGHUP cancel. Once a lazily restored guest runs, limosa is its pager:
//! SIGHUP is survived, the first SIGINT or SIGTERM lifts the rate limit and ends a recording, so that the rest is there
//! soon, the second leaves the guest paused, to be recovered.

use std::thread;

use anyhow::Context;
use limosa_console::say;
use limosa_control::JobKind;
use limosa_migrate::control::{Phase, Stop};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

/// Listens to signals until it is dropped.
pub(crate) struct SignalWatch {
    handle: Handle,
    thread: Option<thread::JoinHandle<()>>,
}

impl SignalWatch {
    /// Starts to listen for a job.
    pub(crate) fn start(job: JobKind, engine: &limosa_migrate::Handle) -> anyhow::Result<Self> {
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot handle signals")?;
        let handle = signals.handle();
        let engine = engine.clone();
        let thread = thread::Builder::new().name("signals".into()).spawn(move || {
            let mut heard = 0;
            for signal in signals.forever() {
                handle_signal(signal, &mut heard, job, &engine);
            }
        });
        Ok(Self { handle, thread: Some(thread.context("cannot start a thread for signals")?) })
    }
}

impl Drop for SignalWatch {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn handle_signal(signal: i32, heard: &mut u32, job: JobKind, engine: &limosa_migrate::Handle) {
    let (control, phase) = (&engine.control, engine.progress.read().phase);
    match (phase, signal) {
        (Phase::PostcopyActive, SIGHUP) => {}
        (Phase::PostcopyActive, _) => {
            *heard += 1;
            if *heard == 1 {
                say!(
                    "limosa: sending the rest at full speed; another signal aborts and leaves the guest without the rest \
                     of its memory"
                );
                control.set_max_bandwidth(None);
                control.push_rest();
            } else {
                control.stop(Stop::Pause);
            }
        }
        // Everything has been handed over; what is left takes a moment and cannot be taken back.
        (Phase::Completing | Phase::Completed, _) if job == JobKind::Restore => {}
        _ => control.stop(Stop::Cancel),
    }
}
