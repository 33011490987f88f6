//! The parts of a VM that its gates and disk servers do not fence.
//!
//! Law: **what nobody is known to refuse is not covered.** A VM that hangs continues some day, and must find no network
//! and no disk then. Gates and servers of disks refuse it; what it reaches without them ends with it alone.

use std::fmt;
use std::path::{Path, PathBuf};

use limosa_snapshot::{FenceScope, Manifest};

/// A part of a VM that its gates and the servers of its disks do not fence.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Uncovered {
    /// It is not known what the VM reaches: its checkpoint does not say it.
    Unknown,
    /// All of it: it has neither a network nor a writable disk at which it could be refused.
    Whole,
    /// Networks without gates, by the names of their back ends.
    Networks(Vec<String>),
    /// The gate of a network that would not be fenced.
    Gate(PathBuf),
    /// Writable disks and shared folders that are no disks of its checkpoints, by the names of their devices.
    Disks(Vec<String>),
}

impl fmt::Display for Uncovered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => write!(f, "its checkpoint does not say what it reaches"),
            Self::Whole => write!(f, "it has neither networks nor writable disks"),
            Self::Networks(names) => write!(f, "its networks ({}) have no gates", names.join(", ")),
            Self::Gate(path) => write!(f, "the gate at {} was not named", path.display()),
            Self::Disks(names) => write!(f, "its disks ({}) are not those of a disk server", names.join(", ")),
        }
    }
}

/// Returns the parts of a VM that are not fenced when these gates and the servers of its checkpoint's disks refuse it,
/// as its checkpoint says it.
#[must_use]
pub fn find_uncovered(manifest: &Manifest, gates: &[PathBuf]) -> Vec<Uncovered> {
    let Some(FenceScope { networks, gates: own, disks, .. }) = &manifest.fence_scope else {
        return vec![Uncovered::Unknown];
    };
    let mut found = Vec::new();
    if manifest.protection.is_none() {
        // A gate knows it by that name.
        found.push(Uncovered::Unknown);
    }
    if networks.is_empty() && disks.is_empty() {
        found.push(Uncovered::Whole);
    }
    if networks.len() > own.len() {
        found.push(Uncovered::Networks(networks.clone()));
    }
    let is_named = |gate: &Path| gates.iter().any(|named| std::path::absolute(named).is_ok_and(|named| named == gate));
    found.extend(own.iter().filter(|gate| !is_named(gate)).cloned().map(Uncovered::Gate));
    let is_served = |device: &String| manifest.protected_disks.iter().any(|disk| disk.device == *device);
    let others: Vec<String> = disks.iter().filter(|device| !is_served(device)).cloned().collect();
    if !others.is_empty() {
        found.push(Uncovered::Disks(others));
    }
    found
}

#[cfg(test)]
mod tests {
    use limosa_snapshot::ProtectedDisk;
    use uuid::Uuid;

    use super::*;

    fn manifest(networks: &[&str], gates: &[&str], disks: &[&str], served: &[&str]) -> Manifest {
        let mut scope = FenceScope::default();
        scope.networks = networks.iter().map(ToString::to_string).collect();
        scope.gates = gates.iter().map(PathBuf::from).collect();
        scope.disks = disks.iter().map(ToString::to_string).collect();
        let disk = |device: &&str| ProtectedDisk {
            device: (*device).to_owned(),
            path: PathBuf::new(),
            format: String::new(),
            export: String::new(),
            control: PathBuf::new(),
            keeper: String::new(),
            log: Uuid::nil(),
        };
        let mut manifest = Manifest::new();
        manifest.protection = Some(manifest.id);
        manifest.protected_disks = served.iter().map(disk).collect();
        manifest.fence_scope = Some(scope);
        manifest
    }

    #[test]
    fn a_vm_is_covered_when_each_network_has_a_gate_that_is_named_and_each_disk_a_server() {
        let gates = [PathBuf::from("/run/a"), PathBuf::from("/run/b")];
        let whole = manifest(&["n0", "n1"], &["/run/a", "/run/b"], &["d0"], &["d0"]);
        assert_eq!(find_uncovered(&whole, &gates), []);
        assert_eq!(find_uncovered(&whole, &gates[..1]), [Uncovered::Gate("/run/b".into())]);
        assert_eq!(find_uncovered(&manifest(&[], &[], &[], &[]), &[]), [Uncovered::Whole]);
        let free = manifest(&["n0"], &[], &["d0", "d1"], &["d1"]);
        let expected = [Uncovered::Networks(vec!["n0".into()]), Uncovered::Disks(vec!["d0".into()])];
        assert_eq!(find_uncovered(&free, &gates), expected);
    }

    #[test]
    fn a_checkpoint_that_does_not_say_what_its_vm_reaches_covers_nothing() {
        assert_eq!(find_uncovered(&Manifest::new(), &[]), [Uncovered::Unknown]);
        let mut nameless = manifest(&[], &[], &["d0"], &["d0"]);
        nameless.protection = None;
        assert_eq!(find_uncovered(&nameless, &[]), [Uncovered::Unknown]);
    }
}
