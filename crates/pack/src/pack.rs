//! Packing a snapshot into an image.
//!
//! Law: the image appears whole or not at all, and its contents are the mapped-ram file byte by byte, but for old bytes
//! in the places of pages that are not stored. Memory is bounded: a piece and what it compresses to, for each thread.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use limosa_image::luks::{self, Passphrase};
use limosa_image::qcow2::{self, Compression, CreateOptions, Header, ImageParts, Qcow2, Qcow2Options, table_digest};
use limosa_image::{CompressedClusters, Compressor, Disk, GuestOffset};
use limosa_migrate::Handle;
use limosa_migrate::control::{MovedPages, Phase};
use limosa_page::{PAGE_SIZE, to_u64, to_usize};
use limosa_snapshot::{Durability, Snapshot, UnnamedFile};
use limosa_storage::{Buffer, FileOptions, FileStorage, Io, LockPolicy, Storage, block_on};

use crate::base::Base;
use crate::chain::Level;
use crate::contents::Contents;
use crate::error::PackError;
use crate::pieces::{PIECE, for_each_piece_in_order, runs};
use crate::record::{Record, TableDigest};
use crate::touched;

/// The most bytes of a LUKS header that is taken over: eight key slots take 2 MiB.
const LUKS_HEADER_MOST: u64 = 16 << 20;
/// Bytes of a disk's sector.
const SECTOR: u64 = 512;
/// The clusters of a snapshot without a base (docs/packed.md has the measurement).
pub const CLUSTER_SIZE: u64 = 128 << 10;
/// The clusters of one with a base: all of a cluster is stored again if one page of it differs.
pub const INCREMENT_CLUSTER_SIZE: u64 = 16 << 10;
/// The level of zstd.
pub const DEFAULT_LEVEL: u8 = 3;
/// Time that the derivation of the key takes, which every opening takes again.
pub const DEFAULT_ITER_TIME: Duration = Duration::from_millis(100);

/// How a snapshot is packed.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct PackOptions {
    /// The level of zstd, 1 to 22; `None`: [`DEFAULT_LEVEL`].
    pub level: Option<u8>,
    /// Bytes that are compressed together: a power of two from 4 KiB to 2 MiB. `None`: [`CLUSTER_SIZE`], with a base
    /// [`INCREMENT_CLUSTER_SIZE`].
    pub cluster_size: Option<u64>,
    /// The encryption.
    pub encryption: Option<PackEncryption>,
    /// Whether publishing waits until the file would survive a power cut.
    pub durability: Durability,
}

/// How a packed snapshot is encrypted: LUKS, AES-256 in mode XTS, below the image.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PackEncryption {
    /// The passphrase.
    pub passphrase: Passphrase,
    /// Time that the derivation of the key may take. What makes a guessed passphrase expensive delays each opening.
    pub iter_time: Duration,
}

impl PackEncryption {
    /// An encryption with [`DEFAULT_ITER_TIME`].
    #[must_use]
    pub const fn new(passphrase: Passphrase) -> Self {
        Self { passphrase, iter_time: DEFAULT_ITER_TIME }
    }
}

/// The result of packing.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Packed {
    /// The file.
    pub path: PathBuf,
    /// Its length in bytes.
    pub length: u64,
    /// Bytes of pages that the snapshot has.
    pub page_bytes: u64,
    /// Bytes of the clusters that the file has itself, before compression; zeros among them take no room in it.
    pub own_bytes: u64,
    /// Bytes that are the base's.
    pub base_bytes: u64,
    /// Bytes that its guest will touch first, by the working set of the snapshot: it is kept in the image. 0: there is
    /// none.
    pub touched_bytes: u64,
    /// Why all of it is in the file although a base was given.
    pub whole_because: Option<String>,
}

/// Packs a snapshot into a new file.
///
/// # Errors
/// The snapshot would restore to a broken guest, or cannot be read; options that contradict each other; a base that
/// cannot be one; the file cannot be written. Nothing is left of it then.
pub fn pack(
    snapshot: &Snapshot,
    pending: UnnamedFile,
    base: Option<&Base>,
    options: &PackOptions,
    handle: &Handle,
) -> Result<Packed, PackError> {
    let new = NewFile { file: pending.file(), target: pending.target(), inherited: &Inherited::default() };
    let mut packed = write(snapshot, &new, base, options, handle)?;
    packed.path = pending.publish(options.durability)?;
    handle.progress.set_phase(Phase::Completed);
    Ok(packed)
}

/// A file without a name that becomes an object of a store: an object is written once and in order, and the tables of
/// an image are written last.
#[derive(Debug, Clone, Copy)]
pub struct ObjectFile<'a> {
    /// The file: empty, open for reading and writing.
    pub file: &'a File,
    /// The URL that it will have.
    pub url: &'a Path,
}

/// Returns a length in bytes that no image of this snapshot has: its contents, tables, and a LUKS header.
#[must_use]
pub fn packed_length_most(snapshot: &Snapshot) -> u64 {
    let contents = Contents::new(snapshot).length();
    contents.saturating_add(contents / 64).saturating_add(64 << 20)
}

/// Packs a snapshot into a file that becomes an object. A base is an object beside that.
///
/// # Errors
/// As [`pack()`]. The file is of no use then.
pub fn pack_object(
    snapshot: &Snapshot,
    object: ObjectFile<'_>,
    base: Option<&Base>,
    options: &PackOptions,
    handle: &Handle,
) -> Result<Packed, PackError> {
    let new = NewFile { file: object.file, target: object.url, inherited: &Inherited::default() };
    let packed = write(snapshot, &new, base, options, handle)?;
    handle.progress.set_phase(Phase::Completed);
    Ok(packed)
}

/// Parts of a file that are those of the one whose place it takes.
#[derive(Debug, Default)]
pub(crate) struct Inherited {
    /// Tables of the files that it replaces.
    pub(crate) replaced: Vec<TableDigest>,
    /// Its encryption: the options of the new file are not used then.
    pub(crate) luks: Option<LuksHeader>,
}

/// The file that a snapshot is packed into: it has no name yet.
#[derive(Debug)]
pub(crate) struct NewFile<'a> {
    pub(crate) file: &'a File,
    /// The path or URL that it will have.
    pub(crate) target: &'a Path,
    pub(crate) inherited: &'a Inherited,
}

/// The header of a LUKS volume with its key slots, for another volume with the same ones.
#[derive(Debug)]
pub(crate) struct LuksHeader {
    bytes: Vec<u8>,
    passphrase: Passphrase,
}

impl LuksHeader {
    /// Reads the header of an encrypted image.
    pub(crate) fn of(level: &Level, passphrase: &Passphrase) -> Result<Self, PackError> {
        let length = block_on(luks::read_header(level.storage()))?.payload_offset();
        if length > LUKS_HEADER_MOST {
            let what = format!("its LUKS header has {length} bytes, of at most {LUKS_HEADER_MOST} that are taken over");
            return Err(PackError::Refused { path: level.path.clone(), what });
        }
        let bytes = Buffer::zeroed(to_usize(length));
        block_on(level.storage().read(0, bytes.clone().into())).map_err(PackError::storage)?;
        Ok(Self { bytes: bytes.to_vec(), passphrase: passphrase.clone() })
    }
}

/// Packs a snapshot into a file that has no name yet.
pub(crate) fn write(
    snapshot: &Snapshot,
    new: &NewFile<'_>,
    base: Option<&Base>,
    options: &PackOptions,
    handle: &Handle,
) -> Result<Packed, PackError> {
    let NewFile { file, target, inherited } = new;
    snapshot.check_restorable()?;
    let base = base.map(|base| base.admit(snapshot, target)).transpose()?;
    let (base, whole_because) = match base {
        Some(Ok(base)) => (Some(base), None),
        Some(Err(why)) => (None, Some(why)),
        None => (None, None),
    };
    if let Some(base) =
        base.filter(|base| base.is_encrypted() && options.encryption.is_none() && inherited.luks.is_none())
    {
        return Err(PackError::Unencrypted { path: target.to_path_buf(), base: base.name().display().to_string() });
    }
    let contents = Contents::new(snapshot);
    let size = contents.length().next_multiple_of(SECTOR);
    let cluster = options.cluster_size.unwrap_or(if base.is_some() { INCREMENT_CLUSTER_SIZE } else { CLUSTER_SIZE });
    let storage = storage(new, options.encryption.as_ref())?;
    let create = CreateOptions::default()
        .size(size)
        .cluster_size(cluster)
        .compression(Compression::Zstd)
        .backing_file(base.map(|base| base.name().to_owned()))
        .backing_format(base.map(|_| "qcow2".to_owned()));
    let mut header = block_on(qcow2::create(&*storage, None, &create))?;
    let replaced = inherited.replaced.clone();
    let record = Record { id: snapshot.id(), base: base.map(Base::record), tables: [0; 32], length: 0, replaced };
    record.put(&mut header);
    let start = header.encode(storage.name())?;
    block_on(storage.write(0, Buffer::from_slice(&start).into())).map_err(PackError::storage)?;
    let parts = ImageParts::new(Arc::clone(&storage), header).backing(base.map(Base::disk));
    let disk = block_on(Qcow2::open(parts, Qcow2Options::default()))?;

    // A merge packs several.
    handle.progress.expect_pages(handle.progress.read().normal_pages.saturating_add(snapshot.stored_pages()));
    handle.progress.set_phase(Phase::Active);
    let base_contents = base.map(|base| Contents::new(base.snapshot()));
    let packer = Packer {
        contents: &contents,
        base: base_contents.as_ref(),
        disk: &disk,
        cluster,
        own_bytes: AtomicU64::new(0),
        base_bytes: AtomicU64::new(0),
        handle,
    };
    let make =
        || Ok(Worker { compressor: disk.compressor(Some(options.level.unwrap_or(DEFAULT_LEVEL)))?, base: Vec::new() });
    // In the order of the disk: the same snapshot gives the same image, so that an upload of it can be continued.
    let work = |worker: &mut Worker, piece| packer.compress(worker, &piece);
    for_each_piece_in_order(size, PIECE.max(cluster), make, work, |piece| packer.put(piece))?;
    let (own_bytes, base_bytes) = (packer.own_bytes.into_inner(), packer.base_bytes.into_inner());
    block_on(disk.close())?;
    drop(disk);
    let touched_bytes = touched::put(snapshot, &*storage, (size, cluster))?;
    // A decrypted disk is whole sectors long.
    let length = storage.length().map_err(PackError::storage)?;
    block_on(storage.set_len(length.next_multiple_of(SECTOR))).map_err(PackError::storage)?;
    let mut header = block_on(Header::read_for_reading(&*storage))?;
    let length = storage.length().map_err(PackError::storage)?;
    let tables = block_on(table_digest(&*storage, &header))?;
    Record { tables, length, ..record }.put(&mut header);
    let start = header.encode(storage.name())?;
    block_on(storage.write(0, Buffer::from_slice(&start).into())).map_err(PackError::storage)?;
    block_on(storage.flush()).map_err(PackError::storage)?;
    drop(storage);
    snapshot.check_unchanged()?;
    // It may have been hours.
    base.map_or(Ok(()), Base::check_still_there)?;
    handle.control.check().map_err(PackError::Cancelled)?;
    let length = file.metadata().map_err(PackError::io("look at it", target))?.len();
    let page_bytes = snapshot.stored_pages().saturating_mul(PAGE_SIZE);
    Ok(Packed { path: target.to_path_buf(), length, page_bytes, own_bytes, base_bytes, touched_bytes, whole_because })
}

/// The new file as the storage of an image: as it is, or encrypted.
fn storage(new: &NewFile<'_>, encryption: Option<&PackEncryption>) -> Result<Arc<dyn Storage>, PackError> {
    let NewFile { file, target, inherited } = new;
    let copy = file.as_fd().try_clone_to_owned().map_err(PackError::io("duplicate its descriptor", target))?;
    // Nobody else knows it, and its compressed clusters are copied into the page cache in small pieces.
    let options = FileOptions { io: Io::CallerThread, lock: LockPolicy::None, ..FileOptions::default() };
    let file = FileStorage::from_fd(copy, &target.display().to_string(), &options).map_err(PackError::storage)?;
    let passphrase = match (&inherited.luks, encryption) {
        (Some(LuksHeader { bytes, passphrase }), _) => {
            block_on(file.write(0, Buffer::from_slice(bytes).into())).map_err(PackError::storage)?;
            passphrase
        }
        (None, Some(encryption)) => {
            let mut create = luks::CreateOptions::new(encryption.passphrase.clone());
            create.header.iter_time = encryption.iter_time;
            block_on(luks::create(&*file, &create))?;
            &encryption.passphrase
        }
        (None, None) => return Ok(file),
    };
    Ok(Arc::new(block_on(luks::open(file, passphrase))?))
}

/// The state that the threads share.
struct Packer<'a> {
    contents: &'a Contents<'a>,
    base: Option<&'a Contents<'a>>,
    disk: &'a Qcow2,
    cluster: u64,
    own_bytes: AtomicU64,
    base_bytes: AtomicU64,
    handle: &'a Handle,
}

/// The buffers of one thread.
struct Worker {
    compressor: Compressor,
    /// Bytes of the base.
    base: Vec<u8>,
}

/// A piece of the disk, compressed.
struct Piece {
    /// The runs of clusters that the image has itself.
    own_runs: Vec<(GuestOffset, CompressedClusters)>,
    /// Pages of the snapshot in it.
    pages: u64,
}

impl Packer<'_> {
    /// Compresses the clusters of a piece that the image has itself.
    fn compress(&self, worker: &mut Worker, piece: &Range<u64>) -> Result<Piece, PackError> {
        self.handle.control.check().map_err(PackError::Cancelled)?;
        let mut own_runs = Vec::new();
        let wanted =
            |range: &Range<u64>| self.contents.has_data(range) || self.base.is_some_and(|base| base.has_data(range));
        for run in runs(piece, self.cluster, wanted) {
            let mut bytes = vec![0; to_usize(run.end - run.start)];
            self.contents.read(&run, &mut bytes)?;
            for own in self.differing(worker, &run, &bytes)? {
                let place = to_usize(own.start - run.start)..to_usize(own.end - run.start);
                let part = bytes.get(place).unwrap_or_default();
                own_runs.push((GuestOffset(own.start), worker.compressor.compress(&Buffer::from_slice(part).into())));
                self.own_bytes.fetch_add(own.end - own.start, Ordering::Relaxed);
            }
        }
        Ok(Piece { own_runs, pages: self.contents.stored_pages(piece) })
    }

    fn put(&self, piece: Piece) -> Result<(), PackError> {
        for (at, clusters) in piece.own_runs {
            block_on(self.disk.write_compressed(at, clusters))?;
        }
        self.handle.progress.add_moved(MovedPages { normal: piece.pages, zero: 0, resent: 0 });
        Ok(())
    }

    /// The clusters of a run that are not in the base as they are.
    fn differing(&self, worker: &mut Worker, run: &Range<u64>, bytes: &[u8]) -> Result<Vec<Range<u64>>, PackError> {
        let Some(base) = self.base else { return Ok(vec![run.clone()]) };
        worker.base.clear();
        worker.base.resize(bytes.len(), 0);
        base.read_raw(run, &mut worker.base)?;
        let theirs = &worker.base;
        let own = runs(run, self.cluster, |range| {
            let place = to_usize(range.start - run.start)..to_usize(range.end - run.start);
            bytes.get(place.clone()) != theirs.get(place)
        });
        let length: u64 = own.iter().map(|range| range.end - range.start).sum();
        self.base_bytes.fetch_add(to_u64(bytes.len()).saturating_sub(length), Ordering::Relaxed);
        Ok(own)
    }
}
