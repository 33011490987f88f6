//! The requests of the control socket.

use std::path::PathBuf;

use limosa_image::qcow2::{JournalFolder, SnapshotChoice};
use limosa_image::reference::Reference;
use limosa_image::{BitmapAction, Compress};
use limosa_storage::{CacheMode, Io};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::args::{ServeAddArgs, ServedImageArgs, parse_aio};
use crate::img::options::{Name, Source};
use crate::serve::wanted::Wanted;

/// The arguments of `export-add`: those of the command line, by the names of its options.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(in crate::serve) struct AddRequest {
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
    // Left out if it is off: older servers refuse fields that they do not know.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    compress: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    compress_level: Option<u8>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    fenced: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    epoch: Option<u64>,
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
    pub(in crate::serve) fn new(args: &ServeAddArgs) -> anyhow::Result<Self> {
        let ServedImageArgs { description, format, image_opts, read_only, shared, snapshot, bitmap, .. } = &args.how;
        let is_elsewhere = || Reference::from_name(&args.image).is_ok_and(|image| image.path().is_none());
        let named = *image_opts || ["json:", "file:"].iter().any(|scheme| is_prefix(scheme, args)) || is_elsewhere();
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
            compress: args.how.compress,
            compress_level: args.how.compress_level,
            fenced: args.how.fenced,
            epoch: args.how.epoch,
            cache: Some(args.how.cache.as_str().to_owned()),
            aio: args.how.aio.and_then(aio_name).map(str::to_owned),
        })
    }

    pub(super) fn wanted(self, untrusted: bool, journals: Option<JournalFolder>) -> anyhow::Result<Wanted> {
        anyhow::ensure!(!self.shared || self.read_only, "shared needs read-only");
        anyhow::ensure!(self.compress || self.compress_level.is_none(), "compress-level needs compress");
        let is_read_only = self.read_only || self.snapshot.is_some();
        anyhow::ensure!(!self.compress || !is_read_only, "compress needs an image that is written");
        let compress = self.compress.then(|| Compress::default().level(self.compress_level));
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
            compress,
            fenced: self.fenced,
            epoch: self.epoch,
            recovery: None,
            journals,
            below: None,
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
pub(super) struct Named {
    /// All exports, if it is missing.
    pub(super) name: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct RemoveRequest {
    pub(super) name: String,
    #[serde(default)]
    pub(super) force: bool,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct QuiesceRequest {
    pub(super) name: Option<String>,
    /// Milliseconds.
    pub(super) timeout: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct ResizeRequest {
    pub(super) name: String,
    /// The new length in bytes.
    pub(super) size: Option<u64>,
    /// Bytes that are added.
    pub(super) more: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct SnapshotRequest {
    pub(super) name: String,
    /// Path of the overlay.
    pub(super) overlay: PathBuf,
    /// Dirty bitmaps that begin empty in the overlay.
    #[serde(default)]
    pub(super) clear: Vec<String>,
    /// Whether the overlay was prepared.
    #[serde(default)]
    pub(super) prepared: bool,
    /// Milliseconds.
    pub(super) timeout: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct QueryRequest {
    pub(super) name: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct PrepareRequest {
    pub(super) name: String,
    /// Path of the overlay.
    pub(super) overlay: PathBuf,
    /// Path of the image that the export must have.
    pub(super) image: PathBuf,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct CommitRequest {
    pub(super) name: String,
    /// Path of the overlay that the export must have.
    pub(super) overlay: Option<PathBuf>,
    /// Milliseconds.
    pub(super) timeout: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct UndoRequest {
    pub(super) name: String,
    /// Path of the overlay.
    pub(super) overlay: PathBuf,
    /// Milliseconds.
    pub(super) timeout: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct BitmapsRequest {
    pub(super) name: String,
    /// Carried out in this order, all of them or none.
    #[serde(default)]
    pub(super) changes: Vec<BitmapChange>,
    /// Milliseconds.
    pub(super) timeout: Option<u64>,
}

/// The beginning of protection.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct ProtectRequest {
    pub(super) name: String,
    pub(super) keeper: String,
    /// The number of the first epoch; 1 if it is missing.
    pub(super) first: Option<u64>,
    /// Identifies the log; made up if it is missing.
    pub(super) log: Option<Uuid>,
    /// The most bytes of the log.
    pub(super) log_size: Option<u64>,
    /// Milliseconds.
    pub(super) timeout: Option<u64>,
}

/// An epoch to be sealed.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct EpochRequest {
    pub(super) name: String,
    pub(super) keeper: String,
    pub(super) epoch: u64,
}

/// An epoch that writes are dropped after.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct DropRequest {
    pub(super) name: String,
    pub(super) keeper: String,
    pub(super) epoch: u64,
    /// Its VM is off, or is refused: the export is served again, under the same name.
    #[serde(default)]
    pub(super) serve_again: bool,
    /// It is not known to be off: it must be refused for certain.
    #[serde(default)]
    pub(super) fence: bool,
}

/// An epoch to be prepared or kept.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct LogRequest {
    pub(super) name: String,
    pub(super) keeper: String,
    pub(super) epoch: u64,
    #[serde(default)]
    pub(super) durable: bool,
}

/// The end of protection.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct UnprotectRequest {
    pub(super) name: String,
    pub(super) keeper: String,
    /// Milliseconds.
    pub(super) timeout: Option<u64>,
}

/// A change of a dirty bitmap.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "action", deny_unknown_fields)]
pub(in crate::serve) enum BitmapChange {
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
    pub(in crate::serve) fn new(bitmap: &str, action: &BitmapAction, granularity: Option<u64>) -> anyhow::Result<Self> {
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

    pub(super) fn named(self) -> (String, BitmapAction) {
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
