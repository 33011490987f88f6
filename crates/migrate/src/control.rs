//! Reaching into a running engine from another thread: stop it, or change its speed.
//!
//! Engines block in system calls. Stopping one therefore means shutting down the channels that it has registered here;
//! the engine finds its call failed, sees that it was told to stop, and reports that instead of a broken channel.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError};

use limosa_channel::{Channel, How, RateLimit};

use crate::error::MigrateError;

/// What a running job was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Give up: before the switchover the VM stays where it is.
    Cancel,
    /// Break off a postcopy so that it can be recovered later: the guest stalls on pages it has not got.
    Pause,
}

#[derive(Debug, Default)]
struct State {
    stop: Option<Stop>,
    /// Nothing is shut down for the time being.
    held: bool,
    channels: Vec<Arc<Channel>>,
}

/// The handle through which a running engine is stopped or its rate is changed. Shared, cheap to clone.
#[derive(Debug, Clone)]
pub struct Control {
    state: Arc<Mutex<State>>,
    rate: RateLimit,
}

impl Default for Control {
    fn default() -> Self {
        Self::new()
    }
}

impl Control {
    /// A control with no rate limit that nobody has stopped.
    pub fn new() -> Self {
        Self { state: Arc::default(), rate: RateLimit::default() }
    }

    /// The limit on what engines send by their own will. Requested pages are never held back by it.
    pub fn rate(&self) -> &RateLimit {
        &self.rate
    }

    /// Changes how many bytes per second may move; `None` lifts the limit. Takes effect at once.
    ///
    /// A job whose pages another program sends (QEMU, when it saves) passes the change on to that program.
    pub fn set_max_bandwidth(&self, bytes_per_second: Option<NonZeroU64>) {
        self.rate.set(bytes_per_second);
    }

    /// The limit in bytes per second.
    pub fn max_bandwidth(&self) -> Option<NonZeroU64> {
        self.rate.get()
    }

    /// Tells the engine to stop. The first word counts; later ones are ignored.
    pub fn stop(&self, stop: Stop) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.stop.get_or_insert(stop);
        if state.held {
            return;
        }
        for channel in state.channels.drain(..) {
            // It may be closed already, which is what we want of it.
            let _ = channel.shutdown(How::Both);
        }
    }

    /// What the engine was told, if anything.
    pub fn stopped(&self) -> Option<Stop> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).stop
    }

    /// From here until [`release`](Self::release) a stop is only remembered: the other side must not be left in the middle
    /// of what it is doing.
    pub(crate) fn hold(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).held = true;
    }

    /// A stop takes effect again, also one that came meanwhile.
    pub(crate) fn release(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.held = false;
        if state.stop.is_some() {
            for channel in state.channels.drain(..) {
                let _ = channel.shutdown(How::Both);
            }
        }
    }

    /// Fails if the engine was told to stop.
    pub fn check(&self) -> Result<(), MigrateError> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.stop {
            Some(stop) if !state.held => Err(stop.into()),
            _ => Ok(()),
        }
    }

    /// Registers a channel that a later [`stop`](Self::stop) shuts down; shuts it down at once if that has come already.
    pub(crate) fn watch(&self, channel: &Arc<Channel>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.stop.is_some() && !state.held {
            let _ = channel.shutdown(How::Both);
        } else {
            state.channels.push(Arc::clone(channel));
        }
    }

    /// Forgets the channels: the engine is done with them.
    pub(crate) fn unwatch(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).channels.clear();
    }

    /// `error`, unless the engine was told to stop: then that is the reason.
    pub(crate) fn explain(&self, error: MigrateError) -> MigrateError {
        self.stopped().map_or(error, MigrateError::from)
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
