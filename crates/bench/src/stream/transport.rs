//! How the two processes are connected, and the names of what is counted of them.

/// Milliseconds of CPU of the sending and of the receiving process.
pub(super) const SENDER: &str = "sender_cpu_ms";
pub(super) const RECEIVER: &str = "receiver_cpu_ms";

/// Microseconds of CPU of the sending process for each GiB of memory.
pub(crate) const SENDER_PER_GIB: &str = "sender_cpu_us_per_gib";

/// Nanoseconds of CPU of both processes for each page that has contents.
pub(super) const PER_PAGE: &str = "cpu_ns_per_page";

/// How the two processes are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    /// Over the loopback interface.
    Tcp,
    Unix,
}

impl Transport {
    pub(crate) const ALL: [Self; 2] = [Self::Tcp, Self::Unix];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
        }
    }
}
