//! Snapshots whose bytes are not those of a file here: packed into images, or in an object store.
//!
//! Law: this crate knows no image format and no store. Who does lends the bytes of a mapped-ram file, and all that
//! reads a snapshot reads those: layout, bitmaps, pages, checksums, trailer.

use std::error::Error;
use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::Path;

use limosa_channel::Counters;

/// The bytes of a mapped-ram file that are not those of a local file.
///
/// Any number of threads may read.
pub trait SnapshotBytes: Debug + Send + Sync {
    /// Returns their number. An image may have more bytes than the mapped-ram file: zeros, up to a whole sector.
    fn length(&self) -> u64;

    /// Reads all of `into` from `offset` on.
    ///
    /// # Errors
    /// Bytes that cannot be returned exactly as they were stored.
    fn read_exact_at(&self, into: &mut [u8], offset: u64) -> Result<(), Box<dyn Error + Send + Sync>>;

    /// Whether all bytes of a range can be read without waiting for a connection. If not, this has them fetched.
    fn is_near(&self, _range: &Range<u64>) -> bool {
        true
    }

    /// Has ranges fetched that will be read soon, in this order, where that takes a connection. Does not wait for them,
    /// and says nothing of what fails: a read will.
    fn prefetch(&self, _ranges: &[Range<u64>]) {}

    /// As [`prefetch`](Self::prefetch), of what differs from the snapshot that it stands on, if it stands on one: a
    /// guest is likely to need first what it has written last.
    fn prefetch_changes(&self) {}

    /// Returns the ranges that a guest has touched after its start, if the bytes have such a record.
    ///
    /// # Errors
    /// The record cannot be read.
    fn touched(&self) -> Result<Option<Vec<Range<u64>>>, Box<dyn Error + Send + Sync>> {
        Ok(None)
    }

    /// Returns how a file below the topmost one has changed since it was opened, if one has. The snapshot looks at the
    /// topmost one by itself.
    fn find_change(&self) -> Option<String> {
        None
    }

    /// Returns the files that the topmost image stands on, with their names: whoever serves the snapshot locks these,
    /// too.
    fn bases(&self) -> Vec<(BorrowedFd<'_>, &Path)> {
        Vec::new()
    }

    /// Returns what was read so far.
    fn counters(&self) -> Counters;

    /// Returns what a person may want to know about the images; `None` if it is not packed.
    fn packed(&self) -> Option<PackedSummary>;

    /// Returns the origin of the byte at `at`, and how many of the `length` bytes from there on have it; `None`: it is
    /// not known without reading. Bytes of one origin at the same offset are equal.
    fn origin(&self, _at: u64, _length: u64) -> Option<(Origin, u64)> {
        None
    }

    /// Returns the images that it is in, the topmost one first, and what is read from each. This looks through all of
    /// their tables.
    ///
    /// # Errors
    /// A table cannot be read.
    fn images(&self) -> Result<Vec<PackedImage>, Box<dyn Error + Send + Sync>> {
        Ok(Vec::new())
    }

    /// Returns the length of the object that they are read from, in bytes; `None`: they are in files here.
    fn object_length(&self) -> Option<u64> {
        None
    }
}

/// A file or object that bytes are read from, as it was when it was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin(String);

impl Origin {
    /// Of zeros that nothing has to be read for.
    pub const ZEROS: Self = Self(String::new());

    /// Of this file or object, by all that tells it from others and from itself at other times.
    #[must_use]
    pub const fn new(identity: String) -> Self {
        Self(identity)
    }
}

/// An image of a packed snapshot, for people and programs.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct PackedImage {
    /// Its file or URL.
    pub name: String,
    /// Its length in bytes.
    pub length: u64,
    /// Bytes of the snapshot that are read from it, unpacked. The others of its contents are replaced by those of
    /// images above it.
    pub contents: u64,
}

/// The images of a packed snapshot, for people and programs.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct PackedSummary {
    /// Its compression, as an image names it.
    pub compression: String,
    /// Bytes that are compressed together.
    pub cluster_size: u64,
    /// Whether all of it is encrypted: the topmost image, and those that it stands on.
    pub encrypted: bool,
    /// The files that it stands on, from the topmost base down.
    pub bases: Vec<String>,
}

impl PackedSummary {
    /// The summary of one image without a base.
    #[must_use]
    pub fn new(compression: String, cluster_size: u64) -> Self {
        Self { compression, cluster_size, encrypted: false, bases: Vec::new() }
    }
}
