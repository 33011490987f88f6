//! The arguments of `limosa keep`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use limosa_channel::Uri;
use limosa_console::parse;

use super::protect::parse_lost_after;
use super::{DurableArg, TlsServerArgs};

#[derive(Debug, Args)]
#[command(after_long_help = "limosa keep tcp:0.0.0.0:4447 /srv/vm --tls-creds /etc/pki/qemu\n  \
limosa protect --qmp /run/vm.qmp --to tcp:backup:4447 --tls-creds /etc/pki/qemu   (on the VM's host)\n  \
limosa protect failover /srv/vm --fence 'ssh host poweroff' -- qemu-system-x86_64 -m 4G ...\n\n\
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

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}

impl KeeperArgs {
    /// Returns the reason why the arguments contradict each other, if they do.
    pub(crate) fn contradiction(&self) -> Option<&'static str> {
        if !self.uri.is_socket() {
            return Some("limosa keep needs several connections: listen on tcp:HOST:PORT or unix:PATH");
        }
        self.tls.contradiction(&self.uri)
    }
}
