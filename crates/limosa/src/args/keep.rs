//! The arguments of `limosa keep`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser as _};
use limosa_channel::Uri;
use limosa_console::parse;

use super::protect::parse_lost_after;
use super::serve::socket_path;
use super::{DurableArg, TlsServerArgs};

#[derive(Debug, Args)]
#[command(after_long_help = "limosa keep tcp:0.0.0.0:4447 /srv/vm --tls-creds /etc/pki/qemu\n  \
limosa protect --qmp /run/vm.qmp --to tcp:backup:4447 --tls-creds /etc/pki/qemu   (on the VM's host)\n  \
limosa protect failover /srv/vm --fence 'ssh host poweroff' -- qemu-system-x86_64 -m 4G ...\n  \
limosa keep tcp:0.0.0.0:4447 /srv/vm --standby --when-lost 3s --fence 'ipmitool -H host1-bmc power off' -- \
qemu-system-x86_64 -m 4G ...\n\n\
DIR/checkpoint.limosa is a whole snapshot from the first base on. One VM at a time is kept. limosa prints the address \
it listens on to stderr. A QEMU whose capability x-colo is on may connect without limosa, too.")]
pub(crate) struct KeeperArgs {
    /// Where primaries connect: tcp:HOST:PORT or unix:PATH
    #[arg(value_name = "LISTEN")]
    pub(crate) uri: Uri,

    /// The directory of the checkpoints; it is created if it does not exist
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,

    #[command(flatten)]
    pub(crate) tls: TlsServerArgs,

    /// Failures that a checkpoint must survive before it counts
    #[arg(long, value_enum, default_value_t = DurableArg::Process)]
    pub(crate) durable: DurableArg,

    /// How long a primary may be silent while its VM runs
    #[arg(long, value_name = "TIME", value_parser = parse_lost_after, default_value = "3s")]
    pub(crate) lost_after: Duration,

    /// How long a checkpoint that has begun may make no progress
    #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "10s")]
    pub(crate) stall_timeout: Duration,

    /// Start the QEMU of the command line when a VM has come, and feed it with each checkpoint: it continues the VM at
    /// once when that is lost
    #[arg(long, requires = "command")]
    pub(crate) standby: bool,

    /// Fail over when the VM has been lost for so long, and at once when its QEMU is known to have ended between two
    /// checkpoints. Without it SIGUSR1 begins a failover
    #[arg(long, value_name = "TIME", value_parser = parse::time, requires = "command")]
    pub(crate) when_lost: Option<Duration>,

    /// The protected VM does not run any more when it is lost, and does not come back
    #[arg(long, conflicts_with = "fence")]
    pub(crate) fenced: bool,

    /// A shell command that makes sure of that before a failover; it must exit with 0
    #[arg(long, value_name = "COMMAND")]
    pub(crate) fence: Option<OsString>,

    /// The --control socket of the `limosa serve` whose disks belong to the checkpoints: a failover has it drop what
    /// the VM wrote later. Repeat it for each server
    #[arg(
        long,
        value_name = "SOCK",
        value_parser = OsStringValueParser::new().map(socket_path),
        requires = "command"
    )]
    pub(crate) disk_server: Vec<PathBuf>,

    /// Have the gate at this socket (see `limosa protect gate`) refuse the VM before a failover, if it runs on this
    /// host. With one for each network, and --disk-server for each disk, neither --fence nor --fenced is needed
    #[arg(long, value_name = "SOCK", value_parser = OsStringValueParser::new().map(socket_path), requires = "command")]
    pub(crate) gate: Vec<PathBuf>,

    /// How long QEMU may take to start
    #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "60s")]
    pub(crate) start_within: Duration,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,

    /// The command line that the protected VM was started with; limosa adds -incoming and a private monitor
    #[arg(value_name = "QEMU", last = true)]
    pub(crate) command: Vec<OsString>,
}

impl KeeperArgs {
    /// Returns the reason why the arguments contradict each other, if they do.
    pub(crate) fn contradiction(&self) -> Option<&'static str> {
        if !self.uri.is_socket() {
            return Some("limosa keep needs several connections: listen on tcp:HOST:PORT or unix:PATH");
        }
        if !self.command.is_empty() && !self.fenced && self.fence.is_none() && self.gate.is_empty() {
            return Some("a failover needs --fence COMMAND, --fenced or --gate: at most one side may run the VM");
        }
        self.tls.contradiction(&self.uri)
    }
}
