//! Conversions from and to pipes: streams of bytes that are read or written once, in order.
//!
//! Law: memory is bounded, however much comes through a pipe. Bytes that are written to one are final: nothing is
//! written a second time.
//!
//! - [`raw_input`]: bytes of unknown length; the target grows while they are read.
//! - [`qcow2_input`]: a qcow2 image whose contents are in the order of the disk.
//! - [`output`]: a raw or qcow2 image that is written in order.

mod output;
mod qcow2_input;
mod raw_input;

use std::fmt;
use std::io::{self, Cursor, Read, Write};
use std::sync::Arc;

use limosa_storage::{Operation, StorageError};

use crate::error::ImageError;
use crate::probe::{Format, Guess, LOOKED_AT, guess};
pub(super) use output::OutputImage;
pub(crate) use output::wanted_clusters;
pub(super) use qcow2_input::{PipeRest, open_qcow2};
pub(super) use raw_input::{Piece, RawInput};

/// Bytes that come in order, once: a pipe that is read.
#[non_exhaustive]
pub struct InputStream {
    /// Its name in messages.
    pub name: Arc<str>,
    /// The format of the image in it; `None`: it is probed.
    pub format: Option<Format>,
    reader: Box<dyn Read + Send>,
}

impl InputStream {
    /// A stream that is read from `reader`.
    #[must_use]
    pub fn new(name: impl Into<Arc<str>>, format: Option<Format>, reader: impl Read + Send + 'static) -> Self {
        Self { name: name.into(), format, reader: Box::new(reader) }
    }

    /// The format of its image, which is probed if it is not given.
    pub(super) fn find_format(&mut self) -> Result<Format, ImageError> {
        if let Some(format) = self.format {
            return Ok(format);
        }
        let mut head = Vec::new();
        let read = (&mut self.reader).take(LOOKED_AT as u64).read_to_end(&mut head);
        read.map_err(|error| StorageError::for_request(Operation::Read, &self.name, 0, LOOKED_AT as u64, error))?;
        let mut start = head.clone();
        start.resize(LOOKED_AT, 0);
        let reader = std::mem::replace(&mut self.reader, Box::new(io::empty()));
        self.reader = Box::new(Cursor::new(head).chain(reader));
        match guess(&start) {
            Guess::Known(format) => Ok(format),
            Guess::Foreign(name) => Err(ImageError::Unsupported {
                image: Arc::clone(&self.name),
                what: format!("it looks like {name}, which is not supported; if it is raw, its format has to be given"),
            }),
        }
    }
}

impl fmt::Debug for InputStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InputStream").field("name", &self.name).field("format", &self.format).finish_non_exhaustive()
    }
}

/// Bytes that are written in order, once: a pipe that another program reads.
#[non_exhaustive]
pub struct OutputStream {
    /// Its name in messages.
    pub name: Arc<str>,
    open: Box<OpenWriter>,
}

/// Opens the writer of an image of this length in bytes; `None`: it is not known.
type OpenWriter = dyn FnOnce(Option<u64>) -> io::Result<Box<dyn Write + Send>> + Send;

impl OutputStream {
    /// A stream that is written to `writer`.
    #[must_use]
    pub fn new(name: impl Into<Arc<str>>, writer: impl Write + Send + 'static) -> Self {
        Self::opened_by(name, |_| Ok(Box::new(writer)))
    }

    /// A stream whose writer is opened when the length of the image in bytes is known; `None`: it is not known before
    /// its end.
    #[must_use]
    pub fn opened_by(
        name: impl Into<Arc<str>>,
        open: impl FnOnce(Option<u64>) -> io::Result<Box<dyn Write + Send>> + Send + 'static,
    ) -> Self {
        Self { name: name.into(), open: Box::new(open) }
    }

    fn open(self, length: Option<u64>) -> Result<Box<dyn Write + Send>, ImageError> {
        let Self { name, open } = self;
        Ok(open(length).map_err(|error| StorageError::for_storage(Operation::Open, &name, error))?)
    }
}

impl fmt::Debug for OutputStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutputStream").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The streams of a conversion.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Streams {
    /// The source, which is the only one.
    pub input: Option<InputStream>,
    /// The target, in place of the place that the request names.
    pub output: Option<OutputStream>,
}

impl Streams {
    /// Source and target, where they are streams.
    #[must_use]
    pub const fn new(input: Option<InputStream>, output: Option<OutputStream>) -> Self {
        Self { input, output }
    }
}

/// The error of a stream that cannot be used like that.
pub(super) fn unsupported(name: &Arc<str>, what: impl Into<String>) -> ImageError {
    ImageError::Unsupported { image: Arc::clone(name), what: what.into() }
}
