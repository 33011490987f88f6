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
const MAGIC: &[u8; 4] = b"QFI\xfb";

/// The head of an image.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) storage: Arc<FileStorage>,
    /// The image in it: the same, or decrypted.
    pub(crate) contents: Arc<dyn Storage>,
    pub(crate) header: Header,
    pub(crate) record: Option<Record>,
    pub(crate) is_encrypted: bool,
}

/// Returns whether a file begins as an image of a packed snapshot: qcow2, or LUKS.
pub(crate) fn is_image(file: &File) -> bool {
    begins_with(file, MAGIC) || is_encrypted(file)
}

/// Returns whether a file is a LUKS volume.
pub(crate) fn is_encrypted(file: &File) -> bool {
    begins_with(file, &luks::MAGIC)
}

fn begins_with(file: &File, magic: &[u8]) -> bool {
    use std::os::unix::fs::FileExt as _;
    let mut head = [0; 6];
    let Some(head) = head.get_mut(..magic.len()) else { return false };
    // What cannot be read at an offset is a pipe, which no image is in.
    file.read_exact_at(head, 0).is_ok() && head == magic
}

impl Head {
    /// Reads the head of a file that [`is_image`]; `None`: something else is encrypted in it. The options say whether
    /// it is locked.
    pub(crate) fn read(
        file: &File,
        path: &Path,
        passphrase: Option<&Passphrase>,
        options: FileOptions,
    ) -> Result<Option<Self>, PackError> {
        let options = FileOptions { io: Io::CallerThread, ..options };
        let copy = file.try_clone().map_err(PackError::io("open it again", path))?;
        let storage =
            FileStorage::from_fd(copy.into(), &path.display().to_string(), &options).map_err(PackError::storage)?;
        let is_encrypted = is_encrypted(file);
        let contents: Arc<dyn Storage> = if is_encrypted {
            let passphrase = passphrase.ok_or_else(|| PackError::NoPassphrase { path: path.to_path_buf() })?;
            Arc::new(block_on(luks::open(Arc::clone(&storage) as Arc<dyn Storage>, passphrase))?)
        } else {
            Arc::clone(&storage) as Arc<dyn Storage>
        };
        if is_encrypted {
            let start = Buffer::zeroed(MAGIC.len());
            let is_long = contents.length().map_err(PackError::storage)? >= limosa_page::to_u64(MAGIC.len());
            if is_long {
                block_on(contents.read(0, start.clone().into())).map_err(PackError::storage)?;
            }
            if start.to_vec() != MAGIC {
                return Ok(None);
            }
        }
        let header = block_on(Header::read_for_reading(&*contents))?;
        let record = Record::of(&header).map_err(|what| PackError::Unsupported { path: path.to_path_buf(), what })?;
        Ok(Some(Self { storage, contents, header, record, is_encrypted }))
    }

    /// The name of the file that the image stands on, as it has it.
    pub(crate) fn base_name(&self) -> Option<&OsStr> {
        self.header.backing.as_ref().map(|backing| backing.name.as_os_str())
    }
}
