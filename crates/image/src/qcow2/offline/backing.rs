//! Another backing file's name in the header of an image.
//!
//! Law: at any moment the header is the old one or the new one. Sectors are written whole or not at all, and the first
//! one says where everything else is. So what is new goes where the header in force does not look, is made durable, and
//! comes into force with one write of the first sector. Extensions that would have to move across the end of the first
//! sector are left out meanwhile: names of features, which are for people only.

use std::ffi::OsString;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;

use limosa_page::{broken_invariant, to_u64, to_usize};
use limosa_storage::{Buffer, Storage};

use crate::error::{CreateOptionsError, ImageError};
use crate::qcow2::format::header::{BACKING_MOST, Backing, Header};

/// Sectors are written whole or not at all.
const SECTOR: usize = 512;

/// Has an image name another backing file, with its format, or none, durably. The file is not opened. The image is not
/// used by anything else meanwhile, and is not open as a disk. `change` changes fixed fields of the header in the same
/// step.
///
/// # Errors
/// [`ImageError::Options`]: the name is empty or too long, or the image has a raw data file;
/// [`ImageError::NeedsRepair`]: it is marked as corrupt; [`ImageError::Unsupported`]: the header's cluster has no room
/// for the name; what the storage says.
pub async fn change_backing(
    storage: &dyn Storage,
    backing: Option<(OsString, Option<String>)>,
    change: impl FnOnce(&mut Header),
) -> Result<(), ImageError> {
    let image = storage.name();
    let mut old = Header::read(storage).await?;
    if old.features.corrupt() {
        let what = "it is marked as corrupt: repair it before its header changes".to_owned();
        return Err(ImageError::NeedsRepair { image: Arc::clone(image), what });
    }
    let mut new = old.clone();
    new.extensions.backing_format = None;
    new.backing = None;
    if let Some((name, format)) = backing {
        if name.is_empty() || name.len() > BACKING_MOST {
            let fault = CreateOptionsError::Name { bytes: name.len(), most: BACKING_MOST };
            return Err(ImageError::options(Arc::clone(image), fault));
        }
        if new.features.raw_data_file() {
            return Err(ImageError::options(Arc::clone(image), CreateOptionsError::RawWithBacking));
        }
        (new.backing, new.extensions.backing_format) = (Some(Backing::new(name)), format);
    }
    old.prepare_autoclear(storage, true).await?;
    new.features = old.features;
    change(&mut new);
    for Step { at, bytes } in steps(&old, new, image)? {
        storage.write(to_u64(at), Buffer::from_slice(&bytes).into()).await?;
        storage.flush().await?;
    }
    Ok(())
}

/// A write, made durable before the next one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Step {
    at: usize,
    bytes: Vec<u8>,
}

/// The writes that replace a header by another one.
fn steps(old: &Header, mut new: Header, image: &Arc<str>) -> Result<Vec<Step>, ImageError> {
    let cluster = to_usize(old.geometry().cluster_size());
    let no_room = |what: &str| ImageError::Unsupported {
        image: Arc::clone(image),
        what: format!("the cluster of its header, {cluster} bytes, has no room for {what}"),
    };
    let mut last = match new.encode(image) {
        Ok(last) => last,
        // It may fit without what is for people only.
        Err(_) if !new.extensions.feature_names.is_empty() => {
            new.extensions.feature_names.clear();
            new.encode(image).map_err(|_| no_room("that name"))?
        }
        Err(_) => return Err(no_room("that name")),
    };
    if last.len() <= SECTOR {
        return Ok(vec![Step { at: 0, bytes: last }]);
    }
    let mut place = place_of_old_name(old, last.len(), cluster);
    if place.is_none() && !new.extensions.feature_names.is_empty() {
        new.extensions.feature_names.clear();
        last = new.encode(image)?;
        if last.len() <= SECTOR {
            return Ok(vec![Step { at: 0, bytes: last }]);
        }
        place = place_of_old_name(old, last.len(), cluster);
    }
    let place = place.ok_or_else(|| no_room("both names"))?;
    let mut meanwhile = old.clone();
    meanwhile.extensions.feature_names.clear();
    let mut steps = Vec::new();
    if let Some(backing) = &mut meanwhile.backing
        && backing.name_offset != to_u64(place.start)
    {
        backing.name_offset = to_u64(place.start);
        steps.push(Step { at: place.start, bytes: backing.name.as_bytes().to_vec() });
    }
    let first = first_sector(&meanwhile, image)?;
    let rest = last.split_off(SECTOR);
    steps.push(Step { at: 0, bytes: first });
    steps.push(Step { at: SECTOR, bytes: rest });
    steps.push(Step { at: 0, bytes: last });
    Ok(steps)
}

/// The place of the old backing file's name until the new header is in force, whose first `taken` bytes are written
/// meanwhile: where it is, or at the end of the cluster; empty without a name. `None`: there is no room for it.
fn place_of_old_name(old: &Header, taken: usize, cluster: usize) -> Option<Range<usize>> {
    let Some(backing) = &old.backing else { return Some(0..0) };
    let (at, length) = (to_usize(backing.name_offset), backing.name.len());
    let taken = taken.next_multiple_of(SECTOR);
    if at >= taken {
        return Some(at..at + length);
    }
    // A sector that has a part of the name in force is not written to.
    let behind = taken.max((at + length).next_multiple_of(SECTOR));
    let place = cluster.checked_sub(length)? / SECTOR * SECTOR;
    (place >= behind).then_some(place..place + length)
}

/// A header as the first sector has it, but for the backing file's name, whose place is known.
fn first_sector(header: &Header, image: &Arc<str>) -> Result<Vec<u8>, ImageError> {
    let mut bytes = Header { backing: None, ..header.clone() }.encode(image)?;
    if bytes.len() > SECTOR {
        let what = format!("its header extensions of {} bytes leave no room to change its backing file", bytes.len());
        return Err(ImageError::Unsupported { image: Arc::clone(image), what });
    }
    let fields = header.encode_fields()?;
    let place = bytes.get_mut(..fields.len()).ok_or_else(|| broken_invariant("a header begins with its fields"))?;
    place.copy_from_slice(&fields);
    bytes.resize(SECTOR, 0);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use limosa_storage::testing::{Loss, PowerCut};
    use limosa_storage::{MemoryStorage, block_on};

    use super::*;
    use crate::qcow2::offline::create::{CreateOptions, create};

    fn named(name: &str, format: &str) -> Option<(OsString, Option<String>)> {
        (!name.is_empty()).then(|| (name.into(), Some(format.to_owned())))
    }

    fn image(cluster: u64, backing: &str, version: u32) -> Vec<u8> {
        let storage = MemoryStorage::growing_to(16 << 20);
        let options = CreateOptions::default().size(1 << 20).cluster_size(cluster).version(version);
        let options = options.backing_file((!backing.is_empty()).then(|| backing.into()));
        block_on(create(&storage, None, &options.backing_format((!backing.is_empty()).then(|| "raw".into())))).unwrap();
        storage.contents()
    }

    fn header(bytes: &[u8]) -> Header {
        block_on(Header::read(&MemoryStorage::with_contents(bytes.to_vec(), 16 << 20))).unwrap()
    }

    /// Everything that matters: names of features and places of names do not.
    fn meaning(bytes: &[u8]) -> Header {
        let mut header = header(bytes);
        header.extensions.feature_names.clear();
        if let Some(backing) = &mut header.backing {
            backing.name_offset = 0;
        }
        header
    }

    #[test]
    fn a_cut_at_any_moment_leaves_the_old_or_the_new_name() {
        let long = "d/".repeat(400);
        let names = ["", "base", &long];
        let mut cuts = 0;
        for (version, cluster) in [(2, 512), (3, 512), (3, 1024), (3, 2048), (3, 4096), (3, 65536), (2, 65536)] {
            for before in names.iter().filter(|name| name.len() < 10 || name.len() as u64 + 600 < cluster) {
                for after in names {
                    let whole = image(cluster, before, version);
                    let power = PowerCut::new();
                    let storage = power.add_storage("image", whole.clone(), 16 << 20);
                    let changed = block_on(change_backing(&*storage, named(after, "qcow2"), |_| {}));
                    let last = power.cut(power.moments(), Loss::None).remove(0);
                    if changed.is_err() {
                        assert!(whole == last && after.len() as u64 + 512 > cluster / 2);
                        continue;
                    }
                    let [old, new] = [&whole, &last].map(|bytes| meaning(bytes));
                    assert_eq!(new.backing.as_ref().map_or("", |backing| backing.name.to_str().unwrap()), after);
                    let losses = (0..20).map(Loss::Some).chain([Loss::None, Loss::All]);
                    for (moment, loss) in
                        (0..=power.moments()).flat_map(|moment| losses.clone().map(move |l| (moment, l)))
                    {
                        let found = meaning(&power.cut(moment, loss).remove(0));
                        assert!(found == old || found == new, "{version} {cluster} {moment} {loss:?}: {found:?}");
                        cuts += 1;
                    }
                }
            }
        }
        assert!(cuts > 1000, "{cuts}");
    }

    #[test]
    fn names_of_features_are_there_again_in_the_end() {
        let storage = MemoryStorage::with_contents(image(65536, "base", 3), 16 << 20);
        let before = header(&storage.contents());
        for name in ["another/base", "", "base"] {
            block_on(change_backing(&storage, named(name, "raw"), |_| {})).unwrap();
        }
        assert_eq!(header(&storage.contents()), before);
    }

    #[test]
    fn a_name_that_no_header_can_have_is_refused_and_nothing_is_written() {
        let storage = MemoryStorage::with_contents(image(65536, "base", 3), 16 << 20);
        let before = storage.contents();
        for name in [String::new(), "b".repeat(1024)] {
            assert!(block_on(change_backing(&storage, Some((name.into(), None)), |_| {})).is_err());
        }
        assert!(storage.contents() == before);
    }
}
