//! The resolved arguments of the commands of `limosa img`.

use std::ffi::{OsStr, OsString};
use std::fmt;

use anyhow::Context as _;
use limosa_image::BitmapAction;
use limosa_image::convert::CopyBitmaps;
use limosa_image::dd::Blocks;
use limosa_image::qcow2::{ReflinkMode, Repair, SnapshotChange, SnapshotChoice};
use limosa_image::rebase::BackingName;
use limosa_image::resize::NewSize;
use limosa_storage::{CacheMode, Io};

/// The name of an image: a path of any bytes, or text that says more.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Name(pub(crate) OsString);

impl Name {
    /// Returns it as text, which everything but a path has to be.
    ///
    /// # Errors
    /// It is not UTF-8.
    pub(crate) fn text(&self) -> anyhow::Result<&str> {
        self.0.to_str().with_context(|| format!("{self}: must be UTF-8 unless it is a path"))
    }
}

impl AsRef<OsStr> for Name {
    fn as_ref(&self) -> &OsStr {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

/// An image that exists, with the options that it is opened with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    /// A file's name, `json:{...}`, or with `image_opts` a list of options.
    pub(crate) name: Name,
    /// The name is a list of options: `driver=qcow2,file.driver=file,file.filename=NAME`.
    pub(crate) image_opts: bool,
    /// Its format, if given.
    pub(crate) format: Option<String>,
    /// How its files are cached.
    pub(crate) cache: CacheMode,
    /// The I/O backend of its files.
    pub(crate) io: Io,
    /// Whether it is opened without locks (`-U`).
    pub(crate) force_share: bool,
    /// Whether every file that it refers to is refused.
    pub(crate) untrusted: bool,
}

/// An image that is created or overwritten, without its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// Its format.
    pub(crate) format: String,
    /// `-o`: `NAME=VALUE,...`, or `help`.
    pub(crate) options: String,
    /// How its files are cached.
    pub(crate) cache: CacheMode,
    /// The name is a list of options.
    pub(crate) image_opts: bool,
}

impl Default for Target {
    fn default() -> Self {
        Self { format: "raw".into(), options: String::new(), cache: CacheMode::Unsafe, image_opts: false }
    }
}

impl Target {
    /// Whether only a list of the options is asked for (`-o help`).
    pub(crate) fn asks_for_help(&self) -> bool {
        self.options.split(',').any(|option| matches!(option, "help" | "?"))
    }
}

/// `limosa img create`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CreateOptions {
    /// Empty for `-o help`.
    pub(crate) name: Name,
    pub(crate) target: Target,
    /// Virtual size in bytes, if given.
    pub(crate) size: Option<u64>,
    pub(crate) backing: Option<OsString>,
    pub(crate) backing_format: Option<String>,
    /// The backing file is not opened.
    pub(crate) backing_unsafe: bool,
    /// Whether every file that the backing file refers to is refused.
    pub(crate) untrusted: bool,
    pub(crate) quiet: bool,
}

/// `limosa img info`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InfoOptions {
    pub(crate) source: Source,
    pub(crate) backing_chain: bool,
    pub(crate) json: bool,
}

/// `limosa img check`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CheckOptions {
    pub(crate) source: Source,
    /// The kinds of damage to repair; `None` only checks.
    pub(crate) repair: Option<Repair>,
    pub(crate) quiet: bool,
    pub(crate) json: bool,
}

/// `limosa img map`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MapOptions {
    pub(crate) source: Source,
    /// Start offset in bytes.
    pub(crate) start: u64,
    /// The most bytes.
    pub(crate) length: Option<u64>,
    pub(crate) json: bool,
}

/// `limosa img resize`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ResizeOptions {
    pub(crate) source: Source,
    pub(crate) size: NewSize,
    pub(crate) shrink: bool,
    pub(crate) preallocation: String,
    pub(crate) quiet: bool,
}

/// Requests of `limosa img convert` in flight by default: qemu-img's.
const PARALLEL: usize = 8;

/// `limosa img convert`. By default that of a command line without options and names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ConvertOptions {
    /// One or more; none for `-o help`.
    pub(crate) sources: Vec<Source>,
    /// The snapshot of the source that is read.
    pub(crate) snapshot: Option<SnapshotChoice>,
    /// The target's name.
    pub(crate) name: Name,
    pub(crate) target: Target,
    pub(crate) backing: Option<OsString>,
    pub(crate) backing_format: Option<String>,
    /// The target exists.
    pub(crate) no_create: bool,
    /// It reads as zeros.
    pub(crate) target_is_zero: bool,
    /// The shortest run of zero bytes that becomes a hole, if given; 0: no holes.
    pub(crate) sparse_size: Option<u64>,
    /// Requests in flight at the same time, if given.
    pub(crate) parallel: Option<u8>,
    /// Writes need not be in order.
    pub(crate) out_of_order: bool,
    /// The kernel copies from file to file.
    pub(crate) copy_range: bool,
    /// Clusters are compressed.
    pub(crate) compress: bool,
    /// The level of compression, if given.
    pub(crate) compress_level: Option<u8>,
    /// The copy can be continued if it is interrupted, and an interrupted one is.
    pub(crate) resume: bool,
    /// Most bytes a second.
    pub(crate) rate: Option<u64>,
    /// Unreadable ranges become zeros.
    pub(crate) salvage: bool,
    /// Bitmaps are copied, too.
    pub(crate) bitmaps: Option<CopyBitmaps>,
    /// Progress is shown also without a terminal.
    pub(crate) progress: bool,
    pub(crate) quiet: bool,
    pub(crate) json: bool,
}

impl ConvertOptions {
    /// Returns the shortest run of zero bytes that becomes a hole; 0: no holes.
    pub(crate) fn sparse(&self) -> u64 {
        self.sparse_size.unwrap_or(limosa_image::convert::ConvertOptions::SPARSE)
    }

    /// Returns the number of requests in flight at the same time: each compresses on its own.
    pub(crate) fn in_flight(&self) -> usize {
        let processors = if self.compress { std::thread::available_parallelism().map_or(1, usize::from) } else { 1 };
        self.parallel.map_or(processors.clamp(PARALLEL, u8::MAX.into()), usize::from)
    }
}

/// `limosa img dd`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DdOptions {
    pub(crate) source: Source,
    /// The output's name.
    pub(crate) name: Name,
    /// The output's format.
    pub(crate) format: String,
    pub(crate) blocks: Blocks,
    pub(crate) json: bool,
}

/// The source of a measurement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Measured {
    /// A new image of this many bytes.
    Size(u64),
    /// An image that would be converted.
    Image(Source),
}

/// `limosa img measure`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MeasureOptions {
    pub(crate) what: Measured,
    /// The target is written to a pipe.
    pub(crate) pipe: bool,
    /// The snapshot of the source that is measured.
    pub(crate) snapshot: Option<SnapshotChoice>,
    pub(crate) target: Target,
    pub(crate) json: bool,
}

/// `limosa img commit`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommitOptions {
    pub(crate) source: Source,
    /// The image that takes the contents; `None`: the backing file.
    pub(crate) base: Option<OsString>,
    /// The new object that takes them in place of a base.
    pub(crate) to: Option<OsString>,
    /// The overlay is not emptied.
    pub(crate) keep: bool,
    /// Most bytes a second.
    pub(crate) rate: Option<u64>,
    /// Progress is shown also without a terminal.
    pub(crate) progress: bool,
    pub(crate) quiet: bool,
    pub(crate) json: bool,
}

/// `limosa img amend`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AmendOptions {
    pub(crate) source: Source,
    /// `NAME=VALUE,NAME=VALUE`.
    pub(crate) options: String,
    /// Key slots may be overwritten, and the last one erased.
    pub(crate) force: bool,
    /// Progress is shown also without a terminal.
    pub(crate) progress: bool,
    pub(crate) quiet: bool,
}

/// `limosa img rebase`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RebaseOptions {
    pub(crate) source: Source,
    /// The new backing file; `None`: the overlay has none any more.
    pub(crate) backing: Option<BackingName>,
    /// Only the header changes (`-u`).
    pub(crate) header_only: bool,
    /// Copied clusters are compressed.
    pub(crate) compress: bool,
    /// How the new backing file is cached.
    pub(crate) backing_cache: CacheMode,
    /// Whether the new backing file is opened without locks (`-U`).
    pub(crate) force_share: bool,
    /// Progress is shown also without a terminal.
    pub(crate) progress: bool,
    pub(crate) quiet: bool,
    pub(crate) json: bool,
}

/// `limosa img snapshot`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SnapshotOptions {
    pub(crate) source: Source,
    /// The change; `None`: they are listed.
    pub(crate) change: Option<SnapshotChange>,
    pub(crate) json: bool,
}

/// `limosa img bitmap`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BitmapOptions {
    pub(crate) source: Source,
    pub(crate) bitmap: String,
    /// At least one.
    pub(crate) actions: Vec<BitmapAction>,
    /// The image that has the bitmaps that are merged, if it is another one.
    pub(crate) merged: Option<Source>,
}

/// `limosa img compare`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CompareOptions {
    pub(crate) first: Source,
    pub(crate) second: Source,
    pub(crate) strict: bool,
    /// Progress is shown also without a terminal.
    pub(crate) progress: bool,
    pub(crate) quiet: bool,
    pub(crate) json: bool,
}

/// `limosa img bench`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BenchOptions {
    pub(crate) source: Source,
    pub(crate) count: u32,
    /// Requests in flight at the same time.
    pub(crate) depth: u32,
    /// Bytes of a request.
    pub(crate) buffer_size: u64,
    /// Bytes from one request's beginning to the next one's.
    pub(crate) step_size: u64,
    /// Offset of the first request.
    pub(crate) offset: u64,
    pub(crate) write: bool,
    /// The value of every byte that is written.
    pub(crate) pattern: u8,
    /// Requests between two flushes; 0: no flushes.
    pub(crate) flush_interval: u32,
    /// Whether a flush waits for the requests in flight.
    pub(crate) drain: bool,
    /// The size from which on contents are cloned in place of being copied.
    pub(crate) clone: ReflinkMode,
    pub(crate) json: bool,
}
