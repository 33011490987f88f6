//! What may stand on the command line, and how it reads in `--help`.
//!
//! Parsing ends here: each command turns its arguments into what the libraries take, and no library sees clap.

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use limosa_channel::Uri;
use limosa_qemu::qmp::MonitorAddress;

/// Save a running QEMU VM and bring it back in milliseconds.
#[derive(Debug, Parser)]
#[command(name = "limosa", version, max_term_width = 100)]
#[command(after_help = "Sizes are written 4K 64M 8G 1T; rates 100M, in bytes per second; times 300ms 30s 5m.\n\
                        Exit status: 0 done, 1 failed (one line says what, where and what to do), 2 bad usage.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Say more on stderr: -v what is decided and undone, -vv also every message to and from QEMU
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub(crate) verbose: u8,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Save a running VM into a file; the VM goes on
    Save(SaveArgs),
    /// Restore a VM into a QEMU started with -incoming defer; lazily where possible
    Restore(RestoreArgs),
    /// Continue a VM that an interrupted job left paused
    Resume(ResumeArgs),
    /// Show what is in a snapshot or a recorded migration stream
    Inspect(InspectArgs),
    /// Measure limosa beside stock QEMU
    Bench(BenchArgs),
    /// Watch over a job and clean up if it dies
    #[command(hide = true)]
    Guard {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ViaArg {
    /// By file where QEMU can (9.0 or newer, on this host), else through a socket
    Auto,
    /// QEMU writes or reads the file itself, through a descriptor that limosa passes
    File,
    /// limosa receives or sends the migration stream
    Socket,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnTimeoutArg {
    /// Stop the VM, so that the rest is saved without it changing
    Pause,
    /// Give up; the VM goes on
    Cancel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DisksArg {
    /// Refuse where memory and disks could be of different instants
    Check,
    /// Somebody else keeps the disks consistent
    Ignore,
}

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

/// How a QEMU is reached, and how the job is watched.
#[derive(Debug, Args)]
pub(crate) struct JobArgs {
    /// QEMU's monitor: a unix socket's path, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "SOCK")]
    pub(crate) qmp: MonitorAddress,

    /// Most bytes a second, no limit by default; below a few MiB QEMU keeps it only roughly
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub(crate) max_bandwidth: Option<NonZeroU64>,

    /// Listen here for programs that watch and steer the job (as QMP does: `query-migrate`, `migrate_cancel`, ...)
    #[arg(long, value_name = "SOCK")]
    pub(crate) control: Option<PathBuf>,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
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

    /// Where QEMU connects with --via socket: unix:PATH or tcp:HOST:PORT; by default a socket passed through the monitor
    #[arg(long, value_name = "URI")]
    pub(crate) listen: Option<Uri>,

    /// Leave the VM stopped, and answer QEMU only when the file is durable
    #[arg(long)]
    pub(crate) stop: bool,

    /// Replace the file if it is there
    #[arg(long)]
    pub(crate) force: bool,

    /// Record a checksum of every 1 MiB of memory, verified when it is restored
    #[arg(long)]
    pub(crate) checksum: bool,

    /// Longest stop of the VM that QEMU should aim for (its downtime-limit)
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) downtime: Option<Duration>,

    /// How long the VM may run on while it is saved
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) timeout: Option<Duration>,

    /// What to do with a VM that changes its memory faster than it is saved
    #[arg(long, value_enum, default_value_t = OnTimeoutArg::Cancel, requires = "timeout")]
    pub(crate) on_timeout: OnTimeoutArg,

    /// What to do about writable disks
    #[arg(long, value_enum, default_value_t = DisksArg::Check)]
    pub(crate) disks: DisksArg,

    /// Do not wait for the file to be durable: a power cut may lose it
    #[arg(long, conflicts_with = "stop")]
    pub(crate) no_sync: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    #[command(flatten)]
    pub(crate) job: JobArgs,

    /// The file to restore from
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    /// When the guest runs
    #[arg(long, value_enum, default_value_t = ModeArg::Auto)]
    pub(crate) mode: ModeArg,

    /// Who reads the pages in an eager restore
    #[arg(long, value_enum, default_value_t = ViaArg::Auto)]
    pub(crate) via: ViaArg,

    /// Where QEMU listens: unix:PATH or tcp:HOST:PORT; by default a socket in a private directory
    #[arg(long, value_name = "URI")]
    pub(crate) listen: Option<Uri>,

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

    /// Return as soon as the guest runs; the pages follow in the background
    #[arg(long, conflicts_with = "recover")]
    pub(crate) detach: bool,

    /// Finish a lazy restore that was interrupted
    #[arg(long, conflicts_with_all = ["mode", "run", "paused"])]
    pub(crate) recover: bool,

    /// What to do about disks that have changed since the VM was saved
    #[arg(long, value_enum, default_value_t = DisksArg::Check)]
    pub(crate) disks: DisksArg,

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

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A snapshot, or a file that a migration stream was recorded into
    #[arg(value_name = "SNAPSHOT|STREAM")]
    pub(crate) file: PathBuf,

    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// What to measure
    #[arg(value_name = "NAME", value_parser = ["save", "restore", "landing"])]
    pub(crate) name: String,

    /// Memory of the VMs; 2G for save, 4G for restore, 1G for landing by default
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) size: Option<u64>,

    /// How often each contestant runs
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) rounds: u32,

    /// Where files are made; the temporary directory by default
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,

    /// Exit with 1 if a target is not met
    #[arg(long)]
    pub(crate) check: bool,

    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

/// `4K`, `64M`, `8G`, `1T` or plain bytes.
fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size: write 4K, 64M, 8G, 1T or a number of bytes");
    let (digits, shift) = match text.char_indices().last().ok_or_else(wrong)? {
        (at, 'K' | 'k') => (text.get(..at).ok_or_else(wrong)?, 10),
        (at, 'M' | 'm') => (text.get(..at).ok_or_else(wrong)?, 20),
        (at, 'G' | 'g') => (text.get(..at).ok_or_else(wrong)?, 30),
        (at, 'T' | 't') => (text.get(..at).ok_or_else(wrong)?, 40),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).filter(|size| *size > 0).ok_or_else(wrong)
}

fn parse_rate(text: &str) -> Result<NonZeroU64, String> {
    let rate = parse_size(text).map_err(|_| format!("{text:?} is not a rate: write 100M for 100 MiB per second"))?;
    NonZeroU64::new(rate).ok_or_else(|| "a rate is more than 0".into())
}

/// `300ms`, `30s`, `5m` or plain seconds.
fn parse_time(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a time: write 300ms, 30s or 5m");
    let (digits, millis) = if let Some(digits) = text.strip_suffix("ms") {
        (digits, 1)
    } else if let Some(digits) = text.strip_suffix('m') {
        (digits, 60_000)
    } else {
        (text.strip_suffix('s').unwrap_or(text), 1000)
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(millis).filter(|millis| *millis > 0).map(Duration::from_millis).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definitions_are_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_have_binary_suffixes_and_never_overflow() {
        assert_eq!(parse_size("4K"), Ok(4096));
        assert_eq!(parse_size("1T"), Ok(1 << 40));
        assert_eq!(parse_size("17"), Ok(17));
        for wrong in ["", "K", "0", "-1", "4KB", "99999999999T", "1.5G", "é"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_are_seconds_unless_they_say_otherwise() {
        assert_eq!(parse_time("300ms"), Ok(Duration::from_millis(300)));
        assert_eq!(parse_time("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(parse_time("30s"), parse_time("30"));
        assert!(parse_time("0").is_err() && parse_time("m").is_err());
    }
}
