//! When a keeper continues the VM itself.
//!
//! Law: **at most one side runs the VM.** The order is: the primary is lost, for as long as was said; no primary is let
//! in any more; the directory still has the checkpoint of its protection, and nothing continues from it; fencing
//! succeeds; its disks are brought to the checkpoint; it is recorded, durably, that this
//! protection is over; the VM runs. A keeper that is killed before the last step runs nothing, and one that is killed
//! after it is the only one that ran it: its standby gets the end of its stream in one piece.
//!
//! ```text
//! kept ─lost─► waiting ─time, or VmLost─► fencing ─► recorded ─► the VM runs
//!   ▲            │ │                        │
//!   └────────────┘ └◄──── fencing failed ───┘
//!    the primary is back
//! ```

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use limosa_migrate::VmError;
use limosa_page::error_with_causes;
use limosa_qemu::{JobContext, refuse_changed_disks};
use limosa_snapshot::{CHECKPOINT_NAME, CheckpointDirectory, Manifest, Snapshot};
use uuid::Uuid;

use super::desk::{Admission, Desk, Visitor, VmName};
use super::message::Farewell;
use super::ownership;
use crate::error::ProtectError;
use crate::standby::{Continued, Standby};

/// How long a primary is waited for before it is looked what else has happened.
const TICK: Duration = Duration::from_millis(20);
/// How soon a step that has failed is tried again, at the earliest.
const TRY_AGAIN: Duration = Duration::from_secs(5);

/// A directory that is held, with the checkpoint of a VM that cannot run or reach anything any more.
struct Cleared {
    held: CheckpointDirectory,
    manifest: Manifest,
}

/// Why a VM is not failed over.
enum Refusal {
    /// It cannot be for now.
    Failed(VmError),
    /// It never is: its checkpoint has been failed over, or is gone.
    Gone(&'static str),
}

impl<E: Into<VmError>> From<E> for Refusal {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Makes sure that the VM of a protection cannot run or reach anything, and has its disks as of its checkpoint. The
/// directory is held from before, so that nobody else runs the VM from it.
fn clear_the_way(options: &StandbyOptions<'_>, directory: &Path, protection: Uuid) -> Result<Cleared, Refusal> {
    let held = CheckpointDirectory::open(directory)?;
    let snapshot = Snapshot::open(&directory.join(CHECKPOINT_NAME))?;
    let manifest = snapshot.manifest().cloned().unwrap_or_else(Manifest::new);
    // Before anything is fenced: it would be the survivor of a failover by hand, or another VM.
    if manifest.protection != Some(protection) {
        return Err(Refusal::Gone("the directory has the checkpoint of another protection"));
    }
    if ownership::has_survivor(directory, &manifest)? {
        return Err(Refusal::Gone("the VM continues from its checkpoint already"));
    }
    // A VM that has continued without protection is better left alone.
    refuse_changed_disks(&manifest.protected_disks, manifest.checkpoint.unwrap_or(0), options.disk_servers)?;
    (options.fence)(&manifest)?;
    Ok(Cleared { held, manifest })
}

/// Records a step until it is recorded: the VM has been fenced, and runs nowhere. `None` if the keeper is to end.
fn recorded<T>(watch: JobContext<'_>, mut record: impl FnMut() -> Result<T, ProtectError>) -> Option<T> {
    loop {
        match record() {
            Ok(done) => return Some(done),
            Err(error) => (watch.notice)(&format!("not failed over yet: {}", error_with_causes(&error))),
        }
        let until = Instant::now() + TRY_AGAIN;
        while Instant::now() < until {
            if watch.handle.control.stop_requested().is_some() {
                return None;
            }
            thread::sleep(TICK);
        }
    }
}

/// How a keeper fails over.
#[derive(Clone, Copy)]
pub struct StandbyOptions<'a> {
    /// The command line of the VM's QEMU here; limosa adds `-incoming` and a private monitor.
    pub command: &'a [OsString],
    /// Whether a QEMU is started when the base has come, and fed with each checkpoint.
    pub warm: bool,
    /// How long QEMU may take to open its monitor.
    pub start_within: Duration,
    /// Fails over by itself when the primary has been lost for so long, and at once when its limosa says that the VM is
    /// lost. `None`: only when `now` is set.
    pub when_lost: Option<Duration>,
    /// Fails over now, if the primary is lost.
    pub now: &'a AtomicBool,
    /// Makes sure that the protected VM cannot run or reach anything, now or later, and has its disks as of the
    /// checkpoint, whose manifest it gets; otherwise says why that is not sure.
    pub fence: &'a (dyn Fn(&Manifest) -> Result<(), VmError> + Sync),
    /// The control sockets of the servers of its disks. Without any, VMs whose disks belong to their checkpoints are
    /// not kept.
    pub disk_servers: &'a [PathBuf],
    /// Is given the VM. What it does until it returns is done while primaries are turned away.
    pub survive: &'a (dyn Fn(Survivor) + Sync),
}

impl std::fmt::Debug for StandbyOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StandbyOptions")
            .field("command", &self.command)
            .field("warm", &self.warm)
            .field("when_lost", &self.when_lost)
            .finish_non_exhaustive()
    }
}

/// The VM that continues here.
#[derive(Debug)]
#[non_exhaustive]
pub enum Survivor {
    /// It runs already, in the standby QEMU.
    Runs(Box<Continued>),
    /// It has to be restored from this checkpoint: there was no standby, or it has failed before it could run.
    Stored(PathBuf),
}

/// A VM that is lost.
pub(super) struct Lost {
    name: VmName,
    /// Whose checkpoint it is, if it is there still.
    protection: Uuid,
    farewell: Option<Farewell>,
    /// The QEMU that has its memory.
    standby: Option<Standby>,
    /// Whether it is failed over without an order.
    by_itself: bool,
    /// When that was seen.
    since: Instant,
    /// Fencing has failed, and is not tried again before.
    again: Option<Instant>,
}

/// The end of waiting for a VM that is lost.
pub(super) enum Fate {
    /// Its primary is back, or another one is there.
    Back(Box<Visitor>),
    /// Another failover has had it.
    Gone,
    /// It was failed over, and has been survived.
    FailedOver,
    /// The keeper is to end.
    Ended,
}

impl Lost {
    pub(super) fn new(
        (name, protection): (VmName, Uuid),
        farewell: Option<Farewell>,
        standby: Option<Standby>,
        by_itself: bool,
    ) -> Self {
        Self { name, protection, farewell, standby, by_itself, since: Instant::now(), again: None }
    }

    /// A VM whose primary was back for a while: its checkpoint does not know what it has done since, so it takes an
    /// order to continue from it.
    pub(super) fn outdated(self) -> Self {
        Self { by_itself: false, ..self }
    }

    /// Who may be its primary.
    pub(super) fn admission(&self) -> Admission {
        Admission::Only(self.name.clone())
    }

    /// The moment of its failover; `None`: not by itself.
    fn due(&self, when_lost: Option<Duration>) -> Option<Instant> {
        let when_lost = when_lost.filter(|_| self.by_itself)?;
        let after = if self.farewell == Some(Farewell::VmLost) { Duration::ZERO } else { when_lost };
        // A time that does not fit never comes.
        let due = self.since.checked_add(after)?;
        Some(self.again.map_or(due, |again| due.max(again)))
    }

    /// Waits until the primary is back, or fails over.
    pub(super) fn wait(
        &mut self,
        desk: &Desk<'_>,
        options: &StandbyOptions<'_>,
        directory: &Path,
        watch: JobContext<'_>,
    ) -> Result<Fate, ProtectError> {
        let notice = watch.notice;
        if options.when_lost.is_some() && !self.by_itself {
            notice("the VM is not failed over by itself: it may run, or have done what its checkpoint does not know");
        }
        let mut ordered = false;
        let Cleared { held, manifest } = loop {
            desk.admit(self.admission());
            let due = self.due(options.when_lost);
            loop {
                ordered |= options.now.swap(false, Ordering::AcqRel);
                if ordered || due.is_some_and(|due| Instant::now() >= due) {
                    break;
                }
                if watch.handle.control.stop_requested().is_some() {
                    return Ok(Fate::Ended);
                }
                let rest = due.map_or(TICK, |due| due.saturating_duration_since(Instant::now()).min(TICK));
                if let Some(visitor) = desk.wait(rest) {
                    return Ok(Fate::Back(Box::new(visitor)));
                }
            }
            if !desk.shut("it fails over to its own host") {
                // A primary has just been let in, and is about to be here.
                if let Some(visitor) = desk.wait(TICK) {
                    return Ok(Fate::Back(Box::new(visitor)));
                }
                continue;
            }
            match clear_the_way(options, directory, self.protection) {
                Ok(cleared) => break cleared,
                Err(Refusal::Gone(why)) => {
                    notice(&format!("not failed over: {why}"));
                    return Ok(Fate::Gone);
                }
                Err(Refusal::Failed(why)) => {
                    notice(&format!("not failed over: {}", error_with_causes(&*why)));
                    ordered = false;
                    self.again = Some(Instant::now() + options.when_lost.unwrap_or_default().max(TRY_AGAIN));
                }
            }
        };
        let Some(is_taken) = recorded(watch, || ownership::take_over(directory, &manifest)) else {
            return Ok(Fate::Ended);
        };
        if !is_taken {
            notice("not failed over: the VM continues from its checkpoint already");
            return Ok(Fate::Gone);
        }
        let newest = manifest.checkpoint.unwrap_or(0);
        let holds = self.standby.as_ref().and_then(Standby::holds);
        let standby = self.standby.take();
        let standby = standby.filter(|_| holds == Some(newest));
        if let Some(other) = holds.filter(|holds| *holds != newest) {
            notice(&format!("the standby has checkpoint {other}, and checkpoint {newest} counts"));
        }
        let survivor = match standby.map(Standby::continue_vm) {
            Some(Ok(continued)) => Survivor::Runs(Box::new(continued)),
            failed => {
                if let Some(Err(error)) = failed {
                    let error = error_with_causes(&error);
                    notice(&format!("{error}; the VM is restored from its checkpoint"));
                }
                // The restore records it again.
                if recorded(watch, || ownership::give_back(directory, &manifest)).is_none() {
                    return Ok(Fate::Ended);
                }
                Survivor::Stored(held.checkpoint())
            }
        };
        drop(held);
        (options.survive)(survivor);
        Ok(Fate::FailedOver)
    }
}
