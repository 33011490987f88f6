//! The VMs that are restored: a guest that beats, saved by limosa while it runs.

use std::fs;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use limosa_page::to_usize;
use serde_json::Value;

use crate::content::{fill_random, mixed_memory, random_memory};
use crate::guest::{self, BEAT, Task};
use crate::limosa::Prepared;
use crate::options::Options;
use crate::page_cache;
use crate::scratch::Scratch;
use crate::vm::{Ram, Role, Vm};

/// How long a guest that runs may take for a byte.
const WITHIN: Duration = Duration::from_secs(60);

/// A saved VM.
#[derive(Debug)]
pub(crate) struct Stored {
    /// Bytes of its memory.
    pub(crate) memory: u64,
    /// Bytes of the pages that have content.
    pub(crate) content: u64,
    /// Bytes that its guest reads for [`Task::Read`]; 0 for a VM full of random bytes, whose guest has no such task.
    pub(crate) read: u64,
    /// The sum that it finds.
    pub(crate) sum: u32,
    /// The snapshot.
    pub(crate) path: PathBuf,
    /// The options that open it, if it is encrypted.
    pub(crate) key: Vec<String>,
    _folder: Scratch,
}

impl Stored {
    /// A VM full of random bytes, and the QEMU that it was saved from, stopped: it can still send the VM elsewhere.
    pub(crate) fn full(options: &Options, size: u64) -> Result<(Self, Vm)> {
        let memory = random_memory(size)?;
        Self::save(options, size, Ram::Shared(&memory))
    }

    /// A VM full of what disks have, and the QEMU that it was saved from, stopped.
    pub(crate) fn mixed(options: &Options, size: u64) -> Result<(Self, Vm)> {
        let memory = mixed_memory(size)?;
        Self::save(options, size, Ram::Shared(&memory))
    }

    /// This VM, packed by limosa with these arguments; `key` opens it.
    pub(crate) fn packed(&self, options: &Options, arguments: &[&str], key: &[String]) -> Result<Self> {
        let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir);
        let folder = Scratch::new_in(&parent)?;
        let path = folder.path().join("snapshot");
        let words: Vec<&str> = key.iter().map(String::as_str).collect();
        let limosa = Prepared::new(options, "pack")?.arguments(arguments).arguments(&words);
        limosa.path(None, &self.path).path(None, &path).start()?.finish()?;
        let Self { memory, content, read, sum, .. } = *self;
        Ok(Self { memory, content, read, sum, path, key: key.to_vec(), _folder: folder })
    }

    /// A VM whose memory is all zero but for `content` bytes.
    pub(crate) fn sparse(options: &Options, size: u64, content: u64) -> Result<Self> {
        let folder = Scratch::new_in(&std::env::temp_dir())?;
        let path = folder.path().join("content");
        let mut bytes = vec![0; usize::try_from(content).context("--size")?];
        fill_random(&mut bytes);
        let read = guest::read_len(content);
        let sum = guest::sum(bytes.get(..to_usize(read)).context("contents to read")?);
        fs::write(&path, bytes).with_context(|| path.display().to_string())?;
        let (stored, _) = Self::save(options, size, Ram::Own { content: Some(&path) })?;
        Ok(Self { read, sum, ..stored })
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
        Ok((Self { memory, content: pages * 4096, read: 0, sum: 0, path, key: Vec::new(), _folder: folder }, vm))
    }

    /// As [`page_cache::chill`].
    pub(crate) fn chill(&self) -> Result<()> {
        page_cache::chill(&self.path)
    }

    /// The value of `-object` for a QEMU whose memory is this snapshot.
    pub(crate) fn mapped_object(&self, options: &Options) -> Result<String> {
        let limosa = Prepared::new(options, "inspect")?.arguments(&["--qemu-args"]).path(None, &self.path);
        let printed = limosa.start()?.finish()?;
        let words = printed.pointer("/arguments").and_then(Value::as_array).context("QEMU's arguments")?;
        let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
        let object = words.windows(2).find_map(|pair| match pair {
            &["-object", object] => Some(object.to_owned()),
            _ => None,
        });
        object.context("no -object in what limosa inspect --qemu-args prints")
    }

    /// As [`page_cache::warm`].
    pub(crate) fn warm(&self) -> Result<()> {
        page_cache::warm(&self.path)
    }
}

/// Waits for a beat of the guest.
pub(crate) fn wait_beat(serial: &mut UnixStream) -> Result<()> {
    let byte = byte(serial).context("no beat from the guest")?;
    ensure!(byte == BEAT, "the guest sent {byte:#x} instead of a beat");
    Ok(())
}

/// Asks the guest for this.
pub(crate) fn ask(serial: &mut UnixStream, task: Task) -> Result<()> {
    serial.write_all(&[task.byte()]).context("asking the guest")
}

/// Waits until the guest has done this; for [`Task::Read`] returns the sum that it found.
pub(crate) fn wait_answer(serial: &mut UnixStream, task: Task) -> Result<u32> {
    let answer = loop {
        let byte = byte(serial).context("no answer from the guest")?;
        if byte != BEAT {
            break byte;
        }
    };
    ensure!(answer == task.answer(), "the guest answered {answer:#x} to {task:?}");
    if task != Task::Read {
        return Ok(0);
    }
    let mut sum = [0; 4];
    serial.read_exact(&mut sum).context("the rest of the guest's answer")?;
    Ok(u32::from_le_bytes(sum))
}

/// The next byte from the serial port.
fn byte(serial: &mut UnixStream) -> Result<u8> {
    serial.set_read_timeout(Some(WITHIN)).context("setting a timeout")?;
    let mut byte = [0];
    match serial.read_exact(&mut byte) {
        Ok(()) => Ok(byte[0]),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => bail!("QEMU closed the serial port"),
        Err(error) => Err(error.into()),
    }
}
