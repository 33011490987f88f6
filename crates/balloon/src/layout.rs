//! Features, and the numbers of queues.
//!
//! The driver numbers the queues, and drivers differ in that. The specification gives each queue a fixed number; Linux
//! leaves no gaps: without statistics, free-page hinting is queue 2. Where statistics, hinting and reporting are all
//! accepted the two agree, so [`Features::ALL`] offers the three together. A driver that accepts only some of them is
//! understood by the [`QueueNumbering`] that was chosen for it: by default Linux's.

use std::fmt;
use std::ops::BitOr;

/// Feature bits of virtio-balloon (virtio 1.2, 5.5.3).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Features(u64);

impl Features {
    /// No feature.
    pub const NONE: Self = Self(0);
    /// The driver notifies the device before it uses a page that it took out of the balloon. Linux does in any case;
    /// only with this feature is memory in huge pages of the host given back when the balloon takes it in parts.
    pub const MUST_TELL_HOST: Self = Self(1 << 0);
    /// A queue for statistics of the guest's memory.
    pub const STATS_VQ: Self = Self(1 << 1);
    /// The driver may take pages out of the balloon by itself before it kills processes because memory is short.
    pub const DEFLATE_ON_OOM: Self = Self(1 << 2);
    /// The device may request a list of free pages.
    pub const FREE_PAGE_HINT: Self = Self(1 << 3);
    /// The driver announces the value with which free pages are filled.
    pub const PAGE_POISON: Self = Self(1 << 4);
    /// The driver reports free pages by itself.
    pub const REPORTING: Self = Self(1 << 5);

    /// All of these, which limosa offers by default.
    pub const ALL: Self = Self(0x3f);

    /// The bits of a feature word that belong to a balloon.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits & Self::ALL.0)
    }

    /// As a feature word.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether all of `other` are among these.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The features that are in both.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// These, but not those of `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Length of the configuration space in bytes: fields of features that are not offered do not exist.
    #[must_use]
    pub const fn config_len(self) -> u32 {
        if self.has(Self::PAGE_POISON) {
            16
        } else if self.has(Self::FREE_PAGE_HINT) {
            12
        } else {
            8
        }
    }
}

impl BitOr for Features {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [(Features, &str); 6] = [
            (Features::MUST_TELL_HOST, "MUST_TELL_HOST"),
            (Features::STATS_VQ, "STATS_VQ"),
            (Features::DEFLATE_ON_OOM, "DEFLATE_ON_OOM"),
            (Features::FREE_PAGE_HINT, "FREE_PAGE_HINT"),
            (Features::PAGE_POISON, "PAGE_POISON"),
            (Features::REPORTING, "REPORTING"),
        ];
        let names = NAMES.iter().filter(|(feature, _)| self.has(*feature)).map(|(_, name)| *name);
        f.write_str(&names.collect::<Vec<_>>().join(" | "))
    }
}

/// The purpose of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QueueRole {
    /// Pages go into the balloon.
    Inflate,
    /// Pages come out of the balloon.
    Deflate,
    /// Statistics of the guest's memory.
    Statistics,
    /// Lists of free pages, on demand.
    Hint,
    /// Free pages that the guest reports by itself.
    Reporting,
}

impl QueueRole {
    /// All of them, in the order of the specification.
    pub const ALL: [Self; 5] = [Self::Inflate, Self::Deflate, Self::Statistics, Self::Hint, Self::Reporting];

    /// The index in [`ALL`](Self::ALL), and the number that the specification gives.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The feature without which there is no such queue.
    #[must_use]
    pub const fn feature(self) -> Features {
        match self {
            Self::Inflate | Self::Deflate => Features::NONE,
            Self::Statistics => Features::STATS_VQ,
            Self::Hint => Features::FREE_PAGE_HINT,
            Self::Reporting => Features::REPORTING,
        }
    }
}

/// How a driver numbers its queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QueueNumbering {
    /// Without gaps, by the features that were accepted: Linux.
    #[default]
    Compact,
    /// Each queue has its number, whether those before it exist or not: the specification.
    Fixed,
}

impl QueueNumbering {
    /// The role of queue `number`, after these features were accepted; `None`: there is no such queue.
    #[must_use]
    pub fn role(self, acked: Features, number: usize) -> Option<QueueRole> {
        let exists = |role: &QueueRole| acked.has(role.feature());
        match self {
            Self::Compact => QueueRole::ALL.into_iter().filter(exists).nth(number),
            Self::Fixed => QueueRole::ALL.get(number).copied().filter(exists),
        }
    }

    /// The number of a queue, after these features were accepted; `None`: there is no such queue.
    #[must_use]
    pub fn number(self, acked: Features, role: QueueRole) -> Option<usize> {
        (0..QueueRole::ALL.len()).find(|number| self.role(acked, *number) == Some(role))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_numberings_agree_where_all_queues_exist() {
        for role in QueueRole::ALL {
            for numbering in [QueueNumbering::Compact, QueueNumbering::Fixed] {
                assert_eq!(numbering.role(Features::ALL, role.index()), Some(role));
                assert_eq!(numbering.number(Features::ALL, role), Some(role.index()));
                assert_eq!(numbering.role(Features::ALL, 5), None);
            }
        }
    }

    #[test]
    fn linux_leaves_no_gap_for_a_queue_that_does_not_exist() {
        let without_statistics = Features::FREE_PAGE_HINT | Features::REPORTING;
        assert_eq!(QueueNumbering::Compact.role(without_statistics, 2), Some(QueueRole::Hint));
        assert_eq!(QueueNumbering::Compact.role(without_statistics, 3), Some(QueueRole::Reporting));
        assert_eq!(QueueNumbering::Compact.role(without_statistics, 4), None);
        let without_hints = Features::STATS_VQ | Features::REPORTING;
        assert_eq!(QueueNumbering::Compact.role(without_hints, 3), Some(QueueRole::Reporting));
        assert_eq!(QueueNumbering::Fixed.role(without_hints, 3), None);
        assert_eq!(QueueNumbering::Fixed.role(without_hints, 4), Some(QueueRole::Reporting));
        assert_eq!(QueueNumbering::Compact.role(Features::NONE, 2), None);
        assert_eq!(QueueNumbering::Fixed.number(Features::NONE, QueueRole::Deflate), Some(1));
    }

    #[test]
    fn the_configuration_is_as_long_as_the_fields_that_may_be_used() {
        assert_eq!(Features::STATS_VQ.config_len(), 8);
        assert_eq!((Features::FREE_PAGE_HINT | Features::REPORTING).config_len(), 12);
        assert_eq!(Features::PAGE_POISON.config_len(), 16);
        assert_eq!(Features::ALL.bits(), 0x3f);
        assert_eq!(format!("{:?}", Features::STATS_VQ | Features::REPORTING), "STATS_VQ | REPORTING");
    }
}
