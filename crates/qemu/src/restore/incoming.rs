//! Where QEMU listens and limosa connects: a socket in a directory that nobody else can enter, or an address that the
//! user chose.

use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use limosa_channel::{Channel, ChannelError, Options, Uri};
use uuid::Uuid;

use crate::job::JobError;
use crate::monitor::Monitor;

/// How long a connection to a QEMU that already listens may take.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// Send buffer of the channel that carries everything. With the kernel's default of about 200 KiB the sender and QEMU wait for
/// each other: 4 GiB took 3.0-3.4 s instead of 2.6 s. More than this gains nothing and lets a requested page wait longer.
const SEND_BUFFER: usize = 512 << 10;

/// The place where QEMU listens for the stream. Dropping it removes the directory that was made for it.
#[derive(Debug)]
pub(super) struct Rendezvous {
    uri: Uri,
    directory: Option<PathBuf>,
}

impl Rendezvous {
    /// At `listen`, or at a private place.
    pub(super) fn new(monitor: &Monitor, listen: Option<&Uri>) -> Result<Self, JobError> {
        match listen {
            None => Self::private(monitor),
            Some(Uri::Unix(path)) => {
                // QEMU has a working directory of its own.
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                Ok(Self { uri: Uri::Unix(path), directory: None })
            }
            Some(uri @ Uri::Tcp { port, .. }) if *port != 0 => Ok(Self { uri: uri.clone(), directory: None }),
            Some(other) => Err(JobError::refused(
                format!("QEMU cannot be made to listen at {other}"),
                "--listen takes unix:PATH or tcp:HOST:PORT with a port of its own",
            )),
        }
    }

    /// A socket in a new directory of mode 0700 that belongs to QEMU's user, because QEMU makes the socket.
    fn private(monitor: &Monitor) -> Result<Self, JobError> {
        if !monitor.qmp().passes_descriptors() {
            return Err(JobError::refused(
                "QEMU's monitor is reached over tcp, so QEMU may be on another host",
                "say with --listen tcp:HOST:PORT where it is to listen for the stream",
            ));
        }
        // A peer of another pid namespace has no number here, and then nothing is known of it: it is taken for our own user.
        let peer = rustix::net::sockopt::socket_peercred(monitor.qmp().descriptor().as_fd()).ok();
        let other = peer.filter(|peer| peer.uid != rustix::process::geteuid());
        let directory = place_for(other.is_none()).join(format!("limosa-{}", Uuid::new_v4().simple()));
        let place = |what| {
            let path = directory.clone();
            move |source| JobError::Place { what, path, source }
        };
        std::fs::DirBuilder::new().mode(0o700).create(&directory).map_err(place("make the directory"))?;
        let rendezvous = Self { uri: Uri::Unix(socket(&directory)), directory: Some(directory.clone()) };
        if let Some(peer) = other {
            std::os::unix::fs::chown(&directory, Some(peer.uid.as_raw()), Some(peer.gid.as_raw()))
                .map_err(place("give QEMU's user (as root, or with --listen elsewhere)"))?;
        }
        Ok(rendezvous)
    }

    /// The address, as QEMU is told it.
    pub(super) fn uri(&self) -> String {
        self.uri.to_string()
    }

    /// Takes the directory away: once connected, nobody needs the name any more, and a kill would leave it.
    pub(super) fn leave(&self) {
        if let Some(directory) = &self.directory {
            let _ = std::fs::remove_file(socket(directory));
            let _ = std::fs::remove_dir(directory);
        }
    }

    /// Connects; QEMU must listen already.
    pub(super) fn connect(&self) -> Result<Channel, ChannelError> {
        let options =
            Options { connect_timeout: Some(CONNECT_WITHIN), send_buffer: Some(SEND_BUFFER), ..Options::default() };
        Channel::connect(&self.uri, &options)
    }

    /// Connects a second channel, for single pages that somebody waits for.
    pub(super) fn connect_preempt(&self) -> Result<Channel, ChannelError> {
        Channel::connect(&self.uri, &Options { connect_timeout: Some(CONNECT_WITHIN), ..Options::default() })
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Where private directories are made: the user's own place is closed to others, and a socket's name has at most 107
/// bytes, of which the name of the directory and the socket take 49.
fn place_for(own_user: bool) -> PathBuf {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|_| own_user);
    let place = own.unwrap_or_else(std::env::temp_dir);
    if place.as_os_str().len() > 107 - 49 { PathBuf::from("/tmp") } else { place }
}

fn socket(directory: &Path) -> PathBuf {
    directory.join("incoming")
}
