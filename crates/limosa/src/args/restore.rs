//! The arguments of `limosa restore` and `limosa resume`.

use std::path::PathBuf;

use clap::builder::TypedValueParser;
use clap::{ArgAction, Args, ValueEnum};
use limosa_channel::{Uri, ZeroCopy};
use limosa_console::named_values;
use limosa_qemu::qmp::MonitorAddress;
use limosa_qemu::{CommandLineProperties, RunChoice};

use super::channels::file_zero_copy;
use super::{ChannelArgs, DisksArg, JobArgs, KeyArgs, TransportArg, WorkingSetArgs};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum MemoryArg {
    /// `mapped` if the destination maps the snapshot, else `lazy` if it supports it, else `eager`; -v prints the
    /// reasons
    Auto,
    /// The guest runs at once; the snapshot file is its memory, shared with all VMs that map it
    Mapped,
    /// The guest runs at once; its pages follow, requested pages first
    Lazy,
    /// The guest runs when all pages have arrived
    Eager,
}

fn read_via() -> impl TypedValueParser<Value = TransportArg> {
    named_values([
        (TransportArg::Auto, "auto", "`file` if QEMU supports it (9.0 or newer, on this host), else `socket`"),
        (TransportArg::File, "file", "QEMU reads the file itself through a file descriptor that limosa passes"),
        (TransportArg::Socket, "socket", "limosa reads the file and sends QEMU a migration stream"),
    ])
}

pub(super) fn preempt() -> impl TypedValueParser<Value = bool> {
    named_values([
        (true, "on", "Answer page requests on a second channel"),
        (false, "off", "Answer page requests on the main channel, between other pages"),
    ])
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ZeroPageDetectionArg {
    /// No check: pages stored in a snapshot are not zero
    None,
    /// In the thread of each multifd channel
    Multifd,
}

/// The run state in which a guest is brought back.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct RunStateArgs {
    /// Run the guest, even if it was saved in another state
    #[arg(long, conflicts_with = "paused")]
    pub(crate) run: bool,

    /// Leave the guest paused, even if it was saved in another state
    #[arg(long)]
    pub(crate) paused: bool,
}

impl RunStateArgs {
    pub(crate) fn choice(self) -> RunChoice {
        match self {
            Self { paused: true, .. } => RunChoice::Paused,
            Self { run: true, .. } => RunChoice::Run,
            Self { run: false, paused: false } => RunChoice::AsSaved,
        }
    }

    /// The choice for a QEMU whose command line may say `-S`.
    pub(crate) fn choice_for(self, line: CommandLineProperties) -> RunChoice {
        match self.choice() {
            RunChoice::AsSaved if line.paused => RunChoice::Paused,
            choice => choice,
        }
    }
}

/// Whether a guest's clock is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SetClockArg {
    /// If a QEMU guest agent runs in the guest, and no other program is connected to it
    Auto,
    /// As auto, but it is a failure if the clock is not set; the VM runs all the same
    On,
    /// The guest continues with the time at which it was saved
    Off,
}

/// How a snapshot is brought back.
#[derive(Debug, Args)]
pub(crate) struct HowArgs {
    /// How the guest gets its memory
    #[arg(long, value_enum, default_value_t = MemoryArg::Auto)]
    pub(crate) memory: MemoryArg,

    /// Who reads the pages in an eager restore
    #[arg(long, value_parser = read_via(), default_value = "auto")]
    pub(crate) via: TransportArg,

    /// Where QEMU listens: unix:PATH or tcp:HOST:PORT; by default a private socket or a passed file descriptor
    #[arg(long, value_name = "URI")]
    pub(crate) listen: Option<Uri>,

    #[command(flatten)]
    pub(crate) channels: ChannelArgs,

    /// Whether limosa checks stored pages for zeros before it sends them on the multifd channels
    #[arg(long, value_enum, default_value_t = ZeroPageDetectionArg::None, requires = "channels")]
    pub(crate) zero_page_detection: ZeroPageDetectionArg,

    /// How pages get from the file to the multifd channels
    #[arg(long, value_parser = file_zero_copy(), value_name = "METHOD", default_value = "auto", requires = "channels")]
    pub(crate) zero_copy: ZeroCopy,

    /// Answer page requests on a separate channel (QEMU's postcopy-preempt). Lower latency, but if limosa is killed at
    /// the very end, the restore may never complete
    #[arg(long, value_parser = preempt(), action = ArgAction::Set, default_value = "off")]
    pub(crate) preempt: bool,

    #[command(flatten)]
    pub(crate) state: RunStateArgs,

    /// Set the guest's clock to the host's when it runs, through its guest agent
    #[arg(long, value_enum, default_value_t = SetClockArg::Auto, value_name = "WHEN")]
    pub(crate) set_clock: SetClockArg,

    /// Action if disks have changed since the VM was saved
    #[arg(long, value_enum, default_value_t = DisksArg::Check)]
    pub(crate) disks: DisksArg,

    /// The --control socket of a limosa serve that serves disks of the new VM: they are checked there. Repeatable
    #[arg(long, value_name = "SOCK")]
    pub(crate) disk_server: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) working_set: WorkingSetArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,

    /// The snapshot to restore from: a file, or the URL of an object in a store
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    #[command(flatten)]
    pub(crate) key: KeyArgs,

    #[command(flatten)]
    pub(crate) how: HowArgs,

    /// Return as soon as the guest runs; pages are restored in the background
    #[arg(long, conflicts_with = "recover")]
    pub(crate) detach: bool,

    /// Resume an interrupted lazy restore
    #[arg(long, conflicts_with_all = ["memory", "run", "paused", "channels", "record_working_set"])]
    pub(crate) recover: bool,

    /// Set for the process that --detach leaves behind: report on stdout when the guest runs, then be silent
    #[arg(long, hide = true)]
    pub(crate) pager: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ResumeArgs {
    /// Also take over from a job on another host, or continue a VM that limosa did not stop
    #[arg(long)]
    pub(crate) force: bool,

    /// The --control socket of a limosa serve that undoes what an interrupted save had it do. Repeatable
    #[arg(long, value_name = "SOCK")]
    pub(crate) disk_server: Vec<PathBuf>,

    /// QEMU's monitor: a unix socket's path, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "SOCK")]
    pub(crate) qmp: MonitorAddress,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}
