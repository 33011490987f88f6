//! All that serves.

use limosa_export::nbd::Server;

use super::devices::BlockDevice;

/// The server of NBD, and the disks over vhost-user-blk.
#[derive(Debug)]
pub(super) struct Servers {
    pub(super) nbd: Server,
    pub(super) devices: Vec<BlockDevice>,
}

impl Servers {
    /// Makes all of them end.
    pub(super) fn stop(&self) {
        self.nbd.stopper().stop();
        self.devices.iter().for_each(BlockDevice::stop);
    }
}
