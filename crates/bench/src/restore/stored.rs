//! The VMs that are restored: a guest that beats, saved by limosa while it runs.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use limosa_page::to_usize;
use rustix::fs::{SeekFrom, seek, sendfile};
use serde_json::Value;

use crate::content::{fill_random, random_memory};
use crate::guest::BEAT;
use crate::limosa::Prepared;
use crate::options::Options;
use crate::scratch::Scratch;
use crate::vm::{Ram, Role, Vm};

/// How long a guest that runs may take for a beat.
const BEAT_WITHIN: Duration = Duration::from_secs(60);

/// A saved VM.
#[derive(Debug)]
pub(super) struct Stored {
    /// Bytes of its memory.
    pub(super) memory: u64,
    /// Bytes of the pages that have content.
    pub(super) content: u64,
    /// The snapshot.
    pub(super) path: PathBuf,
    _folder: Scratch,
}

impl Stored {
    /// A VM full of random bytes, and the QEMU that it was saved from, stopped: it can still send the VM elsewhere.
    pub(super) fn full(options: &Options, size: u64) -> Result<(Self, Vm)> {
        let memory = random_memory(size)?;
        Self::save(options, size, Ram::Shared(&memory))
    }

    /// A VM whose memory is almost all zero.
    pub(super) fn sparse(options: &Options, size: u64, content: u64) -> Result<Self> {
        let folder = Scratch::new_in(&std::env::temp_dir())?;
        let path = folder.path().join("content");
        let mut bytes = vec![0; usize::try_from(content).context("--size")?];
        fill_random(&mut bytes);
        fs::write(&path, bytes).with_context(|| path.display().to_string())?;
        Ok(Self::save(options, size, Ram::Own { content: Some(&path) })?.0)
    }

    fn save(options: &Options, memory: u64, ram: Ram<'_>) -> Result<(Self, Vm)> {
        let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir);
        let folder = Scratch::new_in(&parent)?;
        let path = folder.path().join("snapshot");
        let vm = Vm::start(&options.qemu, memory, ram, Role::Source)?;
        let mut serial = vm.serial()?;
        vm.run()?;
        wait_beat(&mut serial)?;
        drop(serial);
        let limosa = Prepared::new(options, "save")?.arguments(&["--via", "file"]);
        let said = limosa.path(Some("--qmp"), &vm.limosa_monitor()).path(None, &path).start()?.finish()?;
        vm.stop()?;
        let pages = said.pointer("/pages/normal").and_then(Value::as_u64).context("limosa's count of pages")?;
        Ok((Self { memory, content: pages * 4096, path, _folder: folder }, vm))
    }

    /// Brings the file into the page cache, even if the kernel has dropped parts of it meanwhile. Holes are left alone:
    /// to read them would fill the cache with nothing.
    pub(super) fn warm(&self) -> Result<()> {
        let file = File::open(&self.path).with_context(|| self.path.display().to_string())?;
        let nowhere = File::options().write(true).open("/dev/null").context("/dev/null")?;
        let mut at = 0;
        loop {
            let end = match seek(&file, SeekFrom::Data(at)) {
                Ok(start) => {
                    at = start;
                    seek(&file, SeekFrom::Hole(start)).context("SEEK_HOLE")?
                }
                Err(rustix::io::Errno::NXIO) => return Ok(()),
                Err(error) => return Err(error).context("SEEK_DATA"),
            };
            while at < end {
                // Without a copy, because the bytes are not used.
                let most = to_usize(end - at).min(1 << 30);
                if sendfile(&nowhere, &file, Some(&mut at), most).context("reading the snapshot")? == 0 {
                    return Ok(());
                }
            }
        }
    }
}

/// Waits for a byte from the serial port.
pub(super) fn wait_beat(serial: &mut std::os::unix::net::UnixStream) -> Result<()> {
    serial.set_read_timeout(Some(BEAT_WITHIN)).context("setting a timeout")?;
    let mut byte = [0];
    loop {
        match serial.read(&mut byte) {
            Ok(0) => bail!("QEMU closed the serial port"),
            Ok(_) => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error).context("no beat from the guest"),
        }
    }
    ensure!(byte == [BEAT], "the guest sent {byte:?} instead of a beat");
    Ok(())
}
