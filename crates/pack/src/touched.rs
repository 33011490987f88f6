//! The working set of a packed snapshot: a persistent bitmap of its image, which stock tools show and keep.
//!
//! Law: **it is a hint.** One that is missing, of another program or not to be relied on costs a reader the order of
//! reads, and nothing else.

use std::ops::Range;

use limosa_image::qcow2::{CheckOptions, Qcow2, change_bitmap};
use limosa_image::{BitmapAction, BitmapBits, Disk, ImageError};
use limosa_page::{PageBitmap, PageNumber, PageRange};
use limosa_snapshot::{Snapshot, WorkingSet};
use limosa_storage::{Storage, block_on};

/// The most runs of clusters that are looked at, as many as a working set has.
const RUNS_MOST: usize = 1 << 18;

/// The name of the bitmap.
pub(crate) const BITMAP: &str = "limosa-working-set";

/// Writes the working set of a snapshot into the image that it was packed in, which is closed. Returns the bytes that
/// it says are touched; 0: the snapshot has no working set.
pub(crate) fn put(snapshot: &Snapshot, storage: &dyn Storage, (size, cluster): (u64, u64)) -> Result<u64, ImageError> {
    // One that cannot be read does not count.
    let Some(set) = WorkingSet::of(snapshot).ok().flatten() else { return Ok(0) };
    let places = set.places_in(snapshot);
    let granularity_bits = cluster.trailing_zeros();
    let mut bits = PageBitmap::new(size.div_ceil(cluster));
    for place in places.iter().filter(|place| place.end <= size) {
        bits.set_range(PageRange::new(PageNumber(place.start / cluster), PageNumber(place.end.div_ceil(cluster))));
    }
    let touched = bits.count().saturating_mul(cluster);
    if touched == 0 {
        return Ok(0);
    }
    let granularity_bits = u8::try_from(granularity_bits).unwrap_or(u8::MAX);
    let actions = [
        BitmapAction::Add { granularity: Some(cluster) },
        // It says what was touched, and not what is written to the image.
        BitmapAction::Disable,
        BitmapAction::Set(BitmapBits { granularity_bits, bits }),
    ];
    block_on(change_bitmap(storage, BITMAP, &actions, None, CheckOptions::default()))?;
    Ok(touched)
}

/// Returns the ranges that an image's bitmap says are touched; `None`: it has none.
pub(crate) fn of(image: &Qcow2) -> Result<Option<Vec<Range<u64>>>, ImageError> {
    let known = block_on(image.bitmaps())?;
    if !known.iter().any(|bitmap| bitmap.name == BITMAP && bitmap.set.is_some()) {
        return Ok(None);
    }
    let BitmapBits { granularity_bits, bits } = image.bitmap_bits(BITMAP)?;
    let all = PageRange::new(PageNumber(0), PageNumber(bits.len()));
    let offset = |granule: PageNumber| granule.0.checked_shl(granularity_bits.into()).unwrap_or(u64::MAX);
    // A bitmap that alternates would take more memory than its image.
    let runs = bits.runs_in(all).take(RUNS_MOST);
    Ok(Some(runs.map(|run| offset(run.start)..offset(run.end)).collect()))
}
