//! The kinds of guests, and what a new one does.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The kind of a built-in guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum GuestKind {
    /// Threads of the demonstration's own process
    #[default]
    Threads,
    /// A flat guest under /dev/kvm
    Kvm,
}

impl fmt::Display for GuestKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Threads => "threads",
            Self::Kvm => "kvm",
        })
    }
}

/// The dirty log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LogKind {
    /// The best one there is for the guest on this kernel
    #[default]
    #[value(skip)]
    Best,
    /// userfaultfd's asynchronous write protection, read by `PAGEMAP_SCAN` (Linux 6.7)
    WpAsync,
    /// userfaultfd's write protection with a thread that answers (Linux 5.19)
    WpThread,
    /// KVM's dirty log, cleared in slices
    KvmLog,
    /// KVM's dirty log, without protecting pages in slices
    #[value(skip)]
    KvmLogInOneStep,
    /// KVM's dirty ring
    KvmRing,
}

/// How fast a guest writes its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rate {
    /// Bytes of pages that get dirty in a second, all writers together; 0: it idles.
    BytesPerSecond(u64),
    /// As fast as it can.
    Max,
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BytesPerSecond(0) => f.write_str("idle"),
            Self::BytesPerSecond(bytes) => write!(f, "{bytes} B/s"),
            Self::Max => f.write_str("max"),
        }
    }
}

/// The options of a new guest. Pages are counted over all blocks, in their order; a kind may keep the first few for
/// itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestOptions {
    /// How fast it writes.
    pub rate: Rate,
    /// Bytes that it writes over and over, from the front of its memory; `None`: all.
    pub working_set: Option<u64>,
    /// Bytes that have contents when it begins, from the front of its memory; `None`: the working set. The rest is
    /// zero.
    pub filled: Option<u64>,
    /// Writers (threads or vCPUs), each with its own share of the working set: 1 to 64.
    pub writers: u16,
    /// Tells the contents of guests apart.
    pub seed: u32,
    /// The dirty log.
    pub log: LogKind,
}

impl Default for GuestOptions {
    fn default() -> Self {
        Self {
            rate: Rate::BytesPerSecond(64 << 20),
            working_set: None,
            filled: None,
            writers: 1,
            seed: 1,
            log: LogKind::Best,
        }
    }
}
