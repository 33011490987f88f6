//! Where QEMU sends its migration stream to: one socket passed through the monitor, or several connections.
//!
//! QEMU takes multifd over addresses that it can connect to more than once, not over a descriptor (fact found with QEMU
//! 10.0.2); so its channels connect to limosa in a private directory, unless an address was given.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use limosa_channel::{Channel, Listener, Options, Uri};
use limosa_migrate::multifd::{MultifdAccept, MultifdAcceptOptions, MultifdChannels};

use rustix::net::Shutdown;

use super::job::SaveJob;
use super::watcher::Watcher;
use crate::conflict::{Conflict, RendezvousConflict};
use crate::job::JobError;
use crate::socket_directory::SocketDirectory;

/// The name under which QEMU keeps its end of the socket pair.
pub(super) const DESCRIPTOR: &str = "limosa-save";
/// How long QEMU is waited for at a stretch.
const ACCEPT_TICK: Duration = Duration::from_millis(50);
/// How long QEMU may take to connect.
const CONNECT_WITHIN: Duration = Duration::from_secs(30);

/// Starts QEMU's migration towards this process, and returns the connections. If there are several, `hold` is given the
/// place where they are accepted and each of them, as soon as there is one.
pub(super) fn connect(
    job: &SaveJob<'_>,
    watcher: &mut Watcher<'_>,
    hold: &mut dyn FnMut(BorrowedFd<'_>),
) -> Result<MultifdChannels, JobError> {
    match (&job.options.listen, job.options.channels) {
        (None, None) => {
            let (main, peer) = Channel::pair()?;
            job.monitor.getfd(DESCRIPTOR, peer.as_fd())?;
            drop(peer);
            if let Err(error) = begin(job, &format!("fd:{DESCRIPTOR}")) {
                let _ = job.monitor.closefd(DESCRIPTOR);
                return Err(error);
            }
            Ok(MultifdChannels { main, multifd: Vec::new() })
        }
        (None, Some(_)) => {
            let (_directory, listener) = SocketDirectory::with_listener(job.monitor, "save", &Options::default())?;
            accept(job, &listener, watcher, hold)
        }
        (Some(uri @ (Uri::Unix(_) | Uri::Tcp { .. })), _) => {
            accept(job, &Listener::bind(uri, &Options::default())?, watcher, hold)
        }
        (Some(other), _) => Err(JobError::conflict(
            format!("QEMU cannot connect to {other}"),
            Conflict::Rendezvous(RendezvousConflict::Address),
        )),
    }
}

fn begin(job: &SaveJob<'_>, uri: &str) -> Result<(), JobError> {
    job.monitor.migrate(uri, false).map_err(|error| job.setup_error(error))
}

/// Waits until all channels have connected.
fn accept(
    job: &SaveJob<'_>,
    listener: &Listener,
    watcher: &mut Watcher<'_>,
    hold: &mut dyn FnMut(BorrowedFd<'_>),
) -> Result<MultifdChannels, JobError> {
    let channels = job.options.channels.unwrap_or(0);
    // One channel needs no distinction.
    let options = MultifdAcceptOptions { channels, timeout: CONNECT_WITHIN, main_first: channels == 0 };
    let mut gathering = MultifdAccept::new(listener, options);
    // Strangers may come too: they are not to be held in any number.
    let mut room = if channels > 0 { u32::from(channels) + 1 } else { 0 };
    let place = listener.socket().filter(|_| channels > 0);
    place.into_iter().for_each(&mut *hold);
    if place.is_some() {
        watcher.channels_begin();
    }
    begin(job, &listener.local_uri().to_string())?;
    loop {
        let set = gathering.poll_observed(ACCEPT_TICK, |accepted| {
            if room > 0 {
                room -= 1;
                hold(accepted.as_fd());
            }
        });
        if let Some(set) = set? {
            // It may still be held: no further connection is expected.
            let _ = place.map(|place| rustix::net::shutdown(place, Shutdown::Both));
            return Ok(set);
        }
        // Meanwhile QEMU may have given up, or the migration was cancelled.
        watcher.look()?;
    }
}
