//! The space that an image would need, as the target of a conversion or as a new one.
//!
//! Law: nothing is created and no contents are read: the map of the source and the options of the target decide.
//!
//! The figures are those of `qemu-img measure`: bytes of the file, with all tables of a fully allocated image, also
//! where only a part of the contents is counted.

use std::ops::Range;
use std::sync::Arc;

use super::convert::{SECTOR, Source, wanted_clusters};
use super::operation::{DiskOperation, OperationError};
use crate::chain::{self, ImageFile, NamedImage};
use crate::disk::Disk;
use crate::error::{CreateOptionsError, ImageError};
use crate::luks;
use crate::new_image::NewImageFormat;
use crate::offset::GuestOffset;
use crate::preallocation::Preallocation;
use crate::probe::Format;
use crate::qcow2::{Bitmap, CreateOptions, Header, StreamedImage, read_bitmaps};

/// The space that an image would need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Measurement {
    /// Bytes of its file right after it is created, or after the source is copied to it.
    pub required: u64,
    /// Bytes of its file once all of its disk is written.
    pub fully_allocated: u64,
    /// Further bytes for copies of the source's bitmaps; `None` if source or target cannot have bitmaps.
    pub bitmaps: Option<u64>,
}

/// Measures a new image of this format and size.
///
/// # Errors
/// [`ImageError::Options`]: there can be no such image; `name` is its name.
pub fn measure_new(target: &NewImageFormat, name: &str) -> Result<Measurement, ImageError> {
    let plan = match target {
        NewImageFormat::Raw(options) => raw(options.size),
        NewImageFormat::Qcow2(options) => qcow2(options, options.size, 0),
        NewImageFormat::Luks(options) => luks(options, options.size),
    };
    plan.map_err(|error| ImageError::options(name, error))
}

/// Measures the target of a conversion. Its size is that of the source.
///
/// # Errors
/// [`OperationError::Image`]: the source cannot be opened, or there can be no such target, which is called `name`;
/// [`OperationError::Failed`]: the source's map cannot be read.
pub async fn measure_copy(
    source: &NamedImage,
    target: &NewImageFormat,
    name: &str,
) -> Result<Measurement, OperationError> {
    let new = match target {
        NewImageFormat::Raw(_) => {
            let disk = chain::open(&source.reference, &source.options).await?;
            let measured = raw(disk.len());
            return Ok(measured.map_err(|error| ImageError::options(name, error))?);
        }
        NewImageFormat::Luks(new) => {
            let disk = chain::open(&source.reference, &source.options).await?;
            return Ok(luks(new, disk.len()).map_err(|error| ImageError::options(name, error))?);
        }
        NewImageFormat::Qcow2(new) => new,
    };
    let bitmaps = bitmaps(source).await?;
    let disk = chain::open(&source.reference, &source.options).await?;
    // How much the target's backing file has of the source's contents is not known: perhaps nothing.
    let contents =
        if new.backing_file.is_some() { disk.len() } else { contents(&*disk, new.cluster_size.max(1)).await? };
    let measured = qcow2(new, disk.len(), contents).map_err(|error| ImageError::options(name, error))?;
    let bitmaps = bitmaps.filter(|_| new.version > 2).map(|found| found.space(new.cluster_size));
    Ok(Measurement { bitmaps, ..measured })
}

/// Measures the target of a conversion that is written to a pipe: exactly the bytes that are written.
///
/// # Errors
/// As [`measure_copy`]; [`ImageError::Unsupported`]: images of this format are not written to a pipe.
pub async fn measure_stream(
    source: &NamedImage,
    target: &NewImageFormat,
    name: &str,
) -> Result<Measurement, OperationError> {
    let measured = measure_copy(source, target, name).await?;
    let name = Arc::from(name);
    let required = match target {
        NewImageFormat::Raw(_) => measured.required,
        NewImageFormat::Luks(_) => {
            let what = "images of format luks are not written to a pipe".to_owned();
            return Err(ImageError::Unsupported { image: name, what }.into());
        }
        NewImageFormat::Qcow2(new) => {
            let disk = chain::open(&source.reference, &source.options).await?;
            let source = Source::new(&[disk], None)?;
            let wanted = wanted_clusters(&source, new, &name).await?;
            StreamedImage::new(&(**new).clone().size(source.len()), &wanted, &name)?.len()
        }
    };
    Ok(Measurement { required, ..measured })
}

fn raw(size: u64) -> Result<Measurement, CreateOptionsError> {
    let size = size.checked_next_multiple_of(SECTOR).ok_or(CreateOptionsError::TooLarge(size))?;
    Ok(Measurement { required: size, fully_allocated: size, bitmaps: None })
}

fn luks(options: &luks::CreateOptions, size: u64) -> Result<Measurement, CreateOptionsError> {
    let length = options.clone().size(size).length().ok_or(CreateOptionsError::TooLarge(size))?;
    Ok(Measurement { required: length, fully_allocated: length, bitmaps: None })
}

/// A qcow2 image whose disk of `size` bytes has `contents` bytes of contents.
fn qcow2(options: &CreateOptions, size: u64, contents: u64) -> Result<Measurement, CreateOptionsError> {
    options.check()?;
    let size = size.checked_next_multiple_of(options.cluster_size).ok_or(CreateOptionsError::TooLarge(size))?;
    let fully_allocated = options.allocated_length(size)?;
    let contents = match options.preallocation {
        Preallocation::Off | Preallocation::Metadata => contents.next_multiple_of(options.cluster_size),
        Preallocation::Falloc | Preallocation::Full => size,
    };
    let required = fully_allocated.saturating_sub(size).saturating_add(contents.min(size));
    Ok(Measurement { required, fully_allocated, bitmaps: None })
}

/// Bytes of the target's clusters that get contents.
async fn contents(disk: &dyn Disk, cluster_size: u64) -> Result<u64, OperationError> {
    let mut clusters = Clusters::new(cluster_size);
    let mut at = 0;
    while at < disk.len() {
        let left = disk.len() - at;
        let found = disk.map(GuestOffset(at), left).await.map_err(OperationError::at(DiskOperation::Mapping, at))?;
        let end = at + found.length.clamp(1, left);
        if found.kind.is_zero() {
            at = end;
        } else {
            // The rest of the last cluster changes nothing.
            at = clusters.add(at..end);
        }
    }
    Ok(clusters.bytes)
}

/// Counts the clusters that have contents.
#[derive(Debug)]
struct Clusters {
    size: u64,
    bytes: u64,
}

impl Clusters {
    const fn new(size: u64) -> Self {
        Self { size, bytes: 0 }
    }

    /// Counts all clusters of a range that begins in none that was counted before, and returns their end.
    fn add(&mut self, range: Range<u64>) -> u64 {
        let start = range.start / self.size * self.size;
        let end = range.end.checked_next_multiple_of(self.size).unwrap_or(u64::MAX);
        self.bytes = self.bytes.saturating_add(end - start);
        end
    }
}

/// Bitmaps of a source, and the length of its disk.
#[derive(Debug)]
struct SourceBitmaps {
    size: u64,
    all: Vec<Bitmap>,
}

/// The bitmaps of a source; `None` if its format has none.
async fn bitmaps(source: &NamedImage) -> Result<Option<SourceBitmaps>, ImageError> {
    let file = ImageFile::open(&source.reference, &source.options).await?;
    if file.format != Format::Qcow2 {
        return Ok(None);
    }
    let header = Header::read_for_reading(&*file.storage).await?;
    if header.version < 3 {
        return Ok(None);
    }
    let all = read_bitmaps(&*file.storage, &header).await?;
    Ok(Some(SourceBitmaps { size: header.size, all }))
}

impl SourceBitmaps {
    /// Bytes that copies of them need in an image with such clusters: their contents, fully allocated, their tables,
    /// and the directory. A bitmap that was not stored properly is not copied.
    fn space(&self, cluster_size: u64) -> u64 {
        /// Bytes of an entry of the directory before the name, and of an entry of a table.
        const ENTRY: (u64, u64) = (24, 8);
        let clusters = |bytes: u64| bytes.div_ceil(cluster_size) * cluster_size;
        let (mut space, mut directory) = (0, 0);
        for bitmap in self.all.iter().filter(|bitmap| !bitmap.in_use) {
            let contents = clusters(self.size.div_ceil(1 << bitmap.granularity_bits).div_ceil(8));
            space += contents + clusters(contents / cluster_size * ENTRY.1);
            directory += (ENTRY.0 + bitmap.name.len() as u64).next_multiple_of(8);
        }
        space + clusters(directory)
    }
}

#[cfg(test)]
mod tests {
    use limosa_storage::block_on;
    use proptest::prelude::*;

    use super::*;
    use crate::disk::BlockStatus;
    use crate::offset::HostOffset;
    use crate::raw as raw_format;
    use crate::test_disk::TestDisk;

    fn new(options: CreateOptions) -> Measurement {
        measure_new(&NewImageFormat::Qcow2(Box::new(options)), "new").unwrap()
    }

    #[test]
    fn a_new_image_needs_its_tables_and_one_that_is_preallocated_all() {
        let usual = || CreateOptions::default().size(1 << 30);
        let measured = new(usual());
        assert_eq!((measured.required, measured.fully_allocated), (393_216, 393_216 + (1 << 30)));
        assert_eq!(new(usual().preallocation(Preallocation::Metadata)), measured);
        for how in [Preallocation::Falloc, Preallocation::Full] {
            assert_eq!(new(usual().preallocation(how)).required, measured.fully_allocated);
        }
        let raw = NewImageFormat::Raw(raw_format::CreateOptions::default().size(700));
        assert_eq!(measure_new(&raw, "new").unwrap(), raw_measurement(1024));
    }

    fn raw_measurement(size: u64) -> Measurement {
        Measurement { required: size, fully_allocated: size, bitmaps: None }
    }

    #[test]
    fn a_size_that_no_image_has_is_refused_by_name() {
        let small = CreateOptions::default().cluster_size(512).size(1 << 40);
        let error = measure_new(&NewImageFormat::Qcow2(Box::new(small)), "new").unwrap_err();
        assert!(error.to_string().starts_with("new: "), "{error}");
        let raw = NewImageFormat::Raw(raw_format::CreateOptions::default().size(u64::MAX));
        assert!(measure_new(&raw, "new").is_err());
    }

    #[test]
    fn bitmaps_need_their_contents_their_tables_and_a_directory() {
        let bitmap = |name: &str, in_use| Bitmap {
            name: name.into(),
            table: (HostOffset(0), 0),
            in_use,
            auto: true,
            granularity_bits: 16,
        };
        let size = 1 << 40;
        let space = |all| SourceBitmaps { size, all }.space(65536);
        assert_eq!(space(vec![]), 0);
        assert_eq!(space(vec![bitmap("a", true)]), 0);
        assert_eq!(space(vec![bitmap("a", false)]), (2 << 20) + 2 * 65536);
        assert_eq!(space(vec![bitmap("a", false), bitmap("b", false)]), 2 * ((2 << 20) + 65536) + 65536);
    }

    proptest! {
        #[test]
        fn each_cluster_with_contents_is_counted_once(
            kinds in prop::collection::vec((1_u64..40, any::<bool>()), 1..30),
            bits in 9_u32..14,
        ) {
            let status = |data| if data { BlockStatus::Data } else { BlockStatus::Zero };
            let parts: Vec<_> =
                kinds.iter().map(|(sectors, data)| (sectors * SECTOR, status(*data), 0, u8::from(*data))).collect();
            let disk = TestDisk::new(&parts);
            let bytes = disk.bytes();
            let cluster = 1_usize << bits;
            let with_contents = bytes.chunks(cluster).filter(|cluster| cluster.contains(&1)).count();
            let counted = block_on(contents(&disk, 1 << bits)).unwrap();
            prop_assert_eq!(counted, (with_contents * cluster) as u64);
        }
    }
}
