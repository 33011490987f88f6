//! Commands of the control socket.
//!
//! Laws: files are opened because of these commands, and never because of what a client of an export sends. A command
//! that fails leaves every export as it was. The server closes its images when no command is under way any more.

mod epochs;
mod overlays;
mod prepared;
mod requests;

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use limosa_console::{anyhow_error_line, quantity};
use limosa_control::{CommandError, Commands};
use limosa_export::{Export, ExportError, Exports};
use limosa_image::ImageError;
use limosa_storage::block_on;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use serde::Deserialize;
use serde_json::{Value, json};

use super::devices::BlockDevice;
use super::images::{self, Images};
use super::report;
use super::servers::Servers;
use crate::args::{SandboxArg, ServeArgs};
use crate::{remedy, remote};
use prepared::Prepared;
pub(super) use requests::{AddRequest, BitmapChange};
use requests::{BitmapsRequest, Named, QuiesceRequest, RemoveRequest, ResizeRequest};

/// Time that clients of an export that is removed get to take their last replies.
const DRAIN: Duration = Duration::from_secs(10);
/// Time that requests in flight get when nothing else is asked for.
const QUIESCE: Duration = Duration::from_secs(30);

/// The commands of a server.
#[derive(Debug)]
pub(super) struct Steering {
    servers: Arc<Servers>,
    exports: Exports,
    images: Images,
    /// Where clients of NBD connect.
    nbd_addresses: Vec<Value>,
    /// A lock for each export, by name: held while an overlay is put on its image or committed, and while its disk
    /// becomes longer.
    media: Mutex<HashMap<String, Arc<Mutex<()>>>>,
    /// Overlays for snapshots that are prepared.
    prepared: Mutex<Prepared>,
    /// Names of exports whose clients were cut off: they would come back.
    dropped: Mutex<HashSet<String>>,
    untrusted: bool,
    /// Whether files outside of the allowed folders cannot be opened.
    confined: bool,
    /// Whether there are allowed folders.
    has_folders: bool,
    /// Whether the server has ended. Held for reading by every command that changes something.
    ended: RwLock<bool>,
}

impl Steering {
    /// The commands of a server of these exports.
    pub(super) fn new(
        servers: Arc<Servers>,
        (exports, images): (Exports, Images),
        nbd_addresses: Vec<Value>,
        args: &ServeArgs,
    ) -> Self {
        let (untrusted, confined) = (args.open.untrusted, args.sandbox != SandboxArg::Off && !remote::is_in_use());
        let (media, prepared, ended) = (Mutex::default(), Mutex::default(), RwLock::new(false));
        let dropped = Mutex::default();
        let has_folders = !args.allow_dir.is_empty();
        Self {
            servers,
            exports,
            images,
            nbd_addresses,
            media,
            prepared,
            dropped,
            untrusted,
            confined,
            has_folders,
            ended,
        }
    }

    /// Waits for the commands under way, and refuses further ones.
    pub(super) fn end(&self) {
        *self.ended.write() = true;
    }

    /// Keeps the server from closing its images.
    fn keep(&self) -> anyhow::Result<RwLockReadGuard<'_, bool>> {
        let ended = self.ended.read();
        anyhow::ensure!(!*ended, "the server is ending");
        Ok(ended)
    }

    /// The lock of the export of a name.
    fn medium(&self, name: &str) -> Arc<Mutex<()>> {
        Arc::clone(self.media.lock().entry(name.to_owned()).or_default())
    }

    /// The export of a name, or all.
    fn chosen(&self, name: Option<&str>) -> anyhow::Result<Vec<Arc<Export>>> {
        name.map_or_else(|| Ok(self.exports.all()), |name| Ok(vec![self.export(name)?]))
    }

    fn run(&self, name: &str, arguments: &Value) -> anyhow::Result<Option<Value>> {
        let done = json!({});
        Ok(Some(match name {
            "query-exports" => {
                let state = |export: &Arc<Export>| report::state(export, self.servers.client_count(export));
                self.exports.all().iter().map(state).collect()
            }
            "query-export" => self.with_files(&read(arguments)?)?,
            "query-server" => {
                let counters = self.servers.nbd.counters();
                json!({
                    "active": counters.active,
                    "counters": report::server_counters(&counters),
                    "nbd": self.nbd_addresses,
                    "vhost-user-blk": self.servers.devices.iter().map(BlockDevice::description).collect::<Vec<_>>(),
                })
            }
            "export-add" => self.add(read::<AddRequest>(arguments)?)?,
            "export-remove" => {
                let RemoveRequest { name, force } = read(arguments)?;
                let _kept = self.keep()?;
                self.exports.remove(&name, if force { Duration::ZERO } else { DRAIN })?;
                self.images.forget(&name);
                self.media.lock().remove(&name);
                done
            }
            "export-flush" => {
                let exports = self.chosen(read::<Named>(arguments)?.name.as_deref())?;
                let _kept = self.keep()?;
                exports.iter().try_for_each(|export| export.flush())?;
                done
            }
            "export-quiesce" => {
                let QuiesceRequest { name, timeout } = read(arguments)?;
                self.quiesce(name.as_deref(), timeout.map_or(QUIESCE, Duration::from_millis))?;
                done
            }
            "export-resume" => {
                let exports = self.chosen(read::<Named>(arguments)?.name.as_deref())?;
                exports.iter().try_for_each(|export| export.resume())?;
                done
            }
            "export-resize" => self.resize(&read(arguments)?)?,
            "export-prepare-snapshot" => self.prepare_snapshot(&read(arguments)?)?,
            "export-snapshot" => self.snapshot(&read(arguments)?)?,
            "export-commit" => self.commit(&read(arguments)?)?,
            "export-undo-snapshot" => self.undo_snapshot(&read(arguments)?)?,
            "export-bitmaps" => self.bitmaps(read(arguments)?)?,
            "export-protect" => self.protect(&read(arguments)?)?,
            "export-seal" => self.seal(&read(arguments)?)?,
            "export-prepare" => self.prepare_epoch(&read(arguments)?)?,
            "export-keep" => self.keep_epoch(&read(arguments)?)?,
            "export-drop" => self.drop_after(&read(arguments)?)?,
            "export-unprotect" => self.unprotect(&read(arguments)?)?,
            "quit" => {
                self.servers.stop();
                done
            }
            _ => return Ok(None),
        }))
    }

    fn add(&self, request: AddRequest) -> anyhow::Result<Value> {
        let _kept = self.keep()?;
        let begun = Instant::now();
        let mut wanted = request.wanted(self.untrusted, self.images.journals().cloned())?;
        // Before its file is opened: a name that is taken is found without it.
        if let Some(name) = wanted.name.as_ref().filter(|name| self.exports.find(name).is_some()) {
            return Err(ExportError::Exists(name.clone()).into());
        }
        if let Some(name) = wanted.name.as_ref().filter(|name| self.dropped.lock().contains(*name)) {
            anyhow::bail!("the clients of a VM that was dropped know the name {name:?}; give it another one");
        }
        let export = images::open_export(&mut wanted, self.images.boot()).map_err(|error| self.explained(error))?;
        let disk = export.disk();
        let added = match self.exports.add(export) {
            Ok(added) => {
                self.images.note(&added, wanted);
                added
            }
            Err(error) => {
                block_on(disk.close())?;
                return Err(error).context("give it a name of its own");
            }
        };
        let mut answer = report::description(&added);
        answer.insert("ms".into(), quantity::millis(begun.elapsed()).into());
        Ok(answer.into())
    }

    /// Says what helps if the sandbox may be why a file cannot be opened.
    fn explained(&self, error: anyhow::Error) -> anyhow::Error {
        // What the kernel or the filesystem cannot do is no matter of permission.
        let is_own_reason = error.chain().any(
            |cause| matches!(cause.downcast_ref(), Some(ImageError::Storage(cause)) if cause.open_error().is_some()),
        );
        let mut kinds = error.chain().filter_map(|cause| match cause.downcast_ref() {
            Some(ImageError::Storage(cause)) => Some(cause.source.kind()),
            _ => (cause.downcast_ref::<Arc<io::Error>>().map(|cause| cause.kind()))
                .or_else(|| cause.downcast_ref::<io::Error>().map(io::Error::kind))
                .or_else(|| cause.downcast_ref::<rustix::io::Errno>().map(|errno| errno.kind())),
        });
        // Landlock answers with the first of them, and seccomp with the second.
        let is_forbidden = |kind| matches!(kind, io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported);
        if self.confined && !is_own_reason && kinds.any(is_forbidden) {
            let why = if self.has_folders {
                "images that are added, overlays, and the images below them must be in folders of the server's --allow-dir"
            } else {
                "the server was started without --allow-dir: it opens no further image, and puts no overlay on one"
            };
            return anyhow::anyhow!("{}; {why}", anyhow_error_line(&error));
        }
        error
    }

    /// The export of a name.
    pub(super) fn export(&self, name: &str) -> anyhow::Result<Arc<Export>> {
        self.exports.find(name).ok_or_else(|| {
            let names: Vec<_> = self.exports.all().iter().map(|export| format!("{:?}", export.name())).collect();
            let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            anyhow::anyhow!("{}; exports are: {names}", ExportError::NotFound(name.to_owned()))
        })
    }

    fn resize(&self, request: &ResizeRequest) -> anyhow::Result<Value> {
        let _kept = self.keep()?;
        // An overlay is as long as the image was when it was made.
        let medium = self.medium(&request.name);
        let _alone = medium.lock();
        let export = self.export(&request.name)?;
        let size = match (request.size, request.more) {
            (Some(size), None) => Some(size),
            (None, Some(more)) => export.size().checked_add(more),
            _ => anyhow::bail!("the arguments are wrong: give either size or more"),
        };
        export.resize(size.context("no disk is that long")?, QUIESCE)?;
        self.servers.devices.iter().for_each(|device| device.notify_resized(&export));
        Ok(report::description(&export).into())
    }

    fn bitmaps(&self, request: BitmapsRequest) -> anyhow::Result<Value> {
        let _kept = self.keep()?;
        // An overlay has the bitmaps that the image had when it was put on it.
        let medium = self.medium(&request.name);
        let _alone = medium.lock();
        let export = self.export(&request.name)?;
        let changes: Vec<_> = request.changes.into_iter().map(BitmapChange::named).collect();
        if !changes.is_empty() {
            export.change_bitmaps(&changes, request.timeout.map_or(QUIESCE, Duration::from_millis))?;
        }
        Ok(report::bitmaps(&export).into())
    }

    /// Quiesces one export or all of them; if one fails, those that were not quiesced before continue.
    fn quiesce(&self, name: Option<&str>, within: Duration) -> anyhow::Result<()> {
        let exports = self.chosen(name)?;
        let _kept = self.keep()?;
        let begun = Instant::now();
        let mut done: Vec<&Export> = Vec::new();
        for export in &exports {
            let was_quiesced = export.is_quiesced();
            if let Err(error) = export.quiesce(within.saturating_sub(begun.elapsed())) {
                // One that is being removed meanwhile has nothing to continue.
                done.iter().for_each(|export| drop(export.resume()));
                return Err(error.into());
            }
            if !was_quiesced {
                done.push(export);
            }
        }
        Ok(())
    }
}

fn read<'a, T: Deserialize<'a>>(arguments: &'a Value) -> anyhow::Result<T> {
    T::deserialize(arguments).context("the arguments are wrong")
}

impl Commands for Steering {
    fn execute(&self, name: &str, arguments: &Value) -> Option<Result<Value, CommandError>> {
        let refused = |error: &anyhow::Error| format!("{}{}", anyhow_error_line(error), remedy::of_cause(error)).into();
        self.run(name, arguments).map_err(|error| refused(&error)).transpose()
    }
}
