//! QEMU's background snapshot: the memory is protected against writing, and a page that the guest is about to change is
//! saved first. Each page goes once, and the VM stands still for its devices only.
//!
//! Law: **a host that cannot do it is recognized before anything is changed**, because QEMU finds out in two places,
//! when the capability is set and when the migration begins.
//!
//! Facts found with QEMU 10.0.2:
//!
//! * The capability excludes many others, a return path among them: QEMU takes its last write for success.
//! * Beside `mapped-ram` it is accepted, and the file restores to empty memory. So it is never used for a file that
//!   QEMU writes.
//! * It needs userfaultfd with write protection for every RAM block: anonymous memory on Linux 5.7, shared memory and
//!   huge pages on 5.19. Where QEMU may not open userfaultfd, the capability is refused.
//! * A QEMU before 8.1 lets go of the protected memory only at the end of a whole snapshot. If one is cancelled, or
//!   its channel breaks, the VM hangs at its next write, for good (shown with 7.2.22). So it is refused there.
//! * The state `paused` while the devices are saved is QEMU's own doing; the stream says which one it was before.

use crate::conflict::{Conflict, JobOption, MissingPermission};
use crate::job::JobError;
use crate::monitor::{Monitor, Settings};
use crate::qmp::{QmpError, Version};

/// Capabilities that exclude it, beyond those that are off for every save.
const EXCLUDED: [&str; 4] = ["auto-converge", "late-block-activate", "postcopy-blocktime", "validate-uuid"];

/// The first QEMU that lets go of the memory whenever a snapshot ends.
const FIRST_THAT_LETS_GO: Version = Version::new(8, 1, 0);

/// Settings with everything off that excludes it.
pub(super) fn settings() -> Settings {
    EXCLUDED.into_iter().fold(Settings::new(), |wish, name| wish.capability(name, false))
}

/// Whether QEMU has it, in a form that never costs the VM.
pub(super) fn check(monitor: &Monitor, current: &Settings) -> Result<(), JobError> {
    let why = if current.capabilities.contains_key("background-snapshot") {
        why_not(monitor.version())
    } else {
        Some(format!("QEMU {} has no background snapshots", monitor.version()))
    };
    match why {
        None => Ok(()),
        Some(why) => Err(JobError::conflict(why, Conflict::Unsupported(JobOption::Background))),
    }
}

/// Returns why a QEMU of this version is not asked for background snapshots, if it is not.
#[must_use]
pub fn why_not(version: Version) -> Option<String> {
    (version < FIRST_THAT_LETS_GO).then(|| {
        format!("a background snapshot of QEMU {version} that ends early leaves the VM hanging (8.1 mends that)")
    })
}

/// Returns QEMU's refusal of a background snapshot as the conflict that it is; other errors as they are.
pub fn explain(error: QmpError) -> JobError {
    match error.desc() {
        Some(said) => JobError::conflict(
            format!("this host cannot save this VM in the background: QEMU says: {said}"),
            Conflict::Permission(MissingPermission::WriteProtection),
        ),
        None => error.into(),
    }
}
