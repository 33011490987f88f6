//! Copying between records and memory that may be the guest's.
//!
//! The law: guest memory is never a slice, because the guest writes it while it is read. It is copied once into a
//! buffer of this process, and the copy is encrypted; decrypted bytes are copied to their place. A torn read does no
//! harm, as with `writev`: the page is dirty again.
#![allow(unsafe_code, reason = "copies from and to addresses")]

use std::ptr;

use crate::vector::{Batch, In, Out};

/// A position in the bytes of a batch.
pub(super) struct Walk<'b, D> {
    batch: &'b Batch<'b, D>,
    entry: usize,
    offset: usize,
}

impl<'b, D> Walk<'b, D> {
    pub(super) fn over(batch: &'b Batch<'b, D>) -> Self {
        Self { batch, entry: 0, offset: 0 }
    }

    /// Returns the next piece of at most `most` bytes within one entry; it is never empty. `None` at the end of the
    /// batch.
    fn next(&mut self, most: usize) -> Option<(*mut u8, usize)> {
        loop {
            let entry = self.batch.entries().get(self.entry)?;
            let left = entry.iov_len - self.offset;
            if left == 0 {
                (self.entry, self.offset) = (self.entry + 1, 0);
                continue;
            }
            let length = left.min(most);
            let start = entry.iov_base.cast::<u8>().wrapping_add(self.offset);
            self.offset += length;
            return Some((start, length));
        }
    }
}

impl Walk<'_, Out> {
    /// Copies the next bytes to `into`; returns how many: fewer than its length only at the end of the batch.
    pub(super) fn gather(&mut self, into: &mut [u8]) -> usize {
        let mut done = 0;
        while let Some(room) = into.get_mut(done..).filter(|room| !room.is_empty()) {
            let Some((from, length)) = self.next(room.len()) else { break };
            // SAFETY: this is a part of the batch's entries, which are valid for reads; the room is a buffer of this
            // process that is at least as long, and not guest memory.
            unsafe { ptr::copy_nonoverlapping(from, room.as_mut_ptr(), length) };
            done += length;
        }
        done
    }
}

impl Walk<'_, In> {
    /// Copies `bytes` to the next places; returns how many: fewer than `bytes` has only at the end of the batch.
    pub(super) fn scatter(&mut self, bytes: &[u8]) -> usize {
        let mut done = 0;
        while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
            let Some((to, length)) = self.next(rest.len()) else { break };
            // SAFETY: this is a part of the batch's entries, which are valid for writes; the bytes are in a buffer of
            // this process, and not guest memory.
            unsafe { ptr::copy_nonoverlapping(rest.as_ptr(), to, length) };
            done += length;
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, IoSliceMut};

    use proptest::prelude::*;

    use super::*;
    use crate::vector::Cursor;

    proptest! {
        #[test]
        fn bytes_are_copied_once_and_in_order(
            lengths in prop::collection::vec(0..40_usize, 1..30),
            pieces in prop::collection::vec(1..50_usize, 1..10),
        ) {
            let total: usize = lengths.iter().sum();
            prop_assume!(total > 0);
            let data: Vec<u8> = (0..total).map(|i| i.to_le_bytes()[0]).collect();
            let mut rest = data.as_slice();
            let list: Vec<_> = lengths.iter().map(|&n| IoSlice::new(rest.split_off(..n).unwrap())).collect();
            let mut places: Vec<Vec<u8>> = lengths.iter().rev().map(|&n| vec![0; n]).collect();
            let mut room: Vec<_> = places.iter_mut().map(|place| IoSliceMut::new(place)).collect();
            let (mut out, mut into) = (Cursor::gather(&list), Cursor::scatter(&mut room));
            let (out, into) = (out.batch(usize::MAX).unwrap(), into.batch(usize::MAX).unwrap());
            let (mut gather, mut scatter) = (Walk::over(&out), Walk::over(&into));
            let mut buffer = [0; 50];
            for round in 0.. {
                let wanted = pieces[round % pieces.len()];
                let got = gather.gather(&mut buffer[..wanted]);
                prop_assert_eq!(scatter.scatter(&buffer[..got]), got);
                if got < wanted {
                    break;
                }
            }
            prop_assert_eq!(scatter.scatter(&[0]), 0);
            prop_assert_eq!(places.concat(), data);
        }
    }
}
