//! The parts of a protected VM that reach the world: a fence has to cover them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The networks and disks of a protected VM when its protection began.
///
/// A VM that has been failed over must not reach any of them again. A gate and a server of disks can see to that; what
/// else there is needs its host's end. Serial ports, displays and the like are not among them: they are output that
/// nobody holds back.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct FenceScope {
    /// The back ends of its network cards, by name.
    pub networks: Vec<String>,
    /// The control sockets of the gates that its networks go through: as many as networks, or none.
    pub gates: Vec<PathBuf>,
    /// Its writable disks and shared folders, by the names of their devices.
    pub disks: Vec<String>,
}
