//! The directory's entry of a bitmap that is new.

use std::sync::Arc;

use limosa_page::to_u64;

use crate::error::ImageError;
use crate::offset::HostOffset;
use crate::qcow2::format::bitmap_directory::{BITS_MOST, Bitmap, Entry, GRANULARITY, NAME_MOST};
use crate::qcow2::format::header::{BITMAP_DIRECTORY_MOST, BITMAPS_MOST, Header};

/// The least bytes that a bit of a new bitmap is about if nothing else is asked for: QEMU's.
const USUAL_LEAST: u64 = 4096;

/// Returns the entry of a new bitmap of this name and granularity, besides those that the image has.
///
/// # Errors
/// [`ImageError::Unsupported`]: the name exists or cannot be; the granularity cannot be; there are too many bitmaps, or
/// bits; images of version 2 have none.
pub(in crate::qcow2) fn new_entry<'a>(
    image: &Arc<str>,
    header: &Header,
    others: impl Iterator<Item = &'a Entry>,
    (name, granularity): (&str, Option<u64>),
) -> Result<Entry, ImageError> {
    let unsupported = |what: String| ImageError::Unsupported { image: Arc::clone(image), what };
    let granularity = granularity.unwrap_or_else(|| header.geometry().cluster_size().max(USUAL_LEAST));
    let bits = u8::try_from(granularity.trailing_zeros()).ok().filter(|bits| GRANULARITY.contains(bits));
    let Some(granularity_bits) = bits.filter(|bits| granularity == 1 << bits) else {
        let least = 1_u64 << GRANULARITY.start();
        let what = format!("granularity {granularity}: must be a power of two from {least} bytes to 2 GiB");
        return Err(unsupported(what));
    };
    if name.is_empty() || to_u64(name.len()) > NAME_MOST {
        return Err(unsupported(format!("bitmap {name:?}: a name has 1 to {NAME_MOST} bytes")));
    }
    if header.version < 3 {
        return Err(unsupported("images of version 2 (compat=0.10) cannot have bitmaps".into()));
    }
    let bitmap =
        Bitmap { name: name.to_owned(), table: (HostOffset(0), 0), in_use: false, auto: true, granularity_bits };
    let bits = bitmap.bits(header.size);
    if bits > BITS_MOST {
        let what =
            format!("bitmap {name:?} would have {bits} bits, and {BITS_MOST} are the most: take a larger granularity");
        return Err(unsupported(what));
    }
    let entry = Entry::new(bitmap);
    let (mut count, mut directory) = (0, to_u64(entry.encode()?.len()));
    for other in others {
        if other.is_named(name) {
            return Err(unsupported(format!("bitmap {name:?} already exists")));
        }
        count += 1;
        directory += to_u64(other.encode()?.len());
    }
    if count >= u64::from(BITMAPS_MOST) {
        return Err(unsupported(format!("it has {BITMAPS_MOST} bitmaps, which are the most")));
    }
    if directory > BITMAP_DIRECTORY_MOST {
        return Err(unsupported(format!("its bitmap directory would be longer than {BITMAP_DIRECTORY_MOST} bytes")));
    }
    Ok(entry)
}
