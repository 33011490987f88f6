//! The layout of a journal: changes of L2 entries that are in no image yet.
//!
//! A journal is read on the machine that wrote it, since it was booted: its words of 8 bytes are in the machine's own
//! order. A header, then the records of two halves, in turn. A record is valid if its tag is the epoch that
//! the header has for its half; 0 is the epoch of a half without records. The half of the lower epoch is the earlier
//! one. A record's tag is stored after its other words, so a record that was cut short is not valid.
//!
//! Law: nothing of a journal is believed. Invalid records are left out, and what valid ones say is compared with the
//! image before anything is written.

use limosa_page::to_usize;

/// Words of the header.
pub(in crate::qcow2) const HEADER: usize = 64;
/// Words of a record.
pub(in crate::qcow2) const RECORD: usize = 6;
/// Records of a half: of new clusters of 64 KiB, 4 GiB.
pub(in crate::qcow2) const RECORDS: usize = 1 << 16;
/// Words of a journal.
pub(in crate::qcow2) const WORDS: usize = HEADER + 2 * RECORDS * RECORD;
/// The words of the header in which the epochs of the halves are.
pub(in crate::qcow2) const EPOCHS: [usize; 2] = [16, 17];

const MAGIC: u64 = u64::from_le_bytes(*b"limosajn");
const VERSION: u64 = 1;

/// The image of a journal, and the time in which it is valid.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::qcow2) struct Subject {
    /// Identifies the time since the machine was booted.
    pub boot: [u64; 2],
    /// When the image's file was created: seconds and nanoseconds; 0 where the filesystem does not know.
    pub birth: [u64; 2],
    /// The logarithm of a cluster's bytes, and whether entries have bitmaps of subclusters.
    pub layout: (u32, bool),
}

/// A change of the L2 entry of a cluster: the two words before, and after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::qcow2) struct EntryChange {
    /// The cluster's number on the guest's disk.
    pub cluster: u64,
    pub old: (u64, u64),
    pub new: (u64, u64),
}

impl Subject {
    /// The words of the header, but for the epochs.
    pub(in crate::qcow2) fn encode(&self) -> [u64; 8] {
        let ([boot, more], [seconds, nanoseconds], (bits, bitmaps)) = (self.boot, self.birth, self.layout);
        [MAGIC, VERSION, boot, more, seconds, nanoseconds, u64::from(bits), u64::from(bitmaps)]
    }

    fn decode(words: &[u64]) -> Option<Self> {
        match *words.first_chunk()? {
            [MAGIC, VERSION, boot, more, seconds, nanoseconds, bits, bitmaps @ 0..=1] => {
                let layout = (u32::try_from(bits).ok()?, bitmaps == 1);
                Some(Self { boot: [boot, more], birth: [seconds, nanoseconds], layout })
            }
            _ => None,
        }
    }
}

impl EntryChange {
    /// The words of a record, the tag first.
    pub(in crate::qcow2) const fn encode(&self, epoch: u64) -> [u64; RECORD] {
        [epoch, self.cluster, self.old.0, self.old.1, self.new.0, self.new.1]
    }

    fn decode(words: &[u64], epoch: u64) -> Option<Self> {
        match *words.first_chunk()? {
            [tag, cluster, old, old_bitmap, new, new_bitmap] if tag == epoch => {
                Some(Self { cluster, old: (old, old_bitmap), new: (new, new_bitmap) })
            }
            _ => None,
        }
    }
}

/// The word at which a record of a half begins.
pub(in crate::qcow2) const fn record_at(half: usize, number: usize) -> usize {
    HEADER + (2 * number + half) * RECORD
}

/// The subject of a journal, and its changes in the order in which they were made; `None`: these bytes are no journal,
/// or one of another version.
pub(in crate::qcow2) fn decode(bytes: &[u8]) -> Option<(Subject, Vec<EntryChange>)> {
    let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
    let subject = Subject::decode(&words)?;
    let mut halves: Vec<(u64, usize)> = Vec::new();
    for (half, at) in EPOCHS.into_iter().enumerate() {
        halves.extend(words.get(at).filter(|epoch| **epoch != 0).map(|epoch| (*epoch, half)));
    }
    halves.sort_unstable();
    let records = |(epoch, half)| {
        let records = words.get(HEADER..).unwrap_or_default().chunks(RECORD).skip(half).step_by(2);
        records.filter_map(move |record| EntryChange::decode(record, epoch))
    };
    let changes = halves.into_iter().flat_map(records).collect();
    Some((subject, changes))
}

/// Bytes of a journal.
pub(in crate::qcow2) const fn bytes() -> usize {
    WORDS * 8
}

/// Two words of an identifier in text: its first 32 hexadecimal digits.
pub(in crate::qcow2) fn identifier(text: &str) -> Option<[u64; 2]> {
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).take(32).collect();
    let (first, second) = digits.split_at_checked(16)?;
    let number = |digits| u64::from_str_radix(digits, 16).ok();
    (digits.len() == to_usize(32)).then_some([number(first)?, number(second)?])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn change(cluster: u64) -> EntryChange {
        EntryChange { cluster, old: (0, 0), new: (cluster << 16 | 1 << 63, 7) }
    }

    /// The bytes of a journal with these records: half, number, tag, cluster.
    fn journal(epochs: [u64; 2], records: &[(usize, usize, u64, u64)]) -> Vec<u8> {
        let mut words = vec![0; WORDS];
        words[..8].copy_from_slice(&Subject { layout: (16, false), ..Subject::default() }.encode());
        for (at, epoch) in EPOCHS.into_iter().zip(epochs) {
            words[at] = epoch;
        }
        for (half, number, tag, cluster) in records {
            let at = record_at(*half, *number);
            words[at..at + RECORD].copy_from_slice(&change(*cluster).encode(*tag));
        }
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn clusters(bytes: &[u8]) -> Vec<u64> {
        decode(bytes).unwrap().1.iter().map(|change| change.cluster).collect()
    }

    #[test]
    fn the_earlier_half_is_first_and_records_of_other_epochs_are_none() {
        let records =
            [(0, 0, 8, 10), (0, 1, 6, 11), (0, 3, 8, 12), (0, RECORDS - 1, 8, 15), (1, 0, 7, 13), (1, 5, 0, 14)];
        assert_eq!(clusters(&journal([8, 7], &records)), [13, 10, 12, 15]);
        assert_eq!(clusters(&journal([8, 0], &records)), [10, 12, 15]);
        assert_eq!(clusters(&journal([0, 0], &records)), [0; 0]);
        assert_eq!(clusters(&journal([8, 7], &records)[..record_at(0, 3) * 8 + 47]), [13, 10]);
        assert_eq!(decode(&journal([8, 7], &records)).unwrap().1[1], change(10));
    }

    #[test]
    fn a_boot_is_two_words() {
        assert_eq!(identifier("00000000-0000-0001-ffff-ffffffffffff\n"), Some([1, u64::MAX]));
        assert_eq!(identifier("0000"), None);
        assert_eq!(identifier(""), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_journal_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..2048), begins: bool) {
            let mut bytes = bytes;
            if begins {
                let head: Vec<u8> = Subject::default().encode().iter().flat_map(|word| word.to_ne_bytes()).collect();
                bytes.splice(..head.len().min(bytes.len()), head);
            }
            if let Some((_, changes)) = decode(&bytes) {
                prop_assert!(changes.len() <= bytes.len() / (RECORD * 8));
            }
        }
    }
}
