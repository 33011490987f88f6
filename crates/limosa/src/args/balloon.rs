//! The arguments of `limosa balloon`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::TypedValueParser;
use clap::{ArgAction, Args, Subcommand};
use limosa_balloon::Strategy;
use limosa_console::{named_values, parse};
use limosa_memory::ReleaseMethod;
use limosa_qemu::qmp::MonitorAddress;

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_long_help = "The server serves one guest at a time. ctl talks to it, or to the monitor of a QEMU that has its own \
                       virtio-balloon (query and target only).\n\n  \
  limosa balloon --vhost-user /run/vm/balloon.sock --control /run/vm/balloon-control.sock\n  \
  limosa balloon ctl /run/vm/balloon-control.sock target 2G\n  \
  limosa balloon ctl /run/vm/balloon-control.sock stats --watch\n  \
  limosa balloon ctl /run/vm/balloon-control.sock hint --squeeze"
)]
pub(crate) struct BalloonArgs {
    #[command(subcommand)]
    pub(crate) command: Option<BalloonCommand>,

    #[command(flatten)]
    pub(crate) serve: Option<BalloonServeArgs>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BalloonCommand {
    /// Query and control a served balloon
    Ctl(BalloonCtlArgs),
}

#[derive(Debug, Args)]
pub(crate) struct BalloonServeArgs {
    /// Path of the socket to create for the front end; only the owner can open it
    #[arg(long, value_name = "SOCK")]
    pub(crate) vhost_user: PathBuf,

    /// Create a QMP-like socket here for programs and `limosa balloon ctl` (`balloon`, `query-balloon`,
    /// `BALLOON_CHANGE`, ...)
    #[arg(long, value_name = "SOCK")]
    pub(crate) control: Option<PathBuf>,

    /// How memory is returned to the host
    #[arg(long, value_name = "HOW", value_parser = discard(), default_value = "auto")]
    pub(crate) discard: Strategy,

    /// Whether pages that the guest reports as free are returned to the host; can be changed later
    #[arg(long, value_name = "on|off", value_parser = reporting(), action = ArgAction::Set, default_value = "on")]
    pub(crate) reporting: bool,

    /// Initial memory of the guest without the balloon; by default all of it
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    pub(crate) target: Option<u64>,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}

fn discard() -> impl TypedValueParser<Value = Strategy> {
    named_values([
        (Strategy::Auto, "auto", "Chosen by the kind of memory"),
        (
            Strategy::Method(ReleaseMethod::PunchHole),
            "punch-hole",
            "`fallocate(PUNCH_HOLE)` on the file that backs the memory",
        ),
        (
            Strategy::Method(ReleaseMethod::DontNeed),
            "dontneed",
            "`madvise(MADV_DONTNEED)`, for private memory; not possible with a front end",
        ),
        (Strategy::Method(ReleaseMethod::Remove), "remove", "`madvise(MADV_REMOVE)`, for shared memory"),
        (
            Strategy::Method(ReleaseMethod::Free),
            "free",
            "`madvise(MADV_FREE)`, for private memory; not possible with a front end",
        ),
        (Strategy::Nothing, "none", "Not at all"),
    ])
}

fn reporting() -> impl TypedValueParser<Value = bool> {
    named_values([(true, "on", "Return them to the host"), (false, "off", "Keep them")])
}

#[derive(Debug, Args)]
pub(crate) struct BalloonCtlArgs {
    /// The server's --control socket
    #[arg(value_name = "SOCK")]
    pub(crate) control: MonitorAddress,

    #[command(subcommand)]
    pub(crate) what: BalloonCtlCommand,

    /// Print JSON on stdout, one object a line
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BalloonCtlCommand {
    /// Set how much memory the guest may use
    Target {
        /// Memory of the guest without the balloon; a size above its RAM means all of it
        #[arg(value_name = "SIZE", value_parser = parse::size)]
        size: u64,

        /// Wait until the guest has reached it, at most this long
        #[arg(long, value_name = "TIME", value_parser = parse::time)]
        wait: Option<Duration>,

        /// Set it also if the guest uses more than that: it then ends processes of its own, or panics
        #[arg(long)]
        force: bool,
    },
    /// Show the size of the balloon and its counters
    Query,
    /// Show memory statistics of the guest
    Stats {
        /// Repeat at this interval
        #[arg(long, value_name = "TIME", value_parser = parse::time, num_args = 0..=1, default_missing_value = "1s")]
        watch: Option<Duration>,
    },
    /// Ask the guest for a list of its free pages
    Hint {
        /// First inflate by the guest's available memory and deflate again, so that the guest drops its caches
        #[arg(long)]
        squeeze: bool,

        /// Available memory to leave when squeezing, at least 16M; default: a sixteenth of the guest's memory, at least
        /// 64M
        #[arg(long, value_name = "SIZE", value_parser = parse::size, requires = "squeeze")]
        reserve: Option<u64>,
    },
    /// Return pages that the guest reports as free to the host, or keep them
    Reporting {
        #[arg(value_name = "WHAT", value_parser = reporting(), action = ArgAction::Set)]
        what: bool,
    },
}
