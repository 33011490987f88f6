//! The arguments of `limosa protect`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser as _};
use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use limosa_channel::Uri;
use limosa_console::parse;
use limosa_protect::CheckpointTiming;
use limosa_protect::gate::NetworkAddress;
use limosa_qemu::qmp::MonitorAddress;

use super::serve::{parse_group, parse_mode, socket_path};
use super::{HowArgs, SteerArgs, TlsClientArgs};

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_long_help = "limosa protect --qmp /run/vm.qmp /srv/vm --every 100ms\n  \
limosa protect gate /run/vm.gate --listen /run/vm.net --net tap:tap0\n  \
limosa protect --qmp /run/vm.qmp /srv/vm --every event --gate /run/vm.gate\n  \
limosa protect --qmp /run/vm.qmp --to tcp:backup:4447 --tls-creds /etc/pki/qemu   (there: limosa keep)\n  \
limosa protect failover /srv/vm --fence 'ssh host poweroff' -- qemu-system-x86_64 -m 4G ...\n  \
limosa protect failover /srv/vm --gate /run/vm.gate --disk-server /run/vm.disks -- qemu-system-x86_64 -m 4G ...\n\n\
DIR/checkpoint.limosa is at every moment a whole snapshot. The VM needs QEMU 11.1, or 10.0.7 with KVM. Without --gate \
its network output is not held back: after a failover, others may have seen what the VM no longer knows."
)]
pub(crate) struct ProtectArgs {
    #[command(subcommand)]
    pub(crate) command: Option<ProtectCommand>,

    #[command(flatten)]
    pub(crate) keep: Option<KeepArgs>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ProtectCommand {
    /// Start a QEMU from the newest checkpoint, once the protected VM cannot run any more
    Failover(Box<FailoverArgs>),
    /// Forward a VM's network, and hold its output back while a limosa protect keeps checkpoints of it
    Gate(Box<GateArgs>),
    /// Bring all that a VM with --disks overlays wrote to its images, instead of failing over to its checkpoint
    Merge(MergeArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "For a VM that is off, and starts from its disks again: no checkpoint is of that instant.")]
pub(crate) struct MergeArgs {
    /// The directory of the checkpoints
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DurableArg {
    /// A checkpoint survives the end of any process, and not a power cut
    Process,
    /// A checkpoint survives a power cut: it counts when it is on the disk
    Disk,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProtectDisksArg {
    /// Refuse the VM
    Refuse,
    /// They belong to the checkpoints: raw and qcow2 files of this host that QEMU opens itself. An overlay beside each
    /// has the writes of a checkpoint, and is merged when it counts. Each pause has an fsync; --every is at least 1s
    Overlays,
    /// Do not check; disks are kept consistent by other means
    Ignore,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLossArg {
    /// It continues without protection until the keeper is back
    Continue,
    /// It stands still until the keeper is back, or until limosa protect is ended
    Pause,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputArg {
    /// It leaves at once: after a failover others may have seen what the VM does not know
    Free,
    /// Filters in QEMU hold it back, for a VM without gates. Frames beyond 10,000 between two checkpoints, and those of
    /// a checkpoint that counts, may be lost with the VM
    Filter,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum MethodArg {
    /// COLO: the VM stops until its changed pages are received, many times a second
    Colo,
    /// Background snapshots of the whole VM, for a QEMU without a COLO that works: every few seconds
    Background,
}

#[derive(Debug, Args)]
pub(crate) struct KeepArgs {
    /// QEMU's monitor: a unix socket's path, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "SOCK")]
    pub(crate) qmp: MonitorAddress,

    /// The directory of the checkpoints; it is created if it does not exist
    #[arg(value_name = "DIR", required_unless_present = "to", conflicts_with = "to")]
    pub(crate) directory: Option<PathBuf>,

    /// Send the checkpoints to a limosa keep on another host: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI")]
    pub(crate) to: Option<Uri>,

    // No `flatten` as elsewhere: of optional arguments that have some of their own clap sees none.
    /// Encrypt the connection of --to by TLS; DIR has ca-cert.pem, client-cert.pem and client-key.pem (the dir of
    /// QEMU's tls-creds-x509)
    #[arg(long, value_name = "DIR", requires = "to")]
    tls_creds: Option<PathBuf>,

    /// Host name expected in the keeper's certificate; default: HOST of tcp:HOST:PORT
    #[arg(long, value_name = "NAME", requires = "tls_creds")]
    tls_hostname: Option<String>,

    /// How long the keeper of --to may be out of reach, or owe an answer
    #[arg(long, value_name = "TIME", value_parser = parse_lost_after, default_value = "3s", requires = "to")]
    pub(crate) lost_after: Duration,

    /// Treatment of the VM while the keeper of --to is lost
    #[arg(long, value_enum, default_value_t = OnLossArg::Continue, requires = "to")]
    pub(crate) on_loss: OnLossArg,

    /// How QEMU makes checkpoints
    #[arg(long, value_enum, default_value_t = MethodArg::Colo)]
    pub(crate) via: MethodArg,

    /// Time between checkpoints, at least 1 ms; event, or event:TIME: as soon as a gate holds output, and at the latest
    /// after TIME (1s). With --via background at least 1s, and 5s by default; with --disks overlays at least 1s, its
    /// default
    #[arg(
        long,
        value_name = "TIME",
        value_parser = parse_timing,
        default_value = "100ms",
        default_value_ifs([("via", "background", "5s"), ("disks", "overlays", "1s")])
    )]
    pub(crate) every: CheckpointTiming,

    /// Move pages on N multifd channels, 1 to 16, in addition to the main one (QEMU's multifd and multifd-channels)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16), conflicts_with = "to")]
    pub(crate) channels: Option<u8>,

    /// Hold network output back until its checkpoint counts, by the gate at this socket (see `limosa protect gate`).
    /// Repeat it for each network of the VM
    #[arg(long, value_name = "SOCK", value_parser = OsStringValueParser::new().map(socket_path))]
    pub(crate) gate: Vec<PathBuf>,

    /// Treatment of network output without --gate
    #[arg(long, value_enum, conflicts_with = "gate")]
    pub(crate) output: Option<OutputArg>,

    /// Failures that a checkpoint must survive before it counts. With --to that is up to the keeper, and this one is
    /// about the disks of --disk-server
    #[arg(long, value_enum, default_value_t = DurableArg::Process)]
    pub(crate) durable: DurableArg,

    /// Have disks that `limosa serve` serves belong to the checkpoints: its --control socket. Repeat it for each server
    #[arg(long, value_name = "SOCK", value_parser = OsStringValueParser::new().map(socket_path))]
    pub(crate) disk_server: Vec<PathBuf>,

    /// How to treat other writable disks
    #[arg(long, value_enum, default_value_t = ProtectDisksArg::Refuse)]
    pub(crate) disks: ProtectDisksArg,

    /// How long the VM may stand still for a checkpoint that makes no progress; it then continues without protection
    #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "2s")]
    pub(crate) stall_timeout: Duration,

    /// The address at which limosa listens and QEMU connects, unix:PATH or tcp:HOST:PORT, for a QEMU in a container or
    /// on another host. By default a private directory
    #[arg(long, value_name = "URI")]
    pub(crate) listen: Option<Uri>,

    /// Create a QMP-like socket here to monitor and control the job (`query-protect`, `migrate_cancel`, ...)
    #[arg(long, value_name = "SOCK")]
    pub(crate) control: Option<PathBuf>,

    /// Serve metrics in Prometheus' text format here, over HTTP: GET /metrics at unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "URI")]
    pub(crate) metrics: Option<Uri>,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,

    /// Print a JSON object a line on stdout for the base, for each checkpoint and for the end
    #[arg(long, conflicts_with = "json")]
    pub(crate) events: bool,
}

#[derive(Debug, Args)]
#[command(after_long_help = "qemu-system-x86_64 ... -netdev \
stream,id=n0,server=off,addr.type=unix,addr.path=/run/vm.net,reconnect-ms=100\n  \
limosa protect gate /run/vm.gate --listen /run/vm.net --net unix:/run/passt.sock\n\n\
One gate for each network of the VM. It must run as long as the VM: without it the VM has no network. While no \
limosa protect has it, frames leave at once.")]
pub(crate) struct GateArgs {
    /// Create the socket here that limosa protect --gate connects to
    #[arg(value_name = "SOCK", value_parser = OsStringValueParser::new().map(socket_path))]
    pub(crate) socket: PathBuf,

    /// Create the socket here that the VM's `-netdev stream` connects to
    #[arg(long, value_name = "SOCK", value_parser = OsStringValueParser::new().map(socket_path))]
    pub(crate) listen: PathBuf,

    /// The VM's network: a tap device, tap:NAME, or a socket that speaks the framing of QEMU's stream back end,
    /// unix:PATH (passt, another QEMU)
    #[arg(long, value_name = "NET")]
    pub(crate) net: NetworkAddress,

    /// Most bytes of output that are held. At half of it a checkpoint is made at once; what comes beyond it is dropped
    #[arg(long, value_name = "SIZE", value_parser = parse::size, default_value = "64M")]
    pub(crate) limit: u64,

    /// How long output is still held after limosa protect has died, in case the VM dies with it. Longer if a limosa
    /// keep fails over by itself: until it has
    #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "1s")]
    pub(crate) grace: Duration,

    /// Mode of the socket of --listen, in octal: 660 for a group. The other one is always for its owner alone
    #[arg(long, value_name = "MODE", value_parser = parse_mode, default_value = "600")]
    pub(crate) socket_mode: u32,

    /// Group of the socket of --listen: a name in /etc/group, or a number
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    pub(crate) socket_group: Option<u32>,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}

impl KeepArgs {
    /// Returns the reason why the arguments contradict each other, if they do.
    pub(crate) fn contradiction(&self) -> Option<&'static str> {
        if self.disks == ProtectDisksArg::Ignore && !self.disk_server.is_empty() {
            return Some("--disks ignore leaves no disks for --disk-server");
        }
        if self.via == MethodArg::Background && self.channels.is_some() {
            return Some("--via background has one channel");
        }
        match &self.to {
            Some(uri) if !uri.is_socket() => Some("--to needs tcp:HOST:PORT or unix:PATH"),
            Some(_) if self.durable == DurableArg::Disk && self.disk_server.is_empty() => {
                Some("with --to the keeper says which failures a checkpoint survives: limosa keep --durable")
            }
            Some(uri) => self.tls().contradiction(uri),
            None => None,
        }
    }

    /// How the connection to a keeper is encrypted.
    pub(crate) fn tls(&self) -> TlsClientArgs {
        TlsClientArgs { tls_creds: self.tls_creds.clone(), tls_hostname: self.tls_hostname.clone() }
    }
}

/// Parses a time of at least a second: the kernel counts in them.
pub(super) fn parse_lost_after(text: &str) -> Result<Duration, String> {
    const LEAST: Duration = Duration::from_secs(1);
    let time = parse::time(text).map_err(|error| error.to_string())?;
    if time < LEAST { Err("it must be at least 1s".into()) } else { Ok(time) }
}

/// Parses a time, or `event` with the longest time.
fn parse_timing(text: &str) -> Result<CheckpointTiming, String> {
    const AT_MOST: Duration = Duration::from_secs(1);
    let time = |text| parse::time_with_unit(text).map_err(|error| format!("{error}; or event or event:TIME"));
    match text.split_once(':') {
        None if text == "event" => Ok(CheckpointTiming::Output { at_most: AT_MOST }),
        Some(("event", longest)) => Ok(CheckpointTiming::Output { at_most: time(longest)? }),
        _ => Ok(CheckpointTiming::Period(time(text)?)),
    }
}

#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("fencing").args(["fenced", "fence"]),
    after_help = "Terminal, signals and exit status are QEMU's. limosa prints nothing unless it fails or -v is given."
)]
pub(crate) struct FailoverArgs {
    /// The directory of the checkpoints
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,

    /// The protected VM is known not to run any more, and not to come back
    #[arg(long)]
    pub(crate) fenced: bool,

    /// A shell command that makes sure of that; it must exit with 0
    #[arg(long, value_name = "COMMAND")]
    pub(crate) fence: Option<OsString>,

    /// Have the gate at this socket refuse the protected VM from now on (see `limosa protect gate`). With one for each
    /// of its networks, and a --disk-server for each of its writable disks, neither --fence nor --fenced is needed
    #[arg(long, value_name = "SOCK", value_parser = OsStringValueParser::new().map(socket_path))]
    pub(crate) gate: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) how: HowArgs,

    #[command(flatten)]
    pub(crate) steer: SteerArgs,

    /// How long QEMU may take to start
    #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "60s")]
    pub(crate) start_within: Duration,

    /// The command line that the protected VM was started with; limosa adds -incoming and a private monitor
    #[arg(value_name = "QEMU", last = true, required = true)]
    pub(crate) command: Vec<OsString>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_are_timed_by_a_period_or_by_output() {
        let second = Duration::from_secs(1);
        for (text, timing) in [
            ("20ms", CheckpointTiming::Period(Duration::from_millis(20))),
            ("event", CheckpointTiming::Output { at_most: second }),
            ("event:500ms", CheckpointTiming::Output { at_most: second / 2 }),
        ] {
            assert_eq!(parse_timing(text), Ok(timing), "{text}");
        }
        for text in ["events", "event:", "event:0", "0", "", "1s:event", "100", "event:1"] {
            assert!(parse_timing(text).is_err(), "{text}");
        }
    }
}
