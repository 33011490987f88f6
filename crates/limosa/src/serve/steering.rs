//! Commands of the control socket.
//!
//! Laws: files are opened because of these commands, and never because of what a client of an export sends. A command
//! that fails leaves every export as it was. The server closes its images when no command is under way any more.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use limosa_console::{anyhow_error_line, quantity};
use limosa_control::{CommandError, Commands};
use limosa_export::{Export, ExportError, Exports};
use limosa_image::qcow2::{JournalFolder, SnapshotChoice};
use limosa_image::{BitmapAction, ImageError};
use limosa_storage::{CacheMode, Io, block_on};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::images::{Images, Wanted};
use super::overlay;
use super::report;
use super::servers::Servers;
use crate::args::{SandboxArg, ServeAddArgs, ServeArgs, ServedImageArgs, parse_aio};
use crate::img::options::{Name, Source};
use crate::remedy;

/// Time that clients of an export that is removed get to take their last replies.
const DRAIN: Duration = Duration::from_secs(10);
/// Time that requests in flight get when nothing else is asked for.
const QUIESCE: Duration = Duration::from_secs(30);

/// The arguments of `export-add`: those of the command line, by the names of its options.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct AddRequest {
    image: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(default)]
    description: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<String>,
    #[serde(default)]
    image_opts: bool,
    #[serde(default)]
    read_only: bool,
    #[serde(default)]
    shared: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot: Option<SnapshotName>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    bitmaps: Vec<String>,
    #[serde(default)]
    offset: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aio: Option<String>,
}

/// An internal snapshot: its id or name, or both.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum SnapshotName {
    IdOrName(String),
    IdAndName { id: Option<String>, name: Option<String> },
}

impl AddRequest {
    /// The request for an image of `limosa serve ctl add`. A path is made absolute: the server has another folder.
    ///
    /// # Errors
    /// The path is not UTF-8.
    pub(super) fn new(args: &ServeAddArgs) -> anyhow::Result<Self> {
        let ServedImageArgs { description, format, image_opts, read_only, shared, snapshot, bitmap, .. } = &args.how;
        let named = *image_opts || ["json:", "file:"].iter().any(|scheme| is_prefix(scheme, args));
        let image = if named { args.image.clone() } else { std::path::absolute(&args.image)?.into_os_string() };
        let image = image.into_string().map_err(|image| {
            anyhow::anyhow!("{}: the path must be UTF-8, which the control socket requires", image.display())
        })?;
        Ok(Self {
            image,
            name: args.name.clone(),
            description: description.clone(),
            format: format.clone(),
            image_opts: *image_opts,
            read_only: *read_only,
            shared: *shared,
            snapshot: snapshot.clone().map(SnapshotName::from),
            bitmaps: bitmap.clone(),
            offset: args.how.offset,
            size: args.how.size,
            cache: Some(args.how.cache.as_str().to_owned()),
            aio: args.how.aio.and_then(aio_name).map(str::to_owned),
        })
    }

    fn wanted(self, untrusted: bool, journals: Option<JournalFolder>) -> anyhow::Result<Wanted> {
        anyhow::ensure!(!self.shared || self.read_only, "shared needs read-only");
        let cache = self.cache.as_deref().map(str::parse).transpose()?.unwrap_or(CacheMode::Writeback);
        let io = self.aio.as_deref().map(parse_aio).transpose().map_err(anyhow::Error::msg)?.unwrap_or_default();
        let source = Source {
            name: Name(self.image.into()),
            image_opts: self.image_opts,
            format: self.format,
            cache,
            io,
            force_share: self.shared,
            untrusted,
        };
        Ok(Wanted {
            source,
            read_only: self.read_only,
            snapshot: self.snapshot.map(SnapshotChoice::from),
            name: self.name,
            description: self.description,
            bitmaps: self.bitmaps,
            offset: self.offset,
            size: self.size,
            journals,
        })
    }
}

fn is_prefix(scheme: &str, args: &ServeAddArgs) -> bool {
    args.image.as_encoded_bytes().starts_with(scheme.as_bytes())
}

/// The option's value for a backend; `None`: it has none, and is what is used without the option.
const fn aio_name(io: Io) -> Option<&'static str> {
    match io {
        Io::Threads => Some("threads"),
        Io::Uring => Some("io_uring"),
        _ => None,
    }
}

impl From<SnapshotChoice> for SnapshotName {
    fn from(choice: SnapshotChoice) -> Self {
        match choice {
            SnapshotChoice::IdOrName(text) => Self::IdOrName(text),
            SnapshotChoice::IdAndName { id, name } => Self::IdAndName { id, name },
        }
    }
}

impl From<SnapshotName> for SnapshotChoice {
    fn from(name: SnapshotName) -> Self {
        match name {
            SnapshotName::IdOrName(text) => Self::IdOrName(text),
            SnapshotName::IdAndName { id, name } => Self::IdAndName { id, name },
        }
    }
}

/// The arguments of commands on exports.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Named {
    /// All exports, if it is missing.
    name: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct RemoveRequest {
    name: String,
    #[serde(default)]
    force: bool,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct QuiesceRequest {
    name: Option<String>,
    /// Milliseconds.
    timeout: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct ResizeRequest {
    name: String,
    /// The new length in bytes.
    size: Option<u64>,
    /// Bytes that are added.
    more: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct SnapshotRequest {
    name: String,
    /// Path of the overlay.
    overlay: PathBuf,
    /// Dirty bitmaps that begin empty in the overlay.
    #[serde(default)]
    clear: Vec<String>,
    /// Milliseconds.
    timeout: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct BitmapsRequest {
    name: String,
    /// Carried out in this order, all of them or none.
    #[serde(default)]
    changes: Vec<BitmapChange>,
    /// Milliseconds.
    timeout: Option<u64>,
}

/// A change of a dirty bitmap.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "action", deny_unknown_fields)]
pub(super) enum BitmapChange {
    Add {
        bitmap: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        granularity: Option<u64>,
    },
    Remove {
        bitmap: String,
    },
    Clear {
        bitmap: String,
    },
    Enable {
        bitmap: String,
    },
    Disable {
        bitmap: String,
    },
    Merge {
        bitmap: String,
        source: String,
    },
}

impl BitmapChange {
    /// The request for a change of `limosa serve ctl bitmap`. `granularity`: of a bitmap that is added.
    ///
    /// # Errors
    /// Bits themselves are not sent.
    pub(super) fn new(bitmap: &str, action: &BitmapAction, granularity: Option<u64>) -> anyhow::Result<Self> {
        let bitmap = bitmap.to_owned();
        Ok(match action {
            BitmapAction::Add { .. } => Self::Add { bitmap, granularity },
            BitmapAction::Remove => Self::Remove { bitmap },
            BitmapAction::Clear => Self::Clear { bitmap },
            BitmapAction::Enable => Self::Enable { bitmap },
            BitmapAction::Disable => Self::Disable { bitmap },
            BitmapAction::Merge { source } => Self::Merge { bitmap, source: source.clone() },
            other => anyhow::bail!("{other:?} cannot be sent to a server"),
        })
    }

    fn named(self) -> (String, BitmapAction) {
        match self {
            Self::Add { bitmap, granularity } => (bitmap, BitmapAction::Add { granularity }),
            Self::Remove { bitmap } => (bitmap, BitmapAction::Remove),
            Self::Clear { bitmap } => (bitmap, BitmapAction::Clear),
            Self::Enable { bitmap } => (bitmap, BitmapAction::Enable),
            Self::Disable { bitmap } => (bitmap, BitmapAction::Disable),
            Self::Merge { bitmap, source } => (bitmap, BitmapAction::Merge { source }),
        }
    }
}

/// The commands of a server.
#[derive(Debug)]
pub(super) struct Steering {
    servers: Arc<Servers>,
    exports: Exports,
    images: Images,
    /// Held while an overlay is put on an image, or a disk becomes longer.
    snapshots: Mutex<()>,
    untrusted: bool,
    /// Whether files outside of the allowed folders cannot be opened.
    confined: bool,
    /// Whether the server has ended. Held for reading by every command that changes something.
    ended: RwLock<bool>,
}

impl Steering {
    /// The commands of a server of these exports.
    pub(super) fn new(servers: Arc<Servers>, exports: Exports, images: Images, args: &ServeArgs) -> Self {
        let (untrusted, confined) = (args.open.untrusted, args.sandbox != SandboxArg::Off);
        Self { servers, exports, images, snapshots: Mutex::new(()), untrusted, confined, ended: RwLock::new(false) }
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

    /// The export of a name, or all.
    fn chosen(&self, name: Option<&str>) -> anyhow::Result<Vec<Arc<Export>>> {
        name.map_or_else(|| Ok(self.exports.all()), |name| Ok(vec![self.export(name)?]))
    }

    fn run(&self, name: &str, arguments: &Value) -> anyhow::Result<Option<Value>> {
        let done = json!({});
        Ok(Some(match name {
            "query-exports" => self.exports.all().iter().map(|export| report::state(export)).collect(),
            "query-server" => {
                let counters = self.servers.nbd.counters();
                json!({ "active": counters.active, "counters": report::server_counters(&counters) })
            }
            "export-add" => self.add(read::<AddRequest>(arguments)?)?,
            "export-remove" => {
                let RemoveRequest { name, force } = read(arguments)?;
                let _kept = self.keep()?;
                self.exports.remove(&name, if force { Duration::ZERO } else { DRAIN })?;
                self.images.forget(&name);
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
            "export-snapshot" => self.snapshot(&read(arguments)?)?,
            "export-bitmaps" => self.bitmaps(read(arguments)?)?,
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
        let wanted = request.wanted(self.untrusted, self.images.journals().cloned())?;
        // Before its file is opened: a name that is taken is found without it.
        if let Some(name) = wanted.name.as_ref().filter(|name| self.exports.find(name).is_some()) {
            return Err(ExportError::Exists(name.clone()).into());
        }
        let export = wanted.open().map_err(|error| self.explained(error))?;
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
        let mut kinds = error.chain().filter_map(|cause| match cause.downcast_ref() {
            Some(ImageError::Storage(cause)) => Some(cause.source.kind()),
            _ => (cause.downcast_ref::<Arc<io::Error>>().map(|cause| cause.kind()))
                .or_else(|| cause.downcast_ref::<io::Error>().map(io::Error::kind))
                .or_else(|| cause.downcast_ref::<rustix::io::Errno>().map(|errno| errno.kind())),
        });
        // Landlock answers with the first of them, and seccomp with the second.
        let is_forbidden = |kind| matches!(kind, io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported);
        if self.confined && kinds.any(is_forbidden) {
            let line = anyhow_error_line(&error);
            return anyhow::anyhow!(
                "{line}; images that are added, overlays, and the images below \
                 them must be in folders of the server's --allow-dir"
            );
        }
        error
    }

    /// The export of a name.
    fn export(&self, name: &str) -> anyhow::Result<Arc<Export>> {
        Ok(self.exports.find(name).ok_or_else(|| ExportError::NotFound(name.to_owned()))?)
    }

    fn resize(&self, request: &ResizeRequest) -> anyhow::Result<Value> {
        let _kept = self.keep()?;
        // An overlay is as long as the image was when it was made.
        let _alone = self.snapshots.lock();
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

    fn snapshot(&self, request: &SnapshotRequest) -> anyhow::Result<Value> {
        let _kept = self.keep()?;
        // Of two overlays the second one is on top of the first.
        let _alone = self.snapshots.lock();
        let export = self.export(&request.name)?;
        let begun = Instant::now();
        let within = request.timeout.map_or(QUIESCE, Duration::from_millis);
        let frozen = Arc::clone(export.disk().name());
        // Missing for a moment while it is added or removed.
        let wanted = self.images.wanted(&export).ok_or_else(|| ExportError::NotFound(request.name.clone()))?;
        let overlay = overlay::put(&export, &wanted, (&request.overlay, &request.clear), within);
        let overlay = overlay.map_err(|error| self.explained(error))?;
        if self.exports.find(&request.name).is_some_and(|now| Arc::ptr_eq(&now, &export)) {
            self.images.note(&export, overlay);
        }
        self.servers.devices.iter().for_each(|device| device.notify_replaced(&export));
        let mut answer = report::description(&export);
        answer.insert("frozen".into(), (&*frozen).into());
        answer.insert("ms".into(), quantity::millis(begun.elapsed()).into());
        Ok(answer.into())
    }

    fn bitmaps(&self, request: BitmapsRequest) -> anyhow::Result<Value> {
        let _kept = self.keep()?;
        // An overlay has the bitmaps that the image had when it was put on it.
        let _alone = self.snapshots.lock();
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
