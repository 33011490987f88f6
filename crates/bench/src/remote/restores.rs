//! A VM out of the store, in every way.
//!
//! The clock begins with the first exec: of the download, if there is one, else of the restore. CPU seconds are those
//! of limosa alone, because this process is the line.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use limosa_page::to_micros;
use serde_json::Value;

use super::store::{Far, Store, cost, with_cost};
use crate::frame::Frame;
use crate::guest::Task;
use crate::limosa::Prepared;
use crate::measure::{Measured, Stopwatch};
use crate::options::Options;
use crate::raw::children_cpu;
use crate::restore::runs::{TO_BEAT, TO_WORK};
use crate::scratch::Scratch;
use crate::stored::{Stored, ask, wait_answer, wait_beat};
use crate::vm::{Ram, Role, Vm};

/// The guest's work.
const TASK: Task = Task::WriteScattered;

/// How long the guest is recorded, as limosa's option and as a time. The work is done within.
const RECORDED: (&str, Duration) = ("--record-working-set=5s", Duration::from_secs(5));

/// How the VM gets out of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    /// The image is downloaded into a file, and restored lazily from there.
    Download,
    /// Lazily, without the working set.
    Lazy,
    /// Lazily, the working set first.
    WorkingSet,
    /// The same with a cache that has all of the object.
    WarmCache,
}

impl Method {
    pub(super) const ALL: [Self; 4] = [Self::Download, Self::Lazy, Self::WorkingSet, Self::WarmCache];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Download => "download, then restore",
            Self::Lazy => "lazy",
            Self::WorkingSet => "lazy, working set",
            Self::WarmCache => "lazy, warm cache",
        }
    }
}

/// A packed VM in the store.
pub(super) struct Image {
    /// Bytes of its memory.
    memory: u64,
    url: String,
    /// A cache that has all of the object, of an image with a working set. Its guest does the work.
    cache: Option<Scratch>,
}

impl Image {
    /// Saves a VM full of what disks have, and puts it into the store with the working set of its guest's work.
    pub(super) fn with_working_set(options: &Options, store: &Store, memory: u64) -> Result<Self> {
        let (plain, vm) = Stored::mixed(options, memory)?;
        drop(vm);
        record(options, &plain)?;
        let packed = plain.packed(options, &[], &[])?;
        ensure_working_set(options, &packed.path)?;
        let url = store.put(&packed.path, "vm.qcow2")?;
        let cache = Scratch::new_in(store.folder())?;
        let (run, file) = file_in(store)?;
        store.begin_run(Duration::ZERO)?;
        let said = store.download(options, &url, &file, Some(cache.path()))?.start()?.finish()?;
        ensure!(cost(&said, "bytes-received")? > 0, "nothing was fetched into a cache: {said}");
        drop(run);
        Ok(Self { memory, url, cache: Some(cache) })
    }

    /// Saves a VM whose memory is all zero but for `content` bytes, and puts it into the store.
    pub(super) fn sparse(options: &Options, store: &Store, memory: u64, content: u64) -> Result<Self> {
        let packed = Stored::sparse(options, memory, content)?.packed(options, &[], &[])?;
        let url = store.put(&packed.path, &format!("sparse-{memory}.qcow2"))?;
        Ok(Self { memory, url, cache: None })
    }

    /// Restores it into a fresh destination once, over a line.
    pub(super) fn run(&self, far: Far<'_>, method: Method, frame: &Frame) -> Result<Measured> {
        let Far { options, store, latency } = far;
        let vm = Vm::start(&options.qemu, self.memory, Ram::Own { content: None }, Role::Destination)?;
        let mut serial = vm.serial()?;
        let (run, file) = file_in(store)?;
        let download = match method {
            Method::Download => Some(store.download(options, &self.url, &file, None)?),
            Method::Lazy | Method::WorkingSet | Method::WarmCache => None,
        };
        let empty = run.path().join("cache");
        let (snapshot, cache) = match method {
            Method::Download => (file.as_path(), None),
            Method::Lazy | Method::WorkingSet => (Path::new(&self.url), Some(empty.as_path())),
            Method::WarmCache => {
                (Path::new(&self.url), Some(self.cache.as_ref().context("no cache was filled with this image")?.path()))
            }
        };
        let read_ahead = if method == Method::Lazy { "off" } else { "auto" };
        let restore = Prepared::new(options, "restore")?
            .arguments(&["--memory", "lazy", "--run", "--read-ahead", read_ahead])
            .path(Some("--qmp"), &vm.limosa_monitor())
            .path(None, snapshot);
        let restore = store.at_line(restore, cache);
        frame.touch()?;
        store.begin_run(Duration::from_millis(latency.into()))?;

        let cpu_before = children_cpu().context("getrusage of children")?;
        let watch = Stopwatch::start(&[vm.pid()])?;
        let downloaded = download.map(|download| download.start()?.finish()).transpose()?;
        let limosa = restore.start()?;
        let why = || format!("limosa: {}", limosa.said());
        wait_beat(&mut serial).with_context(why)?;
        let beat = watch.elapsed();
        let mut work = None;
        if self.cache.is_some() {
            ask(&mut serial, TASK)?;
            wait_answer(&mut serial, TASK).with_context(why)?;
            work = Some(watch.elapsed());
        }
        let said = limosa.finish()?;
        let measured = watch.stop()?;
        let cpu = children_cpu().context("getrusage of children")?.saturating_sub(cpu_before);

        let mode = said.get("mode").and_then(Value::as_str);
        ensure!(mode == Some("lazy"), "the restore was not lazy: {said}");
        if method == Method::WarmCache {
            ensure!(cost(&said, "blocks-in-cache")? > 0, "nothing came from the cache: {said}");
        }
        let mut measured = Measured { cpu, ..measured }.with(TO_BEAT, to_micros(beat));
        if let Some(work) = work {
            measured = measured.with(TO_WORK, to_micros(work));
        }
        with_cost(measured, downloaded.as_ref().unwrap_or(&said))
    }
}

/// A directory of a run, and the file in it that an image is downloaded to.
fn file_in(store: &Store) -> Result<(Scratch, PathBuf)> {
    let folder = Scratch::new_in(store.folder())?;
    let file = folder.path().join("vm.qcow2");
    Ok((folder, file))
}

/// Records the working set of the guest's work, beside the snapshot.
fn record(options: &Options, stored: &Stored) -> Result<()> {
    let (argument, length) = RECORDED;
    let vm = Vm::start(&options.qemu, stored.memory, Ram::Own { content: None }, Role::Destination)?;
    let mut serial = vm.serial()?;
    let restore = Prepared::new(options, "restore")?
        .arguments(&["--memory", "lazy", "--run", argument])
        .path(Some("--qmp"), &vm.limosa_monitor())
        .path(None, &stored.path);
    let watch = Stopwatch::start(&[])?;
    let limosa = restore.start()?;
    let why = || format!("recording the working set: limosa: {}", limosa.said());
    wait_beat(&mut serial).with_context(why)?;
    ask(&mut serial, TASK)?;
    wait_answer(&mut serial, TASK).with_context(why)?;
    ensure!(watch.elapsed() < length, "the guest's work took longer than it was recorded");
    // Nobody reads it from here on.
    drop(serial);
    let said = limosa.finish()?;
    let pages = said.pointer("/recorded_working_set/pages").and_then(Value::as_u64);
    ensure!(pages.is_some_and(|pages| pages > 0), "no working set was recorded: {said}");
    Ok(())
}

/// Fails unless a packed image holds a working set.
fn ensure_working_set(options: &Options, packed: &Path) -> Result<()> {
    let said = Prepared::new(options, "inspect")?.path(None, packed).start()?.finish()?;
    let pages = said.pointer("/working_set/pages").and_then(Value::as_u64);
    ensure!(pages.is_some_and(|pages| pages > 0), "{}: the image holds no working set", packed.display());
    Ok(())
}
