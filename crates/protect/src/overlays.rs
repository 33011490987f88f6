//! Overlays of the disks that QEMU opens itself, in the turns of checkpoints.
//!
//! Law: **the VM is not stopped while its last epoch is being merged**: QEMU would refuse the overlays of the next one.
//! The checkpoint waits, and the VM runs.

use std::thread;
use std::time::{Duration, Instant};

use crate::error::ProtectError;
use crate::options::{CheckpointMethod, CheckpointTiming, ProtectDisks, ProtectOptions};
use crate::primary::LocalVm;

/// Shortest time between checkpoints: making an overlay and merging one take tens of milliseconds, and each pause has
/// an fsync.
const SHORTEST: Duration = Duration::from_secs(1);
/// How often a merge is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// A checkpoint that waits longer is worth a notice.
const NOTICED_AFTER: Duration = Duration::from_secs(1);

/// Refuses options with which disks cannot have overlays.
pub(crate) fn check(options: &ProtectOptions) -> Result<(), ProtectError> {
    if !matches!(options.disks, ProtectDisks::Overlays(_)) {
        return Ok(());
    }
    let refused = |why: String| Err(ProtectError::Refused(why));
    match options.every {
        _ if options.method == CheckpointMethod::Background => {
            refused("overlays cannot be put over the disks at the instant of a background snapshot".into())
        }
        CheckpointTiming::Output { .. } => {
            refused("overlays of the disks take too long to be put when something wants to leave".into())
        }
        CheckpointTiming::Period(every) if every < SHORTEST => {
            let shortest = SHORTEST.as_secs();
            refused(format!("overlays of the disks need a period of at least {shortest} s: each pause has an fsync"))
        }
        CheckpointTiming::Period(_) => Ok(()),
    }
}

impl LocalVm<'_> {
    /// Waits until the overlays of the last epoch are merged. The VM runs.
    pub(crate) fn wait_merged(&self) -> Result<(), ProtectError> {
        let (begun, mut noticed) = (Instant::now(), false);
        while !self.overlays.is_merged(self.monitor)? {
            self.check_stop()?;
            if !noticed && begun.elapsed() >= NOTICED_AFTER {
                noticed = true;
                (self.notice)("the next checkpoint waits: what the VM has written is still merged into its disks");
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlays_have_periods_of_seconds_and_checkpoints_by_colo() {
        let second = Duration::from_secs(1);
        let with = |every, method| {
            let disks = ProtectDisks::Overlays(Vec::new());
            check(&ProtectOptions { every, method, disks, ..ProtectOptions::default() })
        };
        assert!(with(CheckpointTiming::Period(second), CheckpointMethod::Colo).is_ok());
        assert!(with(CheckpointTiming::Period(second), CheckpointMethod::Background).is_err());
        for every in [CheckpointTiming::Period(second * 99 / 100), CheckpointTiming::Output { at_most: second }] {
            assert!(with(every, CheckpointMethod::Colo).is_err(), "{every:?}");
        }
        assert!(check(&ProtectOptions::default()).is_ok(), "other disks have any");
    }
}
