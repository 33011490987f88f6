//! SIGINT, SIGTERM and SIGHUP in `limosa img`.
//!
//! Law: a file that a command created and did not finish is removed, since it looks like an image; a file that was
//! there before stays, and so does a finished one. An image is valid at any instant.

use std::fs;
use std::io;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use limosa_image::UnfinishedFiles;
use parking_lot::{Condvar, Mutex};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use super::meter;
use crate::program::say_named;

/// The number that a shell adds to the signal's for the exit status.
pub(crate) const ENDED_BY: i32 = 128;

/// Files of images that are not complete yet.
pub(crate) static UNFINISHED: UnfinishedFiles = UnfinishedFiles::new();

/// A line that is printed if a signal ends the command, which leaves something to continue with.
static KEPT: OnceLock<String> = OnceLock::new();

/// A request that runs when a signal comes: it is asked to stop, and has time to leave nothing behind.
static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// The last line of a request that has stopped.
static STOPPED: Mutex<Option<String>> = Mutex::new(None);
static HAS_STOPPED: Condvar = Condvar::new();

/// How long a request may take to stop: the limits of an upload's parts in flight and of its abort, and some more.
const STOP_WITHIN: Duration = Duration::from_secs(25);

/// Returns the flag of a request that a signal has to stop: it ends with [`stopped`].
pub(crate) fn stop() -> Arc<AtomicBool> {
    Arc::clone(STOP.get_or_init(Arc::default))
}

/// Whether a signal has come that a request has to stop for.
pub(crate) fn is_stopping() -> bool {
    STOP.get().is_some_and(|stop| stop.load(Ordering::Relaxed))
}

/// Ends a command whose request has stopped because of a signal, with this line.
pub(crate) fn stopped(line: String) -> ! {
    *STOPPED.lock() = Some(line);
    HAS_STOPPED.notify_all();
    loop {
        thread::park();
    }
}

/// Has this line said if a signal ends the command.
pub(crate) fn keep(line: String) {
    KEPT.get_or_init(|| line);
}

/// Listens to signals, except those that were ignored when the process was started.
///
/// # Errors
/// The kernel's.
pub(crate) fn listen() -> anyhow::Result<()> {
    let heard = signals();
    // If what has to be done first does not come to its end, the second signal ends it.
    let again = Arc::new(AtomicBool::new(false));
    for &signal in &heard {
        flag::register_conditional_shutdown(signal, ENDED_BY + signal, Arc::clone(&again))?;
        flag::register(signal, Arc::clone(&again))?;
    }
    let mut signals = Signals::new(heard).context("cannot handle signals")?;
    let wait = move || {
        if let Some(signal) = signals.forever().next() {
            // Held to the end: no file is created any more.
            let done = UNFINISHED.remove_all();
            meter::end_line();
            if let Some(stop) = STOP.get() {
                stop.store(true, Ordering::Relaxed);
                let mut line = STOPPED.lock();
                HAS_STOPPED.wait_while_for(&mut line, |line| line.is_none(), STOP_WITHIN);
                if let Some(line) = &*line {
                    say_named!("{line}");
                }
            } else if let Some(line) = KEPT.get() {
                say_named!("{line}");
            } else if !done.removed().is_empty() {
                let names: Vec<_> = done.removed().iter().map(|path| path.display().to_string()).collect();
                say_named!("interrupted; removed {}", names.join(", "));
            }
            process::exit(ENDED_BY + signal);
        }
    };
    thread::Builder::new().name("signals".into()).spawn(wait).context("cannot start a thread for signals")?;
    Ok(())
}

/// Returns the signals that end a program in order, without those that were ignored when it was started (nohup).
pub(crate) fn signals() -> Vec<i32> {
    let ignored = ignored().unwrap_or(0);
    [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0).collect()
}

/// The signals that are ignored, a bit each: `proc_pid_status(5)`.
fn ignored() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    Ok(mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0))
}
