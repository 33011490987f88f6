//! How memory is sent.

use std::num::NonZeroU64;

use limosa_channel::ZeroCopy;
use limosa_migrate::live::ZeroCheck;
use limosa_page::ZeroMethod;
use serde::{Deserialize, Serialize};

/// How memory is sent. By default as records on the main channel, gathered and without a limit.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct SendOptions {
    /// Multifd channels.
    pub(super) channels: u8,
    /// Pages of a packet there; `None`: as many as it takes.
    pub(super) packet_pages: Option<usize>,
    /// Whether records are copied into a buffer, and not gathered.
    pub(super) copied: bool,
    /// Bytes a second.
    pub(super) max_bandwidth: Option<NonZeroU64>,
    /// When and how pages are looked at.
    pub(super) zeros: ZeroPages,
    /// How pages leave on the multifd channels.
    #[serde(with = "zero_copy")]
    pub(super) zero_copy: ZeroCopy,
    /// Whether the destination's memory is not populated ahead.
    #[serde(skip)]
    pub(super) faulting: bool,
}

/// A way of leaving, by its name.
mod zero_copy {
    use limosa_channel::ZeroCopy;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(zero_copy: &ZeroCopy, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(zero_copy.into())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ZeroCopy, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl SendOptions {
    /// In packets on this number of multifd channels, with the best settings for them.
    pub(crate) fn multifd(channels: u8) -> Self {
        Self { channels, zero_copy: ZeroCopy::Auto, ..Self::default() }
    }

    /// The same, the pages leaving in this way.
    pub(crate) fn leaving(self, zero_copy: ZeroCopy) -> Self {
        Self { zero_copy, ..self }
    }

    /// The same, into memory that is not populated ahead.
    pub(super) fn faulting(self) -> Self {
        Self { faulting: true, ..self }
    }

    /// The same, with this detection of zero pages.
    pub(crate) fn with_zeros(self, zeros: ZeroPages) -> Self {
        Self { zeros, ..self }
    }
}

/// When pages are looked at, and how.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ZeroPages {
    /// In every round.
    #[default]
    Always,
    /// In every round, by the plain loop.
    Plainly,
    /// In the first round.
    Bulk,
    /// Never.
    Off,
}

impl ZeroPages {
    pub(crate) const ALL: [Self; 4] = [Self::Always, Self::Plainly, Self::Bulk, Self::Off];

    pub(super) fn params(self) -> (ZeroCheck, ZeroMethod) {
        match self {
            Self::Always => (ZeroCheck::Always, ZeroMethod::best()),
            Self::Plainly => (ZeroCheck::Always, ZeroMethod::Plain),
            Self::Bulk => (ZeroCheck::Bulk, ZeroMethod::best()),
            Self::Off => (ZeroCheck::Off, ZeroMethod::best()),
        }
    }
}
