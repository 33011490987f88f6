//! The arguments of `limosa serve ctl`, and those that say how an image is served.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use limosa_console::parse;
use limosa_image::Compress;
use limosa_image::qcow2::SnapshotChoice;
use limosa_image::resize::NewSize;
use limosa_qemu::qmp::MonitorAddress;
use limosa_storage::{CacheMode, Io};

use super::bitmap_changes::BitmapChanges;
use super::img::{parse_aio, parse_new_size, parse_snapshot};
use crate::img::size::parse_size;

/// How an image is served: of a server that starts, or one that is added.
#[derive(Debug, Args)]
pub(crate) struct ServedImageArgs {
    /// Description of the export for people
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) description: String,

    /// The image's format: raw or qcow2; probed by default
    #[arg(short, long, value_name = "FMT")]
    pub(crate) format: Option<String>,

    /// IMAGE is a list of options: driver=qcow2,file.driver=file,file.filename=NAME,...
    #[arg(long, conflicts_with = "format")]
    pub(crate) image_opts: bool,

    /// Refuse writes; other processes may read the image meanwhile
    #[arg(short, long)]
    pub(crate) read_only: bool,

    /// Serve an image that another process is writing to, without locks; contents may be inconsistent
    #[arg(short = 'U', long, requires = "read_only")]
    pub(crate) shared: bool,

    /// Serve this internal snapshot of IMAGE: its id or name, or snapshot.id=ID,snapshot.name=NAME; implies --read-only
    #[arg(long, value_name = "SNAPSHOT", value_parser = parse_snapshot)]
    pub(crate) snapshot: Option<SnapshotChoice>,

    /// Let clients of NBD read this dirty bitmap of the image, as qemu:dirty-bitmap:NAME. Repeatable
    #[arg(long, value_name = "NAME")]
    pub(crate) bitmap: Vec<String>,

    /// Begin the export at this offset of the disk
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub(crate) offset: u64,

    /// Limit the export to this size; default: up to the end of the disk
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) size: Option<u64>,

    /// Compress whole clusters that clients write, in a qcow2 image: for backups that are written once, in large
    /// requests. A cluster that is written in parts is stored uncompressed
    #[arg(long, conflicts_with_all = ["read_only", "snapshot"])]
    pub(crate) compress: bool,

    /// Level of compression: zlib 1 to 9 (default 9), zstd 1 to 22 (default 3)
    #[arg(long, value_name = "LEVEL", requires = "compress")]
    pub(crate) compress_level: Option<u8>,

    /// Serve an image as of the last epoch that was kept of a protected VM: that VM is off for certain, or reaches no
    /// server of the image. What it wrote later is gone
    #[arg(long, conflicts_with_all = ["read_only", "snapshot"])]
    pub(crate) fenced: bool,

    /// With --fenced: serve it as of this epoch, which may be one that was prepared. Needed if the server ended between
    /// both: the checkpoint says which of them counts
    #[arg(long, value_name = "EPOCH", requires = "fenced")]
    pub(crate) epoch: Option<u64>,

    /// Cache mode: none, writeback, writethrough, unsafe, directsync
    #[arg(long, value_name = "MODE", default_value = "writeback")]
    pub(crate) cache: CacheMode,

    /// Asynchronous I/O backend; native means the same as `io_uring` here
    #[arg(long, value_name = "threads|native|io_uring", value_parser = parse_aio)]
    pub(crate) aio: Option<Io>,
}

impl ServedImageArgs {
    /// How what clients write is compressed, if it is.
    pub(crate) fn compress(&self) -> Option<Compress> {
        self.compress.then(|| Compress::default().level(self.compress_level))
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum ServeCommand {
    /// Query and steer a running server
    Ctl(ServeCtlArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ServeCtlArgs {
    /// The server's --control socket
    #[arg(value_name = "SOCK")]
    pub(crate) control: MonitorAddress,

    #[command(subcommand)]
    pub(crate) what: ServeCtlCommand,

    /// Print one JSON object on stdout
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ServeCtlCommand {
    /// Show the exports, their clients and their counters
    List,
    /// Serve another image
    Add(Box<ServeAddArgs>),
    /// Stop serving an image: its clients are ended after their requests, and it is closed
    Remove {
        /// Name of the export; '' is the default export
        #[arg(value_name = "NAME")]
        name: String,

        /// Do not wait until clients have taken their last replies: requests in flight are carried out all the same
        #[arg(long)]
        force: bool,
    },
    /// Make acknowledged writes durable
    Flush {
        /// Name of the export; default: all
        #[arg(value_name = "NAME")]
        name: Option<String>,
    },
    /// Have requests wait, and make the image's file complete: nothing is written to it until `resume`
    Quiesce {
        /// Name of the export; default: all
        #[arg(value_name = "NAME")]
        name: Option<String>,

        /// Fail if requests in flight are not done after this time
        #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "30s")]
        timeout: Duration,
    },
    /// Continue after `quiesce`
    Resume {
        /// Name of the export; default: all
        #[arg(value_name = "NAME")]
        name: Option<String>,
    },
    /// Make a disk longer while it is used; added bytes read as zeros
    Resize {
        /// Name of the export; '' is the default export
        #[arg(value_name = "NAME")]
        name: String,

        /// The new size, or with + what is added
        #[arg(value_name = "[+]SIZE", value_parser = parse_new_size, allow_hyphen_values = true)]
        size: NewSize,
    },
    /// Continue on a new overlay: the image stays as it is now, and can be read by others
    Snapshot {
        /// Name of the export; '' is the default export
        #[arg(value_name = "NAME")]
        name: String,

        /// The overlay to create, a qcow2 image whose backing file is the image
        #[arg(value_name = "OVERLAY")]
        overlay: PathBuf,

        /// Have this dirty bitmap begin empty in the overlay: it has what is written from now on. The others have what
        /// they have in the image. Repeatable
        #[arg(long, value_name = "BITMAP")]
        clear: Vec<String>,

        /// Fail if requests in flight are not done after this time
        #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "30s")]
        timeout: Duration,
    },
    /// Bring what its overlay has to the image below, continue on that, and remove the overlay. Requests wait meanwhile
    Commit {
        /// Name of the export; '' is the default export
        #[arg(value_name = "NAME")]
        name: String,

        /// The overlay: refuse if the disk's image is another one
        #[arg(value_name = "OVERLAY")]
        overlay: Option<PathBuf>,

        /// Fail if requests in flight are not done after this time
        #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "30s")]
        timeout: Duration,
    },
    /// Change the dirty bitmaps of a disk, all at one moment; without an option: show them
    Bitmap(ServeBitmapArgs),
    /// Have writes belong to epochs from now on: they become the image's when an epoch is kept
    Protect {
        #[command(flatten)]
        export: ServeKeeperArgs,

        /// Number of the first epoch
        #[arg(long, value_name = "EPOCH", default_value = "1", value_parser = clap::value_parser!(u64).range(1..))]
        first: u64,

        /// The most bytes of the log beside the image that has the writes; further ones fail
        #[arg(long, value_name = "SIZE", default_value = "4G", value_parser = parse_size)]
        log_size: u64,

        /// Fail if requests in flight are not done after this time
        #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "30s")]
        timeout: Duration,
    },
    /// Seal the open epoch: later writes belong to the next one. The VM is stopped meanwhile
    Seal(ServeEpochArgs),
    /// Prepare a sealed epoch: if the server is killed, its checkpoint says whether it counts
    Prepare {
        #[command(flatten)]
        epoch: ServeEpochArgs,

        /// Find it even if the power is cut, too
        #[arg(long)]
        durable: bool,
    },
    /// Keep a sealed or prepared epoch, and those before it: their writes become the image's
    Keep {
        #[command(flatten)]
        epoch: ServeEpochArgs,

        /// Keep it even if the power is cut, too
        #[arg(long)]
        durable: bool,
    },
    /// Drop what was written after an epoch, cut off the export's clients, and close its image: the VM has failed
    Drop {
        #[command(flatten)]
        epoch: ServeEpochArgs,

        /// Serve the image again under the same name. The VM's process is refused there, if it is connected to a unix
        /// socket; otherwise the VM must be off
        #[arg(long)]
        serve_again: bool,

        /// Refuse the command unless the VM is recognized when it comes back: it is not known to be off
        #[arg(long)]
        fence: bool,
    },
    /// End protection: the open epoch becomes the image's, too
    Unprotect {
        #[command(flatten)]
        export: ServeKeeperArgs,

        /// Fail if requests in flight are not done after this time
        #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "30s")]
        timeout: Duration,
    },
    /// End the server, as SIGTERM does
    Quit,
}

/// An export, and who protects it.
#[derive(Debug, Args)]
pub(crate) struct ServeKeeperArgs {
    /// Name of the export; '' is the default export
    #[arg(value_name = "NAME")]
    pub(crate) name: String,

    /// Name of the keeper: another one is refused
    #[arg(long, value_name = "NAME", default_value = "ctl")]
    pub(crate) keeper: String,
}

/// An epoch of an export.
#[derive(Debug, Args)]
pub(crate) struct ServeEpochArgs {
    #[command(flatten)]
    pub(crate) export: ServeKeeperArgs,

    /// Number of the epoch
    #[arg(value_name = "EPOCH")]
    pub(crate) epoch: u64,
}

#[derive(Debug, Args)]
pub(crate) struct ServeBitmapArgs {
    /// Name of the export; '' is the default export
    #[arg(value_name = "NAME")]
    pub(crate) name: String,

    #[command(flatten)]
    pub(crate) changes: BitmapChanges,

    /// Bytes that a bit of added bitmaps is about: a power of two from 512 to 2G; default: a cluster, at least 4K
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size, requires = "add")]
    pub(crate) granularity: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct ServeAddArgs {
    /// The image: a path, or json:{...}, in which relative names are from the server's folder
    #[arg(value_name = "IMAGE")]
    pub(crate) image: OsString,

    /// Name of the export; default: the name of the image's file
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,

    #[command(flatten)]
    pub(crate) how: ServedImageArgs,
}
