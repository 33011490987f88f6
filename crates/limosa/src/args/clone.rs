//! The arguments of `limosa clone`.

use std::ffi::OsString;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use limosa_console::parse;
use limosa_qemu::qmp::MonitorAddress;

use super::{KeyArgs, RECORDED_BY_DEFAULT, ReadAheadArg, RunStateArgs, SetClockArg, WorkingSetArgs};

/// `{n}` in a help text. clap takes these three characters for a line break; an empty style between them, which is
/// taken out where no terminal reads it, keeps them apart.
macro_rules! number {
    () => {
        "{\u{1b}[0mn}"
    };
}

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_long_help = concat!("In QEMU's command line ", number!(), " is the clone's number, {name} its name and {dir} its directory.\n\n  \
limosa clone vm.limosa --count 8 --dir /run/clones -- qemu-system-x86_64 -m 4G -name vm-", number!(), " ...\n  \
limosa clone --qmp /run/vm.qmp vm.limosa --count 8 --dir /run/clones -- qemu-system-x86_64 -m 4G ...\n  \
limosa clone list /run/clones\n  \
limosa clone stop /run/clones\n  \
limosa clone rm /run/clones 003\n\n\
Each clone has a directory with its monitor (qmp), what QEMU says (log), its overlays and clone.json.")
)]
pub(crate) struct CloneArgs {
    #[command(subcommand)]
    pub(crate) command: Option<CloneCommand>,

    #[command(flatten)]
    pub(crate) make: Option<MakeClonesArgs>,

    // Not in `make`: clap takes a group with a group in it for absent when it is optional.
    #[command(flatten)]
    pub(crate) key: KeyArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CloneMemoryArg {
    /// `mapped` if the command line allows it, else each clone gets a copy of the memory; the reason is printed
    Auto,
    /// All clones share the snapshot file as their memory; what they write is their own
    Mapped,
    /// Each clone gets a copy of the memory
    Eager,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackingArg {
    /// By absolute path
    Absolute,
    /// By the path from the overlay's directory
    Relative,
}

#[derive(Debug, Args)]
pub(crate) struct MakeClonesArgs {
    /// The snapshot: a file, or the URL of an object in a store, which is unpacked into --dir so that clones can map it
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    /// Save the running VM behind this monitor (a unix socket's path) into SNAPSHOT first. It continues; its writable
    /// disks are frozen, and it continues on overlays
    #[arg(long, value_name = "SOCK")]
    pub(crate) qmp: Option<MonitorAddress>,

    /// Replace SNAPSHOT if it exists
    #[arg(long, requires = "qmp")]
    pub(crate) force: bool,

    /// Directory of the overlays that the saved VM continues on; by default each disk's own, as NAME.overlay-ID
    #[arg(long, value_name = "DIR", requires = "qmp")]
    pub(crate) overlay_dir: Option<PathBuf>,

    /// How many VMs to start; --count, --pool or both must be given
    #[arg(long, value_name = "N", required_unless_present = "pool")]
    pub(crate) count: Option<NonZeroU64>,

    /// Keep N QEMUs waiting in the directory. Later calls with the same snapshot and command line take them one by one,
    /// and save the time that QEMU takes to start. --pool, --count or both must be given
    #[arg(long, value_name = "N")]
    pub(crate) pool: Option<NonZeroU64>,

    /// Directory in which each clone gets its own, under the first free number; created if it does not exist
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: PathBuf,

    /// How the clones get their memory
    #[arg(long, value_enum, default_value_t = CloneMemoryArg::Auto)]
    pub(crate) memory: CloneMemoryArg,

    /// Start the VMs even if the host, or the control group, has less memory than they need at least
    #[arg(long)]
    pub(crate) overcommit: bool,

    /// How many to start at a time; by default as many as there are processors
    #[arg(long, value_name = "N")]
    pub(crate) jobs: Option<NonZeroUsize>,

    // Not flattened, as above.
    /// Run the guests, even if they were saved in another state
    #[arg(long, conflicts_with = "paused")]
    run: bool,

    /// Leave the guests paused, even if they were saved in another state
    #[arg(long)]
    paused: bool,

    /// Set the guests' clocks to the host's when they run, through their guest agents
    #[arg(long, value_enum, default_value_t = SetClockArg::Auto, value_name = "WHEN")]
    pub(crate) set_clock: SetClockArg,

    /// Record which pages the first clone's guest touches within TIME (10s by default) after its start, in
    /// SNAPSHOT.working-set. SIGINT ends the recording
    #[arg(
        long,
        value_name = "TIME",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = RECORDED_BY_DEFAULT,
        value_parser = parse::time
    )]
    record_working_set: Option<Duration>,

    /// Read the pages of the recorded working set into the page cache, beside the start; by default not
    #[arg(long, value_enum, default_value_t = ReadAheadArg::Auto, value_name = "WHEN")]
    read_ahead: ReadAheadArg,

    /// How overlays name the disks below them
    #[arg(long, value_enum, default_value_t = BackingArg::Absolute)]
    pub(crate) backing: BackingArg,

    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,

    /// The command line that the saved VM was started with; limosa adds -incoming, a monitor and its memory
    #[arg(value_name = "QEMU", last = true, required = true)]
    pub(crate) command: Vec<OsString>,
}

impl MakeClonesArgs {
    pub(crate) fn state(&self) -> RunStateArgs {
        RunStateArgs { run: self.run, paused: self.paused }
    }

    pub(crate) fn working_set(&self) -> WorkingSetArgs {
        WorkingSetArgs { record_working_set: self.record_working_set, read_ahead: self.read_ahead }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum CloneCommand {
    /// List the clones of a directory
    List(ListClonesArgs),
    /// End VMs
    Stop(StopClonesArgs),
    /// Remove ended clones: overlays, logs, directories
    Rm(RemoveClonesArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ListClonesArgs {
    /// The directory
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,

    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct StopClonesArgs {
    /// The directory
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,

    /// Names of the clones (default: all)
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,

    /// Ask the guest to shut down first, and wait this long for it
    #[arg(long, value_name = "TIME", value_parser = parse::time)]
    pub(crate) power_down: Option<Duration>,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveClonesArgs {
    /// The directory
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,

    /// Names of the clones (default: all)
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,

    /// End those that run, and remove those whose process cannot be reached
    #[arg(long)]
    pub(crate) force: bool,
}
