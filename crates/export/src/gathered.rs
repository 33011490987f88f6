//! Requests that are handed to the kernel together.

/// Requests that are handed to the kernel before more are taken from the client, and their bytes. What the page cache
/// has, or takes, is done at once, so the client can take these replies while the next requests are carried out. In
/// larger pieces, server and client wait for each other in turn; in smaller ones, each system call does less.
const MOST: (usize, usize) = (8, 128 << 10);

/// Requests that were begun, and are not handed to the kernel yet.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Gathered {
    requests: usize,
    bytes: usize,
}

impl Gathered {
    /// Adds a request of some bytes.
    pub(crate) const fn add(&mut self, bytes: usize) {
        self.requests += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// Whether there are some.
    pub(crate) const fn is_some(&self) -> bool {
        self.requests > 0
    }

    /// Whether enough are gathered.
    pub(crate) const fn is_enough(&self) -> bool {
        self.requests >= MOST.0 || self.bytes >= MOST.1
    }
}
