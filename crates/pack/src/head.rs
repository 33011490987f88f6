//! The head of an image: its header and its record, decrypted.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;

use limosa_image::luks::{self, Passphrase};
use limosa_image::qcow2::Header;
use limosa_page::to_usize;
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

/// The first bytes of a file or a storage, zeros behind its end.
type Start = [u8; luks::MAGIC.len()];

/// Returns whether a file begins as an image of a packed snapshot: qcow2, or LUKS.
pub(crate) fn is_image(file: &File) -> bool {
    start_of_file(file).is_some_and(|start| start.starts_with(&MAGIC) || start == luks::MAGIC)
}

/// Returns whether a file is a LUKS volume.
pub(crate) fn is_encrypted(file: &File) -> bool {
    start_of_file(file).is_some_and(|start| start == luks::MAGIC)
}

/// Returns whether a storage begins as such an image.
pub(crate) fn starts_as_image(storage: &dyn Storage) -> Result<bool, PackError> {
    let start = start_of(storage)?;
    Ok(start.starts_with(&MAGIC) || start == luks::MAGIC)
}

/// `None`: it is shorter, or cannot be read at an offset, as a pipe cannot.
fn start_of_file(file: &File) -> Option<Start> {
    use std::os::unix::fs::FileExt as _;
    let mut start = Start::default();
    file.read_exact_at(&mut start, 0).ok().map(|()| start)
}

fn start_of(storage: &dyn Storage) -> Result<Start, PackError> {
    let (mut start, buffer) = (Start::default(), Buffer::zeroed(luks::MAGIC.len()));
    let length = storage.length().map_err(PackError::storage)?;
    let there = buffer.slice(0..to_usize(length));
    block_on(storage.read(0, there.into())).map_err(PackError::storage)?;
    buffer.copy_to(0, &mut start);
    Ok(start)
}

impl Head {
    /// Reads the head of the image in a storage; `None`: something else is encrypted in it.
    pub(crate) fn read(
        storage: Arc<dyn Storage>,
        path: &Path,
        passphrase: Option<&Passphrase>,
    ) -> Result<Option<Self>, PackError> {
        let is_encrypted = start_of(&*storage)? == luks::MAGIC;
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

/// Whether the name of a backing file, as an image has it, may mean the file of this name beside the image.
pub(crate) fn may_name(backing: &OsStr, name: &OsStr) -> bool {
    let (bytes, wanted) = (backing.as_bytes(), name.as_bytes());
    if let Some(json) = bytes.strip_prefix(b"json:") {
        let is_plain = wanted.iter().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\' | b'/'));
        return !is_plain || json.windows(wanted.len()).any(|window| window == wanted);
    }
    bytes.strip_prefix(b"file:").unwrap_or(bytes) == wanted
}

/// Opens a file as the storage of an image. The options say whether it is locked.
pub(crate) fn storage_of(file: &File, path: &Path, options: FileOptions) -> Result<Arc<FileStorage>, PackError> {
    let options = FileOptions { io: Io::CallerThread, ..options };
    let copy = file.try_clone().map_err(PackError::io("open it again", path))?;
    FileStorage::from_fd(copy.into(), &path.display().to_string(), &options).map_err(PackError::storage)
}
