//! Snapshots in object stores: packed into images, or plain mapped-ram files.
//!
//! Law: a base is the object beside the image that names it, at the same store; nothing else is opened. What the images
//! must be, `image.rs` checks. Who opens objects sees to it that one that is replaced is an error of each read.

use std::collections::HashSet;
use std::error::Error;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use limosa_channel::Counters;
use limosa_image::qcow2::{Qcow2, prefetch_tables};
use limosa_image::{Disk, GuestOffset, ImageError};
use limosa_page::to_u64;
use limosa_snapshot::{Origin, PackedImage, PackedSummary, Snapshot, SnapshotBytes};
use limosa_storage::{Buffer, Storage, block_on};

use crate::bytes::{origin, shares, summary, unit};
use crate::error::PackError;
use crate::head::starts_as_image;
use crate::image::{BaseFault, Image, open_bases, open_contents};
use crate::open::Access;
use crate::record::Record;
use crate::touched;
use crate::unpacked_disk::UnpackedDisk;

/// Threads that unpack ahead: most of them wait for the store.
const THREADS: usize = 32;

/// Opens the snapshot that is an object of a store.
pub(crate) fn open(name: &Path, access: &Access) -> Result<Snapshot, PackError> {
    let storage = open_object(name, access)?;
    let bytes: Arc<dyn SnapshotBytes> = if starts_as_image(&*storage)? {
        Arc::new(PackedObject::open(storage, name, access)?)
    } else {
        let length = storage.length().map_err(PackError::storage)?;
        Arc::new(PlainObject { storage, length, read: ReadCounters::default() })
    };
    Ok(Snapshot::from_remote(name, bytes)?)
}

/// Opens the images of a packed snapshot; `None`: the object is no image.
pub(crate) fn open_packed(name: &Path, access: &Access) -> Result<Option<PackedObject>, PackError> {
    let storage = open_object(name, access)?;
    if !starts_as_image(&*storage)? {
        return Ok(None);
    }
    PackedObject::open(storage, name, access).map(Some)
}

/// Reads the record of the image in an object, and nothing below it; `None`: it is no image, or of another program.
pub(crate) fn record(name: &Path, access: &Access) -> Result<Option<Record>, PackError> {
    let storage = open_object(name, access)?;
    if !starts_as_image(&*storage)? {
        return Ok(None);
    }
    Ok(Image::open(storage, name, access.passphrase.as_ref())?.record().cloned())
}

fn open_object(name: &Path, access: &Access) -> Result<Arc<dyn Storage>, PackError> {
    let refused = || PackError::Refused { path: name.to_path_buf(), what: "its URL is not text".to_owned() };
    access.stores.open(name.to_str().ok_or_else(refused)?).map_err(PackError::storage)
}

/// A packed snapshot whose images are objects.
#[derive(Debug)]
pub(crate) struct PackedObject {
    disk: UnpackedDisk,
    contents: Arc<Qcow2>,
    images: Vec<Image>,
    /// The topmost object.
    top: Arc<dyn Storage>,
    length: u64,
    read: ReadCounters,
}

impl PackedObject {
    fn open(storage: Arc<dyn Storage>, name: &Path, access: &Access) -> Result<Self, PackError> {
        let length = storage.length().map_err(PackError::storage)?;
        let top = Arc::clone(&storage);
        let (images, contents) = open_chain(storage, name, access)?;
        let disk = UnpackedDisk::far(Arc::clone(&contents) as Arc<dyn Disk>, unit(images.iter()), THREADS);
        Ok(Self { disk, contents, images, top, length, read: ReadCounters::default() })
    }

    /// Its images, the topmost one first.
    pub(crate) fn images(&self) -> &[Image] {
        &self.images
    }

    /// The contents of the topmost one, with those below it.
    pub(crate) const fn contents(&self) -> &Arc<Qcow2> {
        &self.contents
    }
}

/// Opens an image and its bases.
fn open_chain(storage: Arc<dyn Storage>, name: &Path, access: &Access) -> Result<(Vec<Image>, Arc<Qcow2>), PackError> {
    let passphrase = access.passphrase.as_ref();
    let open = |storage: Arc<dyn Storage>, name: &Path| {
        prefetch_ends(&*storage)?;
        let image = Image::open(storage, name, passphrase)?;
        // Those of a base are read to see that it is the one.
        block_on(prefetch_tables(&*image.head.contents, &image.head.header))?;
        Ok::<_, PackError>(image)
    };
    let mut images = vec![open(storage, name)?];
    let mut seen = HashSet::from([name.to_path_buf()]);
    open_bases(&mut images, |above, base| {
        let below = beside(above, base).map_err(BaseFault::Refused)?;
        if !seen.insert(below.clone()) {
            return Err(BaseFault::Refused("that object is already part of the chain".to_owned()));
        }
        let storage = open_object(&below, access).map_err(|error| fault_of(error, &below))?;
        if !starts_as_image(&*storage)? {
            return Err(BaseFault::Refused("it is not a packed snapshot".to_owned()));
        }
        Ok(open(storage, &below)?)
    })?;
    let disk = open_contents(images.iter(), name)?;
    Ok((images, disk))
}

/// The fault of a base that cannot be opened. One that is not there is a fault of the image that names it; of any other
/// it is not known.
fn fault_of(error: PackError, base: &Path) -> BaseFault {
    match &error {
        PackError::Image(ImageError::Storage(cause)) if cause.kind() == io::ErrorKind::NotFound => {
            BaseFault::Refused(format!("there is no object {}", base.display()))
        }
        _ => error.into(),
    }
}

/// Bytes at the beginning of an image that has its first tables and contents.
const BEGINNING: u64 = 2 << 20;
/// Bytes at the end of an image that has its bitmap, and the devices of the VM.
const END: u64 = 1 << 20;

/// Has the ends of an image fetched, which every use of it needs: one after the other they would be many round trips.
fn prefetch_ends(storage: &dyn Storage) -> Result<(), PackError> {
    let length = storage.length().map_err(PackError::storage)?;
    let end = length.saturating_sub(END)..length;
    // The end first: of the beginning, what comes last is wanted least.
    storage.prefetch(&[end.clone(), 0..BEGINNING.min(end.start)]);
    Ok(())
}

/// Returns the URL of a base: the object of that name beside the image.
fn beside(image: &Path, name: &OsStr) -> Result<PathBuf, String> {
    let (Some(image), Some(name)) = (image.to_str(), name.to_str()) else {
        return Err("the name is not text".to_owned());
    };
    let (folder, _) = image.rsplit_once('/').ok_or("the image has no folder")?;
    let mut url = format!("{folder}/");
    if image.starts_with("http") {
        // The keys of stores are literal, and URLs of web servers are not.
        for byte in name.bytes() {
            if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                url.push(char::from(byte));
            } else {
                let _ = write!(url, "%{byte:02X}");
            }
        }
    } else {
        url.push_str(name);
    }
    Ok(url.into())
}

impl SnapshotBytes for PackedObject {
    fn length(&self) -> u64 {
        self.disk.length()
    }

    fn read_exact_at(&self, into: &mut [u8], offset: u64) -> Result<(), Box<dyn Error + Send + Sync>> {
        self.disk.read_exact_at(into, offset)?;
        self.read.add(into.len());
        Ok(())
    }

    fn is_near(&self, range: &Range<u64>) -> bool {
        self.disk.is_near(range)
    }

    fn prefetch(&self, ranges: &[Range<u64>]) {
        let (contents, ranges) = (Arc::clone(&self.contents), ranges.to_vec());
        // Tables may have to be fetched before it is known where the contents are. Nobody waits for it.
        let ask = move || {
            for range in ranges {
                if block_on(contents.prefetch(GuestOffset(range.start), range.end - range.start)).is_err() {
                    break;
                }
            }
        };
        _ = thread::Builder::new().name("prefetch".into()).spawn(ask);
    }

    fn prefetch_changes(&self) {
        if self.images.len() > 1 {
            self.top.prefetch(std::slice::from_ref(&(0..self.length)));
        }
    }

    fn touched(&self) -> Result<Option<Vec<Range<u64>>>, Box<dyn Error + Send + Sync>> {
        Ok(touched::of(&self.contents)?)
    }

    fn counters(&self) -> Counters {
        self.read.counters()
    }

    fn origin(&self, at: u64, length: u64) -> Option<(Origin, u64)> {
        let identity = |depth: usize| {
            let image = self.images.get(depth)?;
            Some(format!("object {} {}", image.path.display(), image.head.contents.content_id()?))
        };
        origin(&self.contents, (at, length), identity)
    }

    fn images(&self) -> Result<Vec<PackedImage>, Box<dyn Error + Send + Sync>> {
        Ok(shares(&self.contents, self.images.iter())?)
    }

    fn packed(&self) -> Option<PackedSummary> {
        summary(self.images.iter())
    }

    fn object_length(&self) -> Option<u64> {
        Some(self.length)
    }
}

/// A mapped-ram file as an object.
#[derive(Debug)]
struct PlainObject {
    storage: Arc<dyn Storage>,
    length: u64,
    read: ReadCounters,
}

impl SnapshotBytes for PlainObject {
    fn length(&self) -> u64 {
        self.length
    }

    fn read_exact_at(&self, into: &mut [u8], offset: u64) -> Result<(), Box<dyn Error + Send + Sync>> {
        let end = offset.checked_add(to_u64(into.len())).filter(|end| *end <= self.length);
        end.ok_or_else(|| format!("it ends at {:#x}", self.length))?;
        let buffer = Buffer::zeroed(into.len());
        block_on(self.storage.read(offset, buffer.clone().into()))?;
        buffer.copy_to(0, into);
        self.read.add(into.len());
        Ok(())
    }

    fn is_near(&self, range: &Range<u64>) -> bool {
        self.storage.is_near(range)
    }

    fn prefetch(&self, ranges: &[Range<u64>]) {
        self.storage.prefetch(ranges);
    }

    fn counters(&self) -> Counters {
        self.read.counters()
    }

    fn packed(&self) -> Option<PackedSummary> {
        None
    }

    fn object_length(&self) -> Option<u64> {
        Some(self.length)
    }
}

/// Counters of the bytes that were read out of an object; the store's own client counts its requests.
#[derive(Debug, Default)]
struct ReadCounters {
    calls: AtomicU64,
    bytes: AtomicU64,
}

impl ReadCounters {
    fn add(&self, bytes: usize) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(to_u64(bytes), Ordering::Relaxed);
    }

    fn counters(&self) -> Counters {
        let mut counters = Counters::default();
        counters.calls_in = self.calls.load(Ordering::Relaxed);
        counters.bytes_in = self.bytes.load(Ordering::Relaxed);
        counters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_is_beside_its_image() {
        let base = |image: &str, name: &str| beside(Path::new(image), OsStr::new(name));
        assert_eq!(base("s3://b/vm/tue.qcow2", "mon #1.qcow2"), Ok("s3://b/vm/mon #1.qcow2".into()));
        assert_eq!(base("https://h:1/a/tue", "mon 1%.qcow2"), Ok("https://h:1/a/mon%201%25.qcow2".into()));
    }
}
