//! Files of other programs that hold a VM: recorded migration streams and libvirt's save images.
//!
//! Such a file has its pages in the order in which they were sent, so it can only be read from its beginning: a
//! snapshot that restores lazily is made of it once, by the same engine that receives a stream from a QEMU. No process
//! is at the other end of a recorded stream, so its end is the end of the bytes.
//!
//! Law of this module: a file's kind follows from its first bytes and never from its name; the rest is
//! believed only where it was proven.

mod convert;
mod decompressor;
mod domain_xml;
mod libvirt;

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use limosa_migrate::MigrateError;
use limosa_stream::configuration::MAPPED_RAM;
use limosa_stream::{DecoderOptions, Event, StreamWalk};
use rustix::fs::SeekFrom;
use thiserror::Error;

use crate::error::SnapshotError;
use crate::reader::Snapshot;
pub use convert::Imported;
pub use decompressor::Decompressor;
pub(crate) use decompressor::{Decompression, Forward};
pub use libvirt::{
    ByteOrder, InvalidSaveImage, SAVE_IMAGE_HEADER_LENGTH, SAVE_IMAGE_XML_LIMIT, SaveHeader, SaveImage, SaveImageFormat,
};
use limosa_page::error_with_causes;

/// The first bytes of every migration stream.
const STREAM_MAGIC: &[u8] = b"QEVM";
/// Zeros that are read in search of a stream that does not begin at once, in bytes.
const ZEROS_READ: u64 = 1 << 30;

/// Why a file of another program could not be taken.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ForeignError {
    /// A file: the one that is read, or the one that is made.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The stream.
    #[error("{}: its stream cannot be read", path.display())]
    Stream {
        /// The file it is in.
        path: PathBuf,
        /// The reason.
        source: MigrateError,
    },
    /// A program that unpacks is missing, or failed.
    #[error("{}: {what}", path.display())]
    DecompressorFailed {
        /// The file to be unpacked.
        path: PathBuf,
        /// The failure and its remedy.
        what: String,
    },
    /// The file has the expected kind, but is not whole or not valid.
    #[error("{}: {what}", path.display())]
    Image {
        /// The file.
        path: PathBuf,
        /// The reason.
        what: String,
    },
}

/// Where the bytes come from.
#[derive(Debug)]
enum Bytes {
    /// A regular file: any part of it can be read.
    File(File),
    /// Bytes that come once; `head` are those that were read already and belong to the stream.
    Pipe { fd: OwnedFd, head: Vec<u8> },
}

/// How the VM is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Nothing that is known.
    Unknown,
    /// A mapped-ram file from its first byte on: a snapshot.
    Native,
    /// A mapped-ram file that begins at `offset`.
    Mapped { offset: u64 },
    /// A stream that begins at `offset`, packed or not.
    Stream { offset: u64, decompressor: Option<Decompressor> },
}

/// An open file of another program's, or a pipe, with the kind of its contents.
#[derive(Debug)]
pub struct Foreign {
    path: PathBuf,
    bytes: Bytes,
    kind: Kind,
    save_image: Option<SaveImage>,
    /// When the file was written, in seconds since 1970; for a pipe, none.
    modified: Option<u64>,
}

impl Foreign {
    /// Opens a file and determines its kind. `offset` is where it begins; `None` looks for a stream behind leading
    /// zeros, as QEMU leaves them with `file:PATH,offset=N`.
    ///
    /// A file of another kind is refused when it is used.
    ///
    /// # Errors
    /// It cannot be read, is no regular file, or is a libvirt save image that is not whole.
    pub fn open(path: &Path, offset: Option<u64>) -> Result<Self, ForeignError> {
        // Without O_NONBLOCK, opening a named pipe would wait for its other end.
        let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = opened.map_err(|error| SnapshotError::io("open it", path, None, error))?;
        let metadata = file.metadata().map_err(|error| SnapshotError::io("look at it", path, None, error))?;
        if !metadata.is_file() {
            let why = "is not a regular file".to_owned();
            return Err(SnapshotError::Target { path: path.to_path_buf(), why }.into());
        }
        Self::of_file(file, path, offset)
    }

    /// As [`open`](Self::open), of a descriptor: a pipe, a socket, or a file from its present position on.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_fd(fd: OwnedFd, name: &Path) -> Result<Self, ForeignError> {
        let mut file = File::from(fd);
        let metadata = file.metadata().map_err(|error| SnapshotError::io("look at it", name, None, error))?;
        if metadata.is_file() {
            let position = rustix::fs::seek(&file, SeekFrom::Current(0))
                .map_err(|error| SnapshotError::io("look at it", name, None, error))?;
            return Self::of_file(file, name, (position > 0).then_some(position));
        }
        let read = |file: &mut File, length: u64| -> Result<Vec<u8>, SnapshotError> {
            let mut bytes = Vec::new();
            file.by_ref()
                .take(length)
                .read_to_end(&mut bytes)
                .map(|_| bytes)
                .map_err(|error| SnapshotError::io("read it", name, None, error))
        };
        let head = read(&mut file, SAVE_IMAGE_HEADER_LENGTH as u64)?;
        let (mut kind, mut image, mut rest) = (Kind::Stream { offset: 0, decompressor: None }, None, head);
        if libvirt::is_image(&rest) {
            let found = SaveImage::read(&rest, |length| {
                read(&mut file, u64::from(length)).map_err(|error| error_with_causes(&error))
            })
            .map_err(|what| ForeignError::Image { path: name.to_path_buf(), what })?;
            kind = Self::kind_of(&found);
            if matches!(kind, Kind::Mapped { .. }) {
                let what =
                    "a save image in libvirt's format sparse has to be read from a file, not from a pipe".to_owned();
                return Err(ForeignError::Image { path: name.to_path_buf(), what });
            }
            (image, rest) = (Some(found), Vec::new());
        } else if let Some(decompressor) = Decompressor::of_magic(&rest) {
            let what = format!("packed by {0}: pipe it through {0} -dc on the way", decompressor.program());
            return Err(ForeignError::Image { path: name.to_path_buf(), what });
        }
        let bytes = Bytes::Pipe { fd: file.into(), head: rest };
        Ok(Self { path: name.to_path_buf(), bytes, kind, save_image: image, modified: None })
    }

    fn of_file(file: File, path: &Path, offset: Option<u64>) -> Result<Self, ForeignError> {
        let failed = |error: io::Error| SnapshotError::io("read it", path, None, error);
        let metadata = file.metadata().map_err(failed)?;
        let begin = match offset {
            Some(offset) => offset,
            None => behind_zeros(&file, metadata.len()).map_err(failed)?,
        };
        let head = read_up_to(&file, begin, SAVE_IMAGE_HEADER_LENGTH).map_err(failed)?;
        let mut image = None;
        let kind = if libvirt::is_image(&head) {
            let data = |length: u32| {
                let at = begin.saturating_add(SAVE_IMAGE_HEADER_LENGTH as u64);
                read_up_to(&file, at, length as usize).map_err(|error| error_with_causes(&error))
            };
            let found =
                SaveImage::read(&head, data).map_err(|what| ForeignError::Image { path: path.to_path_buf(), what })?;
            let kind = Self::kind_of(&found).moved(begin);
            image = Some(found);
            kind
        } else if let Some(decompressor) = Decompressor::of_magic(&head) {
            Kind::Stream { offset: begin, decompressor: Some(decompressor) }
        } else {
            match stream_at(&file, begin) {
                None => Kind::Unknown,
                Some(Pages::Placed) if begin == 0 => Kind::Native,
                Some(Pages::Placed) => Kind::Mapped { offset: begin },
                Some(Pages::InOrder) => Kind::Stream { offset: begin, decompressor: None },
            }
        };
        let modified = u64::try_from(metadata.mtime()).ok();
        Ok(Self { path: path.to_path_buf(), bytes: Bytes::File(file), kind, save_image: image, modified })
    }

    /// Returns how the VM is stored in this image, which begins at offset 0.
    fn kind_of(image: &SaveImage) -> Kind {
        let offset = image.payload_offset();
        match image.header.format {
            SaveImageFormat::Raw => Kind::Stream { offset, decompressor: None },
            SaveImageFormat::Compressed(decompressor) => Kind::Stream { offset, decompressor: Some(decompressor) },
            SaveImageFormat::Sparse => Kind::Mapped { offset },
        }
    }

    /// Whether this is a snapshot as it is: a mapped-ram file from its first byte on.
    pub fn is_snapshot(&self) -> bool {
        self.kind == Kind::Native
    }

    /// The snapshot that this is, or seems to be: one whose beginning is damaged is not recognized.
    ///
    /// # Errors
    /// As [`Snapshot::from_file`]; also if this is something else.
    pub fn into_snapshot(self) -> Result<Snapshot, SnapshotError> {
        let path = self.path.clone();
        let Parts { file, .. } = self.into_parts()?;
        Snapshot::from_file(file, &path)
    }

    /// Whether this is something that a snapshot can be made of.
    pub fn is_importable(&self) -> bool {
        matches!(self.kind, Kind::Mapped { .. } | Kind::Stream { .. })
    }

    /// Returns libvirt's save image, if this is one.
    pub fn save_image(&self) -> Option<&SaveImage> {
        self.save_image.as_ref()
    }

    /// Returns the program that unpacks the stream.
    pub fn decompressor(&self) -> Option<Decompressor> {
        match self.kind {
            Kind::Stream { decompressor, .. } => decompressor,
            _ => None,
        }
    }

    /// The name it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Describes the file for people: "a recorded migration stream".
    pub fn describe(&self) -> &'static str {
        match (&self.save_image, self.kind) {
            (Some(_), _) => "a libvirt save image",
            (None, Kind::Stream { .. }) => "a recorded migration stream",
            (None, Kind::Mapped { .. } | Kind::Native) => "a mapped-ram file",
            (None, Kind::Unknown) => "neither a migration stream nor a libvirt save image",
        }
    }

    /// The file and where its VM is.
    pub(crate) fn into_parts(self) -> Result<Parts, SnapshotError> {
        let place = match self.kind {
            Kind::Native => VmLocation::Mapped(0),
            // Reading it as one says what is wrong.
            Kind::Unknown => VmLocation::Stream(0, None),
            Kind::Mapped { offset } => VmLocation::Mapped(offset),
            Kind::Stream { offset, decompressor } => VmLocation::Stream(offset, decompressor),
        };
        match self.bytes {
            Bytes::File(file) => Ok(Parts { file, place, image: self.save_image }),
            Bytes::Pipe { .. } => {
                Err(SnapshotError::Target { path: self.path, why: "is a pipe, not a file".to_owned() })
            }
        }
    }
}

/// A file, for who summarizes it.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) file: File,
    pub(crate) place: VmLocation,
    pub(crate) image: Option<SaveImage>,
}

/// Where a file's VM is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VmLocation {
    /// A mapped-ram file from that offset on.
    Mapped(u64),
    /// A stream from that offset on, packed or not.
    Stream(u64, Option<Decompressor>),
}

impl Kind {
    fn moved(self, by: u64) -> Self {
        match self {
            Self::Unknown | Self::Native => self,
            Self::Mapped { offset } => Self::Mapped { offset: offset.saturating_add(by) },
            Self::Stream { offset, decompressor } => Self::Stream { offset: offset.saturating_add(by), decompressor },
        }
    }
}

/// Reads `length` bytes, or as many as there are.
fn read_up_to(file: &File, offset: u64, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    let mut got = 0;
    while let Some(room) = bytes.get_mut(got..).filter(|room| !room.is_empty()) {
        match file.read_at(room, offset.saturating_add(got as u64)) {
            Ok(0) => break,
            Ok(count) => got += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(got);
    Ok(bytes)
}

/// Where a stream begins that has nothing but zeros and holes before it; 0 without a stream.
fn behind_zeros(file: &File, length: u64) -> io::Result<u64> {
    let mut position = 0;
    let mut read = 0;
    while position < length && read < ZEROS_READ {
        position = match rustix::fs::seek(file, SeekFrom::Data(position)) {
            Ok(data) => data,
            // No data behind it, or a file system that does not tell.
            Err(rustix::io::Errno::NXIO) => return Ok(0),
            Err(rustix::io::Errno::INVAL) => position,
            Err(error) => return Err(error.into()),
        };
        let bytes = read_up_to(file, position, 1 << 16)?;
        match bytes.iter().position(|byte| *byte != 0) {
            Some(at) => {
                let begins = bytes[at..].starts_with(STREAM_MAGIC)
                    || read_up_to(file, position + at as u64, STREAM_MAGIC.len())? == STREAM_MAGIC;
                return Ok(if begins { position + at as u64 } else { 0 });
            }
            None if bytes.is_empty() => return Ok(0),
            None => position += bytes.len() as u64,
        }
        read += bytes.len() as u64;
    }
    Ok(0)
}

/// Where the pages of a stream are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pages {
    /// In places of their own: mapped-ram.
    Placed,
    /// In the order in which they were sent.
    InOrder,
}

/// Returns the kind of the stream that begins here, if one does.
fn stream_at(file: &File, begin: u64) -> Option<Pages> {
    let read = |offset, into: &mut [u8]| file.read_at(into, offset);
    let options = DecoderOptions { base: begin, ..DecoderOptions::default() };
    match StreamWalk::new(read, options).next_event() {
        Ok(Event::Configuration(configuration)) if configuration.has_capability(MAPPED_RAM) => Some(Pages::Placed),
        Ok(Event::Configuration(_)) => Some(Pages::InOrder),
        _ => None,
    }
}
