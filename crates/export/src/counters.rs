//! Counters of an export.

/// Counters of an export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportCounters {
    /// Reads that succeeded.
    pub reads: u64,
    /// Bytes that they returned.
    pub read_bytes: u64,
    /// Writes that succeeded.
    pub writes: u64,
    /// Bytes that they wrote.
    pub written_bytes: u64,
    /// Zeroings and trims that succeeded.
    pub zeroes: u64,
    /// Bytes that they covered.
    pub zeroed_bytes: u64,
    /// Flushes that succeeded.
    pub flushes: u64,
    /// Other requests that succeeded.
    pub others: u64,
    /// Requests that failed.
    pub failures: u64,
}

impl ExportCounters {
    /// Adds others.
    pub(crate) fn add(&mut self, more: &Self) {
        let Self { reads, read_bytes, writes, written_bytes, zeroes, zeroed_bytes, flushes, others, failures } = more;
        let pairs = [
            (&mut self.reads, reads),
            (&mut self.read_bytes, read_bytes),
            (&mut self.writes, writes),
            (&mut self.written_bytes, written_bytes),
            (&mut self.zeroes, zeroes),
            (&mut self.zeroed_bytes, zeroed_bytes),
            (&mut self.flushes, flushes),
            (&mut self.others, others),
            (&mut self.failures, failures),
        ];
        for (total, more) in pairs {
            *total = total.saturating_add(*more);
        }
    }
}
