//! The arguments of `limosa demo`.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use limosa_demo::guest::GuestKind;
use limosa_demo::settings::{
    KernelTlsKind, LogKind, Packing, Postcopy, Settings, Transport, WhenStuck, ZeroCheckKind, ZeroCopyKind,
};
use limosa_page::zero::Method;

use super::tls::KernelTlsArg;
use super::values::{parse_rate, parse_size, parse_time};
use super::{CompressionArg, ZeroCopyArg};

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    #[command(subcommand)]
    pub(crate) command: DemoCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DemoCommand {
    /// Move a built-in guest between two processes of this machine while it runs; needs no QEMU
    Live(Box<DemoLiveArgs>),
    /// Let an undecided source go on: the guest does not run at the destination
    Resume(DecideArgs),
    /// Let an undecided destination run the guest: it does not run at the source any more
    Start(DecideArgs),
    /// Give an undecided end up: the guest runs at the other one
    Discard(DecideArgs),
    /// Go on with a postcopy whose connection is gone
    Recover(RecoverArgs),
    /// Show what an end of a demonstration does: what to look at before deciding
    Status(DecideArgs),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GuestArg {
    /// Threads of the demonstration's own process
    Threads,
    /// A flat guest under /dev/kvm
    Kvm,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogArg {
    /// userfaultfd's asynchronous write-protect, read by `PAGEMAP_SCAN` (Linux 6.7)
    WpAsync,
    /// userfaultfd's write-protect with a thread that answers (Linux 5.19)
    WpThread,
    /// KVM's dirty log, cleared in slices
    KvmLog,
    /// KVM's dirty ring
    KvmRing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TransportArg {
    /// TCP over the loopback device
    Tcp,
    /// A unix socket
    Unix,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnOffArg {
    On,
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ZeroCheckArg {
    /// Every page, in every round
    Always,
    /// In the first round only: a page that was written is rarely zero
    Bulk,
    /// Never
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GiveUpArg {
    /// The guest goes on at the source
    Cancel,
    /// It is paused, however long that takes
    Pause,
    /// It runs ahead of its pages
    Postcopy,
}

#[derive(Debug, Args)]
#[command(
    after_long_help = "Two processes are started: one with a running guest, one that waits. The guest moves while it runs \
and goes on there; both ends compare its memory.\n\n  \
  limosa demo live\n  \
  limosa demo live --guest kvm --log kvm-ring --memory 64M --dirty-rate 200M\n  \
  limosa demo live --dirty-rate 2G --timeout 2s --give-up postcopy --write-trace rounds.svg\n  \
  limosa demo live --transport unix --same-host\n  \
  limosa demo live --hints on --hint-wait 100ms"
)]
pub(crate) struct DemoLiveArgs {
    /// What the guest is
    #[arg(long, value_enum, default_value_t = GuestArg::Threads)]
    pub(crate) guest: GuestArg,

    /// Who tells which pages the guest has written; wp-async for threads and kvm-log for KVM by default
    #[arg(long, value_enum)]
    pub(crate) log: Option<LogArg>,

    /// The guest's memory
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    pub(crate) memory: u64,

    /// How much of it the guest writes a second; 0 for none
    #[arg(long, value_name = "RATE", default_value = "50M", value_parser = parse_dirty_rate)]
    pub(crate) dirty_rate: u64,

    /// How the two processes reach each other
    #[arg(long, value_enum, default_value_t = TransportArg::Tcp)]
    pub(crate) transport: TransportArg,

    /// Move memory on N channels beside the main one, 1 to 16 (QEMU's multifd and multifd-channels)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) channels: Option<u8>,

    /// How pages are compressed on these channels (QEMU's multifd-compression)
    #[arg(long, value_enum, default_value_t = CompressionArg::None, requires = "channels")]
    pub(crate) compression: CompressionArg,

    /// How pages leave on these channels: copied, lent to the kernel (msg: `MSG_ZEROCOPY`), or spliced. auto splices, as both ends
    /// are on one machine
    #[arg(long, value_enum, value_name = "METHOD", default_value_t = ZeroCopyArg::Auto)]
    pub(crate) zero_copy: ZeroCopyArg,

    /// When the guest runs ahead of its pages: off, at-once, or after-rounds=N
    #[arg(long, value_name = "WHEN", default_value = "off", value_parser = parse_postcopy)]
    pub(crate) postcopy: Postcopy,

    /// Answer requested pages on a connection of their own (QEMU's postcopy-preempt)
    #[arg(long)]
    pub(crate) preempt: bool,

    /// Pass the memory itself instead of its pages: both ends are on one machine (QEMU's x-ignore-shared)
    #[arg(long)]
    pub(crate) same_host: bool,

    /// How long the guest may stand still for the rest of its memory (QEMU's downtime-limit)
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = parse_time)]
    pub(crate) downtime_limit: Duration,

    /// Most bytes a second while it runs, no limit by default (QEMU's max-bandwidth)
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub(crate) max_bandwidth: Option<NonZeroU64>,

    /// When pages are looked at if they are zero
    #[arg(long, value_enum, default_value_t = ZeroCheckArg::Always)]
    pub(crate) zero_check: ZeroCheckArg,

    /// Send hundreds of pages of the main channel by one call, from where they are; off copies them into a buffer of 16 KiB
    #[arg(long, value_enum, default_value_t = OnOffArg::On)]
    pub(crate) vectors: OnOffArg,

    /// By which instructions they are looked at: plain (16 bytes at a time), portable, sse2, avx2, avx512, neon; the best there are
    /// by default
    #[arg(long, value_name = "METHOD")]
    pub(crate) zero_method: Option<Method>,

    /// Make room at the destination ahead of arriving pages
    #[arg(long, value_enum, default_value_t = OnOffArg::On)]
    pub(crate) populate: OnOffArg,

    /// Ask the guest which of its memory is free, and do not send that: half of the memory is then a heap that programs allocate,
    /// write and give back, and a balloon's driver tells what of it is free
    #[arg(long, value_enum, default_value_t = OnOffArg::Off)]
    pub(crate) hints: OnOffArg,

    /// How long the first round, or the stop of `--postcopy at-once`, may wait for the list of what is free; by default the list takes
    /// pages out while they are sent
    #[arg(long, value_name = "TIME", value_parser = parse_time, requires = "hints")]
    pub(crate) hint_wait: Option<Duration>,

    /// How long it may take until the guest changes over
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) timeout: Option<Duration>,

    /// What becomes of it after that time
    #[arg(long, value_enum, default_value_t = GiveUpArg::Cancel, requires = "timeout")]
    pub(crate) give_up: GiveUpArg,

    /// Encrypt the connections: a folder with ca-cert.pem and both ends' certificates and keys, server-cert.pem,
    /// server-key.pem, client-cert.pem, client-key.pem (the dir of QEMU's tls-creds-x509); the server's names 127.0.0.1
    #[arg(long, value_name = "DIR")]
    pub(crate) tls_creds: Option<PathBuf>,

    /// Whom the server's certificate names, if not 127.0.0.1 (QEMU's tls-hostname)
    #[arg(long, value_name = "NAME", requires = "tls_creds")]
    pub(crate) tls_hostname: Option<String>,

    /// Who seals and opens what goes over the connections
    #[arg(long, value_enum, value_name = "WHEN", default_value_t, requires = "tls_creds")]
    pub(crate) tls_kernel: KernelTlsArg,

    /// Draw the rounds over time: memory that is left, rates, the pause
    #[arg(long, value_name = "F.svg")]
    pub(crate) write_trace: Option<PathBuf>,

    /// Listen here for programs that watch and steer the source (as QMP does); the destination listens at SOCK.destination
    #[arg(long, value_name = "SOCK")]
    pub(crate) control: Option<PathBuf>,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}

/// An end, by its control socket.
#[derive(Debug, Args)]
pub(crate) struct DecideArgs {
    /// The end's control socket, as it was told
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
    /// What both ends get.
    pub(crate) fn settings(&self) -> Settings {
        let guest = match self.guest {
            GuestArg::Threads => GuestKind::Threads,
            GuestArg::Kvm => GuestKind::Kvm,
        };
        Settings {
            guest,
            log: self.log.map_or(Settings::usual_log(guest), |log| match log {
                LogArg::WpAsync => LogKind::WpAsync,
                LogArg::WpThread => LogKind::WpThread,
                LogArg::KvmLog => LogKind::KvmLog,
                LogArg::KvmRing => LogKind::KvmRing,
            }),
            memory: self.memory,
            dirty_rate: self.dirty_rate,
            transport: match self.transport {
                TransportArg::Tcp => Transport::Tcp,
                TransportArg::Unix => Transport::Unix,
            },
            channels: self.channels.unwrap_or(0),
            compression: match self.compression {
                CompressionArg::None => Packing::None,
                CompressionArg::Zlib => Packing::Zlib,
                CompressionArg::Zstd => Packing::Zstd,
            },
            zero_copy: match self.zero_copy {
                ZeroCopyArg::Off => ZeroCopyKind::Off,
                ZeroCopyArg::Auto => ZeroCopyKind::Auto,
                ZeroCopyArg::Msg => ZeroCopyKind::Msg,
                ZeroCopyArg::Splice => ZeroCopyKind::Splice,
            },
            postcopy: self.postcopy,
            preempt: self.preempt,
            same_host: self.same_host,
            downtime_limit_ms: millis(self.downtime_limit),
            max_bandwidth: self.max_bandwidth,
            zero_check: match self.zero_check {
                ZeroCheckArg::Always => ZeroCheckKind::Always,
                ZeroCheckArg::Bulk => ZeroCheckKind::Bulk,
                ZeroCheckArg::Off => ZeroCheckKind::Off,
            },
            vectors: self.vectors == OnOffArg::On,
            zero_method: self.zero_method.map(|method| method.name().to_owned()),
            populate: self.populate == OnOffArg::On,
            hints: self.hints == OnOffArg::On,
            hint_wait_ms: self.hint_wait.map_or(0, millis),
            timeout_ms: self.timeout.map(millis),
            give_up: match self.give_up {
                GiveUpArg::Cancel => WhenStuck::Cancel,
                GiveUpArg::Pause => WhenStuck::Pause,
                GiveUpArg::Postcopy => WhenStuck::Postcopy,
            },
            tls_creds: self.tls_creds.clone(),
            tls_hostname: self.tls_hostname.clone(),
            tls_kernel: match self.tls_kernel {
                KernelTlsArg::Off => KernelTlsKind::Off,
                KernelTlsArg::Auto => KernelTlsKind::Auto,
                KernelTlsArg::On => KernelTlsKind::On,
            },
            ..Settings::default()
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// `50M`, or `0` for a guest that writes nothing.
fn parse_dirty_rate(text: &str) -> Result<u64, String> {
    if text == "0" { Ok(0) } else { parse_rate(text).map(NonZeroU64::get) }
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
