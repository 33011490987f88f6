//! Statistics of the guest's memory.

use std::time::Instant;

/// Tags that are known, in the order of their numbers: (name, whether the value is bytes).
///
/// The names are those of the specification (virtio 1.2, 5.5.6.3) and of Linux for the newer ones, written as QEMU
/// writes them.
const TAGS: [(&str, bool); 16] = [
    ("swap-in", true),
    ("swap-out", true),
    ("major-faults", false),
    ("minor-faults", false),
    ("free-memory", true),
    ("total-memory", true),
    ("available-memory", true),
    ("disk-caches", true),
    ("htlb-pgalloc", false),
    ("htlb-pgfail", false),
    ("oom-kills", false),
    ("alloc-stalls", false),
    ("async-scans", false),
    ("direct-scans", false),
    ("async-reclaims", false),
    ("direct-reclaims", false),
];

/// Bytes of an entry: a tag of 16 bits, a value of 64, packed.
pub(crate) const ENTRY: usize = 10;
/// Number of entries that are decoded: more than there are tags.
pub(crate) const ENTRIES: usize = 64;

/// One report. Values that the guest has not sent are missing; unknown tags are not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statistics {
    values: [Option<u64>; TAGS.len()],
    /// When it was received.
    pub received_at: Instant,
    /// Counts reports of this device, from 1 on.
    pub sequence: u64,
}

impl Statistics {
    /// Decodes little-endian entries; an incomplete entry at the end is ignored. Also returns how many had unknown
    /// tags.
    pub(crate) fn decode(bytes: &[u8], sequence: u64) -> (Self, u64) {
        let mut statistics = Self { values: [None; TAGS.len()], received_at: Instant::now(), sequence };
        let mut unknown = 0;
        for entry in bytes.as_chunks::<ENTRY>().0 {
            let [tag_low, tag_high, value @ ..] = *entry;
            let tag = usize::from(u16::from_le_bytes([tag_low, tag_high]));
            match statistics.values.get_mut(tag) {
                Some(place) => *place = Some(u64::from_le_bytes(value)),
                None => unknown += 1,
            }
        }
        (statistics, unknown)
    }

    /// Iterates over the values that were sent: name, value, whether the value is in bytes.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64, bool)> + '_ {
        let values = TAGS.iter().zip(&self.values);
        values.filter_map(|((name, bytes), value)| value.map(|value| (*name, value, *bytes)))
    }

    /// The value of a tag by its name.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.iter().find(|(known, ..)| *known == name).map(|(_, value, _)| value)
    }

    /// Bytes that new programs could have without swapping, as the guest estimates.
    pub fn available_memory(&self) -> Option<u64> {
        self.get("available-memory")
    }

    /// Bytes that are unused.
    pub fn free_memory(&self) -> Option<u64> {
        self.get("free-memory")
    }

    /// Bytes that the guest's kernel manages.
    pub fn total_memory(&self) -> Option<u64> {
        self.get("total-memory")
    }
}

/// The last statistics of the current driver.
#[derive(Default)]
pub(crate) struct LatestStatistics {
    pub(crate) statistics: Option<Statistics>,
    /// Also counts those of earlier drivers, so that new ones can be recognized.
    pub(crate) sequence: u64,
}

impl LatestStatistics {
    pub(crate) fn forget(&mut self) {
        self.statistics = None;
    }
}

/// Why no statistics can be requested from the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StatisticsError {
    /// There is no driver.
    #[error("no balloon driver is active in the guest")]
    NoDriver,
    /// The driver did not accept the feature.
    #[error("the guest's driver has no statistics")]
    NotAccepted,
    /// The driver's queue does not run.
    #[error(
        "the guest's queue for statistics does not run: it is stopped, or virtio_balloon was unloaded or is broken"
    )]
    QueueStopped,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(tag: u16, value: u64) -> Vec<u8> {
        [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat()
    }

    #[test]
    fn unknown_tags_and_half_an_entry_are_ignored() {
        let bytes = [entry(4, 17), entry(999, 1), entry(6, u64::MAX), entry(16, 2), vec![5, 0, 1]].concat();
        let (statistics, unknown) = Statistics::decode(&bytes, 3);
        assert_eq!(unknown, 2);
        assert_eq!((statistics.free_memory(), statistics.available_memory()), (Some(17), Some(u64::MAX)));
        assert_eq!(statistics.total_memory(), None);
        assert_eq!(
            statistics.iter().collect::<Vec<_>>(),
            [("free-memory", 17, true), ("available-memory", u64::MAX, true)]
        );
        assert_eq!(statistics.sequence, 3);
    }

    #[test]
    fn the_last_value_of_a_tag_is_kept() {
        let (statistics, _) = Statistics::decode(&[entry(2, 1), entry(2, 2)].concat(), 1);
        assert_eq!(statistics.get("major-faults"), Some(2));
    }
}
