//! How the stream gets to QEMU: through a descriptor that QEMU is passed, or to where QEMU listens, which is a private
//! place or an address that the user chose.

use std::os::fd::AsFd;
use std::time::Duration;

use limosa_channel::{Channel, ChannelError, Options, Uri};
use parking_lot::Mutex;

use crate::conflict::{Conflict, RendezvousConflict};
use crate::job::JobError;
use crate::monitor::Monitor;
use crate::socket_directory::SocketDirectory;

/// How long a connection to a QEMU that already listens may take.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// Send buffer of the channel that carries everything. With the kernel's default of about 200 KiB the sender and QEMU
/// wait for each other: 4 GiB took 3.0-3.4 s instead of 2.6 s. More than this gains nothing and lets a requested page
/// wait longer.
const SEND_BUFFER: usize = 512 << 10;

/// The name of the socket in a private directory.
const SOCKET: &str = "incoming";

/// The name under which QEMU keeps its end of the socket pair until it takes it.
const DESCRIPTOR: &str = "limosa-incoming";

/// How many channels a restore needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channels {
    /// QEMU is passed one end of a socket pair, which works for every user that QEMU runs as and for every view that it
    /// has of the file system.
    One,
    /// QEMU has to listen: it takes a second channel no other way.
    Several,
}

/// The place at which QEMU takes the stream. Dropping it removes what was made for it.
#[derive(Debug)]
pub(crate) enum Rendezvous<'a> {
    /// QEMU was passed the other end of this channel.
    Passed {
        /// The monitor over which it was passed.
        monitor: &'a Monitor,
        /// limosa's end, until it is taken.
        near: Mutex<Option<Channel>>,
    },
    /// QEMU listens.
    Listening {
        /// Its address.
        uri: Uri,
        /// The private directory of the address, if limosa made one.
        directory: Option<SocketDirectory>,
    },
}

impl<'a> Rendezvous<'a> {
    /// At `listen`, or, if the user does not care, where no other process can connect.
    pub(crate) fn new(monitor: &'a Monitor, listen: Option<&Uri>, channels: Channels) -> Result<Self, JobError> {
        let made = match listen {
            None if channels == Channels::One && monitor.qmp().passes_descriptors() => {
                let (near, peer) = Channel::pair()?;
                monitor.getfd(DESCRIPTOR, peer.as_fd())?;
                Self::Passed { monitor, near: Mutex::new(Some(near)) }
            }
            None => {
                let directory = SocketDirectory::new(monitor)?;
                Self::Listening { uri: directory.uri(SOCKET), directory: Some(directory) }
            }
            Some(Uri::Unix(path)) => {
                // QEMU has a working directory of its own.
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                Self::Listening { uri: Uri::Unix(path), directory: None }
            }
            Some(uri @ Uri::Tcp { port, .. }) if *port != 0 => Self::Listening { uri: uri.clone(), directory: None },
            Some(other) => {
                return Err(JobError::conflict(
                    format!("QEMU cannot be made to listen at {other}"),
                    Conflict::Rendezvous(RendezvousConflict::Address),
                ));
            }
        };
        Ok(made)
    }

    /// Returns the place for a guest that runs before it has its memory.
    ///
    /// Where an address is possible QEMU listens, because it takes that command out of band; otherwise it is passed one
    /// channel. A watchdog may not pass one: QEMU takes a descriptor in its main loop only, and that may wait for the
    /// memory that the watchdog is about to send.
    pub(crate) fn lazy(monitor: &'a Monitor, listen: Option<&Uri>, preempt: bool) -> Result<Self, JobError> {
        match Self::new(monitor, listen, Channels::Several) {
            Err(JobError::Refused { .. }) if !preempt => Self::new(monitor, listen, Channels::One),
            made => made,
        }
    }

    /// The address, in QEMU's notation.
    pub(crate) fn uri(&self) -> String {
        match self {
            Self::Passed { .. } => format!("fd:{DESCRIPTOR}"),
            Self::Listening { uri, .. } => uri.to_string(),
        }
    }

    /// Removes a private directory: once connected, the name is not needed any more, and a kill would leave it.
    pub(crate) fn leave(&self) {
        if let Self::Listening { directory: Some(directory), .. } = self {
            directory.remove();
        }
    }

    /// Connects the first channel; QEMU must know the address already.
    pub(crate) fn connect(&self) -> Result<Channel, ChannelError> {
        match self {
            Self::Passed { near, .. } => {
                let near = near.lock().take();
                near.ok_or_else(|| ChannelError::Unsupported {
                    operation: limosa_channel::Operation::Connect,
                    peer: DESCRIPTOR.into(),
                    why: "its one connection was taken before",
                })
            }
            Self::Listening { uri, .. } => {
                let options = Options {
                    connect_timeout: Some(CONNECT_WITHIN),
                    send_buffer: Some(SEND_BUFFER),
                    ..Options::default()
                };
                Channel::connect(uri, &options)
            }
        }
    }

    /// Connects `count` channels beside the first, for memory; QEMU numbers them as they come.
    pub(crate) fn connect_beside(&self, count: u8) -> Result<Vec<Channel>, ChannelError> {
        (0..count).map(|_| self.connect()).collect()
    }

    /// Connects a second channel, for single pages that the guest waits for.
    pub(crate) fn connect_preempt(&self) -> Result<Channel, ChannelError> {
        match self {
            Self::Passed { .. } => self.connect(),
            Self::Listening { uri, .. } => {
                Channel::connect(uri, &Options { connect_timeout: Some(CONNECT_WITHIN), ..Options::default() })
            }
        }
    }
}

impl Drop for Rendezvous<'_> {
    fn drop(&mut self) {
        if let Self::Passed { monitor, near } = self
            && near.get_mut().take().is_some()
        {
            // QEMU has not taken its end, so it still keeps it.
            let _ = monitor.closefd(DESCRIPTOR);
        }
    }
}
