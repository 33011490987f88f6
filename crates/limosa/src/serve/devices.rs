//! The disks that are served over vhost-user-blk: a socket for each image.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use limosa_export::vhost_user_blk::{VhostUserBlk, VhostUserBlkOptions};
use limosa_export::{Export, Exports};
use limosa_vhost::{Device, Server, ServerError};
use parking_lot::{Condvar, Mutex, RwLock};
use serde_json::{Value, json};

use crate::args::ServeArgs;
use crate::usage::misused;

/// A disk at a socket.
#[derive(Debug)]
pub(super) struct BlockDevice {
    path: String,
    options: VhostUserBlkOptions,
    exports: Exports,
    current: RwLock<Current>,
    /// Its front end blocks a thread, which may have requests in flight.
    blocked: AtomicBool,
    life: Mutex<Life>,
    changed: Condvar,
}

/// The disk that is served, and its server.
#[derive(Debug, Clone)]
struct Current {
    device: Arc<VhostUserBlk>,
    server: Arc<Server>,
}

/// Whether a device serves front ends.
#[derive(Debug, Clone, Copy, Default)]
struct Life {
    /// It was cut off from its front end, and serves no other one before it has
    /// [another export](BlockDevice::succeed).
    is_cut: bool,
    /// It serves no front end any more.
    has_ended: bool,
    /// The server ends.
    is_stopped: bool,
}

/// Checks the options against each other.
pub(super) fn check(args: &ServeArgs) {
    let (sockets, images) = (args.vhost_user_blk.len(), args.images.len());
    if sockets != 0 && sockets != images {
        misused(format_args!("--vhost-user-blk is given {sockets} times for {images} images: give a socket for each"));
    }
}

/// Listens at all sockets.
///
/// # Errors
/// A path is in use or invalid.
pub(super) fn bind(args: &ServeArgs, exports: &Exports) -> anyhow::Result<Vec<BlockDevice>> {
    let options = VhostUserBlkOptions::default()
        .queues(args.queues.map_or(0, usize::from))
        .threads(args.threads.map_or(0, usize::from));
    let bind = |((path, image), export): ((&PathBuf, &OsString), Arc<Export>)| -> anyhow::Result<BlockDevice> {
        // That of the image which was named: the disk may continue in an overlay by now, and stays the same disk.
        let file = Path::new(image).file_name().filter(|_| export.name().is_empty());
        let options = options.clone().serial(file.unwrap_or_default().to_string_lossy());
        let device = Arc::new(VhostUserBlk::new(export, &options).of(exports.clone()));
        let server = Server::bind_with(path, args.socket_access(), Arc::clone(&device) as Arc<dyn Device>);
        let server = Arc::new(server.context("--vhost-user-blk")?);
        let path = std::path::absolute(path).context("--vhost-user-blk")?.display().to_string();
        // A successor has as many, also if it would find others then.
        let options = options.queues(device.num_queues()).threads(device.num_threads());
        let (blocked, life, changed) = (AtomicBool::new(false), Mutex::default(), Condvar::new());
        let current = RwLock::new(Current { device, server });
        Ok(BlockDevice { path, options, exports: exports.clone(), current, blocked, life, changed })
    };
    args.vhost_user_blk.iter().zip(&args.images).zip(exports.all()).map(bind).collect()
}

impl BlockDevice {
    /// Serves front ends until the device is stopped.
    ///
    /// # Errors
    /// The front end blocks the server, or the kernel has no room for it.
    pub(super) fn serve(&self) -> anyhow::Result<()> {
        loop {
            let server = self.current().server;
            let served = server.serve();
            if matches!(served, Err(ServerError::StopBlocked { .. })) {
                self.blocked.store(true, Ordering::SeqCst);
            }
            let mut life = self.life.lock();
            life.has_ended = true;
            self.changed.notify_all();
            // The end of one device is the end of all, but for one that was cut off.
            self.changed.wait_while(&mut life, |life| life.is_cut && !life.is_stopped);
            if life.is_stopped || Arc::ptr_eq(&server, &self.current().server) {
                return Ok(served?);
            }
            life.has_ended = false;
        }
    }

    fn current(&self) -> Current {
        self.current.read().clone()
    }

    /// Ends its front end, and serves no other one for now. Blocks until no request is in flight.
    pub(super) fn cut(&self) {
        let mut life = self.life.lock();
        life.is_cut = true;
        self.current().server.stopper().stop();
        self.changed.wait_while(&mut life, |life| !life.has_ended);
    }

    /// Removes the socket of a disk that was cut off: who comes back finds no server, instead of one that does not
    /// answer.
    pub(super) fn abandon(&self) {
        // The server leaves a file alone that is not its own.
        let _ = rustix::fs::unlink(&*self.path);
    }

    /// Serves another export at the socket of a disk that was cut off.
    ///
    /// # Errors
    /// The kernel has no descriptor left.
    pub(super) fn succeed(&self, export: &Arc<Export>) -> anyhow::Result<()> {
        let device = VhostUserBlk::new(Arc::clone(export), &self.options).of(self.exports.clone());
        let device = Arc::new(device);
        let server = self.current().server.successor(Arc::clone(&device) as Arc<dyn Device>)?;
        let mut life = self.life.lock();
        anyhow::ensure!(!life.is_stopped, "the server is ending");
        *self.current.write() = Current { device, server: Arc::new(server) };
        life.is_cut = false;
        self.changed.notify_all();
        Ok(())
    }

    /// Makes it end.
    pub(super) fn stop(&self) {
        let mut life = self.life.lock();
        life.is_stopped = true;
        self.changed.notify_all();
        self.current().server.stopper().stop();
    }

    /// Tells the driver that its disk has another length, if it is of this export.
    pub(super) fn notify_resized(&self, export: &Arc<Export>) {
        if self.is_of(export) {
            self.current().device.notify_resized();
        }
    }

    /// Has its queues use the disk that its export has now, if it is of this export: the old one's files are closed.
    pub(super) fn notify_replaced(&self, export: &Arc<Export>) {
        if self.is_of(export) {
            self.current().device.notify_replaced();
        }
    }

    /// Returns whether it is of this export.
    pub(super) fn is_of(&self, export: &Arc<Export>) -> bool {
        Arc::ptr_eq(self.current.read().device.export(), export)
    }

    /// Returns whether it is of this export, and its front end blocks a thread.
    pub(super) fn is_blocked(&self, export: &Arc<Export>) -> bool {
        self.is_of(export) && self.blocked.load(Ordering::SeqCst)
    }

    /// Returns its address for people.
    pub(super) fn address(&self) -> String {
        format!("{} (--vhost-user-blk)", self.path)
    }

    /// Returns its address for programs.
    pub(super) fn description(&self) -> Value {
        json!({ "socket": self.path, "export": self.current().device.export().name() })
    }

    /// Returns whether a front end uses this export.
    pub(super) fn serves(&self, export: &Arc<Export>) -> bool {
        self.is_of(export) && self.current().server.has_front_end()
    }

    /// Returns the number of front ends that have connected.
    pub(super) fn front_ends(&self) -> u64 {
        self.current().server.connection_count()
    }
}
