//! The transport of a save, and the settings that it needs in QEMU.

use std::num::NonZeroU64;

use limosa_page::to_millis;
use limosa_snapshot::Transport;
use limosa_stream::multifd::Compression;

use super::background;
use super::options::{SaveOptions, TransportChoice};
use crate::conflict::{Conflict, JobOption, RendezvousConflict};
use crate::job::JobError;
use crate::monitor::{Monitor, Settings};

/// Decides who writes the pages.
pub(super) fn choose_transport(monitor: &Monitor, options: &SaveOptions) -> Result<Transport, JobError> {
    let unable = || {
        if monitor.version() < crate::qmp::Version::new(9, 0, 0) {
            Some(format!("QEMU {} cannot write mapped-ram files; 9.0 and newer can", monitor.version()))
        } else if !monitor.qmp().passes_descriptors() {
            Some("a monitor over tcp cannot be passed descriptors".into())
        } else {
            None
        }
    };
    let conflict =
        |why: &str, option| Err(JobError::conflict(why, Conflict::Options(JobOption::FileTransport, option)));
    let compressed = options.compression != Compression::None;
    let transport = match options.transport {
        TransportChoice::File if options.background => {
            return conflict(
                "QEMU cannot write the file itself in a background save: the file would be empty",
                JobOption::Background,
            );
        }
        TransportChoice::File if compressed => {
            return conflict("QEMU compresses nothing in a file that it writes", JobOption::Compression);
        }
        TransportChoice::File if let Some(why) = unable() => {
            return Err(JobError::conflict(why, Conflict::Unsupported(JobOption::FileTransport)));
        }
        TransportChoice::File if options.listen.is_some() => {
            return conflict("an address has no meaning when QEMU writes the file", JobOption::Listen);
        }
        TransportChoice::Auto if compressed || options.background || options.listen.is_some() || unable().is_some() => {
            Transport::Socket
        }
        TransportChoice::File | TransportChoice::Auto => Transport::File,
        TransportChoice::Socket => Transport::Socket,
    };
    if transport == Transport::Socket && options.listen.is_none() && !monitor.qmp().passes_descriptors() {
        return Err(JobError::conflict(
            "a monitor over tcp cannot be passed a socket",
            Conflict::Rendezvous(RendezvousConflict::RemoteMonitor),
        ));
    }
    Ok(transport)
}

/// How QEMU must be set for the transport: what it needs is on, and every option that would give the stream another
/// form is off.
pub(super) fn settings(
    transport: &Transport,
    options: &SaveOptions,
    channels: Option<usize>,
    freezes: bool,
    bandwidth: Option<NonZeroU64>,
) -> Settings {
    let by_file = *transport == Transport::File;
    let mut wish = if options.background { background::settings() } else { Settings::new() };
    wish = wish
        .capability("events", true)
        .capability("return-path", !by_file && !options.background)
        .capability("mapped-ram", by_file)
        .capability("multifd", channels.is_some())
        .capability("background-snapshot", options.background)
        .capability("pause-before-switchover", freezes)
        .parameter("max-bandwidth", bandwidth.map_or(0, NonZeroU64::get))
        .parameter("mode", "normal")
        // Regardless of the user's choice for other migrations: zero pages take no room in a snapshot.
        .parameter("zero-page-detection", if channels.is_some() { "multifd" } else { "legacy" })
        // Neither a file nor a socket to this process has a TLS server at its other end.
        .parameter("tls-creds", "");
    for other in [
        "xbzrle",
        "rdma-pin-all",
        // With it on, QEMU does not ask a balloon which pages are free, and all of them are stored.
        "postcopy-ram",
        "postcopy-preempt",
        "x-colo",
        "release-ram",
        "compress",
        "dirty-bitmaps",
        "x-ignore-shared",
        "zero-copy-send",
        "switchover-ack",
        "block",
    ] {
        wish = wish.capability(other, false);
    }
    if let Some(channels) = channels {
        wish =
            wish.parameter("multifd-channels", channels).parameter("multifd-compression", options.compression.name());
    }
    if by_file {
        wish = wish.parameter("direct-io", false);
    }
    if let Some(downtime) = options.downtime {
        wish = wish.parameter("downtime-limit", to_millis(downtime));
    }
    wish
}
