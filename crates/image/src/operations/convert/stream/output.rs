//! An image that is written to a pipe, in order.
//!
//! Law: each byte is written once, in its place. What the conversion leaves out as zeros is written as zeros where the
//! image has bytes for it: everywhere in a raw image, in qcow2 in the clusters that were found to have contents before
//! the first byte was written. A source that gets contents elsewhere meanwhile has changed, and the conversion fails.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use limosa_page::{to_u64, to_usize};
use limosa_storage::{IoVector, Operation, StorageError};
use parking_lot::Mutex;

use super::{OutputStream, unsupported};
use crate::disk::{BlockStatus, Disk, MapEntry, Pending};
use crate::error::ImageError;
use crate::new_image::NewImageFormat;
use crate::offset::GuestOffset;
use crate::operations::convert::plan::Content;
use crate::operations::convert::source::Source;
use crate::operations::operation::{DiskOperation, OperationError};
use crate::preallocation::Preallocation;
use crate::probe::Format;
use crate::qcow2::{CreateOptions, StreamedImage, WantedClusters};

/// Zeros that are written at once.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// The disk of an image that is written in order.
pub(in crate::operations::convert) struct OutputImage {
    name: Arc<str>,
    format: Format,
    len: AtomicU64,
    /// The clusters that are written; `None`: all bytes.
    wanted: Option<(WantedClusters, u64)>,
    state: Mutex<State>,
}

struct State {
    writer: Box<dyn Write + Send>,
    /// Offset on the disk of the next byte that is written or left out.
    at: u64,
}

impl std::fmt::Debug for OutputImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OutputImage").field("name", &self.name).field("len", &self.len).finish_non_exhaustive()
    }
}

/// Finds the clusters of a new image that get contents of the source.
///
/// # Errors
/// [`OperationError::Failed`]: the source's map cannot be read; [`ImageError::Options`]: there can be no such image.
pub(crate) async fn wanted_clusters(
    source: &Source,
    options: &CreateOptions,
    name: &Arc<str>,
) -> Result<WantedClusters, OperationError> {
    let mut wanted = WantedClusters::new(options, source.len(), name)?;
    let mut at = 0;
    while at < source.len() {
        let span = source.map(at, None).await.map_err(OperationError::at(DiskOperation::Mapping, at))?;
        if span.content == Content::Data {
            wanted.insert(span.range.clone());
        }
        at = span.range.end;
    }
    Ok(wanted)
}

impl OutputImage {
    /// An image of `source`, or of a disk of unknown length; the bytes in front of its contents are written.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`]: it cannot be written in order; [`OperationError::Failed`]: the source's map cannot
    /// be read; the stream cannot be written.
    pub(in crate::operations::convert) async fn begin(
        stream: OutputStream,
        format: &NewImageFormat,
        source: Option<&Source>,
    ) -> Result<Self, OperationError> {
        let name = Arc::clone(&stream.name);
        let refuse = |what: &str| {
            Err(unsupported(&name, format!("{what}, so the image cannot be written to a pipe; write it to a file"))
                .into())
        };
        let len = source.map_or(0, Source::len);
        if let Some(what) = unstreamable(format) {
            return refuse(what);
        }
        let (format, wanted, writer) = match format {
            NewImageFormat::Raw(_) | NewImageFormat::Luks(_) => {
                (Format::Raw, None, stream.open(source.map(Source::len))?)
            }
            NewImageFormat::Qcow2(options) => {
                let Some(source) = source else {
                    return refuse(
                        "it begins with tables that describe its contents, and a raw pipe is read only once",
                    );
                };
                let wanted = wanted_clusters(source, options, &name).await?;
                let image = StreamedImage::new(&(**options).clone().size(len), &wanted, &name)?;
                let mut writer = stream.open(Some(image.len()))?;
                let written = image.write_tables(&wanted, &mut writer);
                written
                    .map_err(|error| failed(&name, 0, len, error))
                    .map_err(OperationError::at(DiskOperation::Writing, 0))?;
                (Format::Qcow2, Some((wanted, options.cluster_size)), writer)
            }
        };
        Ok(Self { name, format, len: AtomicU64::new(len), wanted, state: Mutex::new(State { writer, at: 0 }) })
    }

    /// Writes zeros up to `at` where the image has bytes that were left out.
    fn skip_to(&self, state: &mut State, at: u64) -> Result<(), ImageError> {
        let Some((wanted, cluster)) = &self.wanted else {
            return self.zeros(state, at);
        };
        while state.at < at {
            let end = (state.at / cluster + 1).saturating_mul(*cluster).min(at);
            if wanted.contains(state.at) {
                self.zeros(state, end)?;
            } else {
                // The clusters of a table without contents are left out at once.
                state.at = wanted.next(end).min(at);
            }
        }
        Ok(())
    }

    fn zeros(&self, state: &mut State, end: u64) -> Result<(), ImageError> {
        while state.at < end {
            let part = to_usize((end - state.at).min(to_u64(ZEROS.len())));
            self.put(state, ZEROS.get(..part).unwrap_or(&ZEROS))?;
        }
        Ok(())
    }

    fn put(&self, state: &mut State, bytes: &[u8]) -> Result<(), ImageError> {
        let written = state.writer.write_all(bytes);
        written.map_err(|error| failed(&self.name, state.at, to_u64(bytes.len()), error))?;
        state.at += to_u64(bytes.len());
        Ok(())
    }

    fn write_in_order(&self, at: u64, from: &IoVector) -> Result<(), ImageError> {
        let mut state = self.state.lock();
        if at < state.at {
            return Err(limosa_page::broken_invariant("a pipe is written in order").into());
        }
        self.skip_to(&mut state, at)?;
        for buffer in from.buffers() {
            let bytes = buffer.to_vec();
            let Some((wanted, cluster)) = &self.wanted else {
                self.put(&mut state, &bytes)?;
                continue;
            };
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let length = to_usize(cluster - state.at % cluster).min(rest.len());
                let (part, after) = rest.split_at(length);
                if wanted.contains(state.at) {
                    self.put(&mut state, part)?;
                } else if part.iter().all(|byte| *byte == 0) {
                    state.at += to_u64(length);
                } else {
                    let what = format!("the source got contents at {} while it was read", GuestOffset(state.at));
                    return Err(unsupported(&self.name, what));
                }
                rest = after;
            }
        }
        Ok(())
    }

    fn end(&self) -> Result<(), ImageError> {
        let mut state = self.state.lock();
        let len = self.len();
        let end = self.wanted.as_ref().map_or(Some(len), |(_, cluster)| len.checked_next_multiple_of(*cluster));
        self.skip_to(&mut state, end.unwrap_or(len))?;
        state.writer.flush().map_err(|error| failed(&self.name, len, 0, error))
    }
}

/// Why an image of this format cannot be written in order.
fn unstreamable(format: &NewImageFormat) -> Option<&'static str> {
    let options = match format {
        NewImageFormat::Luks(_) => return Some("key slots and contents of a LUKS volume have no single order"),
        NewImageFormat::Raw(options) => {
            return (options.preallocation != Preallocation::Off).then_some("space in a pipe cannot be preallocated");
        }
        NewImageFormat::Qcow2(options) => options,
    };
    let reasons = [
        (options.backing_file.is_some(), "a backing file's name is relative to the image's place"),
        (options.data_file.is_some(), "contents in a data file are not part of the image"),
        (options.encryption.is_some(), "contents are encrypted by their place, which a pipe does not have"),
        (options.preallocation != Preallocation::Off, "space in a pipe cannot be preallocated"),
    ];
    reasons.into_iter().find_map(|(is_so, why)| is_so.then_some(why))
}

fn failed(name: &Arc<str>, at: u64, length: u64, error: std::io::Error) -> ImageError {
    StorageError::for_request(Operation::Write, name, at, length, error).into()
}

impl Disk for OutputImage {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn format(&self) -> &'static str {
        self.format.name()
    }

    fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, _at: GuestOffset, _into: IoVector) -> Pending<'_> {
        Box::pin(std::future::ready(Err(unsupported(&self.name, "a pipe that is written cannot be read"))))
    }

    fn write(&self, at: GuestOffset, from: IoVector) -> Pending<'_> {
        Box::pin(async move { self.write_in_order(at.0, &from) })
    }

    fn write_zeroes(&self, at: GuestOffset, length: u64, _unmap: bool) -> Pending<'_> {
        Box::pin(async move {
            let mut state = self.state.lock();
            self.skip_to(&mut state, at.0.saturating_add(length))
        })
    }

    fn discard(&self, _at: GuestOffset, _length: u64) -> Pending<'_> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn flush(&self) -> Pending<'_> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn map(&self, _at: GuestOffset, length: u64) -> Pending<'_, MapEntry> {
        Box::pin(std::future::ready(Ok(MapEntry::new(length.max(1), BlockStatus::Unallocated))))
    }

    fn grow(&self, size: u64) -> Pending<'_> {
        self.len.fetch_max(size, Ordering::AcqRel);
        Box::pin(std::future::ready(Ok(())))
    }

    fn close(&self) -> Pending<'_> {
        Box::pin(async move { self.end() })
    }
}
