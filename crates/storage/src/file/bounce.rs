//! Unaligned requests with direct I/O, through aligned bounce buffers.
//!
//! **Law: a request may have any alignment, and changes only its own bytes.** Reads, and writes of whole blocks from
//! unaligned memory, are copied. Partial writes read the surrounding bytes first, with their blocks held (see
//! [`blocks`](crate::file::blocks)).

use std::io;
use std::ops::Range;

use limosa_page::to_usize;

use crate::buffer::{Buffer, IoVector};
use crate::error::StorageError;
use crate::file::align::{MAX_OFFSET, around};
use crate::file::open::OpenFile;
use crate::file::transfer::{Direction, Transfer};
use crate::storage::Alignment;
use crate::striped::StripedArc;

/// How a request fits the alignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fit {
    /// It is aligned.
    Direct,
    /// Offset and length are aligned; its memory is not.
    Memory,
    /// It covers partial blocks.
    Parts,
}

/// How a request for `vector` at `offset` fits the alignment.
pub(crate) fn fit(alignment: Alignment, offset: u64, vector: &IoVector) -> Fit {
    let (block, memory) = (u64::from(alignment.offset), alignment.memory as usize);
    if block == 1 && memory == 1 {
        return Fit::Direct;
    }
    if !offset.is_multiple_of(block) || !(vector.len() as u64).is_multiple_of(block) {
        return Fit::Parts;
    }
    // Each buffer must be whole blocks: some devices accept no others.
    let is_fit =
        |buffer: &Buffer| buffer.address().addr().is_multiple_of(memory) && (buffer.len() as u64).is_multiple_of(block);
    if vector.buffers().iter().all(is_fit) { Fit::Direct } else { Fit::Memory }
}

/// Zeroed memory for blocks.
pub(crate) fn memory(blocks: &Range<u64>) -> io::Result<Buffer> {
    Ok(Buffer::zeroed(usize::try_from(blocks.end - blocks.start).map_err(io::Error::other)?))
}

/// An aligned copy.
pub(crate) fn copied(vector: &IoVector) -> IoVector {
    let copy = IoVector::from(Buffer::zeroed(vector.len()));
    vector.copy_into(&copy);
    copy
}

/// Writes `vector`, whose memory is aligned, at any `offset`, on this thread.
pub(crate) fn write(file: &StripedArc<OpenFile>, offset: u64, vector: &IoVector) -> Result<(), StorageError> {
    let whole = Transfer::new(file.clone(), Direction::Write, offset, vector.clone());
    if let Some(outcome) = whole.early() {
        return outcome;
    }
    if fit(file.alignment, offset, vector) != Fit::Parts {
        return whole.block();
    }
    file.counters.own().merged.add(vector.len() as u64);
    write_parts(file, offset, vector).map_err(|error| whole.failed(error))
}

fn write_parts(file: &StripedArc<OpenFile>, offset: u64, vector: &IoVector) -> io::Result<()> {
    let end = offset + vector.len() as u64;
    let around = around(file.alignment, &(offset..end));
    if around.end > MAX_OFFSET {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut held = file.blocks.hold_for_parts(around.clone());
    let mut length = file.length()?;
    if around.end > length && !file.is_block_device {
        // The file will be truncated to the end of the request: hold everything behind it.
        drop(held);
        held = file.blocks.hold_for_parts(around.start..u64::MAX);
        length = file.length()?;
    }
    let blocks = memory(&around)?;
    let block = u64::from(file.alignment.offset);
    let (first, last) = (around.start..around.start + block, around.end - block..around.end);
    if first.start < offset {
        transfer(file, Direction::Read, &around, &blocks, &first)?;
    }
    if last.end > end && (last != first || first.start == offset) {
        transfer(file, Direction::Read, &around, &blocks, &last)?;
    }
    let from = to_usize(offset - around.start);
    vector.copy_into(&blocks.slice(from..from + vector.len()).into());
    transfer(file, Direction::Write, &around, &blocks, &around)?;
    let wanted = length.max(end);
    if around.end > wanted && !file.is_block_device {
        rustix::fs::ftruncate(&file.fd, wanted)?;
    }
    drop(held);
    Ok(())
}

/// Reads or writes `part` of the blocks `around`, whose memory is `blocks`.
fn transfer(
    file: &StripedArc<OpenFile>,
    direction: Direction,
    around: &Range<u64>,
    blocks: &Buffer,
    part: &Range<u64>,
) -> io::Result<()> {
    let index = |at: u64| to_usize(at - around.start);
    let memory = blocks.slice(index(part.start)..index(part.end));
    let done = Transfer::new(file.clone(), direction, part.start, memory.into()).all();
    done.map_err(|error| error.source.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_copied_only_if_it_has_to_be() {
        let alignment = Alignment { offset: 512, memory: 512 };
        let buffer = Buffer::zeroed(8192);
        let vector = |parts: &[(usize, usize)]| parts.iter().map(|&(begin, end)| buffer.slice(begin..end)).collect();
        let fit = |offset, parts: &[(usize, usize)]| fit(alignment, offset, &vector(parts));
        assert_eq!(fit(512, &[(0, 512), (1024, 8192)]), Fit::Direct);
        assert_eq!(fit(0, &[(1, 513)]), Fit::Memory);
        assert_eq!(fit(0, &[(0, 256), (512, 768)]), Fit::Memory);
        assert_eq!(fit(1, &[(0, 512)]), Fit::Parts);
        assert_eq!(fit(0, &[(0, 511)]), Fit::Parts);
        let odd = vector(&[(3, 4)]);
        assert_eq!(super::fit(Alignment { offset: 1, memory: 1 }, 5, &odd), Fit::Direct);
    }
}
