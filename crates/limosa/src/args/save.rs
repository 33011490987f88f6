//! The arguments of `limosa save`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::TypedValueParser;
use clap::{Args, ValueEnum};
use limosa_channel::Uri;

use super::{ChannelArgs, HowPackedArgs, JobArgs, KeyArgs, NewSnapshotArgs, TransportArg};
use limosa_console::named_values;
use limosa_console::parse::{self, ParseError};
use limosa_pack::DEFAULT_LEVEL;

fn write_via() -> impl TypedValueParser<Value = TransportArg> {
    named_values([
        (TransportArg::Auto, "auto", "`file` if QEMU supports it (9.0 or newer, on this host), else `socket`"),
        (TransportArg::File, "file", "QEMU writes the file itself through a file descriptor that limosa passes"),
        (TransportArg::Socket, "socket", "limosa receives a migration stream from QEMU and writes the file"),
    ])
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnTimeoutArg {
    /// Stop the VM, so that the rest can be saved unchanged
    Pause,
    /// Cancel the save; the VM keeps running
    Cancel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SaveDisksArg {
    /// Refuse if memory and disks could be from different points in time
    Check,
    /// Freeze them at the time of the save; the VM continues on a qcow2 overlay over each disk
    Overlay,
    /// Do not check; disks are kept consistent by other means
    Ignore,
}

/// Parses `zstd` or `zstd:LEVEL`: the level.
fn parse_packing(text: &str) -> Result<u8, ParseError> {
    let wrong = || ParseError::new(text, "compression", "zstd, or zstd:1 to zstd:22");
    match text.strip_prefix("zstd").ok_or_else(wrong)? {
        "" => Ok(DEFAULT_LEVEL),
        level => level
            .strip_prefix(':')
            .and_then(|level| level.parse().ok())
            .filter(|level| (1..=22).contains(level))
            .ok_or_else(wrong),
    }
}

#[derive(Debug, Args)]
pub(crate) struct SaveArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,

    /// The file to create; with --pack also the URL of a new object in a store
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    /// Who writes the pages
    #[arg(long, value_parser = write_via(), default_value = "auto")]
    pub(crate) via: TransportArg,

    /// Where QEMU connects with --via socket: unix:PATH or tcp:HOST:PORT. Default: a socket passed through the monitor,
    /// or with --channels one in a private directory
    #[arg(long, value_name = "URI")]
    pub(crate) listen: Option<Uri>,

    #[command(flatten)]
    pub(crate) channels: ChannelArgs,

    /// Leave the VM stopped. It continues if the save fails before the file is safe on disk
    #[arg(long, conflicts_with = "no_sync")]
    pub(crate) stop: bool,

    /// Keep the VM running: QEMU saves each page before the guest changes it (its background-snapshot); the snapshot
    /// shows the VM as it was at the start
    #[arg(long, conflicts_with = "stop")]
    pub(crate) background: bool,

    #[command(flatten)]
    pub(crate) new: NewSnapshotArgs,

    /// Pack the snapshot when the VM continues, as limosa pack does: zstd, or zstd:LEVEL
    #[arg(long, value_name = "zstd[:LEVEL]", value_parser = parse_packing)]
    pub(crate) pack: Option<u8>,

    #[command(flatten)]
    pub(crate) how_packed: HowPackedArgs,

    #[command(flatten)]
    pub(crate) key: KeyArgs,

    /// Longest downtime of the VM that QEMU aims for (its downtime-limit)
    #[arg(long, value_name = "TIME", value_parser = parse::time)]
    pub(crate) downtime: Option<Duration>,

    /// How long the VM may keep running while it is saved
    #[arg(long, value_name = "TIME", value_parser = parse::time)]
    pub(crate) timeout: Option<Duration>,

    /// Send memory slowly at first, at most this long, until QEMU knows from the guest's balloon which pages are free.
    /// Pages sent before that are stored
    #[arg(long, value_name = "TIME", value_parser = parse::time, conflicts_with = "background")]
    pub(crate) hint_wait: Option<Duration>,

    /// Action when --timeout expires: the VM changes its memory faster than it is saved
    #[arg(long, value_enum, default_value_t = OnTimeoutArg::Cancel, requires = "timeout")]
    pub(crate) on_timeout: OnTimeoutArg,

    /// How to keep writable disks consistent with memory
    #[arg(long, value_enum, default_value_t = SaveDisksArg::Check)]
    pub(crate) disks: SaveDisksArg,

    /// Directory of the overlays with --disks overlay; by default each disk's own directory, as NAME.overlay-ID
    #[arg(long, value_name = "DIR")]
    pub(crate) overlay_dir: Option<PathBuf>,

    /// The --control socket of a limosa serve that serves disks of this VM: with --disks overlay it freezes them.
    /// Repeatable
    #[arg(long, value_name = "SOCK")]
    pub(crate) disk_server: Vec<PathBuf>,
}
