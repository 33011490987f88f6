//! Another header in place of the old one.
//!
//! Law: at any moment the header is the old one or the new one. Sectors are written whole or not at all, and the first
//! one says where everything else is. So what is new goes where the header in force does not look, is made durable, and
//! comes into force with one write of the first sector. Extensions that would have to move across the end of the first
//! sector are left out meanwhile: names of features, which are for people only.

use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;

use limosa_page::{broken_invariant, to_u64, to_usize};
use limosa_storage::{Buffer, Storage};

use crate::error::ImageError;
use crate::qcow2::format::header::Header;

/// Sectors are written whole or not at all.
const SECTOR: usize = 512;

/// Replaces the header of an image by another one, durably. What the new one leads to is durable already.
///
/// # Errors
/// [`ImageError::Unsupported`]: the header's cluster has no room for it; what the storage says.
pub(in crate::qcow2) async fn replace_header(
    storage: &dyn Storage,
    old: &Header,
    new: Header,
) -> Result<(), ImageError> {
    for Step { at, bytes } in steps(old, new, storage.name())? {
        storage.write(to_u64(at), Buffer::from_slice(&bytes).into()).await?;
        storage.flush().await?;
    }
    Ok(())
}

/// Refuses a header that cannot replace another one.
///
/// # Errors
/// [`ImageError::Unsupported`]: the header's cluster has no room for it.
pub(in crate::qcow2) fn can_replace_header(image: &Arc<str>, old: &Header, new: Header) -> Result<(), ImageError> {
    steps(old, new, image).map(drop)
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
            new.encode(image).map_err(|_| no_room("what is new"))?
        }
        Err(_) => return Err(no_room("what is new")),
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
        let what = format!("its header extensions of {} bytes leave no room to change them", bytes.len());
        return Err(ImageError::Unsupported { image: Arc::clone(image), what });
    }
    let fields = header.encode_fields()?;
    let place = bytes.get_mut(..fields.len()).ok_or_else(|| broken_invariant("a header begins with its fields"))?;
    place.copy_from_slice(&fields);
    bytes.resize(SECTOR, 0);
    Ok(bytes)
}
