//! Raw images: a file with the bytes of the disk; and encrypted ones (LUKS), once they are decrypted.
//!
//! Law: a raw image whose format was guessed stays one. A guest owns its first sector; if it wrote another format's
//! signature there, the next guess would open that format, with the files that it names. Such a write fails.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_lock::Mutex;
use limosa_page::to_usize;
use limosa_storage::{Buffer, IoVector, Storage, ZeroOptions};

use crate::disk::{BlockStatus, Disk, MapEntry, Pending};
use crate::error::ImageError;
use crate::holes::inside;
use crate::luks::EncryptedStorage;
use crate::offset::{GuestOffset, HostOffset};
use crate::preallocation::Preallocation;
use crate::probe::{Format, Guess, LOOKED_AT, guess};
use crate::requests::{Inside, Requests};
use crate::setters::setters;
use crate::truncation::truncated_to;

/// Disks are whole sectors long, in bytes.
const SECTOR: u64 = 512;

/// Options of an open raw image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RawOptions {
    /// Offset of the disk in the storage, in bytes.
    pub offset: u64,
    /// The disk's length in bytes, whole sectors; `None`: up to the end of the storage, rounded up to a sector.
    pub size: Option<u64>,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether the format was guessed.
    pub guessed: bool,
}

setters!(RawOptions { offset: u64, size: Option<u64>, read_only: bool, guessed: bool });

/// A raw image in use.
#[derive(Debug)]
pub struct Raw {
    file: Arc<dyn Storage>,
    offset: u64,
    windowed: bool,
    len: AtomicU64,
    read_only: bool,
    /// Raw, or the format of encryption of what is in the file.
    format: Format,
    requests: Requests,
    /// Held while its length changes.
    resizing: Mutex<()>,
    /// Of an image whose format was guessed: held while its first sector changes.
    first_sector: Option<Mutex<()>>,
}

impl Raw {
    /// Opens an image.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`]: the part asked for is not in the storage, or not whole sectors; what the storage
    /// says.
    pub fn open(file: Arc<dyn Storage>, options: &RawOptions) -> Result<Arc<Self>, ImageError> {
        let unsupported = |what: String| ImageError::Unsupported { image: Arc::clone(file.name()), what };
        let length = file.length()?;
        let rest = length.checked_sub(options.offset);
        let rest = rest.ok_or_else(|| unsupported(format!("offset={}: it has {length} bytes", options.offset)))?;
        let len = match options.size {
            Some(size) if !size.is_multiple_of(SECTOR) => {
                return Err(unsupported(format!("size={size}: a disk is whole sectors of {SECTOR} bytes long")));
            }
            Some(size) if size > rest => {
                return Err(unsupported(format!("size={size}: it has {rest} bytes from offset={} on", options.offset)));
            }
            Some(size) => size,
            None => rest.checked_next_multiple_of(SECTOR).unwrap_or(rest),
        };
        Ok(Arc::new(Self {
            offset: options.offset,
            windowed: options.offset != 0 || options.size.is_some(),
            len: AtomicU64::new(len),
            read_only: options.read_only || file.is_read_only(),
            format: Format::Raw,
            requests: Requests::default(),
            resizing: Mutex::new(()),
            first_sector: (options.guessed && options.offset < LOOKED_AT as u64).then(|| Mutex::new(())),
            file,
        }))
    }

    /// Opens the decrypted contents of an image in the format `luks`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_luks(contents: EncryptedStorage, read_only: bool) -> Result<Arc<Self>, ImageError> {
        let raw = Self::open(Arc::new(contents), &RawOptions::default().read_only(read_only))?;
        Ok(Arc::new(Self {
            file: Arc::clone(&raw.file),
            offset: 0,
            windowed: false,
            len: AtomicU64::new(raw.len()),
            read_only: raw.read_only,
            format: Format::Luks,
            requests: Requests::default(),
            resizing: Mutex::new(()),
            first_sector: None,
        }))
    }

    /// Whether it was guessed that it is raw.
    #[must_use]
    pub const fn is_guessed(&self) -> bool {
        self.first_sector.is_some()
    }

    /// Makes the file `len` bytes long, and the disk as many, rounded up to a sector. Added bytes read as zeros. If the
    /// space that is asked for is not available, the file keeps its length.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`]: it is a part of a file, or metadata are preallocated, which raw images do not have;
    /// errors of the storage.
    pub async fn resize(&self, len: u64, preallocation: Preallocation) -> Result<(), ImageError> {
        let _inside = self.admit_write(GuestOffset(0), 0)?;
        let _alone = self.resizing.lock().await;
        self.set_len(len, preallocation).await
    }

    async fn set_len(&self, len: u64, preallocation: Preallocation) -> Result<(), ImageError> {
        let old = self.len();
        let what = if self.windowed {
            "it is a part of a file, which cannot be resized; resize the file"
        } else if len.checked_next_multiple_of(SECTOR).is_none() {
            "no disk is that long"
        } else if preallocation == Preallocation::Metadata || (preallocation != Preallocation::Off && len < old) {
            "preallocation of a raw image must be falloc or full"
        } else {
            ""
        };
        if !what.is_empty() {
            return Err(ImageError::Unsupported { image: Arc::clone(self.name()), what: what.into() });
        }
        let before = self.file.length()?;
        self.file.set_len(len).await?;
        if len > old
            && let Err(error) = reserve(&*self.file, old..len, preallocation).await
        {
            // Longer without the space that was asked for, it would look like one that has it.
            // The first failure is returned.
            let _ = self.file.set_len(before).await;
            return Err(error);
        }
        self.len.store(len.next_multiple_of(SECTOR), Ordering::Release);
        Ok(())
    }

    fn admit(&self, at: GuestOffset, wanted: u64) -> Result<Inside<'_>, ImageError> {
        let length = self.len();
        let Some(inside) = self.requests.enter() else {
            let what = "it has been closed".to_owned();
            return Err(ImageError::Unsupported { image: Arc::clone(self.name()), what });
        };
        match at.0.checked_add(wanted) {
            Some(end) if end <= length => Ok(inside),
            _ => Err(ImageError::PastEnd { image: Arc::clone(self.name()), length, at, wanted }),
        }
    }

    fn admit_write(&self, at: GuestOffset, wanted: u64) -> Result<Inside<'_>, ImageError> {
        let inside = self.admit(at, wanted)?;
        if self.read_only { Err(ImageError::ReadOnly { image: Arc::clone(self.name()) }) } else { Ok(inside) }
    }

    /// The place of a part of the disk in the storage.
    fn host(&self, at: GuestOffset, length: u64) -> Range<u64> {
        let start = self.offset.saturating_add(at.0);
        start..start.saturating_add(length)
    }

    /// How many bytes of a range of the storage are in the sector that must not look like anything.
    fn guarded(&self, host: &Range<u64>) -> u64 {
        let end = if self.first_sector.is_some() { LOOKED_AT as u64 } else { 0 };
        end.saturating_sub(host.start).min(host.end - host.start)
    }

    /// Writes into the first sector, unless it would look like another format then. `bytes` are ours: nothing changes
    /// them between the look and the write.
    async fn write_first(&self, at: u64, bytes: &[u8]) -> Result<(), ImageError> {
        let _changing = match &self.first_sector {
            Some(lock) => Some(lock.lock().await),
            None => None,
        };
        let sector = Buffer::zeroed(LOOKED_AT);
        self.file.read(0, sector.clone().into()).await?;
        let part = to_usize(at);
        sector.copy_from(part, bytes);
        let name = match guess(&sector.to_vec()) {
            Guess::Known(Format::Raw) => {
                return Ok(self.file.write(at, sector.slice(part..part.saturating_add(bytes.len())).into()).await?);
            }
            Guess::Known(format) => format.name(),
            Guess::Foreign(name) => name,
        };
        Err(ImageError::Unsupported {
            image: Arc::clone(self.name()),
            what: format!(
                "a write to its first sector would make it look like {name}, and that it is raw was guessed; say so"
            ),
        })
    }
}

/// Allocates space for a part of a raw or encrypted image that is all holes.
pub(crate) async fn reserve(file: &dyn Storage, range: Range<u64>, how: Preallocation) -> Result<(), ImageError> {
    match how {
        Preallocation::Off | Preallocation::Metadata => {}
        Preallocation::Falloc => file.allocate(range).await?,
        Preallocation::Full => {
            file.allocate(range.clone()).await?;
            let zeros = Buffer::zeroed(1 << 20);
            let mut at = range.start;
            while at < range.end {
                let piece = zeros.slice(0..to_usize(range.end - at));
                let length = piece.len() as u64;
                file.write(at, piece.into()).await?;
                at += length;
            }
        }
    }
    Ok(())
}

/// The options of a new raw image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CreateOptions {
    /// Virtual size in bytes; it is rounded up to a sector.
    pub size: u64,
    /// The space that is allocated at once.
    pub preallocation: Preallocation,
}

setters!(CreateOptions { size: u64, preallocation: Preallocation });

/// Creates a raw image in `file`, whose contents are lost. A block device must be large enough, and keeps its contents.
///
/// # Errors
/// [`ImageError::Unsupported`]: a device is too small, or has to be preallocated; metadata are preallocated; errors of
/// the storage.
pub async fn create(file: &dyn Storage, options: &CreateOptions) -> Result<(), ImageError> {
    let CreateOptions { size, preallocation } = *options;
    let unsupported = |what: String| ImageError::Unsupported { image: Arc::clone(file.name()), what };
    if preallocation == Preallocation::Metadata {
        return Err(unsupported("a raw image has no metadata; preallocation must be off, falloc or full".into()));
    }
    let size = size.checked_next_multiple_of(SECTOR).ok_or_else(|| unsupported(format!("a disk of {size} bytes")))?;
    match file.set_len(0).await {
        Ok(()) => {
            file.set_len(size).await?;
            reserve(file, 0..size, preallocation).await?;
        }
        // Its length is its own.
        Err(_) if file.length()? >= size && preallocation != Preallocation::Off => {
            let what = format!("preallocation={preallocation}: its length is fixed; preallocation must be off");
            return Err(unsupported(what));
        }
        Err(_) if file.length()? >= size => {}
        Err(error) => return Err(error.into()),
    }
    Ok(file.flush().await?)
}

impl Disk for Raw {
    fn name(&self) -> &Arc<str> {
        self.file.name()
    }

    fn format(&self) -> &'static str {
        self.format.name()
    }

    fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn read(&self, at: GuestOffset, into: IoVector) -> Pending<'_> {
        Box::pin(async move {
            let length = into.len() as u64;
            let _inside = self.admit(at, length)?;
            let host = self.host(at, length);
            self.file.read(host.start, into.clone()).await?;
            match truncated_to(&*self.file, &into, host.end)? {
                // The last sector of the disk need not be whole in the file.
                Some(end) if end <= host.end.saturating_sub(SECTOR) => Err(ImageError::Truncated {
                    image: Arc::clone(self.name()),
                    what: format!("contents at {} of guest offset {at}", HostOffset(host.start)),
                    end,
                }),
                _ => Ok(()),
            }
        })
    }

    fn write(&self, at: GuestOffset, from: IoVector) -> Pending<'_> {
        Box::pin(async move {
            let length = from.len() as u64;
            let _inside = self.admit_write(at, length)?;
            let host = self.host(at, length);
            let first = to_usize(self.guarded(&host));
            if first > 0 {
                self.write_first(host.start, &from.slice(0..first).to_vec()).await?;
            }
            if first < from.len() {
                self.file.write(host.start + first as u64, from.slice(first..from.len())).await?;
            }
            Ok(())
        })
    }

    fn write_zeroes(&self, at: GuestOffset, length: u64, unmap: bool) -> Pending<'_> {
        Box::pin(async move {
            let _inside = self.admit_write(at, length)?;
            let host = self.host(at, length);
            let first = self.guarded(&host);
            if first > 0 {
                // Zeros can complete what another format begins with, too.
                self.write_first(host.start, &vec![0; to_usize(first)]).await?;
            }
            let rest = host.start + first..host.end;
            if !rest.is_empty() {
                self.file.write_zeroes(rest, ZeroOptions { unmap, only_fast: false }).await?;
            }
            Ok(())
        })
    }

    fn write_zeroes_fast(&self, at: GuestOffset, length: u64, unmap: bool) -> Pending<'_, bool> {
        Box::pin(async move {
            let _inside = self.admit_write(at, length)?;
            let host = self.host(at, length);
            if self.guarded(&host) > 0 {
                return Ok(false);
            }
            match self.file.write_zeroes(host, ZeroOptions { unmap, only_fast: true }).await {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(false),
                zeroed => Ok(zeroed.map(|()| true)?),
            }
        })
    }

    fn discard(&self, at: GuestOffset, length: u64) -> Pending<'_> {
        Box::pin(async move {
            let _inside = self.admit_write(at, length)?;
            let host = self.host(at, length);
            // What becomes of it would have to be looked at.
            let rest = host.start + self.guarded(&host)..host.end;
            if !rest.is_empty() {
                self.file.discard(rest).await?;
            }
            Ok(())
        })
    }

    fn flush(&self) -> Pending<'_> {
        Box::pin(async move {
            let _inside = self.admit(GuestOffset(0), 0)?;
            Ok(self.file.flush().await?)
        })
    }

    fn map(&self, at: GuestOffset, length: u64) -> Pending<'_, MapEntry> {
        let length = length.max(1);
        Box::pin(async move {
            let _inside = self.admit(at, length)?;
            let host = self.host(at, length);
            let run = self.file.first_run(host.clone())?;
            let (mut length, mut kind) = (run.length, if run.is_zero { BlockStatus::Zero } else { BlockStatus::Data });
            if kind == BlockStatus::Zero {
                match inside(&*self.file, host.start, length, SECTOR)? {
                    // The file was cut off: a read fails and says that it is lost.
                    0 => kind = BlockStatus::Data,
                    here => length = here,
                }
            }
            // What is encrypted is in no file as it is read here.
            let unchanged = self.format == Format::Raw;
            let host = unchanged.then(|| (Arc::clone(self.name()), HostOffset(host.start)));
            Ok(MapEntry { length, kind, depth: 0, host })
        })
    }

    fn storage(&self, depth: u32) -> Option<Arc<dyn Storage>> {
        (depth == 0 && self.format == Format::Raw).then(|| Arc::clone(&self.file))
    }

    fn copy_from(
        &self,
        at: GuestOffset,
        from: &Arc<dyn Storage>,
        from_offset: HostOffset,
        length: u64,
    ) -> Pending<'_, bool> {
        let from = Arc::clone(from);
        Box::pin(async move {
            let _inside = self.admit_write(at, length)?;
            let host = self.host(at, length);
            // What a guarded sector would become has to be seen first.
            if self.guarded(&host) > 0 {
                return Ok(false);
            }
            Ok(self.file.copy_range(host.start, &from, from_offset.0, length).await?)
        })
    }

    fn grow(&self, size: u64) -> Pending<'_> {
        Box::pin(async move {
            let _inside = self.admit_write(GuestOffset(0), 0)?;
            let _alone = self.resizing.lock().await;
            let old = self.len();
            let what = if size < old {
                format!("it has {old} bytes; while it is in use it does not become shorter")
            } else if !size.is_multiple_of(SECTOR) {
                format!("a size of {size} bytes, which is no multiple of {SECTOR}")
            } else {
                self.set_len(size, Preallocation::Off).await?;
                return Ok(self.file.flush().await?);
            };
            Err(ImageError::Unsupported { image: Arc::clone(self.name()), what })
        })
    }

    fn unlock(&self) {
        self.file.unlock();
    }

    fn close(&self) -> Pending<'_> {
        Box::pin(async move {
            self.requests.close();
            self.requests.over().await;
            if !self.read_only {
                self.file.flush().await?;
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use limosa_storage::testing::{Failing, Fault};
    use limosa_storage::{MemoryStorage, Operation, block_on};

    use super::*;
    use crate::qcow2::MAGIC;

    fn disk(bytes: Vec<u8>, options: RawOptions) -> (MemoryStorage, Arc<Raw>) {
        let storage = MemoryStorage::with_contents(bytes, 1 << 20);
        (storage.clone(), Raw::open(Arc::new(storage), &options).unwrap())
    }

    fn found(disk: &Raw, at: u64, length: usize) -> Vec<u8> {
        let found = Buffer::zeroed(length);
        block_on(disk.read(GuestOffset(at), found.clone().into())).unwrap();
        found.to_vec()
    }

    #[test]
    fn the_last_sector_is_filled_up_with_zeros() {
        let (storage, disk) = disk(vec![1; 700], RawOptions::default());
        assert_eq!((disk.len(), found(&disk, 690, 30)), (1024, [vec![1; 10], vec![0; 20]].concat()));
        block_on(disk.write(GuestOffset(1000), Buffer::from_slice(&[2; 24]).into())).unwrap();
        assert_eq!(storage.contents().len(), 1024);
        let error = block_on(disk.write(GuestOffset(1001), Buffer::from_slice(&[2; 24]).into())).unwrap_err();
        assert_eq!(error.to_string(), "memory of 1024 bytes has no 24 bytes at 0x3e9");
    }

    #[test]
    fn a_part_of_a_file_is_a_disk() {
        let bytes: Vec<u8> = (0..8).flat_map(|sector| [sector; 512]).collect();
        let options = RawOptions { offset: 512, size: Some(1024), ..RawOptions::default() };
        let (storage, disk) = disk(bytes.clone(), options);
        assert_eq!((disk.len(), found(&disk, 511, 2)), (1024, vec![1, 2]));
        block_on(disk.write(GuestOffset(1023), Buffer::from_slice(&[9]).into())).unwrap();
        block_on(disk.write_zeroes(GuestOffset(0), 1, true)).unwrap();
        let mut expected = bytes;
        (expected[1535], expected[512]) = (9, 0);
        assert_eq!(storage.contents(), expected);
        assert!(block_on(disk.resize(2048, Preallocation::Off)).is_err());
        let open = |options| Raw::open(Arc::new(storage.clone()), &options).unwrap_err().to_string();
        let usual = RawOptions::default;
        assert_eq!(open(RawOptions { offset: 4097, ..usual() }), "memory: offset=4097: it has 4096 bytes");
        assert_eq!(
            open(RawOptions { offset: 512, size: Some(4096), ..usual() }),
            "memory: size=4096: it has 3584 bytes from offset=512 on"
        );
        assert!(open(RawOptions { size: Some(700), ..usual() }).contains("whole sectors"));
    }

    #[test]
    fn a_raw_image_that_was_guessed_never_looks_like_another_format() {
        let (storage, guessed) = disk(vec![0; 4096], RawOptions { guessed: true, ..RawOptions::default() });
        let write = |at, bytes: &[u8]| block_on(guessed.write(GuestOffset(at), Buffer::from_slice(bytes).into()));
        let said = write(0, &[&MAGIC[..], &[1; 1000]].concat()).unwrap_err().to_string();
        assert!(said.starts_with("memory: a write to its first sector would make it look like qcow2, "), "{said}");
        assert_eq!(storage.contents(), [0; 4096]);
        // Not in two parts either, nor with zeros as the last one.
        write(2, &MAGIC[2..]).unwrap();
        assert!(write(0, &MAGIC[..2]).is_err());
        write(0, b"QEDx").unwrap();
        assert!(block_on(guessed.write_zeroes(GuestOffset(3), 700, true)).is_err());
        block_on(guessed.discard(GuestOffset(0), 4096)).unwrap();
        assert_eq!(storage.contents()[..4], *b"QEDx");
        // Everything else goes through, and behind the sector all.
        write(500, &[7; 600]).unwrap();
        write(512, &MAGIC).unwrap();
        assert_eq!(storage.contents()[500..516], [&[7; 12], &MAGIC[..]].concat());

        let (_, said) = disk(vec![0; 4096], RawOptions::default());
        block_on(said.write(GuestOffset(0), Buffer::from_slice(&MAGIC).into())).unwrap();
    }

    #[test]
    fn a_file_of_many_holes_is_not_walked_to_its_end_for_its_first_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(64 << 20).unwrap();
        for at in (0..64).step_by(2) {
            std::os::unix::fs::FileExt::write_all_at(&file, &vec![1; 1 << 20], at << 20).unwrap();
        }
        let storage = limosa_storage::FileStorage::open(&path, &limosa_storage::FileOptions::default()).unwrap();
        let disk = Raw::open(storage, &RawOptions::default()).unwrap();
        let mut at = 0;
        while at < disk.len() {
            let found = block_on(disk.map(GuestOffset(at), disk.len() - at)).unwrap();
            let kind = if (at >> 20) % 2 == 0 { BlockStatus::Data } else { BlockStatus::Zero };
            assert_eq!((found.kind, found.length), (kind, 1 << 20), "{at:#x}");
            at += found.length;
        }
    }

    #[test]
    fn holes_are_reported_and_a_closed_image_stays_closed() {
        let (storage, disk) = disk(vec![1; 600], RawOptions::default());
        let map = |at, length| block_on(disk.map(GuestOffset(at), length)).unwrap();
        assert_eq!((map(0, 1024).kind, map(0, 1024).length), (BlockStatus::Data, 600));
        assert_eq!((map(600, 424).kind, map(600, 424).length), (BlockStatus::Zero, 424));
        block_on(disk.resize(2047, Preallocation::Full)).unwrap();
        assert_eq!((disk.len(), storage.contents().len()), (2048, 2047));
        block_on(disk.resize(2048, Preallocation::Off)).unwrap();
        assert_eq!((disk.len(), storage.contents().len()), (2048, 2048));
        block_on(disk.close()).unwrap();
        assert!(block_on(disk.read(GuestOffset(0), Buffer::zeroed(1).into())).is_err());
    }

    #[test]
    fn a_disk_for_which_there_is_no_space_stays_as_long_as_it_was() {
        let storage = MemoryStorage::with_contents(vec![1; 600], 1 << 20);
        let failing = Failing::only(&[Operation::Allocate]);
        let disk = Raw::open(failing.wrap(Arc::new(storage.clone())), &RawOptions::default()).unwrap();
        for how in [Preallocation::Falloc, Preallocation::Full] {
            failing.fail(0, 1, Fault::NoSpace);
            let error = block_on(disk.resize(4096, how)).unwrap_err();
            assert!(error.to_string().contains("allocate"), "{error}");
            assert_eq!((disk.len(), storage.contents().len()), (1024, 600), "{how:?}");
        }
        block_on(disk.resize(4096, Preallocation::Full)).unwrap();
        assert_eq!((disk.len(), storage.contents().len()), (4096, 4096));
    }
}
