//! Sources and sinks of pages.
//!
//! The engines are written once, over these two traits: guest RAM or a stored file is behind them. A sink is handed
//! whole pages in the order of the stream, and the *last contents of a page win*; a source is asked for
//! whole pages in the order that the destination wants, from several threads at once.

use std::error::Error;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;

use libc::iovec;
use limosa_memory::MemoryBlock;
use limosa_page::{PAGE_LEN, PageBitmap, PageNumber, PageRange};
use limosa_stream::{Configuration, RamBlock};

/// An error of a sink or a source. It names its own object (path, block, offset).
pub type PageError = Box<dyn Error + Send + Sync>;

/// The contents of a stream before its first page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamSetup {
    /// The machine, and the capabilities both ends must agree on.
    pub configuration: Configuration,
    /// The section id of `ram`, the same in every later RAM section of the stream.
    pub section_id: u32,
    /// The RAM blocks, in stream order; a block's index in this list is its name everywhere below.
    pub blocks: Vec<RamBlock>,
}

/// Consecutive pages of a RAM block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRange {
    /// The block's index in [`StreamSetup::blocks`].
    pub block: usize,
    /// The pages.
    pub pages: PageRange,
}

/// A receiver of pages.
///
/// Contract: [`begin`](PageSink::begin) is called once and first. A page that is never mentioned is zero. A page may be
/// mentioned again, as often as the source's guest dirties it: the last call decides, whether it brings contents or
/// zeros. `block` is always an index into [`StreamSetup::blocks`] and every page lies inside its block: the engine has
/// checked both.
pub trait PageSink {
    /// Accepts or refuses the layout, before any page.
    fn begin(&mut self, start: &StreamSetup) -> Result<(), PageError>;

    /// Takes device sections that come before the pages, between [`begin`](PageSink::begin) and the first of them:
    /// whole sections, to be given back by [`PageSource::early_sections`]. A sink that has no place for them refuses.
    fn put_early_sections(&mut self, sections: &[u8]) -> Result<(), PageError> {
        let _ = sections;
        Err("the VM has a virtio-mem device, whose state comes before its pages and has no place here".into())
    }

    /// Takes consecutive pages of one block, `first` and those behind it, one slice of 4096 bytes a page.
    ///
    /// The slices are borrowed from the receive buffer: what is not stored on return is lost.
    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<(), PageError>;

    /// Makes a run of pages of one block zero.
    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<(), PageError>;

    /// Reads a page with its last contents: zeros if it has not come. Only asked for if the source sends
    /// deltas of pages (capability `xbzrle`).
    ///
    /// # Errors
    /// The page cannot be read; a sink that does not read back, as by default, says so.
    fn read_back(&mut self, block: usize, page: PageNumber, into: &mut [u8; PAGE_LEN]) -> Result<(), PageError> {
        let _ = (block, page, into);
        Err("deltas of pages that were sent before (capability xbzrle) cannot be applied here".into())
    }

    /// The sink as memory of this process, if that is what it is: pages are then received straight to where they lie,
    /// and nothing but [`begin`](Self::begin) is called on the sink itself. Asked for once, after `begin`.
    fn memory(&self) -> Option<&dyn PageMemory> {
        None
    }
}

/// A sink that is memory: several threads receive into it at once, each its own pages.
///
/// The contract is [`PageSink`]'s; between two synchronization points of the channels a page is mentioned on one of
/// them only.
///
/// # Safety
/// The memory that [`iovec`](Self::iovec) returns must stay mapped and writable as long as `self` is borrowed, and no
/// reference to it may exist.
#[allow(unsafe_code, reason = "implementations vouch for addresses")]
pub unsafe trait PageMemory: Sync {
    /// Announces the runs that are filled next, ascending: a chance to make room for all of them at once.
    ///
    /// # Errors
    /// There is no room: the source keeps the VM.
    fn prepare(&self, block: usize, runs: &[PageRange]) -> Result<(), PageError> {
        let _ = (block, runs);
        Ok(())
    }

    /// Returns the memory of pages of a block, which the kernel fills.
    ///
    /// # Errors
    /// The block has not all of them.
    fn iovec(&self, block: usize, pages: PageRange) -> Result<iovec, PageError>;

    /// Notes that pages have been filled. Returns the number of them that had been mentioned before.
    fn mark_filled(&self, block: usize, pages: PageRange) -> u64;

    /// Copies consecutive pages, one slice of 4096 bytes a page. Returns the number of them that had been mentioned
    /// before.
    ///
    /// # Errors
    /// As [`PageSink::put_pages`].
    fn put_pages(&self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<u64, PageError>;

    /// Makes pages zero, without touching those that are. Returns the number of them that had been mentioned before.
    ///
    /// # Errors
    /// As [`PageSink::put_zero`].
    fn put_zero(&self, block: usize, pages: PageRange) -> Result<u64, PageError>;

    /// As [`PageSink::read_back`].
    ///
    /// # Errors
    /// The block has no such page.
    fn read_back(&self, block: usize, page: PageNumber, into: &mut [u8; PAGE_LEN]) -> Result<(), PageError>;
}

/// A source of pages. Immutable while a source role runs.
pub trait PageSource: Sync {
    /// The layout the pages belong to.
    fn setup(&self) -> &StreamSetup;

    /// The pages of `block` that have contents; every other page of the block is zero. One bit a page of the block's
    /// used length.
    fn stored_bitmap(&self, block: usize) -> &PageBitmap;

    /// Reads whole pages of one block into `into`, which is exactly as long as the range.
    ///
    /// Must fail rather than return anything else than the stored contents: a zero page in place of an unreadable one
    /// is silent corruption of a guest.
    fn read(&self, block: usize, pages: PageRange, into: &mut [u8]) -> Result<(), PageError>;

    /// Returns the place of a stored page in a file: the descriptor, and the offset of its first byte. The stored pages
    /// behind it follow there. A sender may pass them on from there without reading them. `None` if they have to
    /// be [read](Self::read), for example because that is where they are verified.
    fn file_location(&self, block: usize, page: PageNumber) -> Option<(BorrowedFd<'_>, u64)> {
        let _ = (block, page);
        None
    }

    /// The guest memory that the pages of a block are, if they are that: a sender may gather them from there, and looks
    /// there for zeros. Such memory may be written while it is sent, as long as its writer has it sent again.
    fn memory(&self, block: usize) -> Option<&MemoryBlock> {
        let _ = block;
        None
    }

    /// Called when the destination has taken everything that was passed on from its
    /// [`file_location`](Self::file_location), and now and then before.
    ///
    /// # Errors
    /// The file may not have held what was stored: the destination must not use the pages that it got.
    fn check_unchanged(&self) -> Result<(), PageError> {
        Ok(())
    }

    /// Whether pages can be read without waiting for a connection. If not, they are on their way from then on: a sender
    /// that has something else to do asks again.
    fn is_near(&self, block: usize, pages: PageRange) -> bool {
        let _ = (block, pages);
        true
    }

    /// Called before the destination is told that pages which are not stored are zero; a source that can verify its
    /// memory does so here.
    ///
    /// `pages` is the claim, whether or not stored pages lie between; called often, and cheap when repeated.
    ///
    /// # Errors
    /// Pages of the range, or the stored pages next to them, are not what was saved: the claim must not be made.
    fn confirm_zero(&self, block: usize, pages: PageRange) -> Result<(), PageError> {
        let _ = (block, pages);
        Ok(())
    }

    /// Device sections that stand in the stream before the pages (of virtio-mem devices), or nothing.
    fn early_sections(&self) -> &[u8] {
        &[]
    }

    /// The device sections as they stood in the stream: from the first FULL section to the last footer.
    fn device_sections(&self) -> &[u8];

    /// The VM description (JSON) that stood behind the device sections, or empty.
    fn description(&self) -> &[u8];
}
