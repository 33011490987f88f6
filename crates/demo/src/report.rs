//! The report of a demonstration. Times are in milliseconds, memory in bytes, rates per second.

use std::time::Duration;

use limosa_channel::Counters;
use serde::{Deserialize, Serialize};

/// A round of the migration.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Counted from 1.
    pub number: u32,
    /// When it began, since the migration did.
    pub begin_ms: f64,
    /// How long it took.
    pub took_ms: f64,
    /// Pages it was about.
    pub pages: u64,
    /// Pages sent with contents.
    pub normal: u64,
    /// Pages sent as zero.
    pub zero: u64,
    /// Zero pages that the fresh memory of the destination has anyway.
    pub left_out: u64,
    /// Pages that the guest had no use for, and that were left out for that.
    pub hinted: u64,
    /// Of the zero pages, those that were never populated and not looked at.
    pub holes: u64,
    /// Bytes of the stream.
    pub bytes: u64,
    /// Bytes of memory that the guest wrote a second.
    pub dirty_rate: u64,
    /// Pages left behind it.
    pub rest: u64,
    /// Bytes a second that are reckoned with.
    pub bandwidth: Option<u64>,
    /// How long the guest would have to be paused for the rest.
    pub expected_downtime_ms: Option<f64>,
    /// Whether the guest was paused.
    pub last: bool,
}

/// The counters of an end's channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Calls {
    /// System calls that sent.
    pub calls_out: u64,
    /// System calls that received.
    pub calls_in: u64,
    /// Bytes sent.
    pub bytes_out: u64,
    /// Bytes received.
    pub bytes_in: u64,
    /// Bytes that were spliced: not copied on the way out.
    pub spliced: u64,
    /// Calls that lent their pages to the kernel.
    pub lent: u64,
    /// Of these, calls whose pages the kernel has copied after all.
    pub lent_copied: u64,
}

impl Calls {
    /// Adds a channel's.
    pub fn add(&mut self, counters: &Counters) {
        self.calls_out += counters.calls_out;
        self.calls_in += counters.calls_in;
        self.bytes_out += counters.bytes_out;
        self.bytes_in += counters.bytes_in;
        self.spliced += counters.spliced;
        self.lent += counters.zero_copy_calls;
        self.lent_copied += counters.zero_copy_copied;
    }
}

/// How long the guest's faults waited for their pages.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct FaultLatency {
    /// Faults.
    pub faults: u64,
    /// Requests to the source that came of them, repeated ones included.
    pub requests: u64,
    /// Half of them took at most so long.
    pub median_us: f64,
    /// 99 of 100.
    pub p99_us: f64,
    /// The longest.
    pub longest_us: f64,
}

/// The source's report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct SourceReport {
    /// `completed`, `resumed`, `undecided`, `postcopy-paused`.
    pub outcome: String,
    /// The error, if there was one.
    pub error: Option<String>,
    /// The rounds.
    pub rounds: Vec<Round>,
    /// From the beginning to the end.
    pub total_ms: f64,
    /// From the request to pause the guest until the destination said that it runs there.
    pub downtime_ms: f64,
    /// The expectation at that time.
    pub expected_downtime_ms: Option<f64>,
    /// The channels' counters.
    pub channels: Calls,
    /// CPU time of the process during the migration, without its guest's threads where they are known.
    pub cpu_ms: f64,
    /// Pages that followed in postcopy, and those that were asked for.
    pub postcopy: Option<PostcopySent>,
    /// The figures of free-page hints.
    pub hints: Option<Hints>,
}

/// The figures of free-page hints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hints {
    /// Times that it was asked.
    pub lists: u32,
    /// Of them, lists that were complete before the round was sent.
    pub complete: u32,
    /// How long the first of those took.
    pub list_ms: Option<f64>,
    /// Ranges that were reported in time.
    pub ranges: u64,
    /// Ranges that came too late, and were not believed.
    pub late: u64,
    /// Why it could not be asked, if it could not.
    pub refused: Option<String>,
}

/// The pages that followed the guest in postcopy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PostcopySent {
    /// Pages that were left when the guest changed over.
    pub pages: u64,
    /// Of those, the ones that the destination asked for.
    pub requested: u64,
    /// From the change-over to the last page.
    pub took_ms: f64,
    /// Since when, since the migration began.
    pub begin_ms: f64,
}

/// The destination's report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct DestinationReport {
    /// `running`, `failed`, `undecided`, `postcopy-paused`.
    pub outcome: String,
    /// The error, if there was one.
    pub error: Option<String>,
    /// Pages that came with contents.
    pub normal: u64,
    /// Pages that came as zero.
    pub zero: u64,
    /// The channels' counters.
    pub channels: Calls,
    /// CPU time of the process during the migration.
    pub cpu_ms: f64,
    /// Faults that waited for their pages.
    pub faults: Option<FaultLatency>,
}

/// The result of a guest's check of its memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct MemoryReport {
    /// Pages: each holds what it must.
    pub pages: u64,
    /// Of them, pages that are zero.
    pub zero_pages: u64,
    /// Pages that the guest has written since it was booted.
    pub writes: u64,
    /// Of all memory that was looked at.
    pub checksum: u64,
    /// Pages besides that the guest has no use for: they may hold anything.
    pub free_pages: u64,
    /// Pages besides that the driver of its balloon holds back.
    pub held_pages: u64,
    /// The damage, if there is any.
    pub error: Option<String>,
}

/// A time, as it is written in reports.
pub(crate) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
