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
//! * The state `paused` while the devices are saved is QEMU's own doing; the stream says which one it was before.

use crate::conflict::{Conflict, JobOption, MissingPermission};
use crate::job::JobError;
use crate::monitor::{Monitor, Settings};
use crate::qmp::QmpError;

/// Capabilities that exclude it, beyond those that are off for every save.
const EXCLUDED: [&str; 4] = ["auto-converge", "late-block-activate", "postcopy-blocktime", "validate-uuid"];

/// Settings with everything off that excludes it.
pub(super) fn settings() -> Settings {
    EXCLUDED.into_iter().fold(Settings::new(), |wish, name| wish.capability(name, false))
}

/// Whether QEMU knows it at all.
pub(super) fn check(monitor: &Monitor, current: &Settings) -> Result<(), JobError> {
    if current.capabilities.contains_key("background-snapshot") {
        return Ok(());
    }
    Err(JobError::conflict(
        format!("QEMU {} has no background snapshots", monitor.version()),
        Conflict::Unsupported(JobOption::Background),
    ))
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
