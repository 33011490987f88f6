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
            Some(uri @ Uri::Unix(_)) => Ok(Self { uri: uri.clone(), directory: None }),
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
        let parent = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
        let directory = parent.join(format!("limosa-{}", Uuid::new_v4().simple()));
        let place = |what| {
            let path = directory.clone();
            move |source| JobError::Place { what, path, source }
        };
        std::fs::DirBuilder::new().mode(0o700).create(&directory).map_err(place("make the directory"))?;
        let rendezvous = Self { uri: Uri::Unix(socket(&directory)), directory: Some(directory.clone()) };
        let peer = rustix::net::sockopt::socket_peercred(monitor.qmp().descriptor().as_fd())
            .map_err(|errno| place("find out who owns the monitor, to give it")(errno.into()))?;
        if peer.uid != rustix::process::geteuid() {
            std::os::unix::fs::chown(&directory, Some(peer.uid.as_raw()), Some(peer.gid.as_raw()))
                .map_err(place("give QEMU's user (as root, or with --listen elsewhere)"))?;
        }
        Ok(rendezvous)
    }

    /// The address, as QEMU is told it.
    pub(super) fn uri(&self) -> String {
        self.uri.to_string()
    }

    /// Connects; QEMU must listen already.
    pub(super) fn connect(&self) -> Result<Channel, ChannelError> {
        Channel::connect(&self.uri, &Options { connect_timeout: Some(CONNECT_WITHIN), ..Options::default() })
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        if let Some(directory) = &self.directory {
            let _ = std::fs::remove_file(socket(directory));
            let _ = std::fs::remove_dir(directory);
        }
    }
}

fn socket(directory: &Path) -> PathBuf {
    directory.join("incoming")
}
