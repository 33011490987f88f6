//! The images of a packed snapshot, from the topmost one down.
//!
//! Law: images are data from outside. A base is a file beside the image that names it, nothing else is opened; no file
//! is in a chain twice; a chain has at most [`DEPTH_LIMIT`] images; and each base is the one that was compared when its
//! increment was made, or nothing is read.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limosa_image::luks::{self, Passphrase};
use limosa_image::qcow2::{Encryption, Header, ImageParts, Qcow2, Qcow2Options, table_digest};
use limosa_image::{Disk, ImageError};
use limosa_storage::{Buffer, FileOptions, FileStorage, Io, Storage, block_on};

use crate::error::PackError;
use crate::record::{BaseRecord, Record};

/// The most images in a chain.
pub const DEPTH_LIMIT: usize = 16;
/// The longest mapped-ram file that is read out of an image: more than the memory that a snapshot may have.
const LENGTH_LIMIT: u64 = 1 << 46;

/// An image of a chain.
#[derive(Debug)]
pub(crate) struct Level {
    pub(crate) path: PathBuf,
    /// Its file, for what must not change.
    pub(crate) file: File,
    pub(crate) storage: Arc<FileStorage>,
    /// The image in it: the same, or decrypted.
    contents: Arc<dyn Storage>,
    header: Header,
    record: Option<Record>,
    pub(crate) is_encrypted: bool,
    /// Its file when it was opened: device and inode, length and modification time.
    opened: [u64; 5],
}

/// The images of a packed snapshot, opened for reading.
#[derive(Debug)]
pub(crate) struct Chain {
    /// The topmost one first.
    pub(crate) levels: Vec<Level>,
    pub(crate) disk: Arc<Qcow2>,
}

/// Returns whether a file begins as an image of a packed snapshot: qcow2, or LUKS.
pub(crate) fn is_image(file: &File) -> bool {
    use std::os::unix::fs::FileExt as _;
    let mut head = [0; 6];
    // What cannot be read at an offset is a pipe, which no image is in.
    file.read_exact_at(&mut head, 0).is_ok() && (head.starts_with(b"QFI\xfb") || head == luks::MAGIC)
}

impl Chain {
    /// Opens an image and its bases.
    pub(crate) fn open(file: &File, path: &Path, passphrase: Option<&Passphrase>) -> Result<Self, PackError> {
        let mut levels =
            vec![Level::open(file.try_clone().map_err(PackError::io("open it again", path))?, path, passphrase)?];
        let mut seen = HashSet::from([identity(file, path)?]);
        while let Some(last) = levels.last()
            && let Some(backing) = &last.header.backing
        {
            let refused = |what: String| PackError::Base {
                path: last.path.clone(),
                base: backing.name.display().to_string(),
                what,
            };
            let record = last.record.and_then(|record| record.base);
            let record = record.ok_or_else(|| refused("the image does not say which one that is".to_owned()))?;
            if levels.len() == DEPTH_LIMIT {
                return Err(refused(format!("the chain has more than {DEPTH_LIMIT} images")));
            }
            let below = beside(&last.path, &backing.name).map_err(&refused)?;
            let opened = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&below);
            let opened = opened.map_err(|error| refused(format!("cannot be opened: {error}")))?;
            if !seen.insert(identity(&opened, &below)?) {
                return Err(refused("that file is already part of the chain".to_owned()));
            }
            if !is_image(&opened) {
                return Err(refused("it is not a packed snapshot".to_owned()));
            }
            let level = Level::open(opened, &below, passphrase)?;
            level.check_is(&record).map_err(|error| match error {
                Found::Another(what) => refused(what),
                Found::Unreadable(error) => error.into(),
            })?;
            levels.push(level);
        }
        let mut disk: Option<Arc<Qcow2>> = None;
        for level in levels.iter().rev() {
            let below = disk.take().map(|disk| disk as Arc<dyn Disk>);
            let parts = ImageParts::new(Arc::clone(&level.contents), level.header.clone()).backing(below);
            disk = Some(block_on(Qcow2::open(parts, Qcow2Options::default().read_only(true)))?);
        }
        let disk =
            disk.ok_or_else(|| PackError::Unsupported { path: path.to_path_buf(), what: "no image".to_owned() })?;
        if disk.len() > LENGTH_LIMIT {
            let what = format!("its contents are said to have {} bytes", disk.len());
            return Err(PackError::Unsupported { path: path.to_path_buf(), what });
        }
        Ok(Self { levels, disk })
    }

    /// Returns the largest cluster of the chain: reading less would unpack some twice.
    pub(crate) fn unit(&self) -> u64 {
        self.levels.iter().map(Level::cluster_size).max().unwrap_or(1 << 16)
    }

    /// The topmost image.
    pub(crate) fn top(&self) -> &Level {
        // There is one: a chain is made of it.
        &self.levels[0]
    }
}

/// Why a file is not the base.
enum Found {
    Another(String),
    Unreadable(ImageError),
}

impl Level {
    pub(crate) fn open(file: File, path: &Path, passphrase: Option<&Passphrase>) -> Result<Self, PackError> {
        Self::open_with(file, path, passphrase, FileOptions::read_only_default())
    }

    /// Opens an image whose record changes. The file is open for writing.
    pub(crate) fn open_to_change(file: File, path: &Path, passphrase: Option<&Passphrase>) -> Result<Self, PackError> {
        Self::open_with(file, path, passphrase, FileOptions::default())
    }

    fn open_with(
        file: File,
        path: &Path,
        passphrase: Option<&Passphrase>,
        options: FileOptions,
    ) -> Result<Self, PackError> {
        let unsupported = |what: &str| PackError::Unsupported { path: path.to_path_buf(), what: what.to_owned() };
        let options = FileOptions { io: Io::CallerThread, ..options };
        // Before the first byte is read.
        let opened = facts(&file.metadata().map_err(PackError::io("look at it", path))?);
        let copy = file.try_clone().map_err(PackError::io("open it again", path))?;
        let storage =
            FileStorage::from_fd(copy.into(), &path.display().to_string(), &options).map_err(PackError::storage)?;
        let head = Buffer::zeroed(luks::MAGIC.len());
        block_on(storage.read(0, head.clone().into())).map_err(PackError::storage)?;
        let is_encrypted = head.to_vec() == luks::MAGIC;
        let contents: Arc<dyn Storage> = if is_encrypted {
            let passphrase = passphrase.ok_or_else(|| PackError::NoPassphrase { path: path.to_path_buf() })?;
            Arc::new(block_on(luks::open(Arc::clone(&storage) as Arc<dyn Storage>, passphrase))?)
        } else {
            Arc::clone(&storage) as Arc<dyn Storage>
        };
        let header = block_on(Header::read_for_reading(&*contents))?;
        if header.features.data_file() {
            return Err(unsupported("its contents are in a file of their own"));
        }
        if header.encryption != Encryption::None {
            return Err(unsupported("it is encrypted inside of qcow2, and packed snapshots are below it"));
        }
        let record = Record::of(&header).map_err(|what| unsupported(&what))?;
        if record.is_some_and(|record| record.base.is_some()) && header.backing.is_none() {
            return Err(unsupported("the name of its base was taken away, and without it parts of it are missing"));
        }
        let length = contents.length().map_err(PackError::storage)?;
        if let Some(record) = record.filter(|record| record.length > length) {
            let what = format!("it is cut short: it had {} bytes, and has {length}", record.length);
            return Err(unsupported(&what));
        }
        Ok(Self { path: path.to_path_buf(), file, storage, contents, header, record, is_encrypted, opened })
    }

    pub(crate) fn cluster_size(&self) -> u64 {
        self.header.geometry().cluster_size()
    }

    /// The name of the file that it stands on, as it has it.
    pub(crate) fn base_name(&self) -> Option<&OsStr> {
        self.header.backing.as_ref().map(|backing| backing.name.as_os_str())
    }

    /// Whether its file was written to since it was opened.
    pub(crate) fn has_changed(&self) -> bool {
        self.file.metadata().map_or(true, |metadata| facts(&metadata) != self.opened)
    }

    /// Whether this is its file.
    pub(crate) fn is_file(&self, metadata: &Metadata) -> bool {
        let [device, inode, ..] = self.opened;
        (metadata.dev(), metadata.ino()) == (device, inode)
    }

    /// Checks that its name is still that of its file, and that nobody has written to it.
    pub(crate) fn check_still_there(&self) -> Result<(), PackError> {
        let named = std::fs::metadata(&self.path).map_err(PackError::io("find it again", &self.path))?;
        if self.is_file(&named) && !self.has_changed() {
            return Ok(());
        }
        let what = "it was replaced or written to meanwhile".to_owned();
        Err(PackError::Unsupported { path: self.path.clone(), what })
    }

    pub(crate) const fn record(&self) -> Option<Record> {
        self.record
    }

    /// Changes the record in its place, durably. Torn by a power cut, it has each of its digests as it was, as it
    /// becomes, or one that is no file's.
    pub(crate) fn change_record(&mut self, record: Record) -> Result<(), PackError> {
        record.put(&mut self.header);
        let start = self.header.encode(self.contents.name())?;
        block_on(self.contents.write(0, Buffer::from_slice(&start).into())).map_err(PackError::storage)?;
        block_on(self.contents.flush()).map_err(PackError::storage)?;
        self.record = Some(record);
        Ok(())
    }

    pub(crate) fn compression(&self) -> &'static str {
        self.header.compression.name()
    }

    /// Returns the identity under which an increment records it as its base; `None`: another program made the image.
    pub(crate) fn identity(&self) -> Result<Option<BaseRecord>, PackError> {
        let Some(record) = self.record else { return Ok(None) };
        let tables = block_on(table_digest(&*self.contents, &self.header))?;
        Ok(Some(BaseRecord { id: record.id, tables, next_tables: None }))
    }

    fn check_is(&self, wanted: &BaseRecord) -> Result<(), Found> {
        match self.record {
            Some(record) if record.id == wanted.id => {}
            Some(record) => {
                let what = format!("holds the snapshot {}, and not {}, which it stands on", record.id, wanted.id);
                return Err(Found::Another(what));
            }
            None => return Err(Found::Another("does not say which snapshot it holds".to_owned())),
        }
        let tables = block_on(table_digest(&*self.contents, &self.header)).map_err(Found::Unreadable)?;
        if tables != wanted.tables && Some(tables) != wanted.next_tables {
            return Err(Found::Another("was changed since this was made on it".to_owned()));
        }
        Ok(())
    }
}

/// Facts of a file that must not change: device and inode, length and modification time.
fn facts(metadata: &Metadata) -> [u64; 5] {
    let (seconds, nanoseconds) = (metadata.mtime().cast_unsigned(), metadata.mtime_nsec().cast_unsigned());
    [metadata.dev(), metadata.ino(), metadata.len(), seconds, nanoseconds]
}

fn identity(file: &File, path: &Path) -> Result<(u64, u64), PackError> {
    let metadata = file.metadata().map_err(PackError::io("look at it", path))?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Returns the path of a base: the file of that name in the directory of the image.
fn beside(image: &Path, name: &OsStr) -> Result<PathBuf, String> {
    let plain = Path::new(name);
    if plain.file_name() != Some(name) {
        return Err("a base is in the directory of its image, and is named without one".to_owned());
    }
    let real = std::fs::canonicalize(image).map_err(|error| format!("the image is gone: {error}"))?;
    Ok(real.with_file_name(plain))
}
