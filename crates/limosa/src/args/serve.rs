//! The arguments of `limosa serve`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser as _};
use clap::{ArgAction, Args, ValueEnum};
use limosa_channel::{ChannelError, Tls, Uri};
use limosa_console::{named_values, on_off_parser, parse};
use limosa_socket::SocketAccess;

use super::img::OpenArgs;
use super::serve_ctl::{ServeCommand, ServedImageArgs};

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_long_help = "One image is the default export, whose name is empty; of several, each has its file's name. \
                             --name changes that. SIGTERM, SIGINT and SIGHUP end the server: requests in flight are \
                             carried out and answered, images are flushed and closed. ctl talks to a server that has a \
                             --control socket; an image whose name is ctl is written ./ctl.\n\n  \
  limosa serve disk.qcow2 --nbd unix:/run/vm/disk.sock\n  \
  limosa serve --read-only --snapshot before-update disk.qcow2 --nbd tcp:localhost:10809\n  \
  limosa serve disk.qcow2 --nbd tcp:0.0.0.0:10809 --tls-creds /etc/pki/qemu --tls-allow host2.example\n  \
  limosa serve disk.qcow2 --vhost-user-blk /run/vm/disk.sock\n  \
  limosa serve a.qcow2 b.qcow2 --name system --name data --nbd unix:/run/disks.sock\n  \
  limosa serve disk.qcow2 --nbd unix:/run/vm/disk.sock --control /run/vm/disk-control.sock --allow-dir .\n  \
  limosa serve ctl /run/vm/disk-control.sock add other.qcow2 --name other\n  \
  nbdinfo 'nbd+unix:///?socket=/run/vm/disk.sock'\n  \
  qemu-system-x86_64 ... -drive 'file=nbd+unix:///?socket=/run/vm/disk.sock,format=raw,if=virtio'"
)]
pub(crate) struct ServeCommandArgs {
    #[command(subcommand)]
    pub(crate) command: Option<ServeCommand>,

    #[command(flatten)]
    pub(crate) serve: ServeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// The images: paths, URLs of objects, or json:{...}. With --control there may be none at first
    #[arg(value_name = "IMAGE", num_args = 1..)]
    pub(crate) images: Vec<OsString>,

    /// Serve NBD at this address: unix:PATH, tcp:HOST:PORT, vsock:CID:PORT (CID 4294967295: for all virtual machines),
    /// fd:N (listening or connected), or - (one client on standard input and output). Repeatable; default: the sockets
    /// that systemd passes (`LISTEN_FDS`)
    #[arg(long, value_name = "URI", value_parser = parse_address)]
    pub(crate) nbd: Vec<Uri>,

    /// Serve a disk over vhost-user-blk at this socket, to one virtual machine; repeat it for each image, in their
    /// order
    #[arg(long, value_name = "SOCK", value_parser = OsStringValueParser::new().map(socket_path))]
    pub(crate) vhost_user_blk: Vec<PathBuf>,

    /// Most queues of a disk over vhost-user-blk; default: the number of cores, and at least 4
    #[arg(long, value_name = "N", requires = "vhost_user_blk", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) queues: Option<u16>,

    /// Threads of a disk over vhost-user-blk; default: one for each queue, at most one for each core
    #[arg(long, value_name = "N", requires = "vhost_user_blk", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) threads: Option<u16>,

    /// Mode of the unix sockets of --nbd, --vhost-user-blk and --metrics, in octal: 660 for a group. The control socket
    /// is always for its owner alone
    #[arg(long, value_name = "MODE", value_parser = parse_mode, default_value = "600")]
    pub(crate) socket_mode: u32,

    /// Group of the unix sockets of --nbd, --vhost-user-blk and --metrics: a name in /etc/group, or a number
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    pub(crate) socket_group: Option<u32>,

    /// Name of the export; repeat it for each image, in their order
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Vec<String>,

    #[command(flatten)]
    pub(crate) how: ServedImageArgs,

    /// Serve an image that is not written, such as an object of a store: clients' writes go to this qcow2 image on top
    /// of it, which is created if it does not exist, and stays
    #[arg(long, value_name = "FILE", conflicts_with_all = ["read_only", "snapshot", "untrusted"])]
    pub(crate) overlay: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) open: OpenArgs,

    #[command(flatten)]
    pub(crate) tls: ServeTlsArgs,

    /// Create a QMP-like socket here for programs and `limosa serve ctl` (`query-exports`, `export-add`, ...)
    #[arg(long, value_name = "SOCK")]
    pub(crate) control: Option<PathBuf>,

    /// With --control: allow images in this folder and below to be added, with the files that they refer to. Repeatable
    #[arg(long, value_name = "DIR", requires = "control")]
    pub(crate) allow_dir: Vec<PathBuf>,

    /// Keep what qcow2 images do not have yet, of acknowledged writes, in this folder too, so that a server that is
    /// killed loses nothing: the next one with the same folder brings it to the image. It may be in memory. Or off;
    /// default: /run/limosa, without root limosa in `$XDG_RUNTIME_DIR`
    #[arg(long, value_name = "DIR|off", value_parser = OsStringValueParser::new().map(JournalArg::from))]
    pub(crate) journal: Option<JournalArg>,

    /// Whether the server gives up, after its start, what it does not need: starting programs, opening other files,
    /// most system calls
    #[arg(long, value_name = "WHEN", value_enum, default_value = "auto")]
    pub(crate) sandbox: SandboxArg,

    /// Serve metrics in Prometheus' text format here, over HTTP: GET /metrics at unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) metrics: Option<Uri>,

    /// Most connections at a time; a further one is closed
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) max_connections: u32,

    /// Most memory for requests and replies of all connections, at least 128M. A connection has an equal part of one
    /// half for itself; the other half is for those who need more
    #[arg(long, value_name = "SIZE", value_parser = parse::size, default_value = "512M")]
    pub(crate) max_memory: u64,

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

/// Parses an address of NBD.
fn parse_address(text: &str) -> Result<Uri, String> {
    match text.parse() {
        Ok(Uri::File { .. } | Uri::Exec(_)) => {
            Err("clients cannot connect to it; must be unix:PATH, tcp:HOST:PORT, vsock:CID:PORT, fd:N or -".into())
        }
        Ok(uri) => Ok(uri),
        Err(error) if ["unix:", "tcp:", "vsock:", "fd:"].iter().any(|scheme| text.starts_with(scheme)) => {
            Err(error.to_string())
        }
        Err(_) => Err("must be unix:PATH, tcp:HOST:PORT, vsock:CID:PORT, fd:N or -".into()),
    }
}

/// The path of a socket, which may be given as other sockets are.
pub(super) fn socket_path(text: OsString) -> PathBuf {
    match text.as_encoded_bytes().strip_prefix(b"unix:") {
        Some(path) => OsStr::from_bytes(path).into(),
        None => text.into(),
    }
}

/// Parses the mode of a socket's file.
pub(super) fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("must be octal, from 0 to 777".into()),
    }
}

/// Parses a group: its name or number.
pub(super) fn parse_group(text: &str) -> Result<u32, String> {
    // The last one means none (chown(2)).
    if let Some(number) = text.parse().ok().filter(|number| *number != u32::MAX) {
        return Ok(number);
    }
    let groups = std::fs::read_to_string("/etc/group").map_err(|error| format!("/etc/group: {error}"))?;
    find_group(&groups, text).ok_or_else(|| "no such group in /etc/group; give its number".into())
}

/// Returns the number of a group of this name, as group(5) has it.
fn find_group(groups: &str, name: &str) -> Option<u32> {
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == name).then(|| fields.nth(1)?.parse().ok()).flatten()
    })
}

/// Where journals are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum JournalArg {
    Folder(PathBuf),
    Off,
}

impl From<OsString> for JournalArg {
    fn from(value: OsString) -> Self {
        if value == "off" { Self::Off } else { Self::Folder(value.into()) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SandboxArg {
    /// All that the kernel has
    Auto,
    /// Fail if the kernel cannot
    On,
    /// It does not
    Off,
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

impl ServeArgs {
    /// Who may connect to the sockets of clients.
    pub(crate) fn socket_access(&self) -> SocketAccess {
        SocketAccess::default().mode(self.socket_mode).group(self.socket_group)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal_and_groups_have_names_or_numbers() {
        assert_eq!(["600", "0660", "0"].map(parse_mode), [Ok(0o600), Ok(0o660), Ok(0)]);
        assert!(["", "8", "1000", "rw", "-1"].iter().all(|text| parse_mode(text).is_err()));
        let groups = "root:x:0:\nkvm:x:108:one,two\nbroken\n";
        assert_eq!(
            ["kvm", "root", "kv", "broken"].map(|name| find_group(groups, name)),
            [Some(108), Some(0), None, None]
        );
        assert_eq!((parse_group("77"), parse_group("root")), (Ok(77), Ok(0)));
    }
}
