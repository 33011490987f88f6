//! Ends of QEMU's connections that stay open for a moment after the process that read them is gone.
//!
//! Law: **connections of several channels do not break while QEMU sets them up**, as long as that takes less than ten
//! seconds and QEMU's monitor answers within half a second. Fact found with QEMU 10.0.2: it then waits for the thread
//! of each channel, and one that ends because *another* channel has broken does not report it; QEMU waits for ever,
//! with a migration that cannot be cancelled and that no other can follow. (It waits in the same way, for a moment, at
//! the end of each round: so it is ordered to cancel before they break.) So limosa and its watchdog both hold the
//! connections, and the place where they are accepted; the process that takes the job over closes them once the
//! migration is past its set-up and cancelled.
//!
//! Not for long: in the last moments of a migration, a QEMU whose connection is not read blocks with its VM and its
//! monitor. So time runs from the beginning, and is extended only by an event of QEMU's set-up.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

/// How long connections are held without an event from QEMU: it may be waiting for a reader.
pub(crate) const HOLD: Duration = Duration::from_millis(500);

/// Descriptors that are held at most: all channels there can be, what they come from, and some strangers.
const MOST: usize = 128;

/// Connections of a job, held open.
#[derive(Debug, Default)]
pub(crate) struct HeldConnections {
    shared: Arc<SharedState>,
}

#[derive(Debug, Default)]
struct SharedState {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    ends: Vec<OwnedFd>,
    until: Option<Instant>,
}

impl HeldConnections {
    /// Holds a duplicate. One that cannot be made is not held: then there is no protection.
    pub(crate) fn hold_duplicate(&self, end: BorrowedFd<'_>) {
        if let Ok(end) = end.try_clone_to_owned() {
            self.hold(end);
        }
    }

    /// Holds it.
    pub(crate) fn hold(&self, end: OwnedFd) {
        let mut state = self.shared.lock();
        if state.ends.len() < MOST {
            state.ends.push(end);
        }
    }

    /// Closes all of them after this time, even if a later time was set before.
    pub(crate) fn release_in(&self, time: Duration) {
        let mut state = self.shared.lock();
        if state.ends.is_empty() {
            return;
        }
        if time.is_zero() {
            state.ends.clear();
            return;
        }
        let waits = state.until.replace(Instant::now() + time).is_some();
        self.shared.changed.notify_all();
        if waits {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let started = thread::Builder::new().name("release".into()).spawn(move || shared.release_in_time());
        if started.is_err() {
            state.ends.clear();
        }
    }

    /// Closes all of them.
    pub(crate) fn release(&self) {
        self.release_in(Duration::ZERO);
    }
}

impl Drop for HeldConnections {
    fn drop(&mut self) {
        self.release();
        self.shared.changed.notify_all();
    }
}

impl SharedState {
    fn release_in_time(&self) {
        let mut state = self.lock();
        while !state.ends.is_empty() {
            let left = state.until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                break;
            }
            self.changed.wait_for(&mut state, left);
        }
        state.ends.clear();
        state.until = None;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A time that no test waits for, on any machine.
    const LONG: Duration = Duration::from_secs(240);

    /// The other end of a connection whose near end is held and nowhere else open.
    fn held() -> (HeldConnections, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        let held = HeldConnections::default();
        held.hold_duplicate(near.as_fd());
        (held, far)
    }

    /// Waits until the near end is gone, but not for a time that a test has brought forward.
    fn wait_gone(mut far: &UnixStream) {
        far.set_read_timeout(Some(LONG / 2)).unwrap();
        assert_eq!(far.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn what_is_held_is_open_until_its_time_has_come() {
        let (held, far) = held();
        far.set_nonblocking(true).unwrap();
        assert_eq!((&far).read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        far.set_nonblocking(false).unwrap();
        let begun = Instant::now();
        held.release_in(Duration::from_millis(30));
        wait_gone(&far);
        assert!(begun.elapsed() >= Duration::from_millis(30));
        held.release();
    }

    #[test]
    fn the_time_can_be_put_off_and_brought_forward() {
        // A busy machine may let the first time come before the second is said: then nothing was put off.
        let (_later, far, begun) = loop {
            let (later, far) = held();
            let begun = Instant::now();
            later.release_in(Duration::from_millis(20));
            later.release_in(Duration::from_millis(80));
            if begun.elapsed() < Duration::from_millis(20) {
                break (later, far, begun);
            }
        };
        wait_gone(&far);
        assert!(begun.elapsed() >= Duration::from_millis(80));
        let (sooner, far) = held();
        sooner.release_in(LONG);
        sooner.release_in(Duration::from_millis(1));
        wait_gone(&far);
    }

    #[test]
    fn nothing_is_held_by_what_is_dropped() {
        let (held, far) = held();
        held.release_in(LONG);
        drop(held);
        wait_gone(&far);
    }
}
