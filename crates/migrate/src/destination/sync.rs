//! The synchronization points of multifd: where the channels wait for each other.
//!
//! The law: what a channel brought before its SYNC packet has been handed over before the main channel passes the join
//! point, and nothing behind the SYNC packet is read before. Between two synchronization points a page travels on one
//! channel only, so no other order is needed.

use std::time::{Duration, Instant};

use limosa_stream::multifd::PACKET_LEN;
use limosa_stream::{ErrorKind, StreamError};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::error::MigrateError;

/// A multifd channel, as its thread has reported it.
#[derive(Debug, Clone, Copy, Default)]
struct ChannelState {
    /// SYNC packets that it has come to.
    arrived: u64,
    ended: bool,
}

#[derive(Debug, Default)]
struct State {
    channels: Vec<ChannelState>,
    /// Join points that the main channel has passed.
    passed: u64,
    /// Since when the main channel has been waiting.
    awaited: Option<Instant>,
    over: bool,
    failure: Option<MigrateError>,
}

/// Where the threads of all channels meet.
#[derive(Debug)]
pub(super) struct MultifdSync {
    state: Mutex<State>,
    changed: Condvar,
}

/// The synchronization point will not be passed any more: it is over, or a channel has failed.
#[derive(Debug)]
pub(super) struct Over;

impl MultifdSync {
    pub(super) fn new(channels: usize) -> Self {
        let state = State { channels: vec![ChannelState::default(); channels], ..State::default() };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The channel has come to a SYNC packet: waits until the main channel passes the synchronization point.
    pub(super) fn arrive(&self, channel: usize) -> Result<(), Over> {
        let mut state = self.lock();
        let Some(reported) = state.channels.get_mut(channel) else { return Err(Over) };
        reported.arrived += 1;
        let arrived = reported.arrived;
        self.changed.notify_all();
        while !state.over && state.passed < arrived {
            self.changed.wait(&mut state);
        }
        // That it is over by now does not undo that it was passed.
        if state.passed < arrived { Err(Over) } else { Ok(()) }
    }

    /// The channel has ended between two packets. That is an error only if something is still expected from it.
    pub(super) fn ended(&self, channel: usize) {
        if let Some(reported) = self.lock().channels.get_mut(channel) {
            reported.ended = true;
        }
        self.changed.notify_all();
    }

    /// The main channel has come to a synchronization point: waits until every channel has, and lets them go on.
    pub(super) fn pass(&self) -> Result<(), MigrateError> {
        let mut state = self.lock();
        state.awaited = Some(Instant::now());
        loop {
            if state.over {
                let gone = || MigrateError::Protocol("a channel has failed".into());
                return Err(state.failure.take().unwrap_or_else(gone));
            }
            let passed = state.passed;
            let mut behind = state.channels.iter().enumerate().filter(|(_, reported)| reported.arrived <= passed);
            match behind.clone().find(|(_, reported)| reported.ended) {
                Some((id, _)) => {
                    let what = "its packets, before the join point that the main channel has come to".into();
                    let fault = ErrorKind::Truncated { what, wanted: PACKET_LEN, available: 0 };
                    let source = Box::new(StreamError::new(0, "multifd channel", fault).into());
                    return Err(MigrateError::Multifd { id: u8::try_from(id).unwrap_or(u8::MAX), source });
                }
                None if behind.next().is_none() => break,
                None => self.changed.wait(&mut state),
            }
        }
        state.passed += 1;
        state.awaited = None;
        self.changed.notify_all();
        Ok(())
    }

    /// How long the main channel has been waiting for this one.
    pub(super) fn waits_for(&self, channel: usize) -> Duration {
        let state = self.lock();
        let behind = state.channels.get(channel).is_some_and(|reported| reported.arrived <= state.passed);
        state.awaited.filter(|_| behind).map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// A channel has failed: no thread waits any more. The first failure counts; those after the end do not.
    pub(super) fn fail(&self, error: MigrateError) {
        let mut state = self.lock();
        if !state.over {
            state.failure = Some(error);
            state.over = true;
        }
        self.changed.notify_all();
    }

    /// Whether no more synchronization points come.
    pub(super) fn is_over(&self) -> bool {
        self.lock().over
    }

    /// No more synchronization points come.
    pub(super) fn end(&self) {
        self.lock().over = true;
        self.changed.notify_all();
    }

    /// Takes the failure of a channel, if that was the first thing to go wrong.
    pub(super) fn failure(&self) -> Option<MigrateError> {
        self.lock().failure.take()
    }
}
