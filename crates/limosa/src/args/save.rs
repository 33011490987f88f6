//! The arguments of `limosa save`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use limosa_channel::Uri;

use super::values::parse_time;
use super::{ChannelArgs, JobArgs, NewSnapshotArgs, ViaArg};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnTimeoutArg {
    /// Stop the VM, so that the rest is saved without it changing
    Pause,
    /// Give up; the VM goes on
    Cancel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SaveDisksArg {
    /// Refuse where memory and disks could be of different instants
    Check,
    /// Freeze them at the instant of the save; the VM goes on with a qcow2 overlay over each
    Overlay,
    /// Somebody else keeps the disks consistent
    Ignore,
}

#[derive(Debug, Args)]
pub(crate) struct SaveArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,

    /// The file to make
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    /// Who writes the pages
    #[arg(long, value_enum, default_value_t = ViaArg::Auto)]
    pub(crate) via: ViaArg,

    /// Where QEMU connects with --via socket: unix:PATH or tcp:HOST:PORT; by default a socket passed through the monitor, with
    /// --channels one in a private directory
    #[arg(long, value_name = "URI")]
    pub(crate) listen: Option<Uri>,

    #[command(flatten)]
    pub(crate) channels: ChannelArgs,

    /// Leave the VM stopped, and answer QEMU only when the file is durable
    #[arg(long, conflicts_with = "no_sync")]
    pub(crate) stop: bool,

    /// Do not stop the VM for its memory: QEMU saves each page before the guest changes it; the snapshot is of the beginning
    #[arg(long, conflicts_with = "stop")]
    pub(crate) background: bool,

    #[command(flatten)]
    pub(crate) new: NewSnapshotArgs,

    /// Longest stop of the VM that QEMU should aim for (its downtime-limit)
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) downtime: Option<Duration>,

    /// How long the VM may run on while it is saved
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) timeout: Option<Duration>,

    /// Send memory slowly at first, for this long at most, until QEMU has heard which pages the guest's balloon hints as free: what
    /// leaves before that is stored
    #[arg(long, value_name = "TIME", value_parser = parse_time, conflicts_with = "background")]
    pub(crate) hint_wait: Option<Duration>,

    /// What to do with a VM that changes its memory faster than it is saved
    #[arg(long, value_enum, default_value_t = OnTimeoutArg::Cancel, requires = "timeout")]
    pub(crate) on_timeout: OnTimeoutArg,

    /// What to do about writable disks
    #[arg(long, value_enum, default_value_t = SaveDisksArg::Check)]
    pub(crate) disks: SaveDisksArg,

    /// Where the overlays go with --disks overlay; by default each beside its disk, as NAME.overlay-ID
    #[arg(long, value_name = "DIR")]
    pub(crate) overlay_dir: Option<PathBuf>,
}
