//! The arguments of `limosa serve`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};
use limosa_channel::{ChannelError, Tls, Uri};
use limosa_console::{named_values, on_off_parser, parse};
use limosa_image::qcow2::SnapshotChoice;
use limosa_storage::{CacheMode, Io};

use super::img::{OpenArgs, parse_aio, parse_snapshot};
use crate::img::size::parse_size;

#[derive(Debug, Args)]
#[command(
    after_long_help = "One image is the default export, whose name is empty; of several, each has its file's name. \
                             --name changes that. SIGTERM, SIGINT and SIGHUP end the server: requests in flight are \
                             carried out and answered, images are flushed and closed.\n\n  \
  limosa serve disk.qcow2 --nbd unix:/run/vm/disk.sock\n  \
  limosa serve --read-only --snapshot before-update disk.qcow2 --nbd tcp:localhost:10809\n  \
  limosa serve disk.qcow2 --nbd tcp:0.0.0.0:10809 --tls-creds /etc/pki/qemu --tls-allow host2.example\n  \
  limosa serve disk.qcow2 --vhost-user-blk /run/vm/disk.sock\n  \
  limosa serve a.qcow2 b.raw -f raw --name system --name data --nbd unix:/run/disks.sock\n  \
  nbdinfo nbd+unix:///?socket=/run/vm/disk.sock\n  \
  qemu-system-x86_64 ... -drive file=nbd+unix:///?socket=/run/vm/disk.sock,format=raw,if=virtio"
)]
pub(crate) struct ServeArgs {
    /// The images: paths, or json:{...}
    #[arg(value_name = "IMAGE", required = true, num_args = 1..)]
    pub(crate) images: Vec<OsString>,

    /// Serve NBD at this address: unix:PATH, tcp:HOST:PORT, fd:N (listening or connected), or - (one client on standard
    /// input and output). Repeatable; default: the sockets that systemd passes (`LISTEN_FDS`)
    #[arg(long, value_name = "URI")]
    pub(crate) nbd: Vec<Uri>,

    /// Serve a disk over vhost-user-blk at this socket, to one virtual machine; repeat it for each image, in their
    /// order
    #[arg(long, value_name = "SOCK")]
    pub(crate) vhost_user_blk: Vec<PathBuf>,

    /// Most queues of a disk over vhost-user-blk; default: the number of cores
    #[arg(long, value_name = "N", requires = "vhost_user_blk", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) queues: Option<u16>,

    /// Threads of a disk over vhost-user-blk; default: one for each queue, at most one for each core
    #[arg(long, value_name = "N", requires = "vhost_user_blk", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) threads: Option<u16>,

    /// Name of the export; repeat it for each image, in their order
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Vec<String>,

    /// Description of the exports for people
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) description: String,

    /// The images' format: raw or qcow2; probed by default
    #[arg(short, long, value_name = "FMT")]
    pub(crate) format: Option<String>,

    /// Each IMAGE is a list of options: driver=qcow2,file.driver=file,file.filename=NAME,...
    #[arg(long, conflicts_with = "format")]
    pub(crate) image_opts: bool,

    /// Refuse writes; other processes may read the images meanwhile
    #[arg(short, long)]
    pub(crate) read_only: bool,

    /// Serve images that another process is writing to, without locks; contents may be inconsistent
    #[arg(short = 'U', long, requires = "read_only")]
    pub(crate) shared: bool,

    /// Serve this internal snapshot of IMAGE: its id or name, or snapshot.id=ID,snapshot.name=NAME; implies --read-only
    #[arg(long, value_name = "SNAPSHOT", value_parser = parse_snapshot)]
    pub(crate) snapshot: Option<SnapshotChoice>,

    /// Begin the export at this offset of the disk
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub(crate) offset: u64,

    /// Limit the export to this size; default: up to the end of the disk
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) size: Option<u64>,

    /// Cache mode: none, writeback, writethrough, unsafe, directsync
    #[arg(long, value_name = "MODE", default_value = "writeback")]
    pub(crate) cache: CacheMode,

    /// Asynchronous I/O backend; native means the same as `io_uring` here
    #[arg(long, value_name = "threads|native|io_uring", value_parser = parse_aio)]
    pub(crate) aio: Option<Io>,

    #[command(flatten)]
    pub(crate) open: OpenArgs,

    #[command(flatten)]
    pub(crate) tls: ServeTlsArgs,

    /// Most connections at a time; a further one is closed
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) max_connections: u32,

    /// Time that a client gets to agree on an export
    #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "10s")]
    pub(crate) handshake_timeout: Duration,

    /// Time that a client gets to send more of an incomplete message, or to take its replies
    #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "60s")]
    pub(crate) stall_timeout: Duration,

    /// Print JSON objects on stdout, one a line: when clients can connect, and at the end
    #[arg(long)]
    pub(crate) json: bool,
}

/// Encryption of the connections.
#[derive(Debug, Args)]
pub(crate) struct ServeTlsArgs {
    /// Encrypt connections by TLS; DIR has ca-cert.pem, server-cert.pem and server-key.pem (the dir of QEMU's
    /// tls-creds-x509)
    #[arg(long, value_name = "DIR")]
    tls_creds: Option<PathBuf>,

    /// Whether a client without TLS is refused
    #[arg(long = "tls", value_name = "WHEN", default_value = "require", requires = "tls_creds", action = ArgAction::Set,
        value_parser = named_values([(true, "require", "It is refused"), (false, "allow", "It is served as well")]))]
    required: bool,

    /// Whether clients must present a certificate (the verify-peer of QEMU's tls-creds-x509)
    #[arg(long, value_parser = on_off_parser(), action = ArgAction::Set, value_name = "TLS_VERIFY_PEER", default_value = "on", requires = "tls_creds")]
    tls_verify_peer: bool,

    /// Serve only clients whose certificate has this name, as a DNS name or as the common name of its subject.
    /// Repeatable
    #[arg(long, value_name = "NAME", requires = "tls_creds")]
    tls_allow: Vec<String>,
}

impl ServeTlsArgs {
    /// Returns the reason why the options contradict each other, if they do.
    pub(crate) fn contradiction(&self, addresses: &[Uri]) -> Option<&'static str> {
        if !self.tls_allow.is_empty() && (!self.tls_verify_peer || !self.required) {
            return Some("--tls-allow needs --tls require and --tls-verify-peer on: others would be served as well");
        }
        let is_pipe = |uri: &Uri| matches!(uri, Uri::Exec(_) | Uri::File { .. });
        (self.tls_creds.is_some() && addresses.iter().any(is_pipe)).then_some("--tls-creds needs a socket")
    }

    /// Whether a client without TLS is refused.
    pub(crate) fn is_required(&self) -> bool {
        self.tls_creds.is_some() && self.required
    }

    /// The credentials, read and found to be good, and whether a client without TLS is refused.
    ///
    /// # Errors
    /// A file is missing or unusable.
    pub(crate) fn read(&self) -> Result<Option<(Tls, bool)>, ChannelError> {
        let Some(folder) = &self.tls_creds else { return Ok(None) };
        let tls = if self.tls_allow.is_empty() {
            Tls::server(folder, self.tls_verify_peer)?
        } else {
            Tls::server_for(folder, self.tls_allow.clone())?
        };
        Ok(Some((tls, self.required)))
    }
}
