//! A primary's connection to its keeper.

use std::time::Duration;

use limosa_channel::{Channel, Options, Tls, Uri};
use limosa_migrate::MigrateError;
use limosa_snapshot::{Manifest, ProtectedDisk};
use rustix::net::sockopt;

use super::message::{Answer, Hello};
use crate::error::ProtectError;

/// How often the kernel asks a silent peer whether it is there.
const PROBE_EVERY: Duration = Duration::from_secs(1);

/// A keeper on another host.
#[derive(Debug, Clone)]
pub struct KeeperAddress {
    /// Its address: `tcp:`, `unix:` or `vsock:`.
    pub uri: Uri,
    /// Encrypts the connection; credentials of a client.
    pub tls: Option<Tls>,
}

/// A keeper that waits for the stream of a QEMU.
pub(crate) struct Greeted {
    pub(crate) channel: Channel,
    /// The disks that belong to the checkpoints, as it was told of them.
    pub(crate) disks: Vec<ProtectedDisk>,
}

impl KeeperAddress {
    /// Connects, and greets: the keeper waits for the stream of a QEMU then. The id of the manifest is that of the
    /// protection.
    pub(crate) fn greet(&self, manifest: &Manifest, within: Duration) -> Result<Greeted, ProtectError> {
        let hello = Hello { protection: manifest.id, manifest: manifest.clone() };
        let keeper = || self.uri.to_string();
        let failed = |error: MigrateError| ProtectError::LineLost { keeper: keeper(), source: Box::new(error) };
        let options = Options { connect_timeout: Some(within), tls: self.tls.clone(), ..Options::default() };
        let channel = Channel::connect(&self.uri, &options).map_err(|error| failed(error.into()))?;
        watch_peer(&channel, within);
        let greet = || {
            channel.set_timeouts(Some(within), Some(within))?;
            hello.write(&channel)?;
            Answer::read(&channel, within)
        };
        match greet().map_err(failed)? {
            Answer::Welcome(_) => Ok(Greeted { channel, disks: hello.manifest.protected_disks }),
            Answer::Busy(why) => Err(ProtectError::KeeperBusy { keeper: keeper(), why }),
            Answer::TakenOver(why) => Err(ProtectError::TakenOver { keeper: keeper(), why }),
            Answer::Refused(why) => Err(ProtectError::Refused(format!("the keeper at {} refuses: {why}", keeper()))),
        }
    }
}

/// Has the kernel find out whether the peer's host is there. What is no TCP socket needs none of it.
pub(super) fn watch_peer(channel: &Channel, lost_after: Duration) {
    let probes = u32::try_from(lost_after.as_secs()).unwrap_or(u32::MAX).clamp(1, 60);
    let millis = u32::try_from(lost_after.as_millis()).unwrap_or(u32::MAX);
    let _ = sockopt::set_socket_keepalive(channel, true);
    let _ = sockopt::set_tcp_keepidle(channel, PROBE_EVERY);
    let _ = sockopt::set_tcp_keepintvl(channel, PROBE_EVERY);
    let _ = sockopt::set_tcp_keepcnt(channel, probes);
    let _ = sockopt::set_tcp_user_timeout(channel, millis);
}
