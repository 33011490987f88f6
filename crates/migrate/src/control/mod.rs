//! Reaching into a running engine from another thread: stop it, or change its speed.
//!
//! Engines block in system calls. Stopping one therefore means shutting down the channels that it has registered here;
//! the engine finds its call failed, sees that it was told to stop, and reports that instead of a broken channel.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use limosa_channel::{Channel, RateLimit, Shutdown};
use parking_lot::{Condvar, Mutex};

use crate::error::MigrateError;

mod progress;

pub use progress::{MovedPages, Phase, Progress, ProgressReading};

/// The handle of an engine: stops and steers it, and shows its progress. Clones belong to the same engine.
#[derive(Debug, Clone, Default)]
pub struct Handle {
    /// Stops the engine and changes its rate.
    pub control: Control,
    /// Shows the engine's progress.
    pub progress: Progress,
}

impl Handle {
    /// A handle of an engine that has not begun: no limit, no stop, counters at zero.
    pub fn new() -> Self {
        Self::default()
    }
}

/// An order to a running job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Gives up: before the switchover the VM stays at the source.
    Cancel,
    /// Breaks off a postcopy that can be recovered later: the guest stalls on missing pages.
    Pause,
}

#[derive(Debug, Default)]
struct State {
    stop: Option<Stop>,
    /// Nothing is shut down for the time being: an engine says so,
    held: bool,
    /// or this number of callers that started one.
    deferred: usize,
    /// The engine has failed, and keeps its channels open until those have let it break them.
    has_failed: bool,
    /// A live migration continues in postcopy.
    postcopy: bool,
    /// Pages that were not requested are no longer held back by a recording.
    rest_wanted: bool,
    downtime_limit: Option<Duration>,
    channels: Vec<Arc<Channel>>,
}

impl State {
    fn is_held(&self) -> bool {
        self.held || self.deferred > 0
    }

    /// Carries out a stop, if there is one that need not wait; so for an engine that has failed and waited for it.
    fn shut_down(&mut self) {
        if (self.stop.is_some() || self.has_failed) && !self.is_held() {
            for channel in self.channels.drain(..) {
                // It may be closed already, which is what we want of it.
                let _ = channel.shutdown(Shutdown::Both);
            }
        }
    }
}

/// The handle through which a running engine is stopped or its rate is changed. Shared, cheap to clone.
#[derive(Debug, Clone)]
pub struct Control {
    state: Arc<Mutex<State>>,
    /// Signalled when nobody defers a stop any more.
    undeferred: Arc<Condvar>,
    rate_limit: RateLimit,
}

impl Default for Control {
    fn default() -> Self {
        Self::new()
    }
}

impl Control {
    /// A control with no rate limit and no stop requested.
    pub fn new() -> Self {
        Self { state: Arc::default(), undeferred: Arc::default(), rate_limit: RateLimit::default() }
    }

    /// Returns the rate limit of unrequested data. Requested pages are never held back by it.
    pub fn rate_limit(&self) -> &RateLimit {
        &self.rate_limit
    }

    /// Changes how many bytes per second may move; `None` lifts the limit. Takes effect at once.
    ///
    /// A job whose pages another program sends (QEMU, when it saves) passes the change on to that program.
    pub fn set_max_bandwidth(&self, bytes_per_second: Option<NonZeroU64>) {
        self.rate_limit.set(bytes_per_second);
    }

    /// The limit in bytes per second.
    pub fn max_bandwidth(&self) -> Option<NonZeroU64> {
        self.rate_limit.get()
    }

    /// Changes how long the VM of a live migration may stand still. Counts from the end of the present round.
    pub fn set_downtime_limit(&self, limit: Duration) {
        self.state.lock().downtime_limit = Some(limit);
    }

    /// The limit that was [set](Self::set_downtime_limit), if one was.
    pub fn downtime_limit(&self) -> Option<Duration> {
        self.state.lock().downtime_limit
    }

    /// Switches a live migration to postcopy at once. Has no effect where postcopy is off.
    pub fn start_postcopy(&self) {
        self.state.lock().postcopy = true;
    }

    /// Whether postcopy was requested.
    pub fn postcopy_wanted(&self) -> bool {
        self.state.lock().postcopy
    }

    /// Ends what keeps a postcopy from sending pages that were not requested: its recording.
    pub fn push_rest(&self) {
        self.state.lock().rest_wanted = true;
    }

    /// Whether [`push_rest`](Self::push_rest) was called.
    pub fn rest_wanted(&self) -> bool {
        self.state.lock().rest_wanted
    }

    /// Tells the engine to stop. The first order counts; later ones are ignored.
    pub fn stop(&self, stop: Stop) {
        let mut state = self.state.lock();
        state.stop.get_or_insert(stop);
        state.shut_down();
    }

    /// Defers a stop until the returned value is dropped: the other side is at a point where it must not lose its
    /// channels.
    #[must_use]
    pub fn defer_stop(&self) -> DeferredStop {
        self.state.lock().deferred += 1;
        DeferredStop(self.clone())
    }

    /// Whether stops are [deferred](Self::defer_stop).
    pub(crate) fn is_deferred(&self) -> bool {
        self.state.lock().deferred > 0
    }

    /// Waits until no stop is deferred any more.
    pub(crate) fn wait_undeferred(&self) {
        let mut state = self.state.lock();
        while state.deferred > 0 {
            self.undeferred.wait(&mut state);
        }
    }

    /// Has those who defer stops learn that the engine has failed. Whether there are any.
    pub(crate) fn note_failure(&self) -> bool {
        let mut state = self.state.lock();
        state.has_failed |= state.deferred > 0;
        state.deferred > 0
    }

    /// Whether the engine has failed, and keeps its channels open for as long as stops are
    /// [deferred](Self::defer_stop). Whoever defers them makes the other side ready to lose its channels.
    pub fn has_failed(&self) -> bool {
        self.state.lock().has_failed
    }

    /// The order that the engine was given, if any.
    pub fn stop_requested(&self) -> Option<Stop> {
        self.state.lock().stop
    }

    /// From here until [`release`](Self::release) a stop is only remembered: the other side must not be left in the
    /// middle of what it is doing.
    pub(crate) fn hold(&self) {
        self.state.lock().held = true;
    }

    /// A stop takes effect again, also one that came meanwhile.
    pub(crate) fn release(&self) {
        let mut state = self.state.lock();
        state.held = false;
        state.shut_down();
    }

    /// Fails if the engine was told to stop.
    pub fn check(&self) -> Result<(), MigrateError> {
        let state = self.state.lock();
        match state.stop {
            Some(stop) if !state.is_held() => Err(stop.into()),
            _ => Ok(()),
        }
    }

    /// Registers a channel that a later [`stop`](Self::stop) shuts down; shuts it down at once if that has come
    /// already.
    pub(crate) fn watch(&self, channel: &Arc<Channel>) {
        let mut state = self.state.lock();
        if state.stop.is_some() && !state.is_held() {
            let _ = channel.shutdown(Shutdown::Both);
        } else {
            state.channels.push(Arc::clone(channel));
        }
    }

    /// Forgets the channels: the engine is done with them.
    pub(crate) fn unwatch(&self) {
        self.state.lock().channels.clear();
    }

    /// Returns `error`, or the stop if the engine was told to stop.
    pub(crate) fn explain(&self, error: MigrateError) -> MigrateError {
        self.stop_requested().map_or(error, MigrateError::from)
    }
}

/// A stop that comes now waits until this is dropped.
#[derive(Debug)]
pub struct DeferredStop(Control);

impl Drop for DeferredStop {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.deferred -= 1;
        state.shut_down();
        self.0.undeferred.notify_all();
    }
}

impl From<Stop> for MigrateError {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Cancel => Self::Cancelled,
            Stop::Pause => Self::Paused,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_deferred_stop_takes_effect_when_the_last_deferral_is_dropped() {
        let control = Control::new();
        let (near, far) = Channel::pair().unwrap();
        let mut far = UnixStream::from(far);
        far.set_nonblocking(true).unwrap();
        control.watch(&Arc::new(near));
        let (one, other) = (control.defer_stop(), control.defer_stop());
        control.stop(Stop::Cancel);
        assert_eq!((control.stop_requested(), control.check().is_ok()), (Some(Stop::Cancel), true));
        drop(one);
        assert_eq!(far.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "it is broken already");
        drop(other);
        assert!(control.check().is_err());
        assert_eq!(far.read(&mut [0]).unwrap(), 0);
    }
}
