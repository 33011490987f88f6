//! Versions of blocks: what tests of killed servers write, and what may be found afterwards.

/// Bytes of a block.
pub(crate) const BLOCK: u64 = 4096;

/// The versions of a block, from 1 on; 0: it was never written.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Versions {
    pub(crate) sent: u64,
    pub(crate) acknowledged: u64,
    pub(crate) durable: u64,
}

impl Versions {
    /// The version, from the oldest that is allowed to the last that was sent, whose contents these are.
    pub(crate) fn find(&self, block: u64, oldest: u64, found: &[u8]) -> Option<u64> {
        (oldest..=self.sent).rev().find(|version| found == contents(block, *version))
    }
}

/// The contents of a version of a block.
pub(crate) fn contents(block: u64, version: u64) -> Vec<u8> {
    if version == 0 { vec![0; 4096] } else { (block << 32 | version).to_le_bytes().repeat(512) }
}

/// A number from the environment.
pub(crate) fn setting(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}
