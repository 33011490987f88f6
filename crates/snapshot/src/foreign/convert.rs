//! From another program's file to a snapshot.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use limosa_channel::{Channel, Counters};
use limosa_migrate::control::{MovedPages, Phase};
use limosa_migrate::stored::{Destination, DestinationOptions, PageSink, PageSource};
use limosa_migrate::{Handle, MigrateError};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageRange, to_usize};
use rustix::fs::SeekFrom;

use super::decompressor::Decompression;
use super::{Bytes, Foreign, ForeignError, Kind, read_up_to};
use crate::error::SnapshotError;
use crate::manifest::{Manifest, Published, Transport};
use crate::reader::Snapshot;
use crate::unnamed_file::UnnamedFile;
use crate::writer::{SnapshotWriter, WriteOptions};

/// Pages that are copied at once.
const STRIDE: u64 = 256;

/// The result of an import.
#[derive(Debug)]
pub struct Imported {
    /// The snapshot.
    pub published: Published,
    /// Of the channel that the stream was read from; none for a mapped-ram file, which is copied.
    pub channel: Option<Counters>,
    /// Of the snapshot file.
    pub file: Counters,
}

/// The part that is written when all pages are in place.
struct Filled {
    tail: Vec<u8>,
    manifest: Manifest,
    channel: Option<Counters>,
}

impl Foreign {
    /// Makes a snapshot of it under the name of `pending`.
    ///
    /// # Errors
    /// Nothing is left of the snapshot then: the file is not whole, is a snapshot already, or cannot be unpacked; the
    /// disk is full; or the job was cancelled.
    pub fn import(
        self,
        pending: UnnamedFile,
        options: WriteOptions,
        handle: &Handle,
    ) -> Result<Imported, ForeignError> {
        let mut writer = SnapshotWriter::new(pending, options)?;
        let filled = self.fill(&mut writer, handle)?;
        handle.control.check().map_err(|source| ForeignError::Stream { path: writer.path().to_path_buf(), source })?;
        let file = writer.counters();
        let published = writer.finish(&filled.tail, filled.manifest)?;
        Ok(Imported { published, channel: filled.channel, file })
    }

    /// Makes a snapshot of it that never gets the name of `pending` and is gone when it is closed.
    ///
    /// # Errors
    /// As [`import`](Self::import).
    pub fn import_unnamed(self, pending: UnnamedFile, handle: &Handle) -> Result<Snapshot, ForeignError> {
        let shown = PathBuf::from(format!("{} (converted)", self.path.display()));
        let mut writer = SnapshotWriter::new(pending, WriteOptions { write_behind: false, ..WriteOptions::default() })?;
        let filled = self.fill(&mut writer, handle)?;
        let file = writer.finish_nameless(&filled.tail, filled.manifest)?;
        Ok(Snapshot::from_file(file, &shown)?)
    }

    fn fill(self, writer: &mut SnapshotWriter, handle: &Handle) -> Result<Filled, ForeignError> {
        let manifest = self.manifest();
        let Self { path, bytes, kind, .. } = self;
        let (fd, head) = match (kind, bytes) {
            (Kind::Unknown, bytes) => {
                let head = match &bytes {
                    Bytes::File(file) => read_up_to(file, 0, 4).unwrap_or_default(),
                    Bytes::Pipe { .. } => Vec::new(),
                };
                return Err(SnapshotError::unrecognized(path, &head).into());
            }
            (Kind::Native, _) => {
                let what = "a mapped-ram file, which is a snapshot as it is".to_owned();
                return Err(ForeignError::Image { path, what });
            }
            (Kind::Mapped { offset }, Bytes::File(file)) => {
                let snapshot = Snapshot::from_file_at(file, &path, offset)?;
                snapshot.check_restorable()?;
                copy(&snapshot, writer, handle).map_err(|source| ForeignError::Stream { path, source })?;
                return Ok(Filled { tail: snapshot.device_tail().to_vec(), manifest, channel: None });
            }
            (Kind::Mapped { .. }, Bytes::Pipe { .. }) => {
                let what = "a mapped-ram file has to be read from a file, not from a pipe".to_owned();
                return Err(ForeignError::Image { path, what });
            }
            (Kind::Stream { offset, .. }, Bytes::File(file)) => {
                rustix::fs::seek(&file, SeekFrom::Start(offset))
                    .map_err(|error| SnapshotError::io("read it", &path, Some(offset), error))?;
                (OwnedFd::from(file), Vec::new())
            }
            (Kind::Stream { .. }, Bytes::Pipe { fd, head }) => (fd, head),
        };
        let (unpacking, fd) = match kind {
            Kind::Stream { decompressor: Some(decompressor), .. } => {
                let (unpacking, output) = Decompression::start(decompressor, fd, &path)?;
                (Some(unpacking), OwnedFd::from(output))
            }
            _ => (None, fd),
        };
        let received = receive(fd, head, writer, handle);
        match (received, unpacking) {
            (Ok((tail, channel)), unpacking) => {
                unpacking.map_or(Ok(()), |unpacking| unpacking.finish(&path))?;
                Ok(Filled { tail, manifest, channel: Some(channel) })
            }
            (Err(source), unpacking) => {
                let reason = unpacking.and_then(|unpacking| unpacking.reason(&path));
                Err(reason.unwrap_or(ForeignError::Stream { path, source }))
            }
        }
    }

    /// Returns the facts about the VM that its stream does not contain.
    fn manifest(&self) -> Manifest {
        let mut manifest = Manifest { transport: Some(Transport::Import), ..Manifest::new() };
        if let Some(modified) = self.modified {
            (manifest.created, manifest.finished) = (modified, modified);
        }
        if let Some(image) = &self.save_image {
            manifest.vm_name.clone_from(&image.name);
            manifest.vm_uuid = image.uuid;
            manifest.run_state = Some(image.run_state().to_owned());
        }
        manifest
    }
}

/// Receives a recorded stream; returns its end and its statistics.
fn receive(
    fd: OwnedFd,
    head: Vec<u8>,
    writer: &mut SnapshotWriter,
    handle: &Handle,
) -> Result<(Vec<u8>, Counters), MigrateError> {
    let options =
        DestinationOptions { recorded: true, first_bytes: head, answer_timeout: None, ..DestinationOptions::default() };
    let incoming = Destination::new(writer, Channel::from_fd(fd)?, handle).options(options).run()?;
    Ok((incoming.tail, incoming.stats.channel))
}

/// Copies pages that have places into their new ones.
fn copy(snapshot: &Snapshot, writer: &mut SnapshotWriter, handle: &Handle) -> Result<(), MigrateError> {
    let start = snapshot.setup();
    writer.begin(start).map_err(MigrateError::Sink)?;
    handle.progress.expect_pages(start.blocks.iter().map(|block| block.pages()).sum());
    handle.progress.set_phase(Phase::Active);
    let mut buffer = vec![0; to_usize(STRIDE * PAGE_SIZE)];
    for block in 0..start.blocks.len() {
        let stored = PageSource::stored_bitmap(snapshot, block);
        for pages in stored.runs().flat_map(|run: PageRange| run.chunks(STRIDE)) {
            handle.control.check()?;
            let length = to_usize(pages.len() * PAGE_SIZE);
            let contents = &mut buffer[..length];
            snapshot.read(block, pages, contents).map_err(MigrateError::Source)?;
            let slices: Vec<_> = contents.chunks(PAGE_LEN).map(IoSlice::new).collect();
            writer.put_pages(block, pages.start, &slices).map_err(MigrateError::Sink)?;
            handle.progress.add_moved(MovedPages { normal: pages.len(), zero: 0, resent: 0 });
        }
        for pages in stored.gaps() {
            writer.put_zero(block, pages).map_err(MigrateError::Sink)?;
            handle.progress.add_moved(MovedPages { normal: 0, zero: pages.len(), resent: 0 });
        }
    }
    handle.progress.set_phase(Phase::Completing);
    Ok(())
}
