//! Sudden death: SIGKILL to a process at a moment drawn from a seed.

use std::ops::Range;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use limosa_page::to_nanos;
use rustix::process::{Pid, Signal, kill_process};

/// Sends SIGKILL to a process. The caller must be its parent and must not have waited for it, or the id may be
/// another process's by now.
///
/// # Errors
/// No such process, or not ours to kill.
pub fn kill9(pid: u32) -> Result<()> {
    let id = i32::try_from(pid).ok().and_then(Pid::from_raw).with_context(|| format!("{pid} is no process id"))?;
    kill_process(id, Signal::KILL).with_context(|| format!("killing {pid}"))
}

/// A kill that is on its way. Dropping it calls it off.
#[derive(Debug)]
pub struct Kill {
    /// When it comes, from the call on.
    pub after: Duration,
    call_off: Option<Sender<()>>,
    thread: Option<JoinHandle<bool>>,
}

impl Kill {
    /// Waits for the kill; says whether there was a process to kill.
    pub fn wait(mut self) -> bool {
        self.thread.take().is_some_and(|thread| thread.join().unwrap_or(false))
    }
}

impl Drop for Kill {
    fn drop(&mut self) {
        drop(self.call_off.take());
        if let Some(thread) = self.thread.take() {
            // It returns at once because its channel is closed.
            let _ = thread.join();
        }
    }
}

/// Kills the process at a moment within `window` from now on that `seed` decides. The child must not be waited for
/// before [`Kill::wait`] has returned or the value is dropped.
pub fn kill9_after(pid: u32, window: Range<Duration>, seed: u64) -> Kill {
    let width = to_nanos(window.end.saturating_sub(window.start));
    let after = window.start + Duration::from_nanos(if width == 0 { 0 } else { mixed(seed) % width });
    let (call_off, called_off) = channel();
    let thread = std::thread::spawn(move || {
        called_off.recv_timeout(after) == Err(RecvTimeoutError::Timeout) && kill9(pid).is_ok()
    });
    Kill { after, call_off: Some(call_off), thread: Some(thread) }
}

/// Spreads small seeds over all 64 bits (the finalizer of murmur3).
fn mixed(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    z = (z ^ (z >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    z ^ (z >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{Process, is_alive};
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    fn sleeper() -> Process {
        let mut command = Command::new("sleep");
        command.arg("1000");
        Process::spawn("sleep", command).unwrap()
    }

    #[test]
    fn the_process_is_killed_within_the_window() {
        let process = sleeper();
        let kill = kill9_after(process.pid(), Duration::from_millis(1)..Duration::from_millis(30), 5);
        assert!((Duration::from_millis(1)..Duration::from_millis(30)).contains(&kill.after));
        assert!(kill.wait());
        assert_eq!(process.wait(Duration::from_secs(10)).unwrap().signal(), Some(9));
    }

    #[test]
    fn a_kill_that_is_dropped_does_not_happen() {
        let process = sleeper();
        drop(kill9_after(process.pid(), Duration::from_secs(1000)..Duration::from_secs(1001), 5));
        assert!(is_alive(process.pid()));
    }

    #[test]
    fn different_seeds_give_different_moments() {
        let window = Duration::from_secs(1000)..Duration::from_secs(2000);
        let moments: std::collections::BTreeSet<Duration> =
            (0..50).map(|seed| kill9_after(1, window.clone(), seed).after).collect();
        assert!(moments.len() > 45);
    }
}
