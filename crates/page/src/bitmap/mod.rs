//! Bitmaps with one bit per page of a RAM block: [`PageBitmap`] for one owner, [`AtomicPageBitmap`] for several
//! threads.
//!
//! Law: the bits of the last word without a page are always clear, so counting, comparing and exporting never
//! look at them. A page outside a bitmap has no bit: reading gives `false`, changing it does nothing, ranges are cut
//! off at the end. No method panics.
//!
//! The layout is that of QEMU's bitmaps on the wire and in mapped-ram files (QEMU docs: migration/mapped-ram): 64-bit
//! little-endian words, page 0 in the least significant bit of the first byte, padded to whole words.

mod atomic;
mod count;
mod plain;
mod runs;
mod word;

pub use atomic::AtomicPageBitmap;
pub use plain::{BitmapError, PageBitmap};
pub use runs::Runs;
