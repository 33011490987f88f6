//! What is in a file that a migration stream was recorded into (`migrate exec:cat>FILE`, `file:FILE`).
//!
//! Such a file has every page in the order it was sent, again and again as the guest wrote to it, so it can only be read
//! from its beginning: it is summarized here, not served.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use limosa_page::{PAGE_SIZE, PageBitmap, PageNumber};
use limosa_stream::configuration::{Configuration, MAPPED_RAM};
use limosa_stream::decoder::{Event, Options};
use limosa_stream::devices::{self, TAIL_LIMIT};
use limosa_stream::ram::RamBlock;
use limosa_stream::walk::{StreamWalk, WalkError};

use crate::anatomy::MEMORY_PAGES_MAX;
use crate::error::SnapshotError;
use crate::reader::Snapshot;
use crate::summary::{BlockSummary, DeviceSummary, Summary, outlines, uuid_text};

/// Summarizes a snapshot or a recorded stream.
///
/// # Errors
/// If the file cannot be read or is neither.
pub fn summarize(path: &Path) -> Result<Summary, SnapshotError> {
    // Without O_NONBLOCK, opening a named pipe would wait for its other end.
    let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = opened.map_err(|error| SnapshotError::io("open it", path, None, error))?;
    let metadata = file.metadata().map_err(|error| SnapshotError::io("look at it", path, None, error))?;
    if !metadata.is_file() {
        return Err(SnapshotError::Target { path: path.to_path_buf(), why: "is not a regular file".to_owned() });
    }
    let wrong = |error: WalkError| walk_error(path, error);
    let mut walk = StreamWalk::new(|offset, into: &mut [u8]| file.read_at(into, offset), Options::default());
    let configuration = match walk.next_event().map_err(wrong)? {
        Event::Configuration(configuration) if configuration.has_capability(MAPPED_RAM) => {
            return Ok(Snapshot::open(path)?.summary());
        }
        Event::Configuration(configuration) => configuration,
        other => return Err(structure(path, 0, format!("expected a configuration, found {other:?}"))),
    };
    let mut recording = Recording::new(path, &configuration);
    loop {
        match walk.next_event().map_err(wrong)? {
            Event::RamStart(blocks) => recording.begin(&blocks, walk.offset())?,
            Event::Page { block, offset } => recording.page(block, offset, true),
            Event::Zero { block, offset } => recording.page(block, offset, false),
            Event::DeviceTail => {
                let begin = walk.offset();
                let length = metadata.len().saturating_sub(begin).min(TAIL_LIMIT);
                let mut tail = vec![0; usize::try_from(length).unwrap_or(0)];
                file.read_exact_at(&mut tail, begin)
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
    let mut summary = recording.finish();
    summary.length = metadata.len();
    summary.allocated = metadata.blocks().saturating_mul(512);
    Ok(summary)
}

fn structure(path: &Path, offset: u64, why: String) -> SnapshotError {
    SnapshotError::Structure { path: path.to_path_buf(), offset, what: why }
}

fn walk_error(path: &Path, error: WalkError) -> SnapshotError {
    match error {
        WalkError::Read { offset, source, .. } => SnapshotError::io("read it", path, Some(offset), source),
        WalkError::Stream(error) => structure(path, error.offset(), format!("{}: {}", error.place(), error.fault())),
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
            outlines: Vec::new(),
            manifest: None,
            without_manifest: Some("a recorded migration stream, not a snapshot".to_owned()),
            checksums: false,
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
        let state = devices::locate(tail, offset, TAIL_LIMIT)
            .map_err(|error| structure(self.path, error.offset(), error.to_string()))?;
        self.summary.run_state = state.global_state(tail).ok().flatten().map(|found| found.run_state);
        self.summary.outlines = outlines(tail.get(state.json_range.clone()).unwrap_or_default());
        self.summary.devices = state.sections.iter().map(|section| DeviceSummary::of(section, tail)).collect();
        Ok(())
    }

    fn finish(mut self) -> Summary {
        for (block, stored) in self.summary.blocks.iter_mut().zip(&self.stored) {
            block.stored = stored.count();
            block.zero = block.pages - block.stored;
        }
        if self.resent > 0 {
            self.summary.warnings.push(format!("{} pages stand in it more than once", self.resent));
        }
        self.summary
    }
}
