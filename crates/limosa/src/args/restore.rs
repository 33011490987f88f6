//! The arguments of `limosa restore` and `limosa resume`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use limosa_channel::Uri;
use limosa_qemu::qmp::MonitorAddress;

use super::{ChannelArgs, DisksArg, FileZeroCopyArg, JobArgs, ViaArg};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeArg {
    /// Lazy where the destination can, else eager, with one line why
    Auto,
    /// The guest runs at once; its pages follow, requested ones first
    Lazy,
    /// The guest runs when all pages are there
    Eager,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PreemptArg {
    /// Answer requested pages on a second channel
    On,
    /// Answer requested pages between the others
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ZeroPageDetectionArg {
    /// Not at all: what a snapshot stores is not zero
    None,
    /// In the thread of each channel
    Multifd,
}

/// How a snapshot is brought back.
#[derive(Debug, Args)]
pub(crate) struct HowArgs {
    /// When the guest runs
    #[arg(long, value_enum, default_value_t = ModeArg::Auto)]
    pub(crate) mode: ModeArg,

    /// Who reads the pages in an eager restore
    #[arg(long, value_enum, default_value_t = ViaArg::Auto)]
    pub(crate) via: ViaArg,

    /// Where QEMU listens: unix:PATH or tcp:HOST:PORT; by default a private socket, or one that it is passed
    #[arg(long, value_name = "URI")]
    pub(crate) listen: Option<Uri>,

    #[command(flatten)]
    pub(crate) channels: ChannelArgs,

    /// Whether limosa looks if stored pages are zero, before it sends them on the channels
    #[arg(long, value_enum, default_value_t = ZeroPageDetectionArg::None, requires = "channels")]
    pub(crate) zero_page_detection: ZeroPageDetectionArg,

    /// How pages leave the file on these channels
    #[arg(long, value_enum, value_name = "METHOD", default_value_t = FileZeroCopyArg::Auto, requires = "channels")]
    pub(crate) zero_copy: FileZeroCopyArg,

    /// Answer requested pages on a channel of their own (QEMU's postcopy-preempt): sooner, but a limosa that is killed in
    /// the very last moment can then leave the VM without an end of its restore
    #[arg(long, value_enum, default_value_t = PreemptArg::Off)]
    pub(crate) preempt: PreemptArg,

    /// Let the guest run, whatever state it was saved in
    #[arg(long, conflicts_with = "paused")]
    pub(crate) run: bool,

    /// Leave the guest paused, whatever state it was saved in
    #[arg(long)]
    pub(crate) paused: bool,

    /// What to do about disks that have changed since the VM was saved
    #[arg(long, value_enum, default_value_t = DisksArg::Check)]
    pub(crate) disks: DisksArg,
}

#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,

    /// The file to restore from
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    #[command(flatten)]
    pub(crate) how: HowArgs,

    /// Return as soon as the guest runs; the pages follow in the background
    #[arg(long, conflicts_with = "recover")]
    pub(crate) detach: bool,

    /// Finish a lazy restore that was interrupted
    #[arg(long, conflicts_with_all = ["mode", "run", "paused", "channels"])]
    pub(crate) recover: bool,

    /// Set for the process that --detach leaves behind: report on stdout when the guest runs, then be silent
    #[arg(long, hide = true)]
    pub(crate) pager: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ResumeArgs {
    /// Also take over from a job on another host, or continue a VM that no job of limosa's stopped
    #[arg(long)]
    pub(crate) force: bool,

    /// QEMU's monitor: a unix socket's path, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "SOCK")]
    pub(crate) qmp: MonitorAddress,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}
