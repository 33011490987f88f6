//! The report of a check.

use std::fmt;

use crate::setters::setters;

/// Limits of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckOptions {
    /// Bytes of memory for counting references. An image that needs more is read several times. Each cluster of its
    /// file takes 1.25 bytes, or 4.25 for a repair or if a cluster has more than 255 references. Tables that are being
    /// read take at most 8 MiB more.
    pub memory: usize,
    /// The most [`Finding`]s that are kept; all are counted.
    pub max_findings: usize,
}

setters!(CheckOptions { memory: usize, max_findings: usize });

impl Default for CheckOptions {
    /// 512 MiB, enough for 19 TiB in clusters of 64 KiB in one pass.
    fn default() -> Self {
        Self { memory: 512 << 20, max_findings: 1000 }
    }
}

/// The extent of a repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repair {
    /// Space that nothing refers to is given back.
    Leaks,
    /// Refcounts, and the flags that say the same: what an image is left with that was not closed while they were
    /// written late. If anything else is wrong, so that something would have to be taken away, nothing is done.
    Refcounts,
    /// Everything.
    All,
}

/// The faults of an image, in the figures of `qemu-img check`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckReport {
    /// Bytes of the file up to the end of its last cluster that is in use.
    pub image_end_offset: u64,
    /// Clusters of the guest's disk.
    pub total_clusters: u64,
    /// Of them, those that the active state has contents for.
    pub allocated_clusters: u64,
    /// Of them, those that are compressed.
    pub compressed_clusters: u64,
    /// Of them, those that do not lie behind their neighbour, and the compressed ones.
    pub fragmented_clusters: u64,
    /// Clusters whose refcount is higher than it has to be: space is lost, nothing else.
    pub leaks: u64,
    /// Faults that can cost data.
    pub corruptions: u64,
    /// Structures that could not be checked.
    pub check_errors: u64,
    /// Leaks that were repaired.
    pub leaks_fixed: u64,
    /// Corruptions that were repaired.
    pub corruptions_fixed: u64,
    /// The first findings.
    pub findings: Vec<Finding>,
    /// The number of further findings.
    pub findings_left_out: u64,
}

impl CheckReport {
    /// Whether nothing is wrong.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.leaks == 0 && self.corruptions == 0 && self.check_errors == 0
    }
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub kind: FindingKind,
    /// The structure, with its offset in the file: `L2 table at 0x50000, entry 7`.
    pub table: String,
    /// The fault.
    pub why: String,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FindingKind {
    /// Space is lost.
    Leak,
    /// Data can be lost.
    Corruption,
    /// It could not be checked.
    Error,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            FindingKind::Leak => "leak",
            FindingKind::Corruption => "corruption",
            FindingKind::Error => "not checked",
        };
        write!(f, "{kind}: {}: {}", self.table, self.why)
    }
}

/// A report that is being written.
#[derive(Debug, Clone)]
pub(super) struct Findings {
    pub(super) report: CheckReport,
    most: usize,
}

impl Findings {
    pub(super) fn new(most: usize) -> Self {
        Self { report: CheckReport::default(), most }
    }

    /// Counts something wrong `times`, and keeps it as one finding.
    pub(super) fn note(&mut self, kind: FindingKind, times: u64, what: impl FnOnce() -> (String, String)) {
        if times == 0 {
            return;
        }
        let figure = match kind {
            FindingKind::Leak => &mut self.report.leaks,
            FindingKind::Corruption => &mut self.report.corruptions,
            FindingKind::Error => &mut self.report.check_errors,
        };
        *figure = figure.saturating_add(times);
        if self.report.findings.len() < self.most {
            let (table, why) = what();
            self.report.findings.push(Finding { kind, table, why });
        } else {
            self.report.findings_left_out += 1;
        }
    }

    pub(super) fn corruption(&mut self, times: u64, what: impl FnOnce() -> (String, String)) {
        self.note(FindingKind::Corruption, times, what);
    }
}
