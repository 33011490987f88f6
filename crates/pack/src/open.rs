//! Opening a snapshot, packed or not.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use limosa_image::luks::Passphrase;
use limosa_image::reference::{ObjectStores, is_object};
use limosa_snapshot::Snapshot;
use limosa_storage::FileIdentity;
use rustix::fs::MemfdFlags;

use crate::bytes::UnpackedBytes;
use crate::chain::Chain;
use crate::error::PackError;
use crate::head::is_image;
use crate::remote;
use crate::touched;

/// How often a snapshot is opened again that another limosa replaces at that moment.
const TRIES: usize = 5;

/// The means to open snapshots that not everybody can open.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Access {
    /// The passphrase of all encrypted images of a chain; a snapshot that is not encrypted needs none.
    pub passphrase: Option<Passphrase>,
    /// The client of object stores.
    pub stores: ObjectStores,
}

impl Access {
    /// Sets `passphrase`.
    #[must_use]
    pub fn passphrase(self, passphrase: Option<Passphrase>) -> Self {
        Self { passphrase, ..self }
    }

    /// Sets `stores`.
    #[must_use]
    pub fn stores(self, stores: ObjectStores) -> Self {
        Self { stores, ..self }
    }
}

/// Opens a snapshot: a mapped-ram file, or one that is packed into an image, with the images that it stands on; in a
/// file, or with a URL as its name ([`is_object`]) in an object store.
///
/// Takes no lock: see [`Snapshot::lock_serving`]. Objects have none; one that is replaced is an error of each read.
///
/// # Errors
/// As [`Snapshot::open`]; a file that looks like an image but holds no snapshot; a missing or wrong passphrase; a base
/// that is missing, was changed, or is another one; the store's.
pub fn open_snapshot(path: &Path, access: &Access) -> Result<Snapshot, PackError> {
    if is_object(path) {
        return remote::open(path, access);
    }
    let passphrase = access.passphrase.as_ref();
    let mut tries = 0;
    loop {
        let file = open_file(path)?;
        if !is_image(&file) {
            return Ok(Snapshot::from_file(file, path)?);
        }
        let is_named = |file: &File| {
            let (found, opened) = (std::fs::metadata(path), file.metadata());
            found.is_ok_and(|found| opened.is_ok_and(|opened| FileIdentity::of(&found) == FileIdentity::of(&opened)))
        };
        match Chain::open(&file, path, passphrase) {
            Ok(chain) => return snapshot_of(chain, file, path),
            // Another limosa has given it another base meanwhile, and removed the one that it had.
            Err(_) if tries < TRIES && !is_named(&file) => tries += 1,
            Err(error) => return Err(error),
        }
    }
}

/// Returns whether a file looks like an image that a snapshot may be packed in. One that cannot be read is not.
#[must_use]
pub fn is_packed(path: &Path) -> bool {
    open_file(path).is_ok_and(|file| is_image(&file))
}

/// Opens the bytes as a packed snapshot from a file in memory, for fuzzers. Bytes must never make it panic, or take
/// memory without a bound.
///
/// # Errors
/// As [`open_snapshot`].
pub fn fuzz_open(bytes: &[u8]) -> Result<Snapshot, PackError> {
    let path = Path::new("bytes");
    let made = rustix::fs::memfd_create("limosa-fuzz", MemfdFlags::CLOEXEC);
    let file = File::from(made.map_err(|errno| PackError::io("make a file in memory", path)(errno.into()))?);
    file.write_all_at(bytes, 0).map_err(PackError::io("fill a file in memory", path))?;
    let chain = Chain::open(&file, path, None)?;
    // What a restore looks at, too.
    _ = touched::of(&chain.disk);
    snapshot_of(chain, file, path)
}

/// Returns the snapshot in images; `file` is the topmost one.
pub(crate) fn snapshot_of(chain: Chain, file: File, path: &Path) -> Result<Snapshot, PackError> {
    Ok(Snapshot::from_packed(file, path, Arc::new(UnpackedBytes::new(chain)))?)
}

pub(crate) fn open_file(path: &Path) -> Result<File, PackError> {
    // Without O_NONBLOCK, opening a named pipe would wait for its other end.
    let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    opened.map_err(PackError::io("open it", path))
}
