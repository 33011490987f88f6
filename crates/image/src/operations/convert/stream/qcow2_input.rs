//! A qcow2 image that comes from a pipe.
//!
//! Law: bytes that are read are in memory or still to come; bytes that were passed are gone, and asking for them fails.
//! Kept are the front of the image, up to the last table if all tables are there (at most [`FRONT_MOST`]), and the
//! last [`WINDOW`] bytes. A conversion reads a disk in its order, so an image is read in one pass if its contents are
//! in that order, each table in front of them or close to the contents that it maps: as `qemu-img convert` and this
//! program write them.

use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::sync::Arc;

use limosa_page::{to_u64, to_usize};
use limosa_storage::{Alignment, Extent, ExtentKind, IoVector, Operation, Request, Storage, StorageError, ZeroOptions};
use parking_lot::Mutex;

use super::{InputStream, unsupported};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::qcow2::{Encryption, Header, ImageParts, Qcow2, Qcow2Options, last_table};

/// The longest front that is kept, in bytes.
const FRONT_MOST: u64 = 256 << 20;
/// Bytes that are kept behind the front: more than a conversion reads at a time.
const WINDOW: u64 = 64 << 20;
/// Bytes that are read at once.
const CHUNK: u64 = 1 << 20;

/// Opens the image in a stream. What it has behind its contents is read when they are.
///
/// # Errors
/// [`ImageError::Unsupported`]: it refers to another file, or is encrypted; what is wrong with the image; the stream
/// cannot be read.
pub(in crate::operations::convert) async fn open_qcow2(
    stream: InputStream,
) -> Result<(Arc<dyn Disk>, PipeRest), ImageError> {
    let storage = Arc::new(PipeStorage::new(stream));
    let header = Header::read(&*storage).await?;
    let refuse = |what: &str| Err(unsupported(storage.name(), format!("{what}, so it cannot be read from a pipe")));
    if header.backing.is_some() {
        return refuse("it has a backing file, whose name is relative to the image's place");
    }
    if header.features.data_file() {
        return refuse("its contents are in another file");
    }
    if header.encryption != Encryption::None {
        return refuse("it is encrypted");
    }
    // The L1 table tells where the other tables are.
    let l1_end = header.l1.0.0.saturating_add(u64::from(header.l1.1) * 8);
    if l1_end > FRONT_MOST {
        return refuse("its L1 table is not in front of its contents");
    }
    storage.keep_front(l1_end);
    let tables_end = last_table(&*storage, &header).await?.saturating_add(header.geometry().cluster_size());
    storage.keep_front(if tables_end <= FRONT_MOST { tables_end.max(l1_end) } else { l1_end });
    // If the stream has ended, its length is known now: an L1 table that was cut off is refused as in a file.
    let header = Header::read(&*storage).await?;
    let parts = ImageParts::new(Arc::clone(&storage) as Arc<dyn Storage>, header);
    Ok((Qcow2::open(parts, Qcow2Options::default().read_only(true)).await?, PipeRest(storage)))
}

/// The rest of an image from a pipe, behind its contents: snapshots, bitmaps, space.
#[derive(Debug)]
pub(in crate::operations::convert) struct PipeRest(Arc<PipeStorage>);

impl PipeRest {
    /// Reads the stream to its end. Who writes it is not ended by a signal then, and an image that was cut off behind
    /// its contents is noticed.
    ///
    /// # Errors
    /// The stream cannot be read, or ends within the image.
    pub(in crate::operations::convert) async fn check(self) -> Result<(), ImageError> {
        {
            let mut state = self.0.state.lock();
            self.0.advance(&mut state, u64::MAX)?;
        }
        Header::read(&*self.0).await.map(drop)
    }
}

/// The bytes of a stream that are kept.
struct PipeStorage {
    name: Arc<str>,
    state: Mutex<State>,
}

struct State {
    reader: Box<dyn Read + Send>,
    /// Bytes from the beginning on.
    front: Vec<u8>,
    /// Where the front ends once it is complete.
    front_end: u64,
    /// The last bytes behind the front, a ring: byte `at` is at `at % WINDOW`.
    window: Vec<u8>,
    /// Bytes that have been read.
    at: u64,
    ended: bool,
    /// The stream could not be read: what follows is not known.
    failed: Option<StorageError>,
}

impl std::fmt::Debug for PipeStorage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PipeStorage").field("name", &self.name).finish_non_exhaustive()
    }
}

impl PipeStorage {
    fn new(stream: InputStream) -> Self {
        let state = State {
            reader: stream.reader,
            front: Vec::new(),
            front_end: CHUNK * 2,
            window: Vec::new(),
            at: 0,
            ended: false,
            failed: None,
        };
        Self { name: stream.name, state: Mutex::new(state) }
    }

    /// Keeps the image's beginning up to `end`. What is in memory already and follows it stays in the window.
    fn keep_front(&self, end: u64) {
        let mut state = self.state.lock();
        if end > state.front_end {
            state.front_end = end;
        }
    }

    /// Reads bytes into memory up to `end`, or to the end of the stream.
    fn advance(&self, state: &mut State, end: u64) -> Result<(), StorageError> {
        while state.at < end && !state.ended {
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            let failed = |at, error| StorageError::for_request(Operation::Read, &self.name, at, CHUNK, error);
            match state.read() {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => state.failed = Some(failed(state.at, error)),
            }
        }
        Ok(())
    }

    fn read_into(&self, offset: u64, into: &IoVector) -> Result<(), StorageError> {
        let mut state = self.state.lock();
        let mut at = offset;
        for buffer in into.buffers() {
            let mut filled = 0;
            // In steps: a long read may be longer than the window.
            while filled < buffer.len() {
                let end = at + to_u64(buffer.len() - filled).min(CHUNK);
                self.advance(&mut state, end)?;
                let Some(part) = state.kept(at..end) else { return Err(self.passed(&state, at..end)) };
                // Bytes behind the end of a storage are zeros.
                let copied = if part.is_empty() { to_usize(end - at) } else { part.len() };
                if part.is_empty() {
                    buffer.slice(filled..filled + copied).clear();
                } else {
                    buffer.copy_from(filled, part);
                }
                filled += copied;
                at += to_u64(copied);
            }
        }
        Ok(())
    }

    fn passed(&self, state: &State, range: Range<u64>) -> StorageError {
        let what = format!(
            "the pipe is at byte {:#x} already: the image's contents are not in the order of its disk, so it has to be \
             stored in a file first",
            state.at
        );
        let length = range.end - range.start;
        StorageError::for_request(Operation::Read, &self.name, range.start, length, std::io::Error::other(what))
    }

    fn refuse<T: Send + 'static>(&self, operation: Operation) -> Request<T> {
        let error = std::io::Error::from(ErrorKind::Unsupported);
        Box::pin(std::future::ready(Err(StorageError::for_storage(operation, &self.name, error))))
    }
}

impl State {
    /// Reads some bytes.
    fn read(&mut self) -> std::io::Result<()> {
        let read = if self.at < self.front_end && to_u64(self.front.len()) == self.at {
            let start = self.front.len();
            let most = to_usize((self.front_end - self.at).min(CHUNK));
            self.front.resize(start + most, 0);
            let read = self.reader.read(self.front.get_mut(start..).unwrap_or_default());
            self.front.truncate(start + read.as_ref().copied().unwrap_or(0));
            read?
        } else {
            self.window.resize(to_usize(WINDOW), 0);
            let start = to_usize(self.at % WINDOW);
            let end = (start + to_usize(CHUNK)).min(self.window.len());
            self.reader.read(self.window.get_mut(start..end).unwrap_or_default())?
        };
        self.at += to_u64(read);
        self.ended = read == 0;
        Ok(())
    }

    /// The beginning of a range that has been read; empty: it is behind the end. `None`: it is not kept.
    fn kept(&self, range: Range<u64>) -> Option<&[u8]> {
        let end = range.end.min(self.at);
        let front = to_u64(self.front.len());
        if range.start >= end {
            return Some(&[]);
        }
        if range.start < front {
            return self.front.get(to_usize(range.start)..to_usize(end.min(front)));
        }
        if range.start < self.at.saturating_sub(WINDOW) {
            return None;
        }
        let start = to_usize(range.start % WINDOW);
        let length = to_usize(end - range.start).min(self.window.len() - start);
        self.window.get(start..start + length)
    }
}

impl Storage for PipeStorage {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// The bytes that were read, once the stream has ended; before that the most that a file can have.
    fn length(&self) -> Result<u64, StorageError> {
        let state = self.state.lock();
        Ok(if state.ended { state.at } else { i64::MAX.unsigned_abs() })
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn alignment(&self) -> Alignment {
        Alignment::NONE
    }

    fn read(&self, offset: u64, into: IoVector) -> Request {
        Box::pin(std::future::ready(self.read_into(offset, &into)))
    }

    fn write(&self, _offset: u64, _from: IoVector) -> Request {
        self.refuse(Operation::Write)
    }

    fn write_zeroes(&self, _range: Range<u64>, _how: ZeroOptions) -> Request {
        self.refuse(Operation::WriteZeroes)
    }

    fn discard(&self, _range: Range<u64>) -> Request {
        self.refuse(Operation::Discard)
    }

    fn flush(&self) -> Request {
        Box::pin(std::future::ready(Ok(())))
    }

    fn set_len(&self, _len: u64) -> Request {
        self.refuse(Operation::SetLength)
    }

    fn allocate(&self, _range: Range<u64>) -> Request {
        self.refuse(Operation::Allocate)
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, StorageError> {
        Ok(vec![Extent::new(range, ExtentKind::Data)])
    }

    fn clone_range(&self, _offset: u64, _from: &Arc<dyn Storage>, _from_offset: u64, _length: u64) -> Request<bool> {
        Box::pin(std::future::ready(Ok(false)))
    }
}

#[cfg(test)]
mod tests {
    use limosa_storage::{Buffer, block_on};

    use super::*;

    fn storage(length: u64) -> PipeStorage {
        let bytes = (0..length / 8).flat_map(u64::to_be_bytes).collect::<Vec<_>>();
        PipeStorage::new(InputStream::new("pipe", None, std::io::Cursor::new(bytes)))
    }

    fn read(storage: &PipeStorage, at: u64, length: usize) -> Result<Vec<u8>, StorageError> {
        let found = Buffer::zeroed(length);
        block_on(storage.read(at, found.clone().into()))?;
        Ok(found.to_vec())
    }

    #[test]
    fn the_front_and_the_last_bytes_can_be_read_again_and_what_is_between_is_gone() {
        let storage = storage(200 << 20);
        storage.keep_front(5 << 20);
        let word = |at: u64| (at / 8).to_be_bytes().to_vec();
        assert_eq!(read(&storage, 150 << 20, 8).unwrap(), word(150 << 20));
        for at in [0, (5 << 20) - 8, (150 << 20) - (32 << 20), (151 << 20) - 8] {
            assert_eq!(read(&storage, at, 8).unwrap(), word(at), "{at:#x}");
        }
        let passed = read(&storage, 6 << 20, 8).unwrap_err();
        assert!(passed.source.to_string().contains("stored in a file first"), "{passed:?}");
        // A read over the border of the ring, and one that is longer than the window.
        assert!(read(&storage, (192 << 20) - 4096, 8192).unwrap()[4096..].starts_with(&word(192 << 20)));
        assert_eq!(storage.length().unwrap(), i64::MAX.unsigned_abs());
        let tail = read(&storage, (200 << 20) - 8, 16).unwrap();
        assert_eq!((&tail[..8], &tail[8..]), (&*word((200 << 20) - 8), &[0; 8][..]));
        assert_eq!(storage.length().unwrap(), 200 << 20);
    }
}
