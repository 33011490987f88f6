//! The head of an image: its header and its record, decrypted.

use std::ffi::OsStr;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use limosa_image::luks::{self, Passphrase};
use limosa_image::qcow2::Header;
use limosa_storage::{Buffer, FileOptions, FileStorage, Io, Storage, block_on};

use crate::error::PackError;
use crate::record::Record;

/// The first bytes of an image.
const MAGIC: [u8; 4] = *b"QFI\xfb";

/// The head of an image.
#[derive(Debug)]
pub(crate) struct Head {
    /// The image: what it is stored in, or that decrypted.
    pub(crate) contents: Arc<dyn Storage>,
    pub(crate) header: Header,
    pub(crate) record: Option<Record>,
    pub(crate) is_encrypted: bool,
}

/// Returns whether a file begins as an image of a packed snapshot: qcow2, or LUKS.
pub(crate) fn is_image(file: &File) -> bool {
    use std::os::unix::fs::FileExt as _;
    let mut start = [0; luks::MAGIC.len()];
    // What cannot be read at an offset is a pipe, which no image is in.
    file.read_exact_at(&mut start, 0).is_ok() && begins_as_image(&start)
}

/// Returns whether a file is a LUKS volume.
pub(crate) fn is_encrypted(file: &File) -> bool {
    use std::os::unix::fs::FileExt as _;
    let mut start = [0; luks::MAGIC.len()];
    file.read_exact_at(&mut start, 0).is_ok() && start == luks::MAGIC
}

/// Returns whether the first bytes are those of an image: qcow2, or LUKS.
pub(crate) fn begins_as_image(start: &[u8]) -> bool {
    start.starts_with(&MAGIC) || start.starts_with(&luks::MAGIC)
}

/// Returns the first bytes of a storage, zeros behind its end: as many as [`begins_as_image`] needs.
pub(crate) fn start_of(storage: &dyn Storage) -> Result<Vec<u8>, PackError> {
    let start = Buffer::zeroed(luks::MAGIC.len());
    let length = storage.length().map_err(PackError::storage)?;
    let there = start.slice(0..usize::try_from(length).unwrap_or(usize::MAX));
    block_on(storage.read(0, there.into())).map_err(PackError::storage)?;
    Ok(start.to_vec())
}

impl Head {
    /// Reads the head of a storage that [`begins_as_image`]; `None`: something else is encrypted in it.
    pub(crate) fn read(
        storage: Arc<dyn Storage>,
        path: &Path,
        passphrase: Option<&Passphrase>,
    ) -> Result<Option<Self>, PackError> {
        let is_encrypted = start_of(&*storage)?.starts_with(&luks::MAGIC);
        let contents: Arc<dyn Storage> = if is_encrypted {
            let passphrase = passphrase.ok_or_else(|| PackError::NoPassphrase { path: path.to_path_buf() })?;
            Arc::new(block_on(luks::open(storage, passphrase))?)
        } else {
            storage
        };
        if is_encrypted && !start_of(&*contents)?.starts_with(&MAGIC) {
            return Ok(None);
        }
        let header = block_on(Header::read_for_reading(&*contents))?;
        let record = Record::of(&header).map_err(|what| PackError::Unsupported { path: path.to_path_buf(), what })?;
        Ok(Some(Self { contents, header, record, is_encrypted }))
    }

    /// The name of the file that the image stands on, as it has it.
    pub(crate) fn base_name(&self) -> Option<&OsStr> {
        self.header.backing.as_ref().map(|backing| backing.name.as_os_str())
    }
}

/// Opens a file as the storage of an image. The options say whether it is locked.
pub(crate) fn storage_of(file: &File, path: &Path, options: FileOptions) -> Result<Arc<FileStorage>, PackError> {
    let options = FileOptions { io: Io::CallerThread, ..options };
    let copy = file.try_clone().map_err(PackError::io("open it again", path))?;
    FileStorage::from_fd(copy.into(), &path.display().to_string(), &options).map_err(PackError::storage)
}
