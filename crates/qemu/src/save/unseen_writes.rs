//! VMs whose QEMU does not see all that they write: such a VM is stopped before its memory is sent.
//!
//! Law: **a snapshot has every write of its VM.** What the dirty log lacks is not sent again, so no live save can have
//! it.
//!
//! Fact: an emulated VM (TCG) writes past the dirty log in every QEMU before 9.0. QEMU clears the log for a round and
//! leaves its emulation's cached translations as they are; a page that was written before is then written again without
//! an entry. Shown with 7.2.22 without limosa: a guest that writes 256 KiB over and over, sent to a file at 1 MiB/s and
//! loaded again, had pages of earlier moments 10 of 10 times; with 10.0.2 none of 10. A background snapshot needs no
//! log.

use limosa_migrate::MigrateError;
use limosa_migrate::stored::ReceivedStream;

use super::options::SaveOptions;
use crate::job::JobError;
use crate::monitor::{Monitor, RunState};
use crate::qmp::{QmpError, Version};

/// The first QEMU that sees what an emulated VM writes.
const FIRST_THAT_SEES: Version = Version::new(9, 0, 0);

/// Whether QEMU would not see all that the VM writes while it is saved, if it runs.
pub(super) fn are_possible(monitor: &Monitor, options: &SaveOptions) -> Result<bool, QmpError> {
    Ok(!options.background && monitor.version() < FIRST_THAT_SEES && !monitor.has_kvm()?)
}

/// Stops the VM if it runs, and returns whether that was done. `was_running` is what the checks have found.
pub(super) fn stop(monitor: &Monitor, was_running: bool, notice: &dyn Fn(&str)) -> Result<bool, JobError> {
    let before = monitor.status()?;
    if before.running && !was_running {
        return Err(continued());
    }
    if before.running {
        notice(&format!(
            "the VM stands still while it is saved: QEMU {} does not see all that a VM without KVM writes (9.0 does)",
            monitor.version()
        ));
        monitor.stop()?;
    }
    let now = monitor.status()?.state;
    expect_awake(&now)?;
    // A guest that is reset at this instant is left in the second.
    Ok(before.running && matches!(now, RunState::Paused | RunState::Prelaunch))
}

/// Refuses a VM that sleeps: QEMU does not stop it, and anything wakes it.
pub(super) fn expect_awake(state: &RunState) -> Result<(), JobError> {
    match state {
        RunState::Suspended => Err(JobError::refused(
            "the VM sleeps, and this QEMU would not see what it writes if it is woken: wake it before it is saved",
        )),
        _ => Ok(()),
    }
}

/// The VM has run while its memory was sent.
pub(super) fn continued() -> JobError {
    JobError::refused("the VM was continued while it had to stand still")
}

/// Has the snapshot of a VM that was stopped say that it runs. Returns that state.
pub(super) fn put_running(stream: &mut ReceivedStream) -> Result<RunState, JobError> {
    let state = RunState::Running;
    // A VM whose user has that section left out comes back as one that runs in any case.
    if stream.devices.global_state(&stream.tail).map_err(MigrateError::from)?.is_some() {
        let put = stream.devices.replace_run_state(&mut stream.tail, &state.to_string());
        put.map_err(MigrateError::from)?;
    }
    Ok(state)
}
