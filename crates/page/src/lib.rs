//! Pages of a VM's memory: numbers, ranges, bitmaps, zero detection, holes.
//!
//! Everything above this crate counts memory in pages of 4 KiB inside a RAM block. A [`PageNumber`] cannot be mistaken
//! for a byte offset, a [`PageRange`] is half-open, a [`PageBitmap`] holds one bit per page in the layout that QEMU
//! writes to its files and sockets. What a page contains is found out in two steps, cheapest first: [`holes`] names
//! what was never populated without touching it, [`is_zero`] looks at the rest, and [`ScanRanges`] joins both into
//! runs. Memory that a guest may be writing is reached through [`GuestPages`] alone.
//!
//! # Example
//!
//! A bitmap of the pages of a buffer that are worth storing, in the bytes that go into a mapped-ram file:
//!
//! ```
//! use limosa_page::{PAGE_LEN, PageBitmap, PageNumber, PageKind, PageRange, scan};
//!
//! let mut memory = vec![0u8; 100 * PAGE_LEN];
//! memory[3 * PAGE_LEN + 17] = 1;
//! memory[4 * PAGE_LEN] = 1;
//!
//! let mut stored = PageBitmap::new(100);
//! for run in scan(&memory, PageNumber(0)) {
//!     if run.kind == PageKind::Data {
//!         stored.set_range(run.pages);
//!     }
//! }
//! assert_eq!(stored.runs().collect::<Vec<_>>(), [PageRange::new(PageNumber(3), PageNumber(5))]);
//! assert_eq!(stored.count(), 2);
//!
//! let bytes = stored.to_le_bytes();
//! assert_eq!(bytes.len(), 16, "100 bits in whole words of 8 bytes");
//! assert_eq!(bytes[0], 0b0001_1000);
//! assert_eq!(PageBitmap::from_le_bytes(100, &bytes)?, stored);
//! # Ok::<(), limosa_page::BitmapError>(())
//! ```

mod bitmap;
mod causes;
mod convert;
mod directory;
mod guest;
pub mod holes;
mod invariant;
mod number;
mod range;
mod scan;
mod zero;

pub use bitmap::{AtomicPageBitmap, BitmapError, PageBitmap, Runs};
pub use causes::error_with_causes;
pub use convert::{to_micros, to_millis, to_nanos, to_u64, to_usize};
pub use directory::directory_of;
pub use guest::{GuestPages, is_zero_at};
pub use invariant::{BrokenInvariant, broken_invariant, invariant};
pub use number::{PAGE_BITS, PAGE_LEN, PAGE_SIZE, PageNumber};
pub use range::PageRange;
pub use scan::{PageKind, PageRun, Scan, ScanPopulated, ScanRanges, scan};
pub use zero::{UnknownZeroMethod, ZeroMethod, is_zero, is_zero_with};

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
