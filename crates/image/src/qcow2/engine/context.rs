//! The constants of an image in use: its storages, geometry and options.
//!
//! The owners of all that changes (the header, the allocator, the tables, the flusher, the writer) have it in common,
//! and nothing else.

use std::ops::Range;
use std::sync::Arc;

use futures_util::future::{join, join_all};
use limosa_page::{to_u64, to_usize};
use limosa_storage::{Buffer, IoVector, Storage};

use super::counters::{Counters, OperationKind};
use super::journal::Recorder;
use super::options::Qcow2Options;
use super::seams;
use crate::compression::Compression;
use crate::disk::Disk;
use crate::error::ImageError;
use crate::luks::{EncryptedStorage, SECTOR, SectorCipher};
use crate::offset::{GuestOffset, HostOffset};
use crate::qcow2::format::entry::EntryRules;
use crate::qcow2::format::geometry::Geometry;
use crate::qcow2::format::header::{Encryption, Header};

/// Why encrypted contents are not compressed: a compressed cluster is bytes of no whole sectors.
pub(super) const ENCRYPTED_AND_COMPRESSED: &str = "an encrypted image cannot have compressed contents";

/// The logarithm of the largest slice's bytes.
const SLICE_BITS: u32 = 12;

pub(super) struct Context {
    name: Arc<str>,
    file: Arc<dyn Storage>,
    /// The storage of contents: the file, without an external data file.
    data: Arc<dyn Storage>,
    /// The cipher that the storage of contents encrypts them with.
    cipher: Option<Arc<SectorCipher>>,
    /// Whether their sectors are numbered by their offsets in the disk, and not in the file.
    is_numbered_by_disk: bool,
    /// The external data file, as it is.
    data_file: Option<Arc<dyn Storage>>,
    has_data_file: bool,
    has_raw_data_file: bool,
    backing: Option<Arc<dyn Disk>>,
    geometry: Geometry,
    rules: EntryRules,
    compression: Compression,
    options: Qcow2Options,
    read_only: bool,
    /// Refcounts are written late, under the dirty bit.
    lazy: bool,
    journal: Option<Recorder>,
    counters: Counters,
    /// A cluster of zeros, to be written from.
    zeros: Buffer,
}

impl Context {
    pub(super) fn new(
        file: Arc<dyn Storage>,
        data_file: Option<Arc<dyn Storage>>,
        backing: Option<Arc<dyn Disk>>,
        journal: Option<Recorder>,
        (header, cipher, options): (&Header, Option<Arc<SectorCipher>>, Qcow2Options),
    ) -> Self {
        let geometry = header.geometry();
        let data = data_file.clone().unwrap_or_else(|| Arc::clone(&file));
        Self {
            name: Arc::clone(file.name()),
            is_numbered_by_disk: header.encryption == Encryption::Aes,
            data: match cipher.clone() {
                // Its sectors are numbered by their offsets in the file.
                Some(cipher) => Arc::new(EncryptedStorage::new(data, cipher, 0)),
                None => data,
            },
            cipher,
            data_file,
            has_data_file: header.features.data_file(),
            has_raw_data_file: header.features.data_file() && header.features.raw_data_file(),
            backing,
            geometry,
            rules: header.rules(),
            compression: header.compression,
            read_only: options.read_only || file.is_read_only(),
            lazy: header.version > 2 && options.lazy_refcounts.unwrap_or_else(|| header.features.lazy_refcounts()),
            journal,
            counters: Counters::default(),
            zeros: Buffer::zeroed(to_usize(geometry.cluster_size())),
            options,
            file,
        }
    }

    pub(super) const fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(super) const fn file(&self) -> &Arc<dyn Storage> {
        &self.file
    }

    /// The storage of contents.
    pub(super) const fn data(&self) -> &Arc<dyn Storage> {
        &self.data
    }

    /// The storage of the contents at `host`, which are the disk's at `at`: to read them.
    pub(super) fn data_of(&self, at: GuestOffset, host: HostOffset) -> Arc<dyn Storage> {
        match &self.cipher {
            Some(cipher) if self.is_numbered_by_disk => {
                let below = self.data_file.as_ref().unwrap_or(&self.file);
                // Both are as far in their clusters, which are whole sectors.
                let first = (at.0 / SECTOR as u64).wrapping_sub(host.0 / SECTOR as u64);
                Arc::new(EncryptedStorage::numbered(Arc::clone(below), Arc::clone(cipher), 0, first))
            }
            _ => Arc::clone(&self.data),
        }
    }

    /// Makes the external data file as long as a disk of `size` bytes. What is added has no contents, encrypted or not.
    pub(super) async fn lengthen_data_file(&self, size: u64) -> Result<(), ImageError> {
        match &self.data_file {
            Some(file) if file.length()? < size => Ok(file.set_len(size).await?),
            _ => Ok(()),
        }
    }

    /// Whether contents are encrypted.
    pub(super) const fn is_encrypted(&self) -> bool {
        self.cipher.is_some()
    }

    /// Whether contents are in an external data file.
    pub(super) const fn has_data_file(&self) -> bool {
        self.has_data_file
    }

    /// Whether they have to be right there for a reader of that file alone.
    pub(super) const fn has_raw_data_file(&self) -> bool {
        self.has_raw_data_file
    }

    /// The backing image.
    pub(super) const fn backing(&self) -> Option<&Arc<dyn Disk>> {
        self.backing.as_ref()
    }

    pub(super) const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    pub(super) const fn rules(&self) -> EntryRules {
        self.rules
    }

    pub(super) const fn compression(&self) -> Compression {
        self.compression
    }

    pub(super) const fn options(&self) -> &Qcow2Options {
        &self.options
    }

    pub(super) const fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether refcounts are written late.
    pub(super) const fn is_lazy(&self) -> bool {
        self.lazy
    }

    /// The journal of changes that the file does not have yet, if it has one.
    pub(super) const fn journal(&self) -> Option<&Recorder> {
        self.journal.as_ref()
    }

    pub(super) const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// A cluster of zeros.
    pub(super) const fn zeros(&self) -> &Buffer {
        &self.zeros
    }

    /// The logarithm of the bytes of a slice of an L2 table or a refcount block.
    pub(super) fn slice_bits(&self) -> u32 {
        self.geometry.cluster_bits.min(SLICE_BITS)
    }

    /// Bytes of the disk whose L2 entries are in one slice: a power of two.
    pub(super) fn region(&self) -> u64 {
        self.geometry.l2_covers() >> (self.geometry.cluster_bits - self.slice_bits())
    }

    /// 8-byte words of an L2 entry.
    pub(super) const fn words_of_entry(&self) -> usize {
        if self.geometry.extended_l2 { 2 } else { 1 }
    }

    pub(super) fn corrupt(&self, table: String, why: impl Into<String>) -> ImageError {
        ImageError::Corrupt { image: Arc::clone(&self.name), table, why: why.into() }
    }

    pub(super) fn unsupported(&self, what: impl Into<String>) -> ImageError {
        ImageError::Unsupported { image: Arc::clone(&self.name), what: what.into() }
    }

    /// An error if a part of a table does not lie in the file: tables are made whole, and zeros in place of entries
    /// would be contents lost without a word.
    fn check_table(&self, name: &str, at: HostOffset, part: &Range<HostOffset>) -> Result<(), ImageError> {
        let length = self.file.length()?;
        if part.end.0 <= length {
            return Ok(());
        }
        let why = format!(
            "the file of {length:#x} bytes ends before {}, where its entries end: get it back from a copy",
            part.end
        );
        Err(self.corrupt(format!("{name} at {at}"), why))
    }

    /// Reads bytes of the file.
    pub(super) async fn read_file(&self, at: HostOffset, length: u64) -> Result<Vec<u8>, ImageError> {
        let buffer = Buffer::zeroed(to_usize(length));
        self.file.read(at.0, buffer.clone().into()).await?;
        Ok(buffer.to_vec())
    }

    /// Reads a part of the table at `at`, which is called `name`.
    ///
    /// # Errors
    /// [`ImageError::Corrupt`]: it is not in the file. That is known after the read: what comes through a pipe has no
    /// length before its end, and a file can be cut off meanwhile.
    pub(super) async fn read_table(
        &self,
        kind: OperationKind,
        name: &str,
        at: HostOffset,
        part: Range<HostOffset>,
    ) -> Result<Vec<u8>, ImageError> {
        let length = part.end - part.start;
        self.counters.add(kind, length);
        let bytes = self.read_file(part.start, length).await?;
        self.check_table(name, at, &part)?;
        Ok(bytes)
    }

    /// Writes a part of a table.
    pub(super) async fn write_table(
        &self,
        kind: OperationKind,
        at: HostOffset,
        bytes: IoVector,
    ) -> Result<(), ImageError> {
        seams::in_the_file(at, to_u64(bytes.len()), 8)?;
        self.counters.add(kind, to_u64(bytes.len()));
        Ok(self.file.write(at.0, bytes).await?)
    }

    /// Writes parts of tables, at once and all to their ends.
    pub(super) async fn write_tables(
        &self,
        kind: OperationKind,
        writes: Vec<(HostOffset, IoVector)>,
    ) -> Result<(), ImageError> {
        let writes = writes.into_iter().map(|(at, bytes)| self.write_table(kind, at, bytes));
        join_all(writes).await.into_iter().collect()
    }

    /// Makes the file durable: not the data file.
    pub(super) async fn flush_file(&self) -> Result<(), ImageError> {
        self.counters.add(OperationKind::Flush, 0);
        Ok(self.file.flush().await?)
    }

    /// Makes both files durable.
    pub(super) async fn flush_all(&self) -> Result<(), ImageError> {
        if !self.has_data_file {
            return self.flush_file().await;
        }
        self.counters.add(OperationKind::Flush, 0);
        let (data, file) = join(self.data.flush(), self.flush_file()).await;
        data?;
        file
    }
}
