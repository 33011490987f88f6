//! The arguments of `limosa balloon`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use limosa_qemu::qmp::MonitorAddress;

use super::values::{parse_size, parse_time};

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_long_help = "The server is a virtio-balloon for one guest after the other; ctl speaks to it, or to a stock QEMU with a \
balloon of its own (query, target).\n\n  \
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
    /// Ask something of a balloon that is served
    Ctl(BalloonCtlArgs),
}

#[derive(Debug, Args)]
pub(crate) struct BalloonServeArgs {
    /// Where the front end connects: a socket, made here, that only its owner can open
    #[arg(long, value_name = "SOCK")]
    pub(crate) vhost_user: PathBuf,

    /// Listen here for programs and `limosa balloon ctl` (as QMP does: `balloon`, `query-balloon`, `BALLOON_CHANGE`, ...)
    #[arg(long, value_name = "SOCK")]
    pub(crate) control: Option<PathBuf>,

    /// How memory is given back to the host
    #[arg(long, value_name = "HOW", value_enum, default_value_t = DiscardArg::Auto)]
    pub(crate) discard: DiscardArg,

    /// Whether pages that the guest reports as free are given back; can be switched later
    #[arg(long, value_name = "on|off", value_enum, default_value_t = OnOffArg::On)]
    pub(crate) reporting: OnOffArg,

    /// Memory that the guest is to have from the beginning, the balloon taken off; all by default
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) target: Option<u64>,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DiscardArg {
    /// By what the memory is
    Auto,
    /// `fallocate(PUNCH_HOLE)` on the file behind it
    PunchHole,
    /// `madvise(MADV_DONTNEED)`, for private memory, which no front end shares
    Dontneed,
    /// `madvise(MADV_REMOVE)`, for shared memory
    Remove,
    /// `madvise(MADV_FREE)`, likewise; taken when the host is short of it
    Free,
    /// Not at all
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnOffArg {
    /// Give them back to the host
    On,
    /// Leave them alone
    Off,
}

#[derive(Debug, Args)]
pub(crate) struct BalloonCtlArgs {
    /// The server's --control socket
    #[arg(value_name = "SOCK")]
    pub(crate) control: MonitorAddress,

    #[command(subcommand)]
    pub(crate) what: BalloonCtlCommand,

    /// Print one JSON object on stdout (with --watch one a line)
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BalloonCtlCommand {
    /// Say how much memory the guest is to have
    Target {
        /// With the balloon taken off; more than it has means all
        #[arg(value_name = "SIZE", value_parser = parse_size)]
        size: u64,

        /// Wait for the guest to get there, at most this long
        #[arg(long, value_name = "TIME", value_parser = parse_time)]
        wait: Option<Duration>,
    },
    /// Show how large the balloon is and what was done
    Query,
    /// Ask the guest about its memory
    Stats {
        /// Ask again and again, this often
        #[arg(long, value_name = "TIME", value_parser = parse_time, num_args = 0..=1, default_missing_value = "1s")]
        watch: Option<Duration>,
    },
    /// Ask the guest for a list of its free pages
    Hint {
        /// Inflate to what is available first, and deflate again: the guest drops its caches for it
        #[arg(long)]
        squeeze: bool,

        /// What is left of the available memory when squeezing; a sixteenth of the guest's memory, at least 64M, by default
        #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "squeeze")]
        reserve: Option<u64>,
    },
    /// Give back what the guest reports as free, or leave it alone
    Reporting {
        #[arg(value_enum)]
        what: OnOffArg,
    },
}
