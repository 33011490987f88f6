//! Whether this process may pin what `MSG_ZEROCOPY` lends.
//!
//! The kernel counts pinned pages against `RLIMIT_MEMLOCK`, for all processes of a user together, unless the process
//! has `CAP_IPC_LOCK` (net/core/skbuff.c, `mm_account_pinned_pages`). A limit that is found too small later is answered
//! by sending less at a time, so what is asked for here is only what makes that sensible.

use std::fs;

use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

/// Bytes that a channel has to be able to pin: two packets of 128 pages, and the kernel's two pages more for each.
pub(super) const LEAST: u64 = 2 * (128 + 2) * 4096;

/// Whether [`LEAST`] may be pinned; if not, the limit in bytes.
pub(super) fn allowed() -> Result<(), u64> {
    enough(getrlimit(Resource::Memlock).current, is_privileged())
}

/// Whether the limit does not hold for this process: the capability counts in the machine's own user namespace alone.
fn is_privileged() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK))
        && fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| is_own_namespace(&map))
}

/// Whether this is the map of a user namespace in which every user is itself (`user_namespaces(7)`).
fn is_own_namespace(map: &str) -> bool {
    map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

fn enough(limit: Option<u64>, privileged: bool) -> Result<(), u64> {
    match limit {
        Some(limit) if !privileged && limit < LEAST => Err(limit),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_below_two_packets_is_too_small_unless_one_may_lock_memory() {
        assert_eq!(enough(Some(65_536), false), Err(65_536));
        assert_eq!(enough(Some(LEAST), false), Ok(()));
        assert_eq!(enough(None, false), Ok(()));
        assert_eq!(enough(Some(0), true), Ok(()));
    }

    #[test]
    fn a_privilege_in_a_container_of_other_users_is_none_here() {
        assert!(is_own_namespace("         0          0 4294967295\n"));
        for other in ["", "0 1000 1", "0 100000 65536", "0 0 1", "0 0 4294967295\n0 0 1"] {
            assert!(!is_own_namespace(other), "{other}");
        }
    }
}
