//! Whether the VM runs, and if not, why: `query-status`, `stop`, `cont`.

use serde_json::Value;

use super::migration::{MigrationInfo, QUERY_MIGRATE};
use super::{Answer, Monitor, Question, named_states, need_text};
use crate::qmp::QmpError;

const QUERY_STATUS: &str = "query-status";

named_states! {
    /// QEMU's run states (QEMU docs: QMP reference, `RunState`).
    RunState {
        /// A debugger has stopped it.
        Debug = "debug",
        /// Waits for, or loads, an incoming migration.
        Inmigrate = "inmigrate",
        /// An internal error stopped it.
        InternalError = "internal-error",
        /// A disk error stopped it.
        IoError = "io-error",
        /// Stopped by `stop`.
        Paused = "paused",
        /// An outgoing migration completed.
        Postmigrate = "postmigrate",
        /// Started with `-S` and never continued.
        Prelaunch = "prelaunch",
        /// The last part of an outgoing migration is being sent.
        FinishMigrate = "finish-migrate",
        /// An internal snapshot is being loaded.
        RestoreVm = "restore-vm",
        /// Runs.
        Running = "running",
        /// An internal snapshot is being written.
        SaveVm = "save-vm",
        /// The guest has powered off.
        Shutdown = "shutdown",
        /// The guest sleeps.
        Suspended = "suspended",
        /// The watchdog stopped it.
        Watchdog = "watchdog",
        /// The guest has panicked.
        GuestPanicked = "guest-panicked",
        /// Stands by for a fault-tolerant pair.
        Colo = "colo",
    }
}

/// The answer to `query-status`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct VmStatus {
    /// The state.
    pub state: RunState,
    /// Whether the virtual CPUs run.
    pub running: bool,
    /// The state that QEMU reported.
    pub raw: Value,
}

impl VmStatus {
    fn of(raw: Value) -> Result<Self, QmpError> {
        let state = need_text(QUERY_STATUS, &raw, "status")?.into();
        let running = raw.get("running").and_then(Value::as_bool).unwrap_or(state == RunState::Running);
        Ok(Self { state, running, raw })
    }
}

impl Monitor {
    /// How the VM is.
    ///
    /// # Errors
    /// The connection's.
    pub fn status(&self) -> Result<VmStatus, QmpError> {
        VmStatus::of(self.qmp().execute(QUERY_STATUS, Value::Null)?)
    }

    /// The state that the VM is in, and its migration: asked at once.
    ///
    /// # Errors
    /// The connection's.
    pub fn status_and_migration(&self) -> Result<(VmStatus, MigrationInfo), QmpError> {
        let [status, migration] = self.qmp().execute_all(questions())?;
        answers(status, migration)
    }

    /// Stops the virtual CPUs and drains the disks.
    ///
    /// # Errors
    /// QEMU's or the connection's.
    pub fn stop(&self) -> Result<(), QmpError> {
        self.order("stop", Value::Null)
    }

    /// Lets the VM run.
    ///
    /// # Errors
    /// QEMU's, for example while it waits for the recovery of a postcopy migration.
    pub fn cont(&self) -> Result<(), QmpError> {
        self.order("cont", Value::Null)
    }
}

/// How the VM is, and its migration.
pub(super) fn questions() -> [Question; 2] {
    [(QUERY_STATUS, Value::Null), (QUERY_MIGRATE, Value::Null)]
}

pub(super) fn answers(status: Answer, migration: Answer) -> Result<(VmStatus, MigrationInfo), QmpError> {
    Ok((VmStatus::of(status?)?, MigrationInfo::of(migration?)))
}
