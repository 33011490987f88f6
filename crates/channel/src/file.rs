//! A seekable transport: vectored transfers at file offsets.
//!
//! The law of this module: a transfer has no position but the one it is given, so any number of threads may read and
//! write one file at once.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::sync::Arc;

use crate::counters::{Counters, DirectionCounters};
use crate::error::{ChannelError, Operation};
use crate::system_call;
use crate::uri::Uri;
use crate::vector::{Cursor, In, Out};

type Result<T> = std::result::Result<T, ChannelError>;

/// Access mode of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reading a file that exists.
    Read,
    /// Reading and writing; created with mode 0600 if it does not exist, never truncated.
    ReadWrite,
}

/// An open file, or block device, from a base offset on.
///
/// ```
/// use std::io::IoSlice;
/// use limosa_channel::FileChannel;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let file = FileChannel::from_file(tempfile::tempfile()?, 0);
/// file.write_all_vectored_at(&[IoSlice::new(b"head"), IoSlice::new(b"tail")], 4096)?;
/// let mut tail = [0; 4];
/// file.read_exact_at(&mut tail, 4100)?;
/// assert_eq!(&tail, b"tail");
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct FileChannel {
    file: File,
    base: u64,
    name: Arc<str>,
    output: DirectionCounters,
    input: DirectionCounters,
}

impl FileChannel {
    /// Opens the file of a `file:` URI; its offset becomes the base of every transfer. `fd:N` takes possession of an
    /// inherited descriptor.
    ///
    /// # Errors
    /// If it cannot be opened; [`ChannelError::Unsupported`] if it has no offsets (a pipe, a socket, a terminal).
    pub fn open(uri: &Uri, access: Access) -> Result<Self> {
        let operation = Operation::Open;
        let name: Arc<str> = uri.to_string().into();
        let failed = |source: io::Error| ChannelError::setup(operation, name.clone(), source);
        let unsupported = |why| ChannelError::Unsupported { operation, peer: name.clone(), why };
        let (file, base) = match uri {
            Uri::File { path, offset } => {
                let mut options = File::options();
                options.read(true).write(access == Access::ReadWrite).create(access == Access::ReadWrite).mode(0o600);
                // Without it, opening a named pipe would wait for its other end.
                options.custom_flags(libc::O_NONBLOCK);
                (options.open(path).map_err(failed)?, *offset)
            }
            Uri::Fd(number) => (crate::descriptor::take(*number, operation)?.into(), 0),
            Uri::Tcp { .. } | Uri::Unix(_) | Uri::Vsock { .. } | Uri::Exec(_) | Uri::Stdio => {
                return Err(unsupported("a stream has no offsets; expected a file"));
            }
        };
        let kind = file.metadata().map_err(failed)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(unsupported("it has no offsets; expected a regular file or a block device"));
        }
        Ok(Self { file, base, name, output: DirectionCounters::default(), input: DirectionCounters::default() })
    }

    /// Creates a channel over an open file; offset 0 is the file's byte `base`.
    pub fn from_file(file: File, base: u64) -> Self {
        use std::os::fd::AsRawFd;
        let name = format!("the file on descriptor {}", file.as_raw_fd()).into();
        Self { file, base, name, output: DirectionCounters::default(), input: DirectionCounters::default() }
    }

    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    /// As [`write_all_vectored_at`](Self::write_all_vectored_at).
    pub fn write_all_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.write_all_vectored_at(&[IoSlice::new(bytes)], offset)
    }

    /// Writes all slices consecutively from `offset` on.
    ///
    /// # Errors
    /// [`ChannelError::Io`] with the file offset at which writing failed (disk full, past the largest offset, ...).
    pub fn write_all_vectored_at(&self, list: &[IoSlice<'_>], offset: u64) -> Result<()> {
        self.write_cursor(Cursor::gather(list), offset)
    }

    /// As [`write_all_vectored_at`](Self::write_all_vectored_at), for memory that must not become a slice.
    ///
    /// # Errors
    /// As `write_all_vectored_at`.
    ///
    /// # Safety
    /// Every entry must name memory that stays mapped and readable until the call returns.
    #[allow(unsafe_code, reason = "passes its own contract on")]
    pub unsafe fn write_all_raw_at(&self, list: &[libc::iovec], offset: u64) -> Result<()> {
        // SAFETY: the caller promises what the cursor asks for, for as long as this call lasts.
        self.write_cursor(unsafe { Cursor::gather_raw(list) }, offset)
    }

    /// Reads exactly `bytes.len()` bytes from `offset` on.
    ///
    /// # Errors
    /// As [`read_exact_vectored_at`](Self::read_exact_vectored_at).
    pub fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> Result<()> {
        self.read_exact_vectored_at(&mut [IoSliceMut::new(bytes)], offset)
    }

    /// Fills all slices with the bytes from `offset` on.
    ///
    /// # Errors
    /// [`ChannelError::Closed`] with the file offset of the end, if the file is shorter; otherwise
    /// [`ChannelError::Io`].
    pub fn read_exact_vectored_at(&self, list: &mut [IoSliceMut<'_>], offset: u64) -> Result<()> {
        self.read_cursor(Cursor::scatter(list), offset)
    }

    /// As [`read_exact_vectored_at`](Self::read_exact_vectored_at), straight into memory that must not become a slice.
    ///
    /// # Errors
    /// As `read_exact_vectored_at`.
    ///
    /// # Safety
    /// Every entry must name memory that stays mapped and writable until the call returns, and to which no reference
    /// exists.
    #[allow(unsafe_code, reason = "passes its own contract on")]
    pub unsafe fn read_exact_raw_at(&self, list: &[libc::iovec], offset: u64) -> Result<()> {
        // SAFETY: the caller promises what the cursor asks for, for as long as this call lasts.
        self.read_cursor(unsafe { Cursor::scatter_raw(list) }, offset)
    }

    fn write_cursor(&self, mut gather: Cursor<'_, Out>, offset: u64) -> Result<()> {
        let (operation, counters) = (Operation::Write, &self.output);
        let mut position = self.position(operation, offset)?;
        while let Some(batch) = gather.batch(usize::MAX) {
            counters.called();
            match system_call::write_at(self.file.as_fd(), &batch, self.kernel_offset(operation, position)?) {
                Ok(0) => return Err(self.failed(operation, position, io::ErrorKind::WriteZero.into())),
                Ok(moved) => {
                    counters.moved(moved, batch.bytes());
                    position = position.saturating_add(moved as u64);
                    gather.advance(moved);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => counters.interrupted(),
                Err(error) => return Err(self.failed(operation, position, error)),
            }
        }
        Ok(())
    }

    fn read_cursor(&self, mut scatter: Cursor<'_, In>, offset: u64) -> Result<()> {
        let (operation, counters) = (Operation::Read, &self.input);
        let begin = self.position(operation, offset)?;
        let mut position = begin;
        while let Some(batch) = scatter.batch(usize::MAX) {
            counters.called();
            match system_call::read_at(self.file.as_fd(), &batch, self.kernel_offset(operation, position)?) {
                Ok(0) => {
                    let got = position - begin;
                    let wanted = got.saturating_add(scatter.left());
                    let peer = Arc::clone(&self.name);
                    return Err(ChannelError::Closed { operation, peer, offset: position, got, wanted });
                }
                Ok(moved) => {
                    counters.moved(moved, batch.bytes());
                    position = position.saturating_add(moved as u64);
                    scatter.advance(moved);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => counters.interrupted(),
                Err(error) => return Err(self.failed(operation, position, error)),
            }
        }
        Ok(())
    }

    fn position(&self, operation: Operation, offset: u64) -> Result<u64> {
        self.base
            .checked_add(offset)
            .ok_or_else(|| self.failed(operation, u64::MAX, io::ErrorKind::InvalidInput.into()))
    }

    fn kernel_offset(&self, operation: Operation, position: u64) -> Result<i64> {
        i64::try_from(position).map_err(|_| self.failed(operation, position, io::ErrorKind::InvalidInput.into()))
    }

    fn failed(&self, operation: Operation, offset: u64, source: io::Error) -> ChannelError {
        ChannelError::Io { operation, peer: Arc::clone(&self.name), offset: Some(offset), source }
    }

    /// Returns the file offset that corresponds to offset 0.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Returns the file, for everything but transfers: its length, syncing, locks.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns this channel's counters.
    pub fn counters(&self) -> Counters {
        Counters::of(&self.output, &self.input)
    }

    /// Returns the file's name, for messages.
    pub fn peer(&self) -> &str {
        &self.name
    }
}

impl AsFd for FileChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
