//! The state of a VM inside a disk image, as a stream.

use std::io::{ErrorKind, PipeWriter, Write as _};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use anyhow::Context as _;
use limosa_image::chain::{OpenOptions, VmState};
use limosa_image::qcow2::SnapshotChoice;
use limosa_image::reference::Reference;
use limosa_page::to_usize;
use limosa_snapshot::Foreign;
use limosa_storage::{Buffer, LockPolicy, block_on};

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

/// Opens the state of a snapshot in an image.
///
/// # Errors
/// The snapshot has no state of a VM; the image cannot be opened, or another process writes it; the state is no
/// migration stream.
pub(crate) fn open(image: &Path, tag: &SnapshotChoice, force_share: bool) -> anyhow::Result<(Foreign, Feeder)> {
    let lock = if force_share { LockPolicy::None } else { LockPolicy::Auto };
    let state = block_on(VmState::open(&Reference::from_name(image)?, tag, &OpenOptions::default().lock(lock)))?;
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
