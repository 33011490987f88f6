//! The limit of pinned memory for `MSG_ZEROCOPY`.
//!
//! The kernel counts pinned pages against `RLIMIT_MEMLOCK`, for all processes of a user together, unless the process
//! has `CAP_IPC_LOCK` (net/core/skbuff.c, `mm_account_pinned_pages`). If the limit turns out too small later, less is
//! sent at a time, so this checks only a sensible minimum.

use std::fs;

use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

/// Minimum number of bytes that a channel must be able to pin: two packets of 128 pages, and two more pages of the
/// kernel for each.
pub(super) const LEAST: u64 = 2 * (128 + 2) * 4096;

/// Checks that [`LEAST`] bytes may be pinned; otherwise fails with the limit in bytes.
pub(super) fn allowed() -> Result<(), u64> {
    enough(getrlimit(Resource::Memlock).current, is_privileged())
}

/// Whether this process is exempt from the limit: the capability counts in the initial user namespace alone.
fn is_privileged() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK))
        && fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| is_own_namespace(&map))
}

/// Whether this is the identity map of the initial user namespace (`user_namespaces(7)`).
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
