//! The state of a VM inside a disk image: read as a stream, and written from one.

use std::io::{ErrorKind, PipeReader, PipeWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::SystemTime;

use anyhow::Context as _;
use limosa_image::chain::{ImageFile, OpenOptions, VmState};
use limosa_image::qcow2::{CheckOptions, SnapshotChoice, VmStateWriter};
use limosa_image::reference::Reference;
use limosa_migrate::Handle;
use limosa_migrate::stats::PrecopyStats;
use limosa_page::to_usize;
use limosa_snapshot::{Foreign, Snapshot};
use limosa_storage::{Buffer, LockPolicy, Storage, block_on};

use crate::disk_set::{self, NewSnapshots};
use crate::img::open::no_journal;
use crate::serve::beside::refuse_incomplete;

/// Bytes that are read at once.
const PIECE: u64 = 1 << 20;

/// A thread that reads the state out of its image.
pub(crate) struct Feeder(JoinHandle<anyhow::Result<()>>);

impl Feeder {
    /// Waits for its end, and returns what became of the stream.
    ///
    /// # Errors
    /// That of the stream; if the image could not be read, which ends the stream early, that.
    pub(crate) fn after<T>(self, result: anyhow::Result<T>) -> anyhow::Result<T> {
        self.0.join().map_err(|_| anyhow::anyhow!("the image cannot be read; this is a bug in limosa"))??;
        result
    }
}

/// Opens the state of a snapshot in an image. `others`: the other disks of the VM, which must have the same snapshot.
///
/// # Errors
/// As [`disk_set::check`]; the snapshot has no state of a VM; the image cannot be opened, or another process writes it;
/// the state is no migration stream.
pub(crate) fn open(
    image: &Path,
    tag: &SnapshotChoice,
    others: &[PathBuf],
    force_share: bool,
) -> anyhow::Result<(Foreign, Feeder)> {
    let lock = if force_share { LockPolicy::None } else { LockPolicy::Auto };
    let options = no_journal(OpenOptions::default().lock(lock));
    let _unchanged = disk_set::check(image, tag, others, &options)?;
    let state = block_on(VmState::open(&Reference::from_name(image)?, tag, &options))?;
    let (read, write) = std::io::pipe().context("a pipe")?;
    let thread = thread::Builder::new().name("vm-state".into());
    let feeder = Feeder(thread.spawn(move || feed(&state, write)).context("cannot start a thread")?);
    let name = PathBuf::from(format!("{} (snapshot with {tag})", image.display()));
    match Foreign::from_fd(read.into(), &name) {
        Ok(foreign) => Ok((foreign, feeder)),
        Err(error) => feeder.after(Err(error.into())),
    }
}

/// Writes all of a state into a pipe, until nobody reads it any more.
fn feed(state: &VmState, mut pipe: PipeWriter) -> anyhow::Result<()> {
    let buffer = Buffer::zeroed(to_usize(PIECE));
    let mut bytes = vec![0; to_usize(PIECE)];
    let mut at = 0;
    while at < state.len() {
        let length = to_usize(PIECE.min(state.len() - at));
        let piece = buffer.slice(0..length);
        block_on(state.read(at, piece.clone().into()))?;
        let bytes = bytes.get_mut(..length).unwrap_or_default();
        piece.copy_to(0, bytes);
        match pipe.write_all(bytes) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
            written => written.context("the pipe to the import")?,
        }
        at += length as u64;
    }
    Ok(())
}

/// Puts the VM of a snapshot into a new internal snapshot of an image, durably. `others`: the other disks of the VM,
/// which get a snapshot of the same name and time.
///
/// # Errors
/// An image cannot be opened, is no qcow2 image, has a snapshot of this name, or another process has it open; the
/// snapshot cannot be read. Then the images are as they were.
pub(crate) fn put(
    snapshot: &Snapshot,
    image: &Path,
    name: &str,
    others: &[PathBuf],
    handle: &Handle,
) -> anyhow::Result<PrecopyStats> {
    let reference = Reference::from_name(image)?;
    refuse_incomplete(&reference)?;
    let file = block_on(ImageFile::open(&reference, &no_journal(OpenOptions::default())))?;
    disk_set::refuse_taken(image, &file, name)?;
    let (read, write) = std::io::pipe().context("a pipe")?;
    let taken = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let taken = (u32::try_from(taken.as_secs()).unwrap_or(u32::MAX), taken.subsec_nanos());
    let mut others = NewSnapshots::begin(others, name, taken)?;
    let storage = &*file.storage;
    thread::scope(|scope| {
        let writer = scope.spawn(move || take(storage, name, read));
        let sent = snapshot.export(write.into(), image, handle);
        let writer =
            writer.join().map_err(|_| anyhow::anyhow!("the image cannot be written; this is a bug in limosa"))?;
        // A stream that nobody takes fails as well, and not by itself.
        let mut writer = writer?;
        let stats = match sent.map_err(anyhow::Error::from).and_then(|stats| others.take().map(|()| stats)) {
            Ok(stats) => stats,
            Err(error) => {
                others.undo();
                block_on(writer.undo());
                return Err(error);
            }
        };
        // The disk with the state is the last one.
        block_on(writer.finish(name, taken)).inspect_err(|_| others.undo())?;
        Ok(stats)
    })
}

/// Writes a stream into an image, up to its end.
fn take<'a>(storage: &'a dyn Storage, name: &str, mut stream: PipeReader) -> anyhow::Result<VmStateWriter<'a>> {
    let mut state = block_on(VmStateWriter::begin(storage, name, CheckOptions::default()))?;
    let mut bytes = vec![0; to_usize(PIECE)];
    let mut copy = || -> anyhow::Result<()> {
        loop {
            let count = stream.read(&mut bytes).context("the pipe from the export")?;
            match bytes.get(..count) {
                Some(bytes) if count > 0 => block_on(state.write(bytes))?,
                _ => return Ok(()),
            }
        }
    };
    let copied = copy();
    if copied.is_err() {
        block_on(state.undo());
    }
    copied.map(|()| state)
}
