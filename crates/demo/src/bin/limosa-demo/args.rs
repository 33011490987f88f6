//! The arguments of `limosa-demo`.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::TypedValueParser;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use limosa_channel::ZeroCopy;
use limosa_console::{named_values, on_off_parser, parse};
use limosa_demo::guest::GuestKind;
use limosa_demo::guest::LogKind;
use limosa_demo::settings::{Postcopy, Settings, Transport};
use limosa_migrate::live::{TimeoutStrategy, ZeroCheck};
use limosa_page::{ZeroMethod, to_millis};
use limosa_stream::multifd::Compression;

/// Built-in guests that move between two processes of this machine; needs no QEMU.
#[derive(Debug, Parser)]
#[command(name = "limosa-demo", version, max_term_width = 100)]
#[command(after_help = "Sizes: 4K 64M 8G 1T. Rates: 100M, in bytes per second. Times: 300ms 30s 5m.\n\
                        Exit status: 0 done, 1 failed, 2 bad usage.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: DemoCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DemoCommand {
    /// Move a built-in guest between two processes of this machine while it runs; needs no QEMU
    Live(Box<DemoLiveArgs>),
    /// Kill a guest that prints, again and again: it continues in another process, which knows every line that was seen
    Protect(DemoProtectArgs),
    /// Resume the guest at an undecided source: it does not run at the destination
    Resume(DecideArgs),
    /// Start the guest at an undecided destination: it no longer runs at the source
    Start(DecideArgs),
    /// Discard an undecided end: the guest runs at the other end
    Discard(DecideArgs),
    /// Recover a postcopy whose connection is lost
    Recover(RecoverArgs),
    /// Show the state of an end, before resume, start or discard
    Status(DecideArgs),
    /// Be one of the two processes of a demonstration
    #[command(hide = true)]
    End {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

#[derive(Debug, Args)]
#[command(
    after_long_help = "Two processes are started: the primary runs a guest that writes its memory and prints lines, the \
keeper has its checkpoints. A line is printed when the checkpoint that knows of it is kept. The primary is killed with \
SIGKILL, and the keeper's guest continues.\n\n  \
  limosa-demo protect\n  \
  limosa-demo protect --every event --kills 20"
)]
pub(crate) struct DemoProtectArgs {
    /// Size of the guest's memory
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse::size)]
    pub(crate) memory: u64,

    /// How much memory the guest writes per second; 0: none
    #[arg(long, value_name = "RATE", default_value = "20M", value_parser = parse_dirty_rate)]
    pub(crate) dirty_rate: u64,

    /// Time from one checkpoint to the next; event: when a line wants to be printed
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = parse_every)]
    pub(crate) every: Every,

    /// When a line is printed
    #[arg(long, value_enum, default_value_t = Output::Held)]
    pub(crate) output: Output,

    /// Primaries to kill, one after the other, each after up to a second
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) kills: u32,

    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

/// When a line is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// When the checkpoint that knows of it is kept
    Held,
    /// At once: the survivor may not know of it, and the demonstration fails
    Free,
}

/// When a checkpoint is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Every {
    Time(Duration),
    Event,
}

fn parse_every(text: &str) -> Result<Every, String> {
    match text {
        "event" => Ok(Every::Event),
        time => parse::time(time).map(Every::Time).map_err(|error| format!("{error}, or event")),
    }
}

#[derive(Debug, Args)]
#[command(
    after_long_help = "Two processes are started: one runs a guest, the other waits. The guest moves while it runs \
and continues there; both ends compare its memory.\n\n  \
  limosa-demo live\n  \
  limosa-demo live --guest kvm --log kvm-ring --memory 64M --dirty-rate 200M\n  \
  limosa-demo live --dirty-rate 2G --timeout 2s --give-up postcopy --write-trace rounds.svg\n  \
  limosa-demo live --transport unix --same-host\n  \
  limosa-demo live --hints on --hint-wait 100ms"
)]
pub(crate) struct DemoLiveArgs {
    /// The kind of guest
    #[arg(long, value_enum, default_value_t = GuestKind::Threads)]
    pub(crate) guest: GuestKind,

    /// The dirty log; default: wp-async for threads, kvm-log for kvm
    #[arg(long, value_enum)]
    pub(crate) log: Option<LogKind>,

    /// Size of the guest's memory
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse::size)]
    pub(crate) memory: u64,

    /// How much memory the guest writes per second; 0: none
    #[arg(long, value_name = "RATE", default_value = "50M", value_parser = parse_dirty_rate)]
    pub(crate) dirty_rate: u64,

    /// How the two processes are connected
    #[arg(long, value_enum, default_value_t = Transport::Tcp)]
    pub(crate) transport: Transport,

    /// Move memory on N multifd channels, 1 to 16, in addition to the main channel (QEMU's multifd and
    /// multifd-channels)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) channels: Option<u8>,

    /// Compression of pages on the multifd channels (QEMU's multifd-compression)
    #[arg(long, value_parser = compression(), default_value = "none", requires = "channels")]
    pub(crate) compression: Compression,

    /// How pages are sent on the multifd channels; auto splices, because both ends are on one machine
    #[arg(long, value_parser = zero_copy(), value_name = "METHOD", default_value = "auto")]
    pub(crate) zero_copy: ZeroCopy,

    /// When the guest runs at the destination before its memory is there: off, at-once, or after-rounds=N
    #[arg(long, value_name = "WHEN", default_value = "off", value_parser = parse_postcopy)]
    pub(crate) postcopy: Postcopy,

    /// Answer page requests on a separate channel (QEMU's postcopy-preempt)
    #[arg(long)]
    pub(crate) preempt: bool,

    /// Pass the memory itself instead of its contents, because both ends are on one machine (QEMU's x-ignore-shared)
    #[arg(long)]
    pub(crate) same_host: bool,

    /// Longest downtime of the guest (QEMU's downtime-limit)
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = parse::time)]
    pub(crate) downtime_limit: Duration,

    /// Maximum bandwidth in bytes per second while the guest runs; unlimited by default (QEMU's max-bandwidth)
    #[arg(long, value_name = "RATE", value_parser = parse::rate)]
    pub(crate) max_bandwidth: Option<NonZeroU64>,

    /// When pages are checked for zeros
    #[arg(long, value_parser = zero_check(), default_value = "always")]
    pub(crate) zero_check: ZeroCheck,

    /// Send hundreds of pages of the main channel in one call, without copying them first; off copies them into a
    /// buffer of 16 KiB
    #[arg(long, value_parser = on_off_parser(), action = ArgAction::Set, value_name = "VECTORS", default_value = "on")]
    pub(crate) vectors: bool,

    /// Instructions that check pages for zeros: plain (16 bytes at a time), portable, sse2, avx2, avx512, neon;
    /// default: the best available
    #[arg(long, value_name = "METHOD")]
    pub(crate) zero_method: Option<ZeroMethod>,

    /// Populate memory of the destination ahead of arriving pages
    #[arg(long, value_parser = on_off_parser(), action = ArgAction::Set, value_name = "POPULATE", default_value = "on")]
    pub(crate) populate: bool,

    /// Ask the guest for its free pages, and do not send these. Half of the memory is then a heap that programs
    /// allocate, write and free, and a balloon driver reports what is free
    #[arg(long, value_parser = on_off_parser(), action = ArgAction::Set, value_name = "HINTS", default_value = "off")]
    pub(crate) hints: bool,

    /// How long the first round, or the stop of `--postcopy at-once`, may wait for the list of free pages; by default
    /// nothing waits, and pages are left out as soon as they are listed
    #[arg(long, value_name = "TIME", value_parser = parse::time, requires = "hints")]
    pub(crate) hint_wait: Option<Duration>,

    /// Longest time until switchover
    #[arg(long, value_name = "TIME", value_parser = parse::time)]
    pub(crate) timeout: Option<Duration>,

    /// Action when --timeout expires
    #[arg(long, value_parser = give_up(), default_value = "cancel", requires = "timeout")]
    pub(crate) give_up: TimeoutStrategy,

    /// Encrypt the connections by TLS; DIR has ca-cert.pem, server-cert.pem, server-key.pem, client-cert.pem and
    /// client-key.pem (the dir of QEMU's tls-creds-x509)
    #[arg(long, value_name = "DIR")]
    pub(crate) tls_creds: Option<PathBuf>,

    /// Host name expected in the server's certificate; default: 127.0.0.1 (QEMU's tls-hostname)
    #[arg(long, value_name = "NAME", requires = "tls_creds")]
    pub(crate) tls_hostname: Option<String>,

    /// Draw the rounds over time: remaining memory, rates, downtime
    #[arg(long, value_name = "F.svg")]
    pub(crate) write_trace: Option<PathBuf>,

    /// Create a QMP-like socket here to monitor and control the source; that of the destination is SOCK.destination
    #[arg(long, value_name = "SOCK")]
    pub(crate) control: Option<PathBuf>,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}

/// An end, by its control socket.
#[derive(Debug, Args)]
pub(crate) struct DecideArgs {
    /// The end's control socket
    #[arg(long, value_name = "SOCK")]
    pub(crate) control: PathBuf,

    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

/// Both ends, by their control sockets.
#[derive(Debug, Args)]
pub(crate) struct RecoverArgs {
    /// The source's control socket
    #[arg(long, value_name = "SOCK")]
    pub(crate) control: PathBuf,

    /// The destination's control socket
    #[arg(long, value_name = "SOCK")]
    pub(crate) destination: PathBuf,
}

impl DemoLiveArgs {
    /// Returns the settings of both ends.
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            guest: self.guest,
            log: self.log.unwrap_or(Settings::usual_log(self.guest)),
            memory: self.memory,
            dirty_rate: self.dirty_rate,
            transport: self.transport,
            channels: self.channels.unwrap_or(0),
            compression: self.compression,
            zero_copy: self.zero_copy,
            postcopy: self.postcopy,
            preempt: self.preempt,
            same_host: self.same_host,
            downtime_limit_ms: millis(self.downtime_limit),
            max_bandwidth: self.max_bandwidth,
            zero_check: self.zero_check,
            vectors: self.vectors,
            zero_method: self.zero_method.map(|method| method.name().to_owned()),
            populate: self.populate,
            hints: self.hints,
            hint_wait_ms: self.hint_wait.map_or(0, millis),
            timeout_ms: self.timeout.map(millis),
            give_up: self.give_up,
            tls_creds: self.tls_creds.clone(),
            tls_hostname: self.tls_hostname.clone(),
            ..Settings::default()
        }
    }
}

fn compression() -> impl TypedValueParser<Value = Compression> {
    named_values([
        (Compression::None, "none", "No compression"),
        (Compression::Zlib, "zlib", "zlib"),
        (Compression::Zstd, "zstd", "Zstandard"),
    ])
}

fn zero_copy() -> impl TypedValueParser<Value = ZeroCopy> {
    named_values([
        (ZeroCopy::Off, "off", "Copied into the kernel"),
        (ZeroCopy::Auto, "auto", "The best method that the connection allows"),
        (ZeroCopy::Msg, "msg", "Lent to the kernel by `MSG_ZEROCOPY`, over TCP"),
        (ZeroCopy::Splice, "splice", "Spliced by reference, over TCP and unix sockets"),
    ])
}

fn zero_check() -> impl TypedValueParser<Value = ZeroCheck> {
    named_values([
        (ZeroCheck::Always, "always", "In every round"),
        (ZeroCheck::Bulk, "bulk", "In the first round only: a page that was written is rarely zero"),
        (ZeroCheck::Off, "off", "Never"),
    ])
}

fn give_up() -> impl TypedValueParser<Value = TimeoutStrategy> {
    named_values([
        (TimeoutStrategy::Cancel, "cancel", "Cancel the migration; the guest stays at the source"),
        (TimeoutStrategy::Pause, "pause", "Pause the guest, however long the downtime"),
        (TimeoutStrategy::Postcopy, "postcopy", "Continue as postcopy"),
    ])
}

fn millis(time: Duration) -> u64 {
    to_millis(time)
}

/// `50M`, or `0` for a guest that writes nothing.
fn parse_dirty_rate(text: &str) -> Result<u64, parse::ParseError> {
    if text == "0" { Ok(0) } else { parse::rate(text).map(NonZeroU64::get) }
}

/// `off`, `at-once`, `after-rounds=3`.
fn parse_postcopy(text: &str) -> Result<Postcopy, String> {
    let wrong = || format!("{text:?}: write off, at-once, or after-rounds=N");
    match text.split_once('=') {
        None if text == "off" => Ok(Postcopy::Off),
        None if text == "at-once" => Ok(Postcopy::AtOnce),
        Some(("after-rounds", rounds)) => {
            rounds.parse().ok().filter(|&rounds| rounds > 0).map(Postcopy::AfterRounds).ok_or_else(wrong)
        }
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definitions_are_consistent() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }

    #[test]
    fn postcopy_is_off_at_once_or_after_a_number_of_rounds() {
        assert_eq!(parse_postcopy("off"), Ok(Postcopy::Off));
        assert_eq!(parse_postcopy("at-once"), Ok(Postcopy::AtOnce));
        assert_eq!(parse_postcopy("after-rounds=3"), Ok(Postcopy::AfterRounds(3)));
        for wrong in ["", "on", "after-rounds", "after-rounds=0", "after-rounds=x", "at-once=1"] {
            assert!(parse_postcopy(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_guest_may_write_nothing() {
        assert_eq!(parse_dirty_rate("0"), Ok(0));
        assert_eq!(parse_dirty_rate("50M"), Ok(50 << 20));
    }
}
