//! How a file is opened.

use std::fmt;
use std::str::FromStr;

use crate::file::lock::LockPolicy;

/// Cache mode, with QEMU's names (`-t` of qemu-img, `cache=` of QEMU).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// Direct I/O, bypassing the host's page cache; a flush makes writes durable.
    None,
    /// Through the host's page cache; a flush makes writes durable.
    #[default]
    Writeback,
    /// Through the host's page cache; each change is durable when it completes.
    Writethrough,
    /// Direct I/O; each change is durable when it completes.
    Directsync,
    /// Through the host's page cache; flushes do nothing.
    Unsafe,
}

impl CacheMode {
    /// All modes.
    pub const ALL: [Self; 5] = [Self::None, Self::Writeback, Self::Writethrough, Self::Directsync, Self::Unsafe];

    /// Whether the host's page cache is bypassed (`O_DIRECT`).
    #[must_use]
    pub fn is_direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }

    /// Whether each change is durable when it completes.
    #[must_use]
    pub fn is_synchronous(self) -> bool {
        matches!(self, Self::Writethrough | Self::Directsync)
    }

    /// Whether flushes do nothing.
    #[must_use]
    pub fn ignores_flush(self) -> bool {
        self == Self::Unsafe
    }

    /// Its name in QEMU.
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

/// The name is not a cache mode's.
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

/// The executor of requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Io {
    /// `io_uring` where it is available, else threads. Large requests through the page cache mostly copy memory; they
    /// go to threads, which copy in parallel.
    #[default]
    Auto,
    /// `io_uring`. Opening fails where it is not available.
    Uring,
    /// Blocking calls on a thread pool.
    Threads,
    /// Blocking calls on the thread that polls. For callers that have a thread per request: it saves a switch to
    /// another thread.
    CallerThread,
}

/// Whether a file is created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Create {
    /// It must exist.
    #[default]
    No,
    /// It is created if it does not exist; an existing file keeps its contents.
    IfMissing,
    /// It is created; an existing file is an error.
    New,
}

/// How a file is opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FileOptions {
    /// Cache mode.
    pub cache: CacheMode,
    /// The executor of requests.
    pub io: Io,
    /// Whether the file is opened read-only.
    pub read_only: bool,
    /// Whether the file is created. This is the caller's decision; the contents of another image must not decide it.
    pub create: Create,
    /// Whether QEMU's image locks are taken and respected.
    pub lock: LockPolicy,
}

impl FileOptions {
    /// Options to open a file read-only.
    #[must_use]
    pub fn read_only_default() -> Self {
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
