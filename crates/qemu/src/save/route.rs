//! The route of a save, and the settings that it needs in QEMU.

use std::num::NonZeroU64;

use limosa_stream::multifd::Compression;

use super::background;
use super::options::{Route, SaveOptions};
use crate::job::JobError;
use crate::monitor::{Monitor, Settings};
use crate::remedy::Remedy;

/// Decides who writes the pages.
pub(super) fn route(monitor: &Monitor, options: &SaveOptions) -> Result<Route, JobError> {
    let unable = || {
        if monitor.version() < crate::qmp::Version::new(9, 0, 0) {
            Some(format!("QEMU {} cannot write mapped-ram files; 9.0 and newer can", monitor.version()))
        } else if !monitor.qmp().passes_descriptors() {
            Some("a monitor over tcp cannot be passed descriptors".into())
        } else {
            None
        }
    };
    match options.route {
        Route::File if options.background => Err(JobError::refused(
            "QEMU cannot write a file of a VM that goes on meanwhile: it would come out empty",
            Remedy::BackgroundBySocket,
        )),
        Route::File if options.compression != Compression::None => {
            Err(JobError::refused("QEMU compresses nothing in a file that it writes", Remedy::CompressionBySocket))
        }
        Route::Auto if options.compression != Compression::None => Ok(Route::Socket),
        Route::Auto if options.background || options.listen.is_some() || unable().is_some() => Ok(Route::Socket),
        Route::Auto => Ok(Route::File),
        Route::File => match unable() {
            Some(why) => Err(JobError::refused(why, Remedy::Socket)),
            None if options.listen.is_some() => {
                Err(JobError::refused("an address has no meaning when QEMU writes the file", Remedy::FileOrListen))
            }
            None => Ok(Route::File),
        },
        Route::Socket => Ok(Route::Socket),
    }
    .and_then(|route| {
        if route == Route::Socket && options.listen.is_none() && !monitor.qmp().passes_descriptors() {
            return Err(JobError::refused("a monitor over tcp cannot be passed a socket", Remedy::ConnectTcp));
        }
        Ok(route)
    })
}

/// How QEMU must be set for the route: what it needs is on, and whatever would give the stream another form is off.
pub(super) fn settings(
    route: Route,
    options: &SaveOptions,
    channels: Option<usize>,
    freezes: bool,
    bandwidth: Option<NonZeroU64>,
) -> Settings {
    let by_file = route == Route::File;
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
        // Whatever the user has chosen for other migrations: zero pages take no room in a snapshot.
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
        wish = wish.parameter("downtime-limit", u64::try_from(downtime.as_millis()).unwrap_or(u64::MAX));
    }
    wish
}
