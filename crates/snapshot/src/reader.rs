//! A snapshot file being read: a [`PageSource`] for a restore and for `limosa inspect`.
//!
//! Law of this module: a page comes back as it was saved or not at all. Reads are positional and whole, checksums that
//! were recorded are enforced, and after each read the file must still be the one that was opened (length and
//! modification time): a file cut short, or cut and filled up again with holes, is an error and never zeros in a guest.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use limosa_channel::Counters;
use limosa_migrate::stored::{PageError, PageSource, StreamSetup};
use limosa_page::{PAGE_SIZE, PageBitmap, PageNumber, PageRange};
use limosa_stream::CompleteTail;
use limosa_stream::configuration::IGNORE_SHARED;
use limosa_stream::mapped_ram::Layout;
use rustix::fs::{FileType, MemfdFlags};
use uuid::Uuid;

use crate::bytes::{Origin, PackedImage, PackedSummary, SnapshotBytes};
use crate::checksum::{self, StoredBlock, Verifier};
use crate::error::SnapshotError;
use crate::layout::{DeviceBytes, FileLayout, Memory};
use crate::lock;
use crate::manifest::Manifest;
use crate::mappable;
use crate::store::StoreFile;
use crate::trailer::{Checksums, Trailer};
use crate::unnamed_file;

/// An open snapshot file, limosa's or QEMU's own.
///
/// All methods take `&self`; any number of threads may read.
#[derive(Debug)]
pub struct Snapshot {
    file: StoreFile,
    identity: Identity,
    /// Bytes of the mapped-ram file, holes included.
    length: u64,
    parts: FileLayout,
    setup: StreamSetup,
    trailer: Trailer,
    verifier: Option<Verifier>,
    devices_damaged: bool,
}

const DEVICES_DAMAGED: &str = "the device state is not the one that was saved: its checksum differs";

/// Facts that must not change while the file is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    length: u64,
    modified: (i64, i64),
}

impl Identity {
    fn of(stat: &rustix::fs::Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            length: stat.st_size.cast_unsigned(),
            modified: (stat.st_mtime, stat.st_mtime_nsec.cast_signed()),
        }
    }
}

impl Snapshot {
    /// Opens a mapped-ram file whose stream begins at offset 0, with or without limosa's trailer.
    ///
    /// Takes no lock: see [`lock_serving`](Snapshot::lock_serving).
    ///
    /// # Errors
    /// If it cannot be opened or is not a whole mapped-ram file. A trailer that is missing or damaged is no error, see
    /// [`warnings`](Snapshot::warnings).
    pub fn open(path: &Path) -> Result<Self, SnapshotError> {
        // Without O_NONBLOCK, opening a named pipe would wait for its other end.
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = opened.map_err(|e| SnapshotError::io("open it", path, None, e))?;
        Self::from_file(file, path)
    }

    /// As [`open`](Snapshot::open), of a file that is open already, for example one that a parent process opened and
    /// locked; `path` is its name in messages.
    ///
    /// # Errors
    /// As [`open`](Snapshot::open).
    pub fn from_file(file: File, path: &Path) -> Result<Self, SnapshotError> {
        Self::from_file_at(file, path, 0)
    }

    /// As [`from_file`](Snapshot::from_file), of a file whose stream begins at `base`. A QEMU that reads such a file
    /// by itself needs that offset.
    pub(crate) fn from_file_at(file: File, path: &Path, base: u64) -> Result<Self, SnapshotError> {
        Self::of_store(StoreFile::new(file, path), base)
    }

    /// Opens a packed snapshot: `file` is the topmost image, open for reading, and `bytes` are its contents. The locks
    /// that this takes, and what must not change meanwhile, are that file's.
    ///
    /// # Errors
    /// As [`open`](Snapshot::open); [`SnapshotError::Packed`] for bytes that cannot be unpacked.
    pub fn from_packed(file: File, path: &Path, bytes: Arc<dyn SnapshotBytes>) -> Result<Self, SnapshotError> {
        Self::of_store(StoreFile::with_bytes(file, bytes, path), 0)
    }

    /// Opens a snapshot that is in no file here; `name` is its name in messages. Who lends the bytes sees to it that
    /// they do not change: there is nothing here that could be locked.
    ///
    /// # Errors
    /// As [`from_packed`](Snapshot::from_packed).
    pub fn from_remote(name: &Path, bytes: Arc<dyn SnapshotBytes>) -> Result<Self, SnapshotError> {
        // An empty file stands for it, so that what looks at a snapshot's file finds one that nobody changes.
        let made = rustix::fs::memfd_create("limosa-remote", MemfdFlags::CLOEXEC);
        let file = made.map_err(|errno| SnapshotError::io("make a file in memory", name, None, errno))?;
        Self::of_store(StoreFile::with_bytes(file.into(), bytes, name), 0)
    }

    fn of_store(file: StoreFile, base: u64) -> Result<Self, SnapshotError> {
        let stat = file.stat()?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            let (path, why) = (file.path().to_path_buf(), "is not a regular file".to_owned());
            return Err(SnapshotError::Target { path, why });
        }
        let identity = Identity::of(&stat);
        let length = file.lent_bytes().map_or(identity.length, |bytes| bytes.length());
        let parts = FileLayout::decode(&file, base, length)?;
        let chunks = checksum::count(&parts.memory.places);
        let read = |offset, length| {
            let mut bytes = vec![0; length];
            file.read("limosa's trailer", offset, &mut bytes).map(|()| bytes)
        };
        let mut trailer = Trailer::read(parts.stream_end, length, chunks, read)?;
        let length = length - trailer.padding;
        let mut devices_damaged = false;
        let verifier = trailer.checksums.take().map(|recorded| {
            devices_damaged = checksum::of_devices(&parts.layout, parts.devices.bytes()) != recorded.devices;
            Verifier::new(recorded.chunks, &parts.memory)
        });
        if devices_damaged {
            trailer.warnings.push(DEVICES_DAMAGED.to_owned());
        }
        if let Some(lost) = verifier.as_ref().and_then(Verifier::lost) {
            trailer.warnings.push(lost.to_string());
        }
        if parts.memory.is_empty() {
            trailer
                .warnings
                .push("no RAM block has a stored page: all memory is zero, or was never written".to_owned());
        }
        let start = StreamSetup {
            configuration: parts.layout.configuration.clone().without_mapped_ram(),
            section_id: parts.layout.section_id,
            blocks: parts.layout.blocks.iter().map(|block| block.block.clone()).collect(),
        };
        Ok(Self { file, identity, length, parts, setup: start, trailer, verifier, devices_damaged })
    }

    /// Takes the lock of a server, which keeps a save with `--force` from replacing the file.
    ///
    /// Of a packed snapshot all files that it stands on are locked, too. The lock is held until the last copy of the
    /// file's descriptor is closed: by dropping this, or, after a fork, by the process that still has it.
    ///
    /// # Errors
    /// [`SnapshotError::Locked`] while a save is replacing the file; [`SnapshotError::Changed`] if one did since it was
    /// opened.
    pub fn lock_serving(&self) -> Result<(), SnapshotError> {
        lock::shared(self.file.fd(), self.file.path())?;
        let bases = self.file.lent_bytes().map(|bytes| bytes.bases()).unwrap_or_default();
        let locked = bases.iter().try_for_each(|(base, path)| lock_base(*base, path));
        let checked = locked.and_then(|()| match rustix::fs::stat(self.file.path()) {
            Ok(named) => self.check_same_inode(&named),
            Err(_) => Ok(()),
        });
        checked.inspect_err(|_| {
            lock::release(self.file.fd());
            bases.iter().for_each(|(base, _)| lock::release(base));
        })
    }

    /// Whether another descriptor is of this file.
    pub(crate) fn check_same_file(&self, other: impl AsFd) -> Result<(), SnapshotError> {
        let stat = rustix::fs::fstat(other).map_err(|errno| self.file.io("look at it", None, errno))?;
        self.check_same_inode(&stat)
    }

    fn check_same_inode(&self, stat: &rustix::fs::Stat) -> Result<(), SnapshotError> {
        let other = Identity::of(stat);
        if (other.device, other.inode) == (self.identity.device, self.identity.inode) {
            return Ok(());
        }
        Err(self.changed("another file has its name now; open it again".to_owned()))
    }

    /// Whether the file is still as long as, and not written since, it was opened.
    ///
    /// Its length and modification time show that. The change time would also show a write whose modification
    /// time a program set back, but it moves just as well when the file is renamed, linked, or given another owner or
    /// mode, and these leave a restore that is under way alone; the kernel has nothing that tells these apart. With
    /// checksums such a write is found all the same, because what is read is verified at each reading.
    ///
    /// # Errors
    /// [`SnapshotError::Changed`] if not.
    pub fn check_unchanged(&self) -> Result<(), SnapshotError> {
        let now = Identity::of(&self.file.stat()?);
        if now == self.identity {
            let changed = self.file.lent_bytes().and_then(|bytes| bytes.find_change());
            return changed.map_or(Ok(()), |what| Err(self.changed(what)));
        }
        let was = self.identity.length;
        Err(self.changed(if now.length == was {
            "it was written to".to_owned()
        } else {
            format!("it had {was} bytes and has {}", now.length)
        }))
    }

    fn changed(&self, what: String) -> SnapshotError {
        SnapshotError::Changed { path: self.file.path().to_path_buf(), what }
    }

    /// Refuses a file that can be looked at but would restore to a broken guest.
    ///
    /// # Errors
    /// [`SnapshotError::Empty`] if no block has a stored page, unless the manifest says that a stream really brought
    /// zeros only; [`SnapshotError::Unsupported`] if shared memory was left out of the save;
    /// [`SnapshotError::Structure`] if a checksum of the device state was recorded and differs;
    /// [`SnapshotError::Checksum`] if no page is stored of a chunk of memory that was not zero by its checksum. Stored
    /// memory is not read here, see [`verify`](Snapshot::verify).
    pub fn check_restorable(&self) -> Result<(), SnapshotError> {
        let path = || self.file.path().to_path_buf();
        if self.devices_damaged {
            return Err(self.file.structure(self.parts.layout.tail_offset, DEVICES_DAMAGED));
        }
        if self.parts.layout.configuration.has_capability(IGNORE_SHARED) {
            let what = "shared memory was left out of it (capability x-ignore-shared), only QEMU itself can load it";
            return Err(SnapshotError::Unsupported { path: path(), what: what.to_owned() });
        }
        if let Some(lost) = self.verifier.as_ref().and_then(Verifier::lost) {
            return Err(lost.error(self.file.path()));
        }
        let all_zero = |manifest: &Manifest| manifest.pages.normal == 0 && manifest.pages.zero > 0;
        if self.parts.memory.is_empty() && !self.manifest().is_some_and(all_zero) {
            return Err(SnapshotError::Empty { path: path() });
        }
        Ok(())
    }

    /// The name it was opened by.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The length of the mapped-ram file in bytes, holes included. A raw image of it may be up to a sector longer.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Whether it is packed into images.
    pub fn is_packed(&self) -> bool {
        self.packed_summary().is_some()
    }

    /// Returns what is known of the images of a packed snapshot.
    pub fn packed_summary(&self) -> Option<PackedSummary> {
        self.file.lent_bytes().and_then(|bytes| bytes.packed())
    }

    /// Returns the images that a packed snapshot is in, the topmost one first; none if it is not packed.
    ///
    /// # Errors
    /// [`SnapshotError::Packed`]: a table cannot be read.
    pub fn images(&self) -> Result<Vec<PackedImage>, SnapshotError> {
        let Some(bytes) = self.file.lent_bytes() else { return Ok(Vec::new()) };
        let path = || self.file.path().to_path_buf();
        bytes.images().map_err(|source| SnapshotError::Packed { path: path(), offset: 0, source })
    }

    /// Whether it is in an object store.
    pub fn is_remote(&self) -> bool {
        self.object_length().is_some()
    }

    /// Returns the length of the object that it is in, in bytes; `None`: it is in a file.
    fn object_length(&self) -> Option<u64> {
        self.file.lent_bytes().and_then(|bytes| bytes.object_length())
    }

    /// Its bytes, if they are not those of its file.
    pub(crate) fn lent_bytes(&self) -> Option<&Arc<dyn SnapshotBytes>> {
        self.file.lent_bytes()
    }

    /// Returns the offset of the first of these pages in the file, what holds it, and of how many bytes from there on.
    pub(crate) fn origin(&self, block: usize, pages: PageRange) -> Option<(u64, (Origin, u64))> {
        let bytes = self.file.lent_bytes()?;
        let at = self.parts.memory.places.get(block)?.offset(pages);
        Some((at, bytes.origin(at, pages.len().saturating_mul(PAGE_SIZE))?))
    }

    /// Why a process cannot read its bytes from its file, as the end of a sentence about it; `None` if one can.
    pub fn not_plain_reason(&self) -> Option<&'static str> {
        let bytes = self.file.lent_bytes()?;
        Some(if bytes.object_length().is_some() { "is in an object store" } else { "is packed" })
    }

    /// Returns the snapshot's identity: the id in its manifest, or one made from its device state if another program
    /// wrote it.
    pub fn id(&self) -> Uuid {
        self.manifest().map_or_else(|| Uuid::new_v5(&Uuid::NAMESPACE_OID, self.device_tail()), |manifest| manifest.id)
    }

    /// limosa's record, if there is a whole one; else see
    /// [`missing_manifest_reason`](Snapshot::missing_manifest_reason).
    pub fn manifest(&self) -> Option<&Manifest> {
        self.trailer.manifest.as_ref()
    }

    /// Returns the reason why the file has no manifest, if it lacks one.
    pub fn missing_manifest_reason(&self) -> Option<&str> {
        self.trailer.without.as_deref()
    }

    /// Returns warnings for a person who relies on the file.
    pub fn warnings(&self) -> &[String] {
        &self.trailer.warnings
    }

    /// Refuses a file that ends with a trailer of a version that this limosa does not know: one behind it would hide
    /// the records of that version.
    pub(crate) fn check_extensible(&self) -> Result<(), SnapshotError> {
        if self.trailer.is_unknown_version {
            let why =
                "its trailer is of a version that this limosa does not know; another behind it would hide its records";
            return Err(self.file.structure(self.length(), why));
        }
        Ok(())
    }

    /// Whether checksums were recorded and are enforced.
    pub fn has_checksums(&self) -> bool {
        self.verifier.is_some()
    }

    /// Whether its trailer says that every page that is not stored reads as zero at its place in the file, so that a
    /// block's part of the file may be mapped as its memory. See [`seal_snapshot`](crate::seal_snapshot). One that is
    /// packed, or in an object store, is not.
    pub fn is_mappable(&self) -> bool {
        self.file.lent_bytes().is_none() && self.manifest().is_some_and(|manifest| manifest.mappable)
    }

    /// A descriptor of the file for a process that maps it as memory. As long as it is open anywhere, limosa does not
    /// write to the file; replacing it does no harm to processes that map it.
    ///
    /// # Errors
    /// The file cannot be opened again, or is being written to.
    pub fn mapping_descriptor(&self) -> Result<OwnedFd, SnapshotError> {
        let name = format!("/proc/self/fd/{}", self.file.fd().as_raw_fd());
        let opened = File::open(name).map_err(|error| self.file.io("open it again", None, error))?;
        lock::mapping(&opened, self.file.path())?;
        Ok(opened.into())
    }

    /// Checks all recorded checksums, each once; does nothing if none were recorded. What is mapped is not looked at
    /// again.
    ///
    /// # Errors
    /// As [`verify`](Self::verify).
    pub fn verify_all(&self) -> Result<(), SnapshotError> {
        let mut places = self.parts.memory.places.iter().enumerate();
        places.try_for_each(|(block, place)| self.verify(block, PageRange::whole_block(place.pages)))
    }

    /// Makes the file read-only for all users, because it is about to be mapped as memory.
    ///
    /// # Errors
    /// It is writable, and this process may not change that.
    pub fn make_read_only(&self) -> Result<(), SnapshotError> {
        mappable::make_read_only(self.file.fd(), self.file.path())
    }

    /// Returns the places of the file; its configuration has the capability `mapped-ram`.
    pub fn layout(&self) -> &Layout {
        &self.parts.layout
    }

    /// The device sections; their ranges are offsets in [`device_tail`](Snapshot::device_tail).
    pub fn devices(&self) -> &CompleteTail {
        self.parts.devices.state()
    }

    /// Returns the device sections, the end mark and the VM description, as they are in the file.
    pub fn device_tail(&self) -> &[u8] {
        self.parts.devices.bytes()
    }

    /// Returns the run state before the save, from the manifest or else from the device state.
    pub fn run_state(&self) -> Option<String> {
        let recorded = self.manifest().and_then(|manifest| manifest.run_state.clone());
        recorded.or_else(|| self.parts.devices.run_state())
    }

    /// Length of all RAM blocks in bytes.
    pub fn ram_bytes(&self) -> u64 {
        self.parts.memory.bytes()
    }

    /// Pages of all RAM blocks that are stored.
    pub fn stored_pages(&self) -> u64 {
        self.parts.memory.stored_pages()
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.parts.memory
    }

    pub(crate) fn device_bytes(&self) -> &DeviceBytes {
        &self.parts.devices
    }

    /// The checksums as the trailer has them.
    pub(crate) fn recorded_checksums(&self) -> Option<Checksums> {
        let chunks = self.verifier.as_ref()?.recorded().to_vec();
        Some(Checksums { chunks, devices: checksum::of_devices(&self.parts.layout, self.parts.devices.bytes()) })
    }

    /// Bytes that the file takes on the disk, or the object in its store; 0 if that is unknown.
    pub fn allocated(&self) -> u64 {
        self.object_length().unwrap_or_else(|| {
            let blocks = self.file.stat().map_or(0, |stat| stat.st_blocks);
            blocks.cast_unsigned().saturating_mul(512)
        })
    }

    /// The file, for sendfile and splice from where [`locate`](Snapshot::locate) says.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.fd()
    }

    /// The file offset of a stored page; the stored pages behind it follow there. None for a page that is not stored,
    /// and where the
    /// bytes are not those of the file.
    ///
    /// A caller that sends from the file past [`read`](PageSource::read) calls [`verify`](Snapshot::verify) before.
    pub fn locate(&self, block: usize, page: PageNumber) -> Option<u64> {
        if self.file.lent_bytes().is_some() {
            return None;
        }
        let (place, stored) = (self.parts.memory.places.get(block)?, self.parts.memory.stored.get(block)?);
        stored.get(page).then(|| place.offset(PageRange::starting_at(page, 1)))
    }

    /// Checks the recorded checksums of all chunks that these pages are in, each once; does nothing if none were
    /// recorded.
    ///
    /// # Errors
    /// [`SnapshotError::Checksum`], or that the file cannot be read or has changed.
    pub fn verify(&self, block: usize, pages: PageRange) -> Result<(), SnapshotError> {
        let Some(verifier) = &self.verifier else { return Ok(()) };
        let (place, stored) = self.block(block, pages)?;
        verifier.verify(&self.file, StoredBlock { index: block, place, stored }, pages)?;
        self.check_unchanged()
    }

    /// Chunks of 1 MiB whose checksum was verified so far; those without a stored page are when the file is opened.
    pub fn verified_chunks(&self) -> u64 {
        self.verifier.as_ref().map_or(0, Verifier::verified)
    }

    /// The counters of what was read.
    pub fn counters(&self) -> Counters {
        self.file.counters()
    }

    /// Reads bytes of the mapped-ram file, wherever they are kept: all of `into`, from `offset` on. What was never
    /// stored may be there too, so pages come from [`read_pages`](Self::read_pages).
    ///
    /// # Errors
    /// The file ends before them, cannot be read, or has changed.
    pub fn read_bytes(&self, offset: u64, into: &mut [u8]) -> Result<(), SnapshotError> {
        self.file.read("it", offset, into)?;
        self.check_unchanged()
    }

    /// Reads whole pages as [`PageSource::read`] does, with this crate's error.
    ///
    /// # Errors
    /// A page that cannot be returned exactly as it was saved; pages or a buffer that do not fit the block.
    pub fn read_pages(&self, block: usize, pages: PageRange, into: &mut [u8]) -> Result<(), SnapshotError> {
        let (place, stored) = self.block(block, pages)?;
        if pages.len().checked_mul(PAGE_SIZE) != Some(into.len() as u64) {
            return Err(self.file.misuse(format!("a buffer of {} bytes for {pages}", into.len())));
        }
        match &self.verifier {
            Some(verifier) => verifier.read(&self.file, StoredBlock { index: block, place, stored }, pages, into)?,
            None => self.file.read_pages(place, stored, pages, into)?,
        }
        self.check_unchanged()
    }

    fn block(
        &self,
        index: usize,
        pages: PageRange,
    ) -> Result<(&crate::store::StoredRange, &PageBitmap), SnapshotError> {
        let memory = &self.parts.memory;
        match (memory.places.get(index), memory.stored.get(index)) {
            (Some(place), Some(stored)) if pages.end.0 <= place.pages => Ok((place, stored)),
            (Some(place), _) => {
                Err(self.file.misuse(format!("{pages} of RAM block {}, which has {}", place.name, place.pages)))
            }
            _ => Err(self.file.misuse(format!("RAM block number {index} of {}", memory.places.len()))),
        }
    }
}

/// Takes the lock of a server on a file that a packed snapshot stands on, which still has its name.
fn lock_base(base: BorrowedFd<'_>, path: &Path) -> Result<(), SnapshotError> {
    lock::shared(base, path)?;
    if unnamed_file::names_file(rustix::fs::CWD, path, base) {
        return Ok(());
    }
    let (path, what) = (path.to_path_buf(), "another file has its name now, or none".to_owned());
    Err(SnapshotError::Changed { path, what })
}

impl AsFd for Snapshot {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.fd()
    }
}

impl PageSource for Snapshot {
    fn setup(&self) -> &StreamSetup {
        &self.setup
    }

    /// # Panics
    /// If there is no such block, as the trait has no other way to say so.
    fn stored_bitmap(&self, block: usize) -> &PageBitmap {
        &self.parts.memory.stored[block]
    }

    fn read(&self, block: usize, pages: PageRange, into: &mut [u8]) -> Result<(), PageError> {
        Ok(self.read_pages(block, pages, into)?)
    }

    /// Where there are checksums, pages come verified or not at all, so they have to be read.
    fn file_location(&self, block: usize, page: PageNumber) -> Option<(BorrowedFd<'_>, u64)> {
        if self.has_checksums() { None } else { self.locate(block, page).map(|offset| (self.file.fd(), offset)) }
    }

    fn check_unchanged(&self) -> Result<(), PageError> {
        Ok(Self::check_unchanged(self)?)
    }

    fn is_near(&self, block: usize, pages: PageRange) -> bool {
        let memory = &self.parts.memory;
        let (Some(bytes), Some(place), Some(stored)) =
            (self.file.lent_bytes(), memory.places.get(block), memory.stored.get(block))
        else {
            return true;
        };
        // All of them, so that none is fetched after another: what is not stored need not be fetched.
        stored.runs_in(pages).fold(true, |is_near, run| {
            let start = place.offset(run);
            let end = start.saturating_add(run.len().saturating_mul(PAGE_SIZE));
            bytes.is_near(&(start..end)) && is_near
        })
    }

    /// Verifies the checksums of the chunks that the pages are in, unless that was done before: a bitmap that
    /// lost some bits of a chunk is found so.
    fn confirm_zero(&self, block: usize, pages: PageRange) -> Result<(), PageError> {
        Ok(self.verify(block, pages)?)
    }

    fn early_sections(&self) -> &[u8] {
        &self.parts.layout.early_sections
    }

    fn device_sections(&self) -> &[u8] {
        self.parts.devices.sections()
    }

    fn description(&self) -> &[u8] {
        self.parts.devices.description()
    }
}
