//! How a file is opened.

use std::fmt;
use std::str::FromStr;

use crate::file::lock::LockPolicy;

/// What is between a write and the medium, by QEMU's names (`-t` of qemu-img, `cache=` of QEMU).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// Direct: past the host's page cache, durable by a flush.
    None,
    /// Through the host's page cache, durable by a flush.
    #[default]
    Writeback,
    /// Through the host's page cache; whatever changes the file is durable when it is complete.
    Writethrough,
    /// Direct; whatever changes the file is durable when it is complete.
    Directsync,
    /// Through the host's page cache, never made durable: flushing does nothing.
    Unsafe,
}

impl CacheMode {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::None, Self::Writeback, Self::Writethrough, Self::Directsync, Self::Unsafe];

    /// Whether the host's page cache is passed by (`O_DIRECT`).
    #[must_use]
    pub fn is_direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }

    /// Whether each change is made durable before it is complete.
    #[must_use]
    pub fn is_synchronous(self) -> bool {
        matches!(self, Self::Writethrough | Self::Directsync)
    }

    /// Whether flushing does nothing.
    #[must_use]
    pub fn ignores_flush(self) -> bool {
        self == Self::Unsafe
    }

    /// QEMU's name of it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Writeback => "writeback",
            Self::Writethrough => "writethrough",
            Self::Directsync => "directsync",
            Self::Unsafe => "unsafe",
        }
    }
}

impl fmt::Display for CacheMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// There is no cache mode of that name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid cache mode '{0}': none, writeback, writethrough, directsync and unsafe are known")]
pub struct UnknownCacheMode(String);

impl FromStr for CacheMode {
    type Err = UnknownCacheMode;

    /// QEMU's names; `off` is `none`, as there.
    fn from_str(name: &str) -> Result<Self, UnknownCacheMode> {
        let name = if name == "off" { "none" } else { name };
        Self::ALL.into_iter().find(|mode| mode.as_str() == name).ok_or_else(|| UnknownCacheMode(name.into()))
    }
}

/// Who carries requests out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Io {
    /// `io_uring` where the kernel has it and lets us, else threads. Large requests through the page cache, which are copies that
    /// processors make, are spread over threads.
    #[default]
    Auto,
    /// `io_uring`. Opening fails where there is none.
    Uring,
    /// A pool of threads, and calls that block.
    Threads,
    /// The thread that polls a read or a write waits for it: for callers with a thread for each request, which spare handing it
    /// to another.
    Caller,
}

/// Whether a file may be made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Create {
    /// It has to be there.
    #[default]
    No,
    /// It is made if it is not there; one that is there keeps its contents.
    IfMissing,
    /// It is made; one that is there is an error.
    New,
}

/// How a file is opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FileOptions {
    /// What is between a write and the medium.
    pub cache: CacheMode,
    /// Who carries requests out.
    pub io: Io,
    /// Whether nothing may be written.
    pub read_only: bool,
    /// Whether the file may be made. An image's caller decides about that, not what is written in another image.
    pub create: Create,
    /// Whether others are kept from it, and whether we keep away.
    pub lock: LockPolicy,
}

impl FileOptions {
    /// Opened for reading.
    #[must_use]
    pub fn reading() -> Self {
        Self { read_only: true, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_modes_have_qemus_names() {
        for mode in CacheMode::ALL {
            assert_eq!(mode.as_str().parse(), Ok(mode));
        }
        assert_eq!("off".parse(), Ok(CacheMode::None));
        assert!("None".parse::<CacheMode>().unwrap_err().to_string().contains("'None'"));
    }
}
