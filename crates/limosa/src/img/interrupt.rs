//! SIGINT, SIGTERM and SIGHUP in `limosa img`.
//!
//! Law: a file that a command has made and not finished is taken away, since it looks like an image; a file that was
//! there stays, and so does one that is finished. Files are made and noted under one lock, so none is missed. An image
//! is valid at any instant.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::Context as _;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use super::meter;

/// Number that a shell adds to that of the signal that ended a process.
const ENDED_BY: i32 = 128;

/// Files that were made and are not finished.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a file, if `make` does, and notes that it is not finished.
///
/// # Errors
/// Those of `make`.
pub(crate) fn making<T, E>(path: &Path, make: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let mut files = unfinished();
    let made = make()?;
    files.push(path.to_owned());
    Ok(made)
}

/// A file that was made is finished, or is not and is taken away.
pub(crate) fn made(path: &Path, finished: bool) {
    let mut files = unfinished();
    files.retain(|file| file != path);
    if !finished {
        let _ = fs::remove_file(path);
    }
}

/// Listens to signals, except those that were ignored when the process was started.
///
/// # Errors
/// The kernel's.
pub(crate) fn listen() -> anyhow::Result<()> {
    let ignored = ignored().unwrap_or(0);
    let heard = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0);
    let heard: Vec<_> = heard.collect();
    // If what has to be done first does not come to its end, the second signal ends it.
    let again = Arc::new(AtomicBool::new(false));
    for &signal in &heard {
        flag::register_conditional_shutdown(signal, ENDED_BY + signal, Arc::clone(&again))?;
        flag::register(signal, Arc::clone(&again))?;
    }
    let mut signals = Signals::new(heard).context("cannot handle signals")?;
    let wait = move || {
        if let Some(signal) = signals.forever().next() {
            // Held to the end: nothing is made any more.
            let files = unfinished();
            meter::end_line();
            for file in &*files {
                let _ = fs::remove_file(file);
            }
            process::exit(ENDED_BY + signal);
        }
    };
    thread::Builder::new().name("signals".into()).spawn(wait).context("cannot start a thread for signals")?;
    Ok(())
}

/// The signals that are ignored, a bit each: `proc_pid_status(5)`.
fn ignored() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    Ok(mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0))
}
