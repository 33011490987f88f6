//! Tables of 8-byte entries, read in pieces.

use futures_util::future::try_join_all;
use limosa_page::{BrokenInvariant, broken_invariant, to_usize};
use limosa_storage::{Buffer, Operation, Storage, StorageError};

/// Bytes of a table that are read at once.
const PIECE: u64 = 1 << 20;
/// Bytes of tables that are under way at once.
const AHEAD: u64 = 8 << 20;

/// The bytes at a place; zeros behind the end.
pub(in crate::qcow2) async fn bytes(storage: &dyn Storage, at: u64, length: u64) -> Result<Vec<u8>, StorageError> {
    if length > AHEAD {
        return Err(StorageError::for_request(
            Operation::Read,
            storage.name(),
            at,
            length,
            std::io::ErrorKind::InvalidInput,
        ));
    }
    let buffer = Buffer::zeroed(to_usize(length));
    storage.read(at, buffer.clone().into()).await?;
    Ok(buffer.to_vec())
}

/// Reads the entry at a place; 0 behind the end.
pub(in crate::qcow2) async fn number(storage: &dyn Storage, at: u64) -> Result<u64, StorageError> {
    let (buffer, mut entry) = (Buffer::zeroed(8), [0; 8]);
    storage.read(at, buffer.clone().into()).await?;
    buffer.copy_to(0, &mut entry);
    Ok(u64::from_be_bytes(entry))
}

/// Changes the entry of this number in a table's bytes.
pub(super) fn set_number(table: &mut [u8], number: usize, entry: u64) -> Result<(), BrokenInvariant> {
    let slot = table
        .as_chunks_mut()
        .0
        .get_mut(number)
        .ok_or_else(|| broken_invariant("a table has the entry that is changed"))?;
    *slot = entry.to_be_bytes();
    Ok(())
}

/// Returns a length that a field of 32 bits has room for.
pub(in crate::qcow2) fn narrow(length: u64) -> Result<u32, BrokenInvariant> {
    u32::try_from(length).map_err(|_| broken_invariant("a length has the 32 bits of its field"))
}

/// Writes bytes.
pub(in crate::qcow2) async fn put(storage: &dyn Storage, at: u64, bytes: &[u8]) -> Result<(), StorageError> {
    storage.write(at, Buffer::from_slice(bytes).into()).await
}

/// The numbers in a table's bytes.
pub(in crate::qcow2) fn numbers(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.as_chunks::<8>().0.iter().map(|entry| u64::from_be_bytes(*entry))
}

/// The parts in which a table of `bytes` at `at` is read, up to the end of a file of `length` bytes: there are no
/// entries past it.
pub(in crate::qcow2) fn pieces(at: u64, bytes: u64, file: u64) -> impl Iterator<Item = (u64, u64)> {
    let end = at.saturating_add(bytes).min(file.max(at));
    (at..end).step_by(to_usize(PIECE)).map(move |from| (from, PIECE.min(at.saturating_add(bytes) - from)))
}

/// Calls `each` with the offset of each entry of a table that is not zero, and the entry.
pub(super) async fn entries<E: From<StorageError>>(
    storage: &dyn Storage,
    at: u64,
    bytes: u64,
    file: u64,
    mut each: impl FnMut(u64, u64) -> Result<(), E>,
) -> Result<(), E> {
    for (from, length) in pieces(at, bytes, file) {
        let piece = self::bytes(storage, from, length).await?;
        for (place, entry) in (from..).step_by(8).zip(numbers(&piece)) {
            if entry != 0 {
                each(place, entry)?;
            }
        }
    }
    Ok(())
}

/// How many tables of `length` bytes are read at once.
pub(super) fn together(length: u64) -> usize {
    to_usize(AHEAD / length.max(1)).clamp(1, 16)
}

/// Several tables of one length, read at once, into memory that is used again: new memory for each of them would cost
/// as much as to read them.
#[derive(Debug, Default)]
pub(super) struct Reader {
    buffers: Vec<Buffer>,
    table: Vec<u8>,
}

impl Reader {
    /// Reads the tables at these places, at most [`together`]; zeros behind the end.
    pub(super) async fn read(&mut self, storage: &dyn Storage, at: &[u64], length: u64) -> Result<(), StorageError> {
        let length = to_usize(length);
        self.buffers.retain(|buffer| buffer.len() == length);
        while self.buffers.len() < at.len() {
            self.buffers.push(Buffer::zeroed(length));
        }
        let reads = at.iter().zip(&self.buffers).map(|(at, buffer)| storage.read(*at, buffer.clone().into()));
        try_join_all(reads).await.map(|_| ())
    }

    /// The bytes of one of the tables that were read last.
    pub(super) fn table(&mut self, number: usize) -> Result<&[u8], BrokenInvariant> {
        let buffer =
            self.buffers.get(number).ok_or_else(|| broken_invariant("a table is looked at after it was read"))?;
        self.table.resize(buffer.len(), 0);
        buffer.copy_to(0, &mut self.table);
        Ok(&self.table)
    }
}
