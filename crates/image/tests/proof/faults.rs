//! Storages that fail at any request: what failed is undefined, everything else is as it was, and the image stays
//! sound.

use std::sync::Arc;

use limosa_image::Disk;
use limosa_storage::testing::{Failing, Fault, PowerCut, RequestHolder};

use crate::Verdict;
use crate::bed::Over;
use crate::linear::Watched;
use crate::model::Plan;

/// How it ended.
pub(crate) struct Ended {
    /// The last contents that the guest saw; `None`: the disk could not be closed.
    pub(crate) seen: Option<Vec<u8>>,
    pub(crate) watched: Watched,
    /// Requests to storages, and how many of them failed.
    pub(crate) requests: (u64, u64),
}

/// The requests to storages that fail, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Failure {
    /// Number of requests that succeed before.
    pub(crate) after: u64,
    pub(crate) times: u64,
    pub(crate) fault: Fault,
}

/// Puts a load on a disk one of whose storage requests fails, or all from one on until the load is over.
///
/// `open` opens the disk, with every storage going through what it is given.
pub(crate) fn run(
    first: &[u8],
    plan: Plan,
    failure: Failure,
    open: &dyn Fn(&Over<'_>) -> Verdict<Arc<dyn Disk>>,
) -> Verdict<Ended> {
    let (held, failing) = (RequestHolder::new().lazily(), Failing::new());
    held.release_all();
    let disk = open(&|storage| held.wrap(failing.wrap(storage)))?;
    held.hold_again();
    failing.fail(failure.after, failure.times, failure.fault);
    let mut watched = Watched::new(disk, first.to_vec(), plan, &held, PowerCut::new());
    watched.may_fail = true;
    watched.run()?;
    let requests = failing.seen();
    failing.mend();
    let seen = match watched.look(&held) {
        Ok(found) => watched.driver.close().is_ok().then_some(found),
        Err(error) => return Err(format!("mended: {error}")),
    };
    Ok(Ended { seen, watched, requests })
}

#[cfg(test)]
mod tests {
    use limosa_storage::testing::SparseMemory;

    use super::*;
    use crate::plain::Plain;

    #[test]
    fn a_disk_over_a_storage_that_fails_keeps_the_rest() {
        let first = vec![3; 100 << 10];
        let plan = Plan {
            seed: 1,
            cluster: 512,
            steps: 100,
            depth: 4,
            drops: false,
            discards_may_stay: false,
            compresses: false,
        };
        for fault in Fault::ALL {
            for after in [0, 5, 20] {
                let memory = Arc::new(SparseMemory::file_with("disk", first.clone(), 1 << 20));
                let open = |over: &Over<'_>| Ok(Plain::disk(over(memory.clone()), first.len() as u64, None));
                let ended = run(&first, plan, Failure { after, times: 3, fault }, &open).unwrap();
                assert_eq!((ended.seen.as_ref(), ended.requests.1), (Some(&memory.contents()), 3));
                ended.watched.history.survived(&memory.contents(), usize::MAX).unwrap();
            }
        }
    }
}
