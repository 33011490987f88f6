//! Gather and scatter lists of any length, split into batches of one system call each.
//!
//! The laws of this module: the kernel receives the caller's list itself, and nothing is copied as long as transfers
//! are complete; a partial transfer copies the rest of one batch of *descriptors* (16 bytes each, never data) and
//! continues after the last byte moved. The bytes themselves are never read here: they may be guest memory, which
//! another thread writes meanwhile.
#![allow(unsafe_code, reason = "reinterprets the standard library's slices of slices as the kernel's")]

use std::io::{IoSlice, IoSliceMut};
use std::marker::PhantomData;
use std::slice;

use libc::iovec;

/// The kernel's bound on the entries of one call (`UIO_MAXIOV`, include/uapi/linux/uio.h).
pub(crate) const ENTRIES_MAX: usize = 1024;

/// The kernel's bound on the bytes of one call (`MAX_RW_COUNT`: `INT_MAX` rounded down to a page).
pub(crate) const BYTES_MAX: usize = 0x7fff_f000;

/// Marks lists whose memory is read, for writes to a channel.
#[derive(Debug)]
pub(crate) enum Out {}

/// Marks lists whose memory is written, for reads from a channel.
#[derive(Debug)]
pub(crate) enum In {}

/// The part of a list that has not been moved yet.
///
/// Invariant: every entry names memory that stays valid during `'a`, for reads (`Out`) or for writes (`In`).
pub(crate) struct Cursor<'a, D> {
    /// Entries that have not been started.
    rest: &'a [iovec],
    /// A batch with a partial transfer, from `at` on; it comes before `rest`.
    begun: Vec<iovec>,
    at: usize,
    direction: PhantomData<D>,
}

/// The entries of one system call.
pub(crate) struct Batch<'b, D> {
    list: &'b [iovec],
    /// The head of a single entry that exceeds the byte limit; replaces `list`.
    cut: Option<iovec>,
    bytes: usize,
    direction: PhantomData<D>,
}

impl<'a> Cursor<'a, Out> {
    pub(crate) fn gather(list: &'a [IoSlice<'a>]) -> Self {
        // SAFETY: the standard library guarantees that IoSlice has the layout of iovec on Unix; the slices are borrowed
        // for 'a, so their memory stays valid for reads.
        unsafe { Self::gather_raw(slice::from_raw_parts(list.as_ptr().cast::<iovec>(), list.len())) }
    }

    /// # Safety
    /// Every entry must name memory that is valid for reads during `'a`.
    pub(crate) unsafe fn gather_raw(list: &'a [iovec]) -> Self {
        Self::over(list)
    }
}

impl<'a> Cursor<'a, In> {
    pub(crate) fn scatter(list: &'a mut [IoSliceMut<'_>]) -> Self {
        // SAFETY: IoSliceMut has the layout of iovec on Unix; the slices are borrowed mutably for at least 'a, so their
        // memory stays valid for writes and has no other user.
        unsafe { Self::scatter_raw(slice::from_raw_parts(list.as_ptr().cast::<iovec>(), list.len())) }
    }

    /// # Safety
    /// Every entry must name memory that is valid for writes during `'a`.
    pub(crate) unsafe fn scatter_raw(list: &'a [iovec]) -> Self {
        Self::over(list)
    }
}

impl<'a, D> Cursor<'a, D> {
    fn over(rest: &'a [iovec]) -> Self {
        Self { rest, begun: Vec::new(), at: 0, direction: PhantomData }
    }

    /// Returns the next batch: whole entries up to `limit` bytes, or the head of one longer entry; `None` when
    /// everything is moved. It has at least one byte, so that 0 from the kernel is always the end of the data.
    pub(crate) fn batch(&mut self, limit: usize) -> Option<Batch<'_, D>> {
        let limit = limit.clamp(1, BYTES_MAX);
        let empty = |list: &[iovec]| list.iter().take_while(|entry| entry.iov_len == 0).count();
        self.at += empty(&self.begun[self.at..]);
        if self.at >= self.begun.len() {
            self.begun.clear();
            self.at = 0;
            self.rest = &self.rest[empty(self.rest)..];
        }
        let source = self.source();
        let first = *source.first()?;
        if first.iov_len > limit {
            let cut = Some(iovec { iov_base: first.iov_base, iov_len: limit });
            return Some(Batch { list: &[], cut, bytes: limit, direction: PhantomData });
        }
        let mut bytes = 0;
        let mut entries = 0;
        for entry in source.iter().take(ENTRIES_MAX) {
            // Below BYTES_MAX, so the sum of the two cannot overflow.
            if entry.iov_len > limit - bytes {
                break;
            }
            bytes += entry.iov_len;
            entries += 1;
        }
        Some(Batch { list: &source[..entries], cut: None, bytes, direction: PhantomData })
    }

    /// Advances by `moved` bytes.
    pub(crate) fn advance(&mut self, mut moved: usize) {
        let mut whole = 0;
        for entry in self.source() {
            if moved < entry.iov_len || moved == 0 {
                break;
            }
            moved -= entry.iov_len;
            whole += 1;
        }
        if self.begun.is_empty() {
            self.rest = &self.rest[whole..];
            if moved != 0 {
                let (batch, rest) = self.rest.split_at(self.rest.len().min(ENTRIES_MAX));
                self.begun.extend_from_slice(batch);
                self.rest = rest;
            }
        } else {
            self.at += whole;
        }
        if moved != 0
            && let Some(entry) = self.begun.get_mut(self.at)
        {
            let moved = moved.min(entry.iov_len);
            entry.iov_base = entry.iov_base.cast::<u8>().wrapping_add(moved).cast();
            entry.iov_len -= moved;
        }
    }

    /// Returns the number of bytes not moved yet.
    pub(crate) fn left(&self) -> u64 {
        let sum = |list: &[iovec]| list.iter().fold(0_u64, |sum, entry| sum.saturating_add(entry.iov_len as u64));
        sum(&self.begun[self.at..]).saturating_add(sum(self.rest))
    }

    fn source(&self) -> &[iovec] {
        if self.begun.is_empty() { self.rest } else { &self.begun[self.at..] }
    }
}

impl<D> Batch<'_, D> {
    /// Returns the entries for the kernel: at most [`ENTRIES_MAX`].
    pub(crate) fn entries(&self) -> &[iovec] {
        self.cut.as_ref().map_or(self.list, slice::from_ref)
    }

    /// Returns the sum of the entries: 1 to [`BYTES_MAX`].
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_list_is_moved_once_and_in_order(
            lengths in prop::collection::vec(prop_oneof![Just(0_usize), 0..9_usize], 0..2500),
            limits in prop::collection::vec(prop_oneof![1..20_usize, Just(usize::MAX)], 1..8),
            parts in prop::collection::vec(1..100_usize, 1..8),
        ) {
            let total: usize = lengths.iter().sum();
            let data: Vec<u8> = (0..total).map(|i| i.to_le_bytes()[0] ^ i.to_le_bytes()[1]).collect();
            let mut rest = data.as_slice();
            let list: Vec<_> = lengths.iter().map(|&n| IoSlice::new(rest.split_off(..n).unwrap())).collect();
            let mut cursor = Cursor::gather(&list);
            let (mut position, mut round) = (data.as_ptr(), 0);
            loop {
                let left = cursor.left();
                let Some(batch) = cursor.batch(limits[round % limits.len()]) else { break };
                prop_assert!(batch.entries().len() <= ENTRIES_MAX && batch.bytes() >= 1);
                prop_assert!(batch.bytes() <= limits[round % limits.len()]);
                prop_assert_eq!(batch.bytes(), batch.entries().iter().map(|e| e.iov_len).sum::<usize>());
                let mut expected = position;
                for entry in batch.entries().iter().filter(|e| e.iov_len != 0) {
                    prop_assert_eq!(entry.iov_base.cast::<u8>().cast_const(), expected);
                    expected = expected.wrapping_add(entry.iov_len);
                }
                let moved = (batch.bytes() * parts[round % parts.len()].min(99) / 99).max(1);
                cursor.advance(moved);
                prop_assert_eq!(cursor.left(), left - moved as u64);
                position = position.wrapping_add(moved);
                round += 1;
            }
            prop_assert_eq!(cursor.left(), 0);
            prop_assert_eq!(position, data.as_ptr_range().end);
        }
    }
}
