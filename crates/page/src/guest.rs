//! Memory that the guest may be writing: the only access to it.
#![allow(unsafe_code, reason = "reads memory that a guest may be writing")]

use std::marker::PhantomData;

use crate::zero::{ZeroMethod, kernel};
use crate::{PAGE_LEN, PAGE_SIZE, PageNumber, PageRange, to_u64, to_usize};

/// Whether the `len` bytes of guest memory at `start` are all zero; true if `len` is 0.
///
/// # Safety
///
/// The `len` bytes at `start` are mapped and readable until the call returns. They may be written meanwhile. (If they
/// are a mapping of a file that is truncated, reading them raises SIGBUS.)
#[must_use]
#[inline]
pub unsafe fn is_zero_at(start: *const u8, len: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { kernel::is_zero(ZeroMethod::best(), start, len) }
}

/// Mapped memory of a RAM block, or a part of it, in which each page has a number. Looks, never writes.
///
/// Also made from a `&[u8]`, for memory that is not being written.
///
/// **Law: guest memory is never a `&[u8]`.** A `&[u8]` promises the compiler that those bytes are not written as long
/// as it lives; a running guest, its devices and other processes do. So guest memory is named by a raw pointer and a
/// length, it is read by volatile reads alone, no reference to it is ever made, and no decision rests on reading a byte
/// twice. An answer about memory that is being written is an answer about the past: a caller that acts on it has a
/// dirty log (or a stopped guest) that reports what was written since.
///
/// [`GuestPages`] takes the promise that the memory is there once, when it is made; everything that is done with it is
/// safe.
#[derive(Clone, Copy, Debug)]
pub struct GuestPages<'a> {
    start: *const u8,
    len: usize,
    first: PageNumber,
    mapping: PhantomData<&'a ()>,
}

// SAFETY: reads memory only, and only by volatile reads, which any number of threads may do at once.
unsafe impl Send for GuestPages<'_> {}
// SAFETY: as above.
unsafe impl Sync for GuestPages<'_> {}

impl<'a> GuestPages<'a> {
    /// The `len` bytes of guest memory at `start`, whose first page has the number `first`. If `len` is not a multiple
    /// of [`PAGE_LEN`], the last page is shorter than the others.
    ///
    /// # Safety
    ///
    /// The `len` bytes at `start` are mapped and readable for `'a`. They may be written meanwhile. (If they
    /// are a mapping of a file that is truncated, reading them raises SIGBUS.)
    #[must_use]
    pub const unsafe fn new(start: *const u8, len: usize, first: PageNumber) -> Self {
        Self { start, len, first, mapping: PhantomData }
    }

    /// The same memory, with `first` as the number of its first page.
    #[must_use]
    pub const fn numbered_from(self, first: PageNumber) -> Self {
        Self { first, ..self }
    }

    /// The numbers of the pages.
    #[must_use]
    pub fn pages(&self) -> PageRange {
        PageRange::starting_at(self.first, to_u64(self.len.div_ceil(PAGE_LEN)))
    }

    /// Where `page` lies and how many bytes of it there are (fewer than [`PAGE_LEN`] only in a last page that is cut
    /// off), for a gather list; `None` if it is not among [`GuestPages::pages`].
    #[must_use]
    #[inline]
    pub fn locate(&self, page: PageNumber) -> Option<(*const u8, usize)> {
        let bytes = page.0.checked_sub(self.first.0)?.checked_mul(PAGE_SIZE)?;
        let offset = usize::try_from(bytes).ok().filter(|offset| *offset < self.len)?;
        // `wrapping_add` needs no promise; offset < len makes the pointer one into the memory.
        Some((self.start.wrapping_add(offset), (self.len - offset).min(PAGE_LEN)))
    }

    /// Whether all of the memory is zero, found out by `method` (by [`ZeroMethod::Portable`] if there is no such).
    #[must_use]
    #[inline]
    pub fn is_zero_with(&self, method: ZeroMethod) -> bool {
        // SAFETY: `new` was promised that this memory is readable for 'a.
        unsafe { kernel::is_zero(method, self.start, self.len) }
    }

    /// Whether `page` is zero, found out by `method`; `None` if it is not among [`GuestPages::pages`].
    #[must_use]
    #[inline]
    pub fn page_is_zero(&self, method: ZeroMethod, page: PageNumber) -> Option<bool> {
        let (start, len) = self.locate(page)?;
        // SAFETY: `locate` names only bytes of the memory that `new` was promised to be readable for 'a.
        Some(unsafe { kernel::is_zero(method, start, len) })
    }

    /// Checks the first pages of `pages` for zeros by `method`: returns a bit for each, set if it is zero, and the
    /// number of checked pages. That is at most 64, and 0 only if the first of `pages` is outside
    /// [`GuestPages::pages`].
    #[inline]
    pub(crate) fn zero_pages(&self, method: ZeroMethod, pages: PageRange) -> (u64, u32) {
        let Some((start, len)) = self.locate(pages.start) else { return (0, 0) };
        if len < PAGE_LEN {
            // SAFETY: `locate` names only bytes of the memory that `new` was promised to be readable for 'a.
            return (u64::from(unsafe { kernel::is_zero(method, start, len) }), 1);
        }
        let behind = self.start.addr() + self.len;
        let whole = (behind - start.addr()) / PAGE_LEN;
        let wanted = to_usize(pages.len()).min(whole);
        let count = wanted.min(kernel::PAGES_A_CALL);
        // SAFETY: `wanted` whole pages are between `start` and the end of the memory, which is readable for 'a.
        let zero = unsafe { kernel::zero_pages(method, start, count, wanted - count) };
        #[expect(clippy::cast_possible_truncation, reason = "at most 64")]
        (zero, count as u32)
    }
}

/// Memory that is not being written, numbered from page 0.
impl<'a> From<&'a [u8]> for GuestPages<'a> {
    #[inline]
    fn from(bytes: &'a [u8]) -> Self {
        // SAFETY: a slice is readable for its lifetime.
        unsafe { Self::new(bytes.as_ptr(), bytes.len(), PageNumber(0)) }
    }
}
