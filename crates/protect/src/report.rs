//! The counters of a protection.

use std::path::PathBuf;
use std::time::Duration;

use limosa_migrate::output::OutputCounters;
use limosa_snapshot::Checkpoint;

use crate::error::ProtectError;
use crate::times::{Percentiles, Times};

/// The base of a series, which counts: the VM is protected from here on.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeptBase {
    /// The snapshot file.
    pub path: PathBuf,
    /// Bytes of page contents that came for it.
    pub bytes: u64,
    /// From QEMU's connection until it counted.
    pub elapsed: Duration,
}

/// A checkpoint that counts.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct KeptCheckpoint {
    /// Its number; the base is 0.
    pub number: u64,
    /// From allowing QEMU to stop the VM to letting it continue; the VM stood still for a part of it.
    pub pause: Duration,
    /// From the end of the pause until it counted.
    pub commit: Duration,
    /// Time for preparing the store for it, before the pause.
    pub catch_up: Duration,
    /// From the checkpoint before; `None` for the first.
    pub period: Option<Duration>,
    /// Bytes that came for it.
    pub bytes: u64,
    /// Its pages and its file.
    pub stored: Checkpoint,
    /// Output that was held back in the series until the checkpoint before it; `None` if output is free.
    pub output: Option<OutputCounters>,
}

impl KeptCheckpoint {
    /// Age of the VM's state in it when it counted: the pause, and the time for storing it.
    #[must_use]
    pub fn lag(&self) -> Duration {
        self.pause.saturating_add(self.commit)
    }
}

/// How a protection ended.
#[derive(Debug)]
#[non_exhaustive]
pub enum ProtectEnd {
    /// It was told to stop.
    Asked,
    /// The VM has ended: its guest powered off, or QEMU was told to quit.
    VmEnded,
    /// Something failed.
    Failed(ProtectError),
}

/// A protection that has ended.
#[derive(Debug)]
#[non_exhaustive]
pub struct ProtectReport {
    /// How it ended.
    pub end: ProtectEnd,
    /// The newest whole checkpoint.
    pub newest: PathBuf,
    /// Bases that counted: one, and one more each time that the keeper was back.
    pub bases: u64,
    /// Number of checkpoints behind the bases that counted.
    pub checkpoints: u64,
    /// Their [pauses](KeptCheckpoint::pause).
    pub pauses: Percentiles,
    /// Their [periods](KeptCheckpoint::period).
    pub periods: Percentiles,
    /// Pages that came with contents.
    pub pages: u64,
    /// Those of them that had not changed, and were not written.
    pub equal_pages: u64,
    /// Pages that came as zero.
    pub zero_pages: u64,
    /// Bytes that came for checkpoints.
    pub bytes: u64,
    /// Output that was held back; `None` if output was free.
    pub output: Option<OutputCounters>,
    /// Whether the VM was left standing still, as its keeper is lost: [`OnLoss::Pause`](crate::OnLoss::Pause).
    pub stands_still: bool,
    /// The VM's state now, by QEMU's name; `unknown` if QEMU does not answer.
    pub vm_state: String,
    /// From the first command to the end.
    pub elapsed: Duration,
}

/// The sums of a series.
#[derive(Debug)]
pub(crate) struct Tally {
    pauses: Times,
    periods: Times,
    pub(crate) checkpoints: u64,
    pub(crate) pages: u64,
    pub(crate) equal_pages: u64,
    pub(crate) zero_pages: u64,
    pub(crate) bytes: u64,
    pub(crate) output: Option<OutputCounters>,
}

impl Tally {
    pub(crate) fn new() -> Self {
        let (pauses, periods) = (Times::new(), Times::new());
        Self { pauses, periods, checkpoints: 0, pages: 0, equal_pages: 0, zero_pages: 0, bytes: 0, output: None }
    }

    /// Counts a checkpoint.
    pub(crate) fn add(&mut self, kept: &KeptCheckpoint) {
        self.pauses.add(kept.pause, 1);
        if let Some(period) = kept.period {
            self.periods.add(period, 1);
        }
        self.checkpoints += 1;
        self.pages = self.pages.saturating_add(kept.stored.pages.contents);
        self.equal_pages = self.equal_pages.saturating_add(kept.stored.pages.equal);
        self.zero_pages = self.zero_pages.saturating_add(kept.stored.pages.zero);
        self.bytes = self.bytes.saturating_add(kept.bytes);
    }

    /// Counts all of another series.
    pub(crate) fn add_all(&mut self, other: &Self) {
        self.pauses.add_all(&other.pauses);
        self.periods.add_all(&other.periods);
        self.checkpoints = self.checkpoints.saturating_add(other.checkpoints);
        self.pages = self.pages.saturating_add(other.pages);
        self.equal_pages = self.equal_pages.saturating_add(other.equal_pages);
        self.zero_pages = self.zero_pages.saturating_add(other.zero_pages);
        self.bytes = self.bytes.saturating_add(other.bytes);
        if let Some(more) = &other.output {
            self.output.get_or_insert_default().add(more);
        }
    }

    pub(crate) fn pauses(&self) -> Percentiles {
        self.pauses.percentiles()
    }

    pub(crate) fn periods(&self) -> Percentiles {
        self.periods.percentiles()
    }
}
