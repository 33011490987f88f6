//! A socket at which a QEMU or a gate connects.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long a program may take to connect, or to say something: for one that hangs, not a measure.
const LIMIT: Duration = Duration::from_secs(120);
/// Longest frame of QEMU's stream back end that is taken.
const LONGEST_FRAME: u32 = 1 << 17;

/// A listening socket for one program.
pub(super) struct Door(UnixListener);

impl Door {
    pub(super) fn open(path: &Path) -> Result<Self> {
        Ok(Self(UnixListener::bind(path).with_context(|| path.display().to_string())?))
    }

    /// The connection of the program, which may not be there yet.
    pub(super) fn enter(&self) -> Result<UnixStream> {
        let limit = Timespec::try_from(LIMIT)?;
        let ready = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&limit)).context("poll")?;
        ensure!(ready == 1, "nothing connected within {} s", LIMIT.as_secs());
        let (stream, _) = self.0.accept().context("accepting a connection")?;
        stream.set_read_timeout(Some(LIMIT))?;
        Ok(stream)
    }
}

/// Reads one frame from a connection of QEMU's stream back end: its length, big-endian in four bytes, and its bytes.
pub(super) fn read_frame(mut stream: impl std::io::Read) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length);
    if length > LONGEST_FRAME {
        return Err(std::io::Error::other(format!("a frame of {length} bytes")));
    }
    let mut frame = vec![0; usize::try_from(length).map_err(std::io::Error::other)?];
    stream.read_exact(&mut frame)?;
    Ok(frame)
}
