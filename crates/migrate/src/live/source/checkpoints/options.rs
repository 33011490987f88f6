//! The options of a series of checkpoints, and how it ends.

use std::fmt;
use std::time::Duration;

use limosa_memory::dirty::DirtyLogs;

use crate::error::MigrateError;
use crate::live::VmError;
use crate::output::{OutputGate, OutputSignal};
use crate::stats::LiveStats;

/// How checkpoints of a VM are made.
#[derive(Clone)]
#[non_exhaustive]
pub struct CheckpointSourceOptions<'a> {
    /// Time from one checkpoint to the next.
    pub every: Duration,
    /// Whether output ends the wait for the next checkpoint (Kemari's rule). `every` is the longest time then.
    pub by_output: bool,
    /// Bytes of pages that are copied aside while the VM stands still, so that it does not wait for the channel; a
    /// checkpoint of more pages is sent from where they are. 0: all are.
    pub copy_aside: u64,
    /// Asks for checkpoints, and ends the series.
    pub signal: OutputSignal,
    /// The gates of the VM's output.
    pub gates: &'a [&'a dyn OutputGate],
    /// Called after each checkpoint that counts, while the VM runs.
    pub counts: &'a (dyn Fn(&CheckpointReport) + Sync),
}

impl Default for CheckpointSourceOptions<'_> {
    /// Every 100 ms, up to 64 MiB copied aside, no output.
    fn default() -> Self {
        Self {
            every: Duration::from_millis(100),
            by_output: false,
            copy_aside: 64 << 20,
            signal: OutputSignal::new(),
            gates: &[],
            counts: &|_| {},
        }
    }
}

impl fmt::Debug for CheckpointSourceOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckpointSourceOptions")
            .field("every", &self.every)
            .field("by_output", &self.by_output)
            .field("copy_aside", &self.copy_aside)
            .field("gates", &self.gates.len())
            .finish_non_exhaustive()
    }
}

/// A checkpoint that counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CheckpointReport {
    /// Its number: the base is 0.
    pub number: u64,
    /// How long the VM stood still for it.
    pub pause: Duration,
    /// From the end of that until the keeper had stored it.
    pub until_it_counts: Duration,
    /// Pages that were written since the checkpoint before.
    pub pages: u64,
    /// Whether they were copied aside.
    pub copied_aside: bool,
    /// Bytes on the channel.
    pub bytes: u64,
}

/// The end of a series of checkpoints.
#[must_use = "it says whether the VM runs"]
#[derive(Debug)]
#[non_exhaustive]
pub struct CheckpointsEnded {
    /// `Ok`: the series was [closed](OutputSignal::close).
    pub result: Result<(), MigrateError>,
    /// The VMM's answer when the VM was to continue; `Ok` also if it ran.
    pub resumed: Result<(), VmError>,
    /// Number of the newest checkpoint that counts; `None` if not even the base does.
    pub acknowledged: Option<u64>,
    /// Checkpoints that the keeper has received, without the base.
    pub made: u64,
    /// Counters of the base.
    pub base: LiveStats,
    /// The logs, which are off.
    pub logs: Option<DirtyLogs>,
}
