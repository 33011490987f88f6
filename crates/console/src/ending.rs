//! Cleaning up when a signal ends the program.

use std::thread;

use anyhow::Context as _;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Runs `cleanup` when SIGINT, SIGTERM or SIGHUP arrives, then exits with status 128 plus the signal's number.
///
/// # Errors
/// The signals cannot be caught, or the thread that waits for them cannot be started.
pub fn exit_on_signal(cleanup: impl FnOnce() + Send + 'static) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot catch signals")?;
    let wait = move || {
        if let Some(signal) = signals.forever().next() {
            cleanup();
            std::process::exit(128 + signal);
        }
    };
    thread::Builder::new().name("signals".into()).spawn(wait).context("cannot start a thread for signals")?;
    Ok(())
}
