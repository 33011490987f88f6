//! Output of a VM that leaves only after the checkpoint that knows of it.
//!
//! Law: **nothing is seen outside that the survivor of a failover does not know.** So the output of a VM that is
//! checkpointed all the while is held back, by an [`OutputGate`] for each device or network that has any. Each
//! checkpoint ends an epoch of output: the gates [seal](OutputGate::seal) it while the VM stands still, and let it out
//! when the checkpoint [counts](OutputGate::commit).
//!
//! ```text
//! VM            runs | stands still        | runs
//! checkpoint         | pages, devices come |         stored: counts
//! gate          holds| seal(n)             | holds   commit(n): epoch n leaves
//! ```
//!
//! With Kemari's rule a checkpoint is made when something wants to leave: a gate says so by
//! [`OutputSignal::before_output`].

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::live::VmError;

/// Output of a VM that is held back for its checkpoints.
///
/// Between two series, and after [`abort`](Self::abort), a gate holds nothing back: the VM has no protection then. A
/// series is [`watch`](Self::watch), [`seal`](Self::seal) of epoch 0 at the end of the base, then for each epoch
/// `commit`, and `seal` of the next one.
pub trait OutputGate: Send + Sync {
    /// Begins a series. From the first `seal` on the gate reports to `signal` what it holds.
    ///
    /// # Errors
    /// The gate is unavailable.
    fn watch(&self, signal: &OutputSignal) -> Result<(), VmError>;

    /// Ends an epoch: all that the VM has sent until now belongs to it, and what it sends from now on does not. Called
    /// while the VM stands still, before it continues.
    ///
    /// # Errors
    /// The gate has failed: the series ends.
    fn seal(&self, epoch: u64) -> Result<(), VmError>;

    /// Lets the output of all epochs up to this one out: its checkpoint counts. Does not wait until it has left.
    ///
    /// # Errors
    /// The gate has failed: the series ends.
    fn commit(&self, epoch: u64) -> Result<(), VmError>;

    /// Has output stay held for at least `time` if this process ends in this series without an
    /// [`abort`](Self::abort): the VM may continue elsewhere until then. Does nothing by default.
    ///
    /// # Errors
    /// The gate has failed: the series ends.
    fn hold_when_lost(&self, _time: Duration) -> Result<(), VmError> {
        Ok(())
    }

    /// Ends the series: drops the output of `epoch` and of all later ones, as no checkpoint will know of it, and holds
    /// nothing back any more.
    ///
    /// # Errors
    /// The gate has failed. It must drop that output all the same.
    fn abort(&self, epoch: u64) -> Result<(), VmError>;

    /// The counters of this series.
    fn counters(&self) -> OutputCounters;
}

/// All gates of a VM, and the signal by which they ask for checkpoints.
#[derive(Clone, Copy)]
pub struct OutputGates<'a> {
    gates: &'a [&'a dyn OutputGate],
    signal: &'a OutputSignal,
}

impl<'a> OutputGates<'a> {
    /// These gates, whose signal this will be.
    #[must_use]
    pub const fn new(gates: &'a [&'a dyn OutputGate], signal: &'a OutputSignal) -> Self {
        Self { gates, signal }
    }

    /// Whether there are none: output is free.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.gates.is_empty()
    }

    /// The signal.
    #[must_use]
    pub const fn signal(self) -> &'a OutputSignal {
        self.signal
    }

    /// Begins a series.
    ///
    /// # Errors
    /// As of [`OutputGate::watch`].
    pub fn watch(self) -> Result<(), VmError> {
        self.gates.iter().try_for_each(|gate| gate.watch(self.signal))
    }

    /// Ends an epoch of all gates, and what was asked for in it. The VM stands still.
    ///
    /// # Errors
    /// As of [`OutputGate::seal`].
    pub fn seal(self, epoch: u64) -> Result<(), VmError> {
        self.gates.iter().try_for_each(|gate| gate.seal(epoch))?;
        self.signal.sealed();
        Ok(())
    }

    /// Lets an epoch out.
    ///
    /// # Errors
    /// As of [`OutputGate::commit`].
    pub fn commit(self, epoch: u64) -> Result<(), VmError> {
        self.gates.iter().try_for_each(|gate| gate.commit(epoch))
    }

    /// Has output stay held for at least `time` if this process ends in this series without an abort.
    ///
    /// # Errors
    /// As of [`OutputGate::hold_when_lost`].
    pub fn hold_when_lost(self, time: Duration) -> Result<(), VmError> {
        self.gates.iter().try_for_each(|gate| gate.hold_when_lost(time))
    }

    /// Ends the series of every gate, also of those behind one that fails.
    ///
    /// # Errors
    /// As of [`OutputGate::abort`]: the first one.
    pub fn abort(self, epoch: u64) -> Result<(), VmError> {
        self.gates.iter().map(|gate| gate.abort(epoch)).fold(Ok(()), Result::and)
    }

    /// The sum of all counters; `None` if output is free.
    #[must_use]
    pub fn counters(self) -> Option<OutputCounters> {
        self.gates.iter().map(|gate| gate.counters()).reduce(|mut sum, more| {
            sum.add(&more);
            sum
        })
    }
}

impl fmt::Debug for OutputGates<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutputGates").field("gates", &self.gates.len()).field("signal", self.signal).finish()
    }
}

/// Counters of a gate. Packets are the units that leave or are dropped as a whole, such as network frames.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutputCounters {
    /// Packets that were held back.
    pub held_packets: u64,
    /// Their bytes.
    pub held_bytes: u64,
    /// Packets of them that were let out.
    pub released_packets: u64,
    /// Their bytes.
    pub released_bytes: u64,
    /// Packets that were dropped as the gate was full.
    pub overflow_packets: u64,
    /// Packets that were dropped as no checkpoint knows of them.
    pub aborted_packets: u64,
    /// Packets that were let out and dropped since their receiver was missing or too slow.
    pub undelivered_packets: u64,
    /// Half of the packets that were let out were held for a shorter time.
    pub median_hold: Duration,
    /// Longest time that a packet was held before it was let out.
    pub longest_hold: Duration,
}

impl OutputCounters {
    /// Adds the counters of another gate. The median becomes the longer one.
    pub fn add(&mut self, other: &Self) {
        self.held_packets = self.held_packets.saturating_add(other.held_packets);
        self.held_bytes = self.held_bytes.saturating_add(other.held_bytes);
        self.released_packets = self.released_packets.saturating_add(other.released_packets);
        self.released_bytes = self.released_bytes.saturating_add(other.released_bytes);
        self.overflow_packets = self.overflow_packets.saturating_add(other.overflow_packets);
        self.aborted_packets = self.aborted_packets.saturating_add(other.aborted_packets);
        self.undelivered_packets = self.undelivered_packets.saturating_add(other.undelivered_packets);
        self.median_hold = self.median_hold.max(other.median_hold);
        self.longest_hold = self.longest_hold.max(other.longest_hold);
    }
}

/// Reason why a wait for the next checkpoint has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CheckpointCause {
    /// Something wants to leave.
    Output,
    /// A gate has not much room left.
    Full,
    /// The time has come.
    Time,
    /// The series is over.
    Closed,
}

/// Asks for checkpoints. Clones are the same signal.
#[derive(Clone, Default)]
pub struct OutputSignal {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    asked: Mutex<Asked>,
    changed: Condvar,
}

#[derive(Debug, Clone, Copy, Default)]
struct Asked {
    output: bool,
    full: bool,
    closed: bool,
}

impl OutputSignal {
    /// Creates a signal by which nothing is asked for.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Something waits to leave that no checkpoint knows of. To be called by a gate, or by a device of a VMM, when it
    /// has the first output of an epoch; more calls in an epoch have no effect.
    pub fn before_output(&self) {
        self.ask(|asked| asked.output = true);
    }

    /// A gate has not much room left: a checkpoint is wanted even if it is not due yet.
    pub fn nearly_full(&self) {
        self.ask(|asked| asked.full = true);
    }

    /// Ends all waits, those of the future too: the series is over.
    pub fn close(&self) {
        self.ask(|asked| asked.closed = true);
    }

    /// Forgets what was asked for, since the epoch is sealed. Called while the VM stands still, so that nothing of the
    /// next epoch can be forgotten.
    pub fn sealed(&self) {
        let mut asked = self.shared.asked.lock();
        (asked.output, asked.full) = (false, false);
    }

    /// Waits until the next checkpoint is due: at `until`, before it if a gate is nearly full, and with `by_output` if
    /// something wants to leave. `None`: no time is too late.
    pub fn wait(&self, until: Option<Instant>, by_output: bool) -> CheckpointCause {
        let mut asked = self.shared.asked.lock();
        loop {
            match *asked {
                Asked { closed: true, .. } => return CheckpointCause::Closed,
                Asked { full: true, .. } => return CheckpointCause::Full,
                Asked { output: true, .. } if by_output => return CheckpointCause::Output,
                _ => {}
            }
            let Some(until) = until else {
                self.shared.changed.wait(&mut asked);
                continue;
            };
            if self.shared.changed.wait_until(&mut asked, until).timed_out() && Instant::now() >= until {
                return CheckpointCause::Time;
            }
        }
    }

    fn ask(&self, change: impl FnOnce(&mut Asked)) {
        change(&mut self.shared.asked.lock());
        self.shared.changed.notify_all();
    }
}

impl fmt::Debug for OutputSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OutputSignal").field(&*self.shared.asked.lock()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn now() -> Option<Instant> {
        Some(Instant::now())
    }

    fn soon() -> Option<Instant> {
        Some(Instant::now() + Duration::from_secs(60))
    }

    #[test]
    fn output_ends_a_wait_for_output_alone() {
        let signal = OutputSignal::new();
        signal.before_output();
        assert_eq!(signal.wait(soon(), true), CheckpointCause::Output);
        assert_eq!(signal.wait(now(), false), CheckpointCause::Time);
        signal.nearly_full();
        assert_eq!(signal.wait(soon(), false), CheckpointCause::Full);
    }

    #[test]
    fn a_sealed_epoch_asks_for_nothing_and_the_end_of_a_series_is_not_forgotten() {
        let signal = OutputSignal::new();
        signal.before_output();
        signal.nearly_full();
        signal.sealed();
        assert_eq!(signal.wait(now(), true), CheckpointCause::Time);
        signal.close();
        signal.sealed();
        assert_eq!(signal.wait(soon(), false), CheckpointCause::Closed);
    }

    #[test]
    fn a_wait_ends_as_soon_as_another_thread_asks() {
        let signal = OutputSignal::new();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                signal.before_output();
            });
            assert_eq!(signal.wait(None, true), CheckpointCause::Output);
        });
    }

    #[test]
    fn counters_of_several_gates_are_added_and_times_are_the_longest() {
        let one = OutputCounters {
            held_packets: 3,
            held_bytes: 300,
            longest_hold: Duration::from_millis(7),
            ..OutputCounters::default()
        };
        let mut sum = OutputCounters { held_packets: u64::MAX, ..OutputCounters::default() };
        sum.add(&one);
        assert_eq!((sum.held_packets, sum.held_bytes), (u64::MAX, 300));
        assert_eq!(sum.longest_hold, Duration::from_millis(7));
    }
}
