//! LUKS1: encrypted disks, as cryptsetup and QEMU have them.
//!
//! A header has up to eight key slots. Each holds the volume key, spread over many stripes (anti-forensic) and
//! encrypted with a key that is derived from a passphrase; a digest tells whether the key is the right one. The
//! volume key encrypts the disk, sector by sector.
//!
//! Law: a header is data from outside. Its lengths, offsets and iteration counts are checked against the file and
//! [`Limits`] before anything is allocated or derived. Keys are wiped when they are dropped, and never printed.
//!
//! Source of the facts: the LUKS1 On-Disk Format Specification, version 1.2.3.

mod algorithm;
mod anti_forensic;
mod change;
mod cipher;
mod hash;
mod header;
mod key_slot;
mod secret;
mod storage;
mod unlock;
mod volume;

pub use algorithm::{CipherAlgorithm, CipherMode, IvGenerator};
pub use change::{KeySlotChange, change_key_slots};
pub(crate) use change::{change_key_slots_at, check_key_slot_change};
pub use cipher::{SECTOR, SectorCipher};
pub use hash::HashAlgorithm;
pub use header::{HEADER_LENGTH, Header, KEY_SLOTS, Layout, Limits, MAGIC, Slot};
pub use key_slot::{DEFAULT_ITER_TIME, NewHeader, STRIPES, iterations_for};
pub use secret::{Passphrase, Secrets};
pub use storage::EncryptedStorage;
pub use unlock::{Unlocked, VolumeKey};
pub use volume::{CreateOptions, create, open, open_detached, read_detached_header, read_header};
pub(crate) use volume::{cipher_at, new_header, read_header_at};

/// A fault of a header, or a passphrase that opens no key slot.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LuksError {
    /// A field of the header is wrong.
    #[error("LUKS header: {0}")]
    Header(String),
    /// The header is valid, but names something that limosa does not have.
    #[error("LUKS header: {0}")]
    Unsupported(String),
    /// No key slot opens with the passphrase.
    #[error("the passphrase does not open any key slot")]
    Passphrase,
    /// The caller names no secret.
    #[error("no secret was given for it")]
    NoSecret,
    /// Options of a new header that exclude each other.
    #[error("{0}")]
    Options(String),
    /// The kernel returned no random bytes.
    #[error("no random bytes: {0}")]
    Random(String),
}
