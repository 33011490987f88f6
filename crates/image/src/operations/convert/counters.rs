//! Counts of a conversion.

use std::ops::Range;

/// Counts of a conversion.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConvertCounters {
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Writes of contents.
    pub writes: u64,
    /// Bytes of contents written.
    pub bytes_written: u64,
    /// Bytes that these writes store: fewer if they are compressed.
    pub bytes_stored: u64,
    /// Copies that the kernel made.
    pub copies: u64,
    /// Bytes of contents that it copied.
    pub bytes_copied: u64,
    /// Requests to make a range zero.
    pub zeroes: u64,
    /// Bytes made zero by them.
    pub bytes_zeroed: u64,
    /// Bytes that are zero in the target already.
    pub bytes_already_zero: u64,
    /// Bytes left to the target's backing image.
    pub bytes_in_backing: u64,
    /// Bytes that could not be read; they are zeros in the target.
    pub bytes_unreadable: u64,
    /// Their places: the first few, in no order.
    pub unreadable_ranges: Vec<Range<u64>>,
}

impl ConvertCounters {
    /// The most places of lost bytes that are listed.
    const PLACES: usize = 1024;

    pub(super) fn add(&mut self, other: Self) {
        self.reads += other.reads;
        self.bytes_read += other.bytes_read;
        self.writes += other.writes;
        self.bytes_written += other.bytes_written;
        self.bytes_stored += other.bytes_stored;
        self.copies += other.copies;
        self.bytes_copied += other.bytes_copied;
        self.zeroes += other.zeroes;
        self.bytes_zeroed += other.bytes_zeroed;
        self.bytes_already_zero += other.bytes_already_zero;
        self.bytes_in_backing += other.bytes_in_backing;
        self.bytes_unreadable += other.bytes_unreadable;
        let room = Self::PLACES.saturating_sub(self.unreadable_ranges.len());
        self.unreadable_ranges.extend(other.unreadable_ranges.into_iter().take(room));
    }

    pub(super) fn lose(&mut self, places: Vec<Range<u64>>) {
        for place in places {
            self.bytes_unreadable += place.end - place.start;
            let room = self.unreadable_ranges.len() < Self::PLACES;
            match self.unreadable_ranges.last_mut() {
                Some(last) if last.end == place.start => last.end = place.end,
                _ if room => self.unreadable_ranges.push(place),
                _ => {}
            }
        }
    }
}
