//! Memory for input and output.
//!
//! **Law: its bytes are never a `&[u8]`.** The kernel, a device or a guest may write them at any time: they are copied
//! in and out, by raw pointers, and passed to the kernel by address. Code that makes a decision by the contents of a
//! buffer copies them first. A clone of a buffer is cheap and names the same memory, which lives as long as any of
//! them.
#![allow(unsafe_code, reason = "memory with other writers is accessed by raw pointers")]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::arena;

/// Alignment of the memory that is allocated here: enough for direct I/O on every device with blocks of up to 4 KiB.
const ALIGN: usize = 4096;

/// A range of memory for input and output.
///
/// The kernel, a device or a guest may write it at any time, so there is no access to it as `&[u8]`: bytes are copied
/// in and out. A clone names the same memory, which lives as long as any of its clones.
#[derive(Clone)]
pub struct Buffer {
    start: *mut u8,
    len: usize,
    keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: a pointer to memory that `keep` keeps; all access copies, as to memory shared with devices.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

/// Memory from the global allocator.
struct Owned {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: owns its memory, and does nothing with it but free it.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed once.
        unsafe { dealloc(self.start, self.layout) }
    }
}

impl Buffer {
    /// Zeroed memory, aligned for direct I/O. Up to 256 KiB come from memory that is registered with the rings, while
    /// some is free.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        if let Some(piece) = arena::take(len) {
            let buffer = Self { start: piece.start(), len, keep: Arc::new(piece) };
            // A piece has the contents of its previous owner.
            buffer.clear();
            return buffer;
        }
        let layout = len.max(1).checked_next_multiple_of(ALIGN).map(|size| Layout::from_size_align(size, ALIGN));
        let Some(Ok(layout)) = layout else { handle_alloc_error(Layout::new::<u8>()) };
        // SAFETY: the layout has a size.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        Self { start, len, keep: Arc::new(Owned { start, layout }) }
    }

    /// A copy of these bytes.
    #[must_use]
    pub fn from_slice(bytes: &[u8]) -> Self {
        let buffer = Self::zeroed(bytes.len());
        buffer.copy_from(0, bytes);
        buffer
    }

    /// Memory that belongs to another owner, such as guest memory.
    ///
    /// # Safety
    /// The `len` bytes at `start` stay mapped, readable and writable as long as `keep` lives, and no reference to them
    /// exists.
    #[must_use]
    pub unsafe fn from_raw(start: *mut u8, len: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self { start, len, keep }
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether other clones or parts of it exist. If none does, the memory that it has allocated can be reused.
    #[must_use]
    pub fn is_shared(&mut self) -> bool {
        // Not by its count: what others did with the memory before they let go of it has to come first.
        Arc::get_mut(&mut self.keep).is_none()
    }

    /// Its address, for the kernel.
    #[must_use]
    pub fn address(&self) -> *mut u8 {
        self.start
    }

    /// A part of it: the same memory. The range is cut off at the buffer's end.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        let end = range.end.min(self.len);
        let begin = range.start.min(end);
        Self { start: self.start.wrapping_add(begin), len: end - begin, keep: Arc::clone(&self.keep) }
    }

    /// Copies bytes in at `offset`, as many as fit. Returns how many were copied.
    pub fn copy_from(&self, offset: usize, bytes: &[u8]) -> usize {
        let len = self.len.saturating_sub(offset).min(bytes.len());
        // SAFETY: `offset + len` is inside memory that `keep` keeps; `bytes` is a reference, so it is other memory.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.wrapping_add(offset), len) };
        len
    }

    /// Copies bytes out from `offset`, as many as there are. Returns how many were copied.
    pub fn copy_to(&self, offset: usize, bytes: &mut [u8]) -> usize {
        let len = self.len.saturating_sub(offset).min(bytes.len());
        // SAFETY: as in `copy_from`.
        unsafe { std::ptr::copy_nonoverlapping(self.start.wrapping_add(offset), bytes.as_mut_ptr(), len) };
        len
    }

    /// Copies bytes into another buffer, from the beginning of both. Returns how many fitted.
    pub fn copy_to_buffer(&self, into: &Self) -> usize {
        let len = self.len.min(into.len);
        // SAFETY: both are memory that its `keep` keeps, which may be the same.
        unsafe { std::ptr::copy(self.start, into.start, len) };
        len
    }

    /// Zeroes all of it.
    pub fn clear(&self) {
        // SAFETY: inside memory that `keep` keeps.
        unsafe { self.start.write_bytes(0, self.len) };
    }

    /// Whether all of it is zero.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        // SAFETY: inside memory that `keep` keeps.
        unsafe { limosa_page::is_zero_at(self.start, self.len) }
    }

    /// Whether both have the same bytes.
    #[must_use]
    pub fn same_as(&self, other: &Self) -> bool {
        // SAFETY: `len` bytes of both are inside memory that their `keep` keeps; the compiler gets no reference to
        // them.
        self.len == other.len && unsafe { libc::memcmp(self.start.cast(), other.start.cast(), self.len) } == 0
    }

    /// A copy of it.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_to(0, &mut bytes);
        bytes
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

/// A list of buffers: what one request reads into or writes from.
#[derive(Clone, Debug, Default)]
pub struct IoVector {
    buffers: Vec<Buffer>,
    len: usize,
}

impl IoVector {
    /// An empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a buffer at the end.
    pub fn push(&mut self, buffer: Buffer) {
        if !buffer.is_empty() {
            self.len += buffer.len();
            self.buffers.push(buffer);
        }
    }

    /// Adds all buffers of another at the end.
    pub fn append(&mut self, other: Self) {
        self.len += other.len;
        self.buffers.extend(other.buffers);
    }

    /// Total length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the total length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The buffers.
    #[must_use]
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// A part of it: the same memory.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        let mut part = Self::new();
        let mut begin = 0;
        for buffer in &self.buffers {
            let end = begin + buffer.len();
            if range.start < end && begin < range.end {
                part.push(buffer.slice(range.start.saturating_sub(begin)..range.end - begin));
            }
            begin = end;
        }
        part
    }

    /// Copies bytes in at `offset`. Returns how many fitted.
    pub fn copy_from(&self, offset: usize, bytes: &[u8]) -> usize {
        let mut done = 0;
        for buffer in self.slice(offset..self.len).buffers {
            let Some(rest) = bytes.get(done..) else { break };
            done += buffer.copy_from(0, rest);
        }
        done
    }

    /// Copies bytes into other buffers, from the beginning of both. Returns how many fitted.
    pub fn copy_into(&self, into: &Self) -> usize {
        let mut done = 0;
        for buffer in &self.buffers {
            let mut from = 0;
            for part in into.slice(done..into.len.min(done + buffer.len())).buffers {
                from += buffer.slice(from..buffer.len()).copy_to_buffer(&part);
            }
            done += from;
        }
        done
    }

    /// A copy of all bytes.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        // By the buffer: an iterator of all their bytes takes longer than zstd does for them.
        let mut bytes = vec![0; self.len()];
        let mut at = 0;
        for buffer in &self.buffers {
            if let Some(part) = bytes.get_mut(at..at + buffer.len()) {
                buffer.copy_to(0, part);
            }
            at += buffer.len();
        }
        bytes
    }

    /// Zeroes all of it.
    pub fn clear(&self) {
        self.buffers.iter().for_each(Buffer::clear);
    }

    /// Whether all of it is zero.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.buffers.iter().all(Buffer::is_zero)
    }
}

impl From<Buffer> for IoVector {
    fn from(buffer: Buffer) -> Self {
        let mut vector = Self::new();
        vector.push(buffer);
        vector
    }
}

impl FromIterator<Buffer> for IoVector {
    fn from_iter<T: IntoIterator<Item = Buffer>>(buffers: T) -> Self {
        let mut vector = Self::new();
        buffers.into_iter().for_each(|buffer| vector.push(buffer));
        vector
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_vector_are_the_same_memory() {
        let buffers: Vec<_> = [b"abc".as_slice(), b"", b"defgh", b"i"].into_iter().map(Buffer::from_slice).collect();
        let vector: IoVector = buffers.iter().cloned().collect();
        assert_eq!((vector.len(), vector.to_vec()), (9, b"abcdefghi".to_vec()));
        for begin in 0..=9 {
            for end in begin..=9 {
                assert_eq!(vector.slice(begin..end).to_vec(), b"abcdefghi"[begin..end]);
            }
        }
        assert_eq!(vector.slice(2..5).copy_from(0, b"XYZW"), 3);
        assert_eq!(vector.to_vec(), b"abXYZfghi");
        assert!(!vector.is_zero());
        vector.clear();
        assert!(vector.is_zero() && buffers[0].is_zero());
    }

    #[test]
    fn buffers_are_compared_by_their_bytes() {
        let buffer = Buffer::from_slice(b"abcabcd");
        assert!(buffer.slice(0..3).same_as(&buffer.slice(3..6)) && Buffer::zeroed(0).same_as(&Buffer::zeroed(0)));
        assert!(!buffer.slice(0..3).same_as(&buffer.slice(3..7)) && !buffer.slice(0..3).same_as(&buffer.slice(4..7)));
    }

    #[test]
    fn buffers_are_copied_into_buffers_of_other_lengths() {
        let from: IoVector = [b"abc".as_slice(), b"defgh"].into_iter().map(Buffer::from_slice).collect();
        for len in 0..12 {
            let into: IoVector = [len / 2, 0, len - len / 2].map(Buffer::zeroed).into_iter().collect();
            assert_eq!(from.copy_into(&into), len.min(8));
            let mut expected = b"abcdefgh\0\0\0\0".to_vec();
            expected.truncate(len);
            assert_eq!(into.to_vec(), expected);
        }
    }

    #[test]
    fn what_was_in_a_buffer_is_in_none_after_it() {
        for round in 0..200 {
            let buffers: Vec<_> = (0..40).map(|number| Buffer::zeroed(round * 61 + number * 997)).collect();
            assert!(buffers.iter().all(Buffer::is_zero));
            buffers.iter().for_each(|buffer| _ = buffer.copy_from(0, &vec![0xff; buffer.len()]));
        }
    }

    #[test]
    fn buffers_lie_apart_also_when_the_arena_is_used_up() {
        let buffers: Vec<_> =
            (1..300u32).map(|number| Buffer::from_slice(&number.to_le_bytes().repeat(arena::LENGTH / 800))).collect();
        assert!(buffers.iter().any(|it| arena::holds(it.address(), it.len())));
        assert!(buffers.iter().any(|it| !arena::holds(it.address(), it.len())));
        for (buffer, number) in buffers.iter().zip(1u32..) {
            assert!(buffer.address().addr().is_multiple_of(ALIGN));
            assert!(buffer.to_vec().chunks(4).all(|bytes| bytes == number.to_le_bytes()));
        }
    }

    #[test]
    fn nothing_is_copied_behind_the_end() {
        let buffer = Buffer::zeroed(4);
        assert_eq!(buffer.copy_from(3, b"xy"), 1);
        assert_eq!(buffer.copy_from(9, b"xy"), 0);
        assert_eq!(buffer.slice(3..9).to_vec(), b"x");
        assert_eq!(buffer.slice(9..12).len(), 0);
    }
}
