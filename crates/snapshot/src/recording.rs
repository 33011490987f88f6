//! The contents of a file that a migration stream was recorded into (`migrate exec:cat>FILE`, `file:FILE`, `virsh
//! save`).
//!
//! Such a file has every page in the order it was sent, again and again as the guest wrote to it, so it can only be
//! read from its beginning: it is summarized here, not served.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use limosa_page::{PAGE_SIZE, PageBitmap, PageNumber, invariant, to_usize};
use limosa_stream::devices::{self, TAIL_LIMIT};
use limosa_stream::{Configuration, DecoderOptions, Event, RamBlock, StreamWalk, WalkError};

use crate::error::SnapshotError;
use crate::foreign::{Decompression, Foreign, ForeignError, Forward, Parts, VmLocation};
use crate::layout::MEMORY_PAGES_MAX;
use crate::reader::Snapshot;
use crate::summary::{BlockSummary, DeviceSummary, SaveImageSummary, Summary, uuid_text, vmdescs};
use rustix::fs::SeekFrom;

/// Summarizes a snapshot, a recorded stream or a libvirt save image.
///
/// # Errors
/// If the file cannot be read, is of another kind, or cannot be unpacked.
pub fn summarize_file(path: &Path) -> Result<Summary, ForeignError> {
    Foreign::open(path, None)?.summary()
}

impl Foreign {
    /// The contents of the file.
    ///
    /// # Errors
    /// As [`summarize_file`]; or if this is a pipe, which can be read only once.
    pub fn summary(self) -> Result<Summary, ForeignError> {
        let (path, described) = (self.path().to_path_buf(), self.describe());
        let Parts { file, place, image } = self.into_parts()?;
        let metadata = file.metadata().map_err(|error| SnapshotError::io("look at it", &path, None, error))?;
        let mut summary = match place {
            VmLocation::Mapped(offset) => Snapshot::from_file_at(file, &path, offset)?.summary(),
            VmLocation::Stream(offset, None) => {
                let read_at = |offset, into: &mut [u8]| file.read_at(into, offset);
                summarize_stream(&path, offset, metadata.len(), read_at)?
            }
            VmLocation::Stream(offset, Some(decompressor)) => {
                let input = positioned(&file, offset)
                    .map_err(|error| SnapshotError::io("read it", &path, Some(offset), error))?;
                let (unpacking, output) = Decompression::start(decompressor, input, &path)?;
                let mut forward = Forward::new(output);
                let read_at = |offset, into: &mut [u8]| forward.read_at(offset, into);
                let summarized = summarize_stream(&path, 0, u64::MAX, read_at);
                drop(forward);
                match summarized {
                    Ok(summary) => unpacking.finish(&path).map(|()| summary)?,
                    Err(error) => return Err(unpacking.reason(&path).unwrap_or(error.into())),
                }
            }
        };
        if !matches!(place, VmLocation::Mapped(0)) {
            summary.missing_manifest_reason = Some(format!("{described}, not a snapshot"));
            summary.importable = true;
        }
        if let VmLocation::Stream(_, Some(decompressor)) = place
            && image.is_none()
        {
            summary.warnings.push(format!("the stream is packed by {}", decompressor.program()));
        }
        if let Some(image) = image {
            summary.run_state = Some(image.run_state().to_owned());
            summary.libvirt = Some(SaveImageSummary::of(&image));
        }
        summary.length = metadata.len();
        summary.allocated = metadata.blocks().saturating_mul(512);
        Ok(summary)
    }
}

/// Summarizes a stream that begins at `base` of what `read_at` reads, and ends before `end`.
fn summarize_stream(
    path: &Path,
    base: u64,
    end: u64,
    mut read_at: impl FnMut(u64, &mut [u8]) -> io::Result<usize>,
) -> Result<Summary, SnapshotError> {
    let wrong = |error: WalkError| walk_error(path, base, error);
    let options = DecoderOptions { base, ..DecoderOptions::default() };
    let mut walk = StreamWalk::new(&mut read_at, options);
    let configuration = match walk.next_event().map_err(wrong)? {
        Event::Configuration(configuration) => configuration,
        other => return Err(structure(path, base, format!("expected a configuration, found {other:?}"))),
    };
    let mut recording = Recording::new(path, &configuration);
    loop {
        match walk.next_event().map_err(wrong)? {
            Event::RamStart(blocks) => recording.begin(&blocks, walk.offset())?,
            Event::Page { block, offset } => recording.page(block, offset, true),
            Event::Zero { block, offset } => recording.page(block, offset, false),
            Event::DeviceTail => {
                let begin = walk.offset();
                let ahead = walk.into_read_ahead();
                let tail = read_tail(ahead, begin, end, read_at)
                    .map_err(|error| SnapshotError::io("read its device sections", path, Some(begin), error))?;
                recording.devices(&tail, begin)?;
                break;
            }
            Event::EndOfStream => {
                recording.summary.warnings.push("a postcopy stream: its device sections are not listed".to_owned());
                break;
            }
            _ => {}
        }
    }
    Ok(recording.finish())
}

/// Reads from `begin` to the end, at most [`TAIL_LIMIT`] bytes; `tail` has been read before.
fn read_tail(
    mut tail: Vec<u8>,
    begin: u64,
    end: u64,
    mut read_at: impl FnMut(u64, &mut [u8]) -> io::Result<usize>,
) -> io::Result<Vec<u8>> {
    let limit = to_usize(end.saturating_sub(begin).min(TAIL_LIMIT));
    while tail.len() < limit {
        let came = tail.len();
        tail.resize(came.saturating_add(1 << 16).min(limit), 0);
        let got = read_at(begin.saturating_add(came as u64), &mut tail[came..]);
        let length = *got.as_ref().unwrap_or(&0);
        invariant(came + length <= tail.len(), "no more bytes are read than there is room for")
            .map_err(io::Error::other)?;
        tail.truncate(came + length);
        match got {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(tail)
}

/// A descriptor of the file whose position is `offset`.
fn positioned(file: &File, offset: u64) -> io::Result<OwnedFd> {
    let copy = file.try_clone()?;
    rustix::fs::seek(&copy, SeekFrom::Start(offset))?;
    Ok(copy.into())
}

fn structure(path: &Path, offset: u64, why: String) -> SnapshotError {
    SnapshotError::Structure { path: path.to_path_buf(), offset, what: why, feature: None }
}

fn walk_error(path: &Path, base: u64, error: WalkError) -> SnapshotError {
    match error {
        WalkError::Read { offset, source, .. } => SnapshotError::io("read it", path, Some(offset), source),
        WalkError::Stream(error) => SnapshotError::undecoded(path, base, "", &error),
        other => structure(path, 0, other.to_string()),
    }
}

/// The summary as it grows.
struct Recording<'a> {
    path: &'a Path,
    summary: Summary,
    stored: Vec<PageBitmap>,
    seen: Vec<PageBitmap>,
    resent: u64,
}

impl<'a> Recording<'a> {
    fn new(path: &'a Path, configuration: &Configuration) -> Self {
        let summary = Summary {
            path: path.display().to_string(),
            length: 0,
            allocated: 0,
            machine: configuration.machine.clone(),
            capabilities: configuration.capabilities.clone(),
            uuid: configuration.uuid.map(uuid_text),
            run_state: None,
            blocks: Vec::new(),
            devices: Vec::new(),
            vmdescs: Vec::new(),
            manifest: None,
            missing_manifest_reason: None,
            importable: false,
            checksums: false,
            packed: None,
            libvirt: None,
            warnings: Vec::new(),
        };
        Self { path, summary, stored: Vec::new(), seen: Vec::new(), resent: 0 }
    }

    fn begin(&mut self, blocks: &[RamBlock], offset: u64) -> Result<(), SnapshotError> {
        let pages: u64 = blocks.iter().map(RamBlock::pages).fold(0, u64::saturating_add);
        if pages > MEMORY_PAGES_MAX {
            return Err(structure(self.path, offset, format!("{pages} pages of memory, more than any VM has")));
        }
        for block in blocks {
            self.stored.push(PageBitmap::new(block.pages()));
            self.seen.push(PageBitmap::new(block.pages()));
            self.summary.blocks.push(BlockSummary {
                name: block.name.clone(),
                used: block.used_length,
                pages: block.pages(),
                stored: 0,
                zero: 0,
                pages_offset: None,
            });
        }
        Ok(())
    }

    fn page(&mut self, block: usize, offset: u64, contents: bool) {
        let page = PageNumber(offset / PAGE_SIZE);
        let (Some(stored), Some(seen)) = (self.stored.get_mut(block), self.seen.get_mut(block)) else { return };
        self.resent += u64::from(seen.set(page));
        if contents {
            stored.set(page);
        } else {
            stored.clear(page);
        }
    }

    fn devices(&mut self, tail: &[u8], offset: u64) -> Result<(), SnapshotError> {
        let state = devices::find_tail_end(tail, offset, TAIL_LIMIT)
            .map_err(|error| structure(self.path, error.offset(), error.to_string()))?;
        self.summary.run_state = state.global_state(tail).ok().flatten().map(|found| found.run_state);
        self.summary.vmdescs = vmdescs(&tail[state.json_range.clone()]);
        self.summary.devices = state.sections.iter().map(|section| DeviceSummary::of(section, tail)).collect();
        Ok(())
    }

    fn finish(mut self) -> Summary {
        for (block, stored) in self.summary.blocks.iter_mut().zip(&self.stored) {
            block.stored = stored.count();
            block.zero = block.pages - block.stored;
        }
        if self.resent > 0 {
            self.summary.warnings.push(format!("{} pages are in it more than once", self.resent));
        }
        self.summary
    }
}
