//! Where QEMU listens and limosa connects: a socket in a directory that nobody else can enter, or an address that the
//! user chose.

use std::time::Duration;

use limosa_channel::{Channel, ChannelError, Options, Uri};

use crate::job::JobError;
use crate::meeting::MeetingPlace;
use crate::monitor::Monitor;

/// How long a connection to a QEMU that already listens may take.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// Send buffer of the channel that carries everything. With the kernel's default of about 200 KiB the sender and QEMU wait for
/// each other: 4 GiB took 3.0-3.4 s instead of 2.6 s. More than this gains nothing and lets a requested page wait longer.
const SEND_BUFFER: usize = 512 << 10;

/// The name of the socket at a private place.
const SOCKET: &str = "incoming";

/// The place where QEMU listens for the stream. Dropping it removes the directory that was made for it.
#[derive(Debug)]
pub(super) struct Rendezvous {
    uri: Uri,
    place: Option<MeetingPlace>,
}

impl Rendezvous {
    /// At `listen`, or at a private place.
    pub(super) fn new(monitor: &Monitor, listen: Option<&Uri>) -> Result<Self, JobError> {
        match listen {
            None => {
                let place = MeetingPlace::new(monitor)?;
                Ok(Self { uri: place.uri(SOCKET), place: Some(place) })
            }
            Some(Uri::Unix(path)) => {
                // QEMU has a working directory of its own.
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                Ok(Self { uri: Uri::Unix(path), place: None })
            }
            Some(uri @ Uri::Tcp { port, .. }) if *port != 0 => Ok(Self { uri: uri.clone(), place: None }),
            Some(other) => Err(JobError::refused(
                format!("QEMU cannot be made to listen at {other}"),
                "--listen takes unix:PATH or tcp:HOST:PORT with a port of its own",
            )),
        }
    }

    /// The address, as QEMU is told it.
    pub(super) fn uri(&self) -> String {
        self.uri.to_string()
    }

    /// Takes the directory away: once connected, nobody needs the name any more, and a kill would leave it.
    pub(super) fn leave(&self) {
        if let Some(place) = &self.place {
            place.leave();
        }
    }

    /// Connects; QEMU must listen already.
    pub(super) fn connect(&self) -> Result<Channel, ChannelError> {
        let options =
            Options { connect_timeout: Some(CONNECT_WITHIN), send_buffer: Some(SEND_BUFFER), ..Options::default() };
        Channel::connect(&self.uri, &options)
    }

    /// Connects so many channels beside the first, for memory; QEMU numbers them as they come.
    pub(super) fn connect_beside(&self, count: u8) -> Result<Vec<Channel>, ChannelError> {
        (0..count).map(|_| self.connect()).collect()
    }

    /// Connects a second channel, for single pages that somebody waits for.
    pub(super) fn connect_preempt(&self) -> Result<Channel, ChannelError> {
        Channel::connect(&self.uri, &Options { connect_timeout: Some(CONNECT_WITHIN), ..Options::default() })
    }
}
