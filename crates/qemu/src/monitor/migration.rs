//! Migrations: starting, watching, ending them.
//!
//! Facts found with QEMU 10.0.2:
//!
//! * The downtime of a save is the time from the event `STOP` to the event `RESUME`, both stamped by QEMU; `RESUME`
//!   comes with `cont`, or by itself when the migration fails or is cancelled. `STOP` directly precedes the state
//!   `device`, in which a source with a return path stays until the receiver's SHUT. `query-migrate` counts its
//!   `downtime` until SHUT only.
//! * A VM that was stopped before ends in `paused` after a cancelled migration and in `postmigrate` after a completed
//!   one.
//! * `stop` before `migrate-incoming`, in the state `inmigrate`, makes the VM arrive stopped (`paused`), in precopy as
//!   in postcopy; `cont` there takes it back, and takes back a `-S`. The state stays `inmigrate` meanwhile.
//! * While a postcopy destination loads device state and waits for a page, it answers no command, except those executed
//!   out of band. Cutting the channel there (`migrate-pause`) ends the QEMU process, even with `exit-on-error` off.
//! * `migrate_cancel` of a save with multifd and mapped-ram ends the QEMU process every fourtieth time or so
//!   (segmentation fault): it frees the file's page bitmaps while its threads still set bits in them. With the threads
//!   idle it does not, if no page reaches them before the order is carried out.
//! * QEMU says `failed`, and `completed`, before it is done with a migration: the first thread that finds its channel
//!   broken says so while the others still run. Until QEMU has let go of it ([`Monitor::holds_migration`]) settings
//!   must not change and no other migration may begin. With multifd switched off or `multifd-channels` lowered in
//!   between, QEMU forgets threads that still run: it ends then or with the next migration (failed assertion,
//!   segmentation fault), or never answers again. One that is begun in between is refused and leaves QEMU in `setup`
//!   for good, or ends the process too. Otherwise `migrate_cancel` does not hurt a multifd migration over sockets at
//!   any moment, nor does breaking its channels once it is `active`. Channels that break before, in `setup`, can leave
//!   QEMU waiting for their threads without end: the VM runs, but never migrates again.
//! * When guest code waits for a page, commands are answered as usual.
//! * A postcopy destination of QEMU 11.1 that cannot load the devices says nothing: it stays in `postcopy-device` and
//!   answers commands, until its source is gone. With a preempt channel it then hangs for good.
//! * A postcopy channel that breaks after the VM was started leaves `postcopy-paused`: `stop` and `cont` work,
//!   `migrate_cancel` does nothing. `migrate-recover` only makes it listen: the state stays `postcopy-paused` until a
//!   source connects (`postcopy-recover`). It may be repeated, each time in place of the one before; a recovery that
//!   breaks is back in `postcopy-paused`, and may be begun again.

use std::ops::Range;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Monitor, RunState, named_states};
use crate::qmp::{QmpError, Version};
use crate::threads;

pub(super) const QUERY_MIGRATE: &str = "query-migrate";

named_states! {
    /// The states of a migration (QEMU docs: QMP reference, `MigrationStatus`).
    MigrationStatus {
        /// There was none.
        None = "none",
        /// Connecting.
        Setup = "setup",
        /// Memory moves.
        Active = "active",
        /// The VM is being handed over: the destination loads its devices, then its memory follows. From QEMU 10.2 on;
        /// before, this is `active` or `postcopy-active`.
        PostcopyDevice = "postcopy-device",
        /// The VM has been handed over, its memory follows.
        PostcopyActive = "postcopy-active",
        /// The channel broke after the VM was handed over.
        PostcopyPaused = "postcopy-paused",
        /// A recovery is connecting.
        PostcopyRecoverSetup = "postcopy-recover-setup",
        /// A recovery is under way.
        PostcopyRecover = "postcopy-recover",
        /// Waits for `migrate-continue`.
        PreSwitchover = "pre-switchover",
        /// The VM is stopped, its devices move. With a return path: until the receiver confirms.
        Device = "device",
        /// Done.
        Completed = "completed",
        /// About to be `failed`. From QEMU 11.0 on.
        Failing = "failing",
        /// Failed.
        Failed = "failed",
        /// Being cancelled.
        Cancelling = "cancelling",
        /// Was cancelled.
        Cancelled = "cancelled",
        /// Waits for a device to be unplugged.
        WaitUnplug = "wait-unplug",
        /// A fault-tolerant pair runs.
        Colo = "colo",
    }
}

impl MigrationStatus {
    /// Whether nothing moves and nothing is about to: there was no migration, or it came to an end.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self, Self::None | Self::Completed | Self::Failed | Self::Cancelled)
    }
}

/// Progress of RAM, as the sending side counts. Bytes where nothing else is said.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct RamProgress {
    /// Sent.
    pub transferred: u64,
    /// Still to be sent in this round.
    pub remaining: u64,
    /// All RAM.
    pub total: u64,
    /// Zero pages.
    pub duplicate: u64,
    /// Pages sent whole.
    pub normal: u64,
    /// Pages dirtied per second.
    pub dirty_pages_rate: u64,
    /// Rounds over the dirty log.
    pub dirty_sync_count: u64,
    /// Bytes in a page.
    pub page_size: u64,
    /// Megabits per second.
    pub mbps: f64,
}

/// The answer to `query-migrate`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MigrationInfo {
    /// Where it stands.
    pub status: MigrationStatus,
    /// Why it failed, in QEMU's words.
    pub error: Option<String>,
    /// Since it began.
    pub total_time: Option<Duration>,
    /// From the command to the first byte of RAM.
    pub setup_time: Option<Duration>,
    /// How long the VM stood; known when it is over.
    pub downtime: Option<Duration>,
    /// How long the VM would stand now.
    pub expected_downtime: Option<Duration>,
    /// Progress of RAM, on the sending side.
    pub ram: Option<RamProgress>,
    /// Why this VM cannot be migrated. Empty if nothing speaks against it.
    pub blocked_reasons: Vec<String>,
    /// The status that QEMU reported.
    pub raw: Value,
}

impl MigrationInfo {
    pub(crate) fn of(raw: Value) -> Self {
        let millis = |key: &str| raw.get(key).and_then(Value::as_u64).map(Duration::from_millis);
        let text = |key: &str| raw.get(key).and_then(Value::as_str).map(str::to_owned);
        let ram = raw.get("ram").map(|ram| {
            let number = |key: &str| ram.get(key).and_then(Value::as_u64).unwrap_or_default();
            RamProgress {
                transferred: number("transferred"),
                remaining: number("remaining"),
                total: number("total"),
                duplicate: number("duplicate"),
                normal: number("normal"),
                dirty_pages_rate: number("dirty-pages-rate"),
                dirty_sync_count: number("dirty-sync-count"),
                page_size: number("page-size"),
                mbps: ram.get("mbps").and_then(Value::as_f64).unwrap_or_default(),
            }
        });
        let reasons = raw.get("blocked-reasons").and_then(Value::as_array);
        Self {
            // A QEMU that never saw a migration answers with an empty object.
            status: text("status").map_or(MigrationStatus::None, |name| name.as_str().into()),
            error: text("error-desc"),
            total_time: millis("total-time"),
            setup_time: millis("setup-time"),
            downtime: millis("downtime"),
            expected_downtime: millis("expected-downtime"),
            ram,
            blocked_reasons: reasons
                .map(|list| list.iter().filter_map(|reason| reason.as_str().map(str::to_owned)).collect())
                .unwrap_or_default(),
            raw,
        }
    }
}

impl Monitor {
    /// How the migration is, and what speaks against one.
    ///
    /// # Errors
    /// The connection's.
    pub fn migration(&self) -> Result<MigrationInfo, QmpError> {
        self.qmp().execute(QUERY_MIGRATE, Value::Null).map(MigrationInfo::of)
    }

    /// Whether QEMU still holds on to a migration, although it may have said that it is over. False where QEMU cannot
    /// say (older than 6.0).
    ///
    /// # Errors
    /// The connection's.
    pub fn holds_migration(&self) -> Result<bool, QmpError> {
        // The list of what can be torn out of QEMU's hands: a migration stands in it from its first moment to the end
        // of its threads.
        let instances = match self.qmp().execute("query-yank", Value::Null) {
            Err(error) if error.is_refusal() => return Ok(false),
            instances => instances?,
        };
        let is_migration = |instance: &Value| instance.get("type").and_then(Value::as_str) == Some("migration");
        Ok(instances.as_array().is_some_and(|list| list.iter().any(is_migration)))
    }

    /// Waits until QEMU has let go of a migration that is over; false if it has not within that time.
    ///
    /// # Errors
    /// The connection's.
    pub fn wait_migration_released(&self, within: Duration) -> Result<bool, QmpError> {
        const LOOK: Duration = Duration::from_millis(2);
        let begun = Instant::now();
        while self.holds_migration()? {
            if begun.elapsed() >= within {
                return Ok(false);
            }
            std::thread::sleep(LOOK);
        }
        Ok(true)
    }

    /// Starts to send this VM to `uri`; returns once the connection stands. `resume`: takes up a paused postcopy
    /// migration instead.
    ///
    /// # Errors
    /// QEMU's.
    pub fn migrate(&self, uri: &str, resume: bool) -> Result<(), QmpError> {
        let arguments = if resume { json!({ "uri": uri, "resume": true }) } else { json!({ "uri": uri }) };
        self.order("migrate", arguments)
    }

    /// Starts to receive a VM from `uri`, in a QEMU that was started with `-incoming defer`. Where QEMU can (9.1 and
    /// newer), a failure leaves the process and its monitor alive, so that its error can be read; older ones exit.
    ///
    /// It can be tried once: after a failure of any kind, even of an address that could not be opened, QEMU refuses a
    /// second attempt and has to be started again.
    ///
    /// # Errors
    /// QEMU's.
    pub fn migrate_incoming(&self, uri: &str) -> Result<(), QmpError> {
        const COMMAND: &str = "migrate-incoming";
        if self.version() >= Version::new(9, 1, 0) {
            return self.order(COMMAND, json!({ "uri": uri, "exit-on-error": false }));
        }
        // Distributions carry the argument back into older versions: ask, and believe the refusal.
        match self.order(COMMAND, json!({ "uri": uri, "exit-on-error": false })) {
            Err(QmpError::Command { desc, .. }) if desc.contains("exit-on-error") => {
                self.order(COMMAND, json!({ "uri": uri }))
            }
            other => other,
        }
    }

    /// Asks for the end of an outgoing migration. The VM continues if it ran before. Without a migration it does
    /// nothing.
    ///
    /// Not to be used for one that writes a mapped-ram file with multifd: see [`Monitor::cancel_file_migration`].
    ///
    /// # Errors
    /// QEMU's, for example once the VM has been handed over by postcopy.
    pub fn migrate_cancel(&self) -> Result<(), QmpError> {
        self.order("migrate_cancel", Value::Null)
    }

    /// Asks for the end of a migration in which QEMU writes a mapped-ram file, in a way that QEMU survives: it is
    /// slowed down until nothing moves, and then cancelled. This changes `max-bandwidth`, which the caller puts back.
    ///
    /// One that is in its last part, with the VM stopped, is left alone, because nothing can slow it down: it is about
    /// to end by itself. `Ok(false)` says so. If it waits before that part (`pre-switchover`), it is let continue to
    /// its end.
    ///
    /// # Errors
    /// QEMU's.
    pub fn cancel_file_migration(&self) -> Result<bool, QmpError> {
        // Slowed down, QEMU has its threads handle a few pages every tenth of a second, and nothing in between: the
        // time to act is soon after such a burst.
        const SLOW: u64 = 4096;
        const AFTER_A_BURST: Range<Duration> = Duration::from_millis(5)..Duration::from_millis(45);
        const NO_BURST: Duration = Duration::from_millis(300);
        // On a busy host a thread may have its pages for longer than that, and QEMU may be late to carry out the
        // order. So the threads have to sleep, and QEMU has to answer promptly; but not for ever.
        const PROMPT: Duration = Duration::from_millis(10);
        const DEMANDING: Duration = Duration::from_secs(2);
        const GIVE_UP: Duration = Duration::from_secs(4);
        const INTERVAL: Duration = Duration::from_millis(5);
        let moves = |info: &MigrationInfo| matches!(info.status, MigrationStatus::Setup | MigrationStatus::Active);
        let waits = MigrationStatus::PreSwitchover;
        if self.migration()?.status == waits {
            return self.migrate_continue(&waits).map(|()| false);
        }
        let vcpus = match self.cpus() {
            Err(error) if error.is_refusal() => Vec::new(),
            cpus => cpus?.into_iter().filter_map(|cpu| cpu.thread).collect(),
        };
        self.order("migrate-set-parameters", json!({ "max-bandwidth": SLOW }))?;
        let threads_sleep =
            || self.qmp().process().and_then(|pid| threads::all_sleep_except(pid, &vcpus)).unwrap_or(true);
        let begun = Instant::now();
        let mut counted = None;
        let (mut changed, mut bursts) = (begun, 0u32);
        while begun.elapsed() < GIVE_UP {
            let asked = Instant::now();
            let (status, info) = self.status_and_migration()?;
            if !moves(&info) || status.state == RunState::FinishMigrate {
                return Ok(false);
            }
            let is_prompt = asked.elapsed() < PROMPT;
            let now = info.ram.map(|ram| (ram.transferred, ram.normal, ram.duplicate));
            let quiet = changed.elapsed();
            if counted != Some(now) {
                bursts += u32::from(counted.is_some());
                (counted, changed) = (Some(now), Instant::now());
            } else if (bursts > 0 && AFTER_A_BURST.contains(&quiet) || quiet >= NO_BURST)
                && (begun.elapsed() >= DEMANDING || is_prompt && threads_sleep())
            {
                break;
            }
            std::thread::sleep(INTERVAL);
            if begun.elapsed() >= GIVE_UP {
                let (status, info) = self.status_and_migration()?;
                if !moves(&info) || status.state == RunState::FinishMigrate {
                    return Ok(false);
                }
            }
        }
        self.migrate_cancel().map(|()| true)
    }

    /// Ends COLO: the VM continues alone, also if it stands still for a checkpoint. The migration is `completed` then.
    ///
    /// In COLO [`migrate_cancel`](Self::migrate_cancel) is no substitute: QEMU (10.0) stays in `cancelling` for good.
    ///
    /// # Errors
    /// QEMU's: it is not in COLO, or was told before.
    pub fn end_colo(&self) -> Result<(), QmpError> {
        self.order("x-colo-lost-heartbeat", Value::Null)
    }

    /// Cuts the channel of a postcopy migration. Out of band: works while the main loop waits for a page.
    ///
    /// # Errors
    /// QEMU's.
    pub fn migrate_pause(&self) -> Result<(), QmpError> {
        self.qmp().execute_oob("migrate-pause", Value::Null).map(|_| ())
    }

    /// Makes a paused postcopy destination receive from `uri` again. Out of band: works while the main loop waits for a
    /// page.
    ///
    /// # Errors
    /// QEMU's.
    pub fn migrate_recover(&self, uri: &str) -> Result<(), QmpError> {
        self.qmp().execute_oob("migrate-recover", json!({ "uri": uri })).map(|_| ())
    }

    /// Switches a running migration to postcopy.
    ///
    /// # Errors
    /// QEMU's.
    pub fn migrate_start_postcopy(&self) -> Result<(), QmpError> {
        self.order("migrate-start-postcopy", Value::Null)
    }

    /// Continues from a state in which a migration waits (`pre-switchover`).
    ///
    /// # Errors
    /// QEMU's.
    pub fn migrate_continue(&self, state: &MigrationStatus) -> Result<(), QmpError> {
        self.order("migrate-continue", json!({ "state": state.as_str() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_answer_means_that_there_was_no_migration() {
        assert_eq!(MigrationInfo::of(json!({})).status, MigrationStatus::None);
        assert_eq!(MigrationInfo::of(json!({ "status": "none", "ram": 7 })).ram, Some(RamProgress::default()));
    }

    #[test]
    fn unknown_states_keep_their_name() {
        let info = MigrationInfo::of(json!({ "status": "postcopy-dancing" }));
        assert_eq!(info.status.to_string(), "postcopy-dancing");
        assert!(!info.status.is_over());
    }

    #[test]
    fn answers_of_the_wrong_shape_are_read_as_far_as_they_go() {
        let info = MigrationInfo::of(json!({ "status": 1, "total-time": -1, "blocked-reasons": ["a", 3] }));
        assert_eq!((info.status, info.total_time), (MigrationStatus::None, None));
        assert_eq!(info.blocked_reasons, ["a"]);
    }
}
