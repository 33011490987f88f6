//! Bytes from many places, put together to one run.

use std::collections::BTreeMap;
use std::ops::Range;

use limosa_page::to_usize;
use limosa_storage::{Buffer, IoVector};

use crate::offset::GuestOffset;

/// Pieces of bytes by offset; a later piece covers earlier ones.
#[derive(Debug, Default)]
pub(super) struct Layers {
    /// By where they begin: where they end, and the bytes.
    pieces: BTreeMap<GuestOffset, (GuestOffset, IoVector)>,
}

impl Layers {
    pub(super) fn put(&mut self, at: GuestOffset, bytes: IoVector) {
        let end = at + bytes.len() as u64;
        let first = self.pieces.range(..at).next_back().map_or(at, |(begin, _)| *begin);
        let covered: Vec<GuestOffset> = self.pieces.range(first..end).map(|(begin, _)| *begin).collect();
        for begin in covered {
            let Some((until, old)) = self.pieces.remove(&begin) else { continue };
            if begin < at {
                self.keep(begin..until.min(at), begin, &old);
            }
            if until > end {
                self.keep(end.max(begin)..until, begin, &old);
            }
        }
        if end > at {
            self.pieces.insert(at, (end, bytes));
        }
    }

    /// Keeps a part of a piece that began at `begin`.
    fn keep(&mut self, range: Range<GuestOffset>, begin: GuestOffset, bytes: &IoVector) {
        let index = |at: GuestOffset| to_usize(at - begin);
        self.pieces.insert(range.start, (range.end, bytes.slice(index(range.start)..index(range.end))));
    }

    /// All that is in `range`, with zeros where nothing was put.
    pub(super) fn run(&self, range: &Range<GuestOffset>, zeros: &Buffer) -> IoVector {
        let mut run = IoVector::new();
        let mut pos = range.start;
        let first = self.pieces.range(..range.start).next_back().map_or(range.start, |(begin, _)| *begin);
        for (begin, (end, bytes)) in self.pieces.range(first..range.end) {
            let (from, to) = ((*begin).max(range.start), (*end).min(range.end));
            if from >= to {
                continue;
            }
            push_zeros(&mut run, from - pos, zeros);
            let index = |at: GuestOffset| to_usize(at - *begin);
            run.append(bytes.slice(index(from)..index(to)));
            pos = to;
        }
        push_zeros(&mut run, range.end - pos, zeros);
        run
    }
}

/// Adds zeros at the end, out of a buffer of them.
pub(super) fn push_zeros(run: &mut IoVector, mut length: u64, zeros: &Buffer) {
    while length > 0 && !zeros.is_empty() {
        let part = to_usize(length).min(zeros.len());
        run.push(zeros.slice(0..part));
        length -= part as u64;
    }
}

/// `length` bytes of a vector, from `from` on.
pub(super) fn part_of(vector: &IoVector, from: u64, length: u64) -> IoVector {
    // A request's length came from a vector's, so it is an index.
    let index = |at: u64| to_usize(at);
    vector.slice(index(from)..index(from + length))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_was_put_last_is_seen(
            puts in prop::collection::vec((0..60_usize, 0..30_usize), 0..20),
            start in 0..50_usize,
            len in 0..60_usize,
        ) {
            let mut layers = Layers::default();
            let mut model = [0_u8; 128];
            for (value, (at, len)) in (1..).zip(puts) {
                let bytes = vec![value; len];
                layers.put(GuestOffset(at as u64), Buffer::from_slice(&bytes).into());
                model[at..at + len].copy_from_slice(&bytes);
            }
            let run = layers.run(&(GuestOffset(start as u64)..GuestOffset((start + len) as u64)), &Buffer::zeroed(7));
            prop_assert_eq!(run.to_vec(), &model[start..start + len]);
        }
    }
}
