//! A device in this process, and disks for it.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use limosa_export::Export;
use limosa_export::vhost_user_blk::{VhostUserBlk, VhostUserBlkOptions};
use limosa_image::Disk;
use limosa_image::raw::{Raw, RawOptions};
use limosa_storage::{Storage, block_on};
use limosa_testkit::{BlkClient, BlkSettings, scratch};
use limosa_vhost::{FaultKind, Server};
use tempfile::TempDir;

/// A running server, stopped when dropped.
pub(crate) struct Served {
    folder: TempDir,
    pub(crate) export: Arc<Export>,
    pub(crate) server: Arc<Server>,
    serving: Option<thread::JoinHandle<()>>,
}

impl Served {
    /// Serves a disk by a device of two queues and two threads.
    pub(crate) fn new(disk: Arc<dyn Disk>) -> Self {
        Self::with(Export::new("a disk with a name of many bytes", disk).unwrap(), 2, 2)
    }

    /// Serves an export.
    pub(crate) fn with(export: Export, queues: usize, threads: usize) -> Self {
        let folder = scratch().unwrap();
        let export = Arc::new(export);
        let options = VhostUserBlkOptions::default().queues(queues).threads(threads);
        let device = VhostUserBlk::new(Arc::clone(&export), &options);
        let server = Arc::new(Server::bind(&folder.path().join("blk"), Arc::new(device)).unwrap());
        let serving = thread::spawn({
            let server = Arc::clone(&server);
            move || server.serve().unwrap()
        });
        Self { folder, export, server, serving: Some(serving) }
    }

    /// Serves a storage as a raw disk.
    pub(crate) fn storage(storage: Arc<dyn Storage>) -> Self {
        Self::new(Raw::open(storage, &RawOptions::default()).unwrap())
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("blk")
    }

    /// A driver of two queues that does not acknowledge these features.
    pub(crate) fn client_without(&self, without: u64) -> BlkClient {
        BlkClient::connect(&self.socket(), BlkSettings { queues: 2, without }).unwrap()
    }

    pub(crate) fn client(&self) -> BlkClient {
        self.client_without(0)
    }

    pub(crate) fn broken_rings(&self) -> u64 {
        self.server.fault_count(FaultKind::Ring)
    }

    /// Stops the server and closes the disk.
    pub(crate) fn stop(mut self) {
        self.end();
        block_on(self.export.disk().close()).unwrap();
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

impl Drop for Served {
    fn drop(&mut self) {
        self.end();
    }
}
