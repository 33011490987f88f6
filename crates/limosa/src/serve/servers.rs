//! All that serves.

use std::sync::Arc;

use limosa_channel::Tls;
use limosa_export::nbd::{Limits, Server, ServerOptions};
use limosa_export::{Export, Exports};
use limosa_page::{to_u64, to_usize};

use super::devices::{self, BlockDevice};
use crate::args::ServeArgs;

/// The server of NBD, and the disks over vhost-user-blk.
#[derive(Debug)]
pub(super) struct Servers {
    pub(super) nbd: Server,
    pub(super) devices: Vec<BlockDevice>,
}

impl Servers {
    /// The servers of these exports. They start no thread yet.
    ///
    /// # Errors
    /// The socket of a device is in use or invalid, or the kernel has no descriptor left.
    pub(super) fn bind(args: &ServeArgs, tls: Option<(Tls, bool)>, exports: &Exports) -> anyhow::Result<Self> {
        let nbd = Server::new(exports.clone(), options(args, tls))?;
        Ok(Self { nbd, devices: devices::bind(args, exports)? })
    }

    /// Returns the number of clients of an export: of NBD, and front ends.
    pub(super) fn client_count(&self, export: &Arc<Export>) -> u64 {
        let front_ends = self.devices.iter().filter(|device| device.serves(export)).count();
        to_u64(export.client_count() + front_ends)
    }

    /// Makes all of them end.
    pub(super) fn stop(&self) {
        self.nbd.stopper().stop();
        self.devices.iter().for_each(BlockDevice::stop);
    }
}

/// The options of the server of NBD.
fn options(args: &ServeArgs, tls: Option<(Tls, bool)>) -> ServerOptions {
    let limits = Limits::default()
        .connections(to_usize(args.max_connections.into()))
        .total_bytes(to_usize(args.max_memory))
        .handshake(args.handshake_timeout)
        .stall(args.stall_timeout);
    let options = ServerOptions::default().limits(limits);
    match tls {
        Some((tls, required)) => options.tls(tls, required),
        None => options,
    }
}
