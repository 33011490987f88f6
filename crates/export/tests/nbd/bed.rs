//! A server in this process, and disks for it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use limosa_channel::{Listener, Options};
use limosa_export::nbd::{Server, ServerCounters, ServerOptions};
use limosa_export::{Export, Exports};
use limosa_image::chain::{OpenOptions, open};
use limosa_image::qcow2::{CheckOptions, CheckReport, CreateOptions, check, create};
use limosa_image::raw::{Raw, RawOptions};
use limosa_image::reference::Reference;
use limosa_image::{Disk, Format, Policy};
use limosa_storage::{Create, FileOptions, FileStorage, MemoryStorage, block_on};
use limosa_testkit::{NbdClient, scratch};
use tempfile::TempDir;

/// `base:allocation` and `qemu:allocation-depth`.
pub(crate) const CONTEXTS: [&str; 2] = ["base:allocation", "qemu:allocation-depth"];

/// A running server, stopped when dropped.
pub(crate) struct Bed {
    folder: TempDir,
    pub(crate) server: Arc<Server>,
    pub(crate) exports: Exports,
    serving: Option<thread::JoinHandle<()>>,
}

impl Bed {
    /// Serves a disk as the default export.
    pub(crate) fn new(disk: Arc<dyn Disk>) -> Self {
        let exports = Exports::new();
        exports.add(Export::new("", disk).unwrap()).unwrap();
        Self::with(exports, ServerOptions::default())
    }

    /// Serves exports.
    pub(crate) fn with(exports: Exports, options: ServerOptions) -> Self {
        let folder = scratch().unwrap();
        let uri = format!("unix:{}", folder.path().join("nbd").display()).parse().unwrap();
        let listener = Listener::bind(&uri, &Options::default()).unwrap();
        let server = Arc::new(Server::new(exports.clone(), options).unwrap());
        let serving = thread::spawn({
            let server = Arc::clone(&server);
            move || server.serve(&listener).unwrap()
        });
        Self { folder, server, exports, serving: Some(serving) }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("nbd")
    }

    /// A client with extended headers and all contexts.
    pub(crate) fn client(&self) -> NbdClient {
        NbdClient::open(&self.socket(), "", &CONTEXTS).unwrap()
    }

    /// Clients of all three forms of headers.
    pub(crate) fn clients(&self) -> [NbdClient; 3] {
        let mut simple = NbdClient::unix(&self.socket()).unwrap();
        simple.go("").unwrap();
        let mut structured = NbdClient::unix(&self.socket()).unwrap();
        structured.use_structured().unwrap();
        structured.set_contexts("", &CONTEXTS).unwrap();
        structured.go("").unwrap();
        [simple, structured, self.client()]
    }

    /// Stops the server, closes its disks, and returns what it has counted.
    pub(crate) fn stop(mut self) -> ServerCounters {
        self.end();
        for export in self.exports.all() {
            block_on(export.disk().close()).unwrap();
        }
        self.server.counters()
    }

    fn end(&mut self) {
        self.server.stopper().stop();
        if let Some(serving) = self.serving.take() {
            let ended = serving.join();
            if !thread::panicking() {
                ended.unwrap();
            }
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.end();
    }
}

/// A raw disk in memory.
pub(crate) fn raw(bytes: Vec<u8>) -> Arc<dyn Disk> {
    let length = bytes.len() as u64;
    Raw::open(Arc::new(MemoryStorage::with_contents(bytes, length)), &RawOptions::default()).unwrap()
}

/// Makes a qcow2 image in a folder.
pub(crate) fn make_qcow2(path: &Path, options: &CreateOptions) {
    let file = FileStorage::open(path, &FileOptions { create: Create::New, ..FileOptions::default() }).unwrap();
    block_on(create(&*file, None, options)).unwrap();
}

/// Opens an image.
pub(crate) fn open_image(path: &Path, format: Format, read_only: bool) -> Arc<dyn Disk> {
    let options = OpenOptions::default().read_only(read_only).policy(Policy::Follow);
    block_on(open(&Reference::file(path).format(Some(format)), &options)).unwrap()
}

/// A qcow2 image of this size in a folder.
pub(crate) fn qcow2(folder: &TempDir, size: u64) -> Arc<dyn Disk> {
    let path = folder.path().join("disk.qcow2");
    make_qcow2(&path, &CreateOptions::default().size(size));
    open_image(&path, Format::Qcow2, false)
}

/// Checks an image.
#[track_caller]
pub(crate) fn report(path: &Path) -> CheckReport {
    let file = FileStorage::open(path, &FileOptions::read_only_default()).unwrap();
    block_on(check(&*file, CheckOptions::default())).unwrap()
}

/// Asserts that an image has no leaks and no errors.
#[track_caller]
pub(crate) fn assert_clean(path: &Path) {
    let report = report(path);
    assert!(report.is_clean(), "{report:?}");
}

/// Bytes that tell where they belong.
pub(crate) fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
