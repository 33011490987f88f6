//! A pool: QEMUs that wait for the next clones of a snapshot.
//!
//! A QEMU of a pool is started as a clone's is, with its own disks, and waits (`-incoming defer`) until a later call
//! takes it: that clone costs a load and no start. It does not end with the limosa that has started it.
//!
//! The law: **a QEMU is taken only for what it was started for**: the same snapshot, by device, inode and id; the same
//! command line, from the same directory; the same memory and overlays. Everything else is proven when it is taken, as
//! for any clone.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;

use limosa_qemu::IncomingFrom;
use parking_lot::Mutex;

use crate::error::CloneError;
use crate::fleet::{FailedClone, Fleet, PooledClone, StartedClone};
use crate::home::Home;
use crate::making::Making;
use crate::phase::Phase;
use crate::record::{LOG, MONITOR, Record, name_of};
use crate::start::{Given, WaitingQemu, connect, finish, give_vm, launch_with};

/// The QEMUs of a directory that wait for clones of a fleet.
#[derive(Debug)]
pub(crate) struct Pool(Mutex<Vec<PathBuf>>);

impl Pool {
    /// Looks for them.
    pub(crate) fn of(fleet: &Fleet<'_>) -> Self {
        let entries = fs::read_dir(&fleet.folder).into_iter().flatten().flatten();
        let mut waiting: Vec<_> = entries.map(|entry| entry.path()).filter(|path| waits_for(path, fleet)).collect();
        // The lowest number is taken first.
        waiting.sort_by(|a, b| b.cmp(a));
        Self(Mutex::new(waiting))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Starts a clone with a QEMU that waits; `None` if there is no other.
    pub(crate) fn take(&self, fleet: &Fleet<'_>) -> Option<Result<StartedClone, FailedClone>> {
        loop {
            let path = self.0.lock().pop()?;
            let begun = Instant::now();
            // Another limosa may be taking or removing it, and may have done so.
            let Ok(Some(home)) = Home::lock(&path) else { continue };
            let Some(record) = Record::read(&path).ok().flatten().filter(|record| is_for(record, fleet)) else {
                continue;
            };
            let mut making = Making::waiting(home, record);
            let given = give(fleet, &mut making, begun);
            // It may be killed while it waits, and nothing of a VM is lost with it: another one is taken, or started.
            if given.is_err() && making.record.phase == Phase::Waiting && !making.record.is_alive() {
                making.undo();
                continue;
            }
            return Some(finish(fleet, making, given));
        }
    }
}

/// Whether a clone's directory has a QEMU that waits for this fleet, and lives.
fn waits_for(path: &Path, fleet: &Fleet<'_>) -> bool {
    Record::read(path).ok().flatten().is_some_and(|record| is_for(&record, fleet) && record.is_alive())
}

fn is_for(record: &Record, fleet: &Fleet<'_>) -> bool {
    record.phase == Phase::Waiting
        && record.snapshot.is_same_file(&fleet.identity)
        && record.pool.as_ref().is_some_and(|pool| *pool == fleet.pool)
}

fn give(fleet: &Fleet<'_>, making: &mut Making, begun: Instant) -> Result<Given, CloneError> {
    let path = making.path().join(LOG);
    let log = File::open(&path).map_err(CloneError::path("open", &path))?;
    let monitor = connect(&making.path().join(MONITOR), None, &log)?;
    give_vm(fleet, making, WaitingQemu { monitor, log, channel: None }, begun)
}

/// Starts a QEMU that waits, under this number.
///
/// # Errors
/// A step failed. What belongs to it is removed, and it is ended.
pub(crate) fn wait_in_pool(fleet: &Fleet<'_>, number: u64) -> Result<PooledClone, FailedClone> {
    let name = name_of(number);
    let mut making = Making::prepare(fleet, number, &name).map_err(|error| FailedClone::new(number, error))?;
    // Written down with its process: a QEMU that waits and is in no pool would wait for ever.
    making.record.pool = Some(fleet.pool.clone());
    // One that answers is there; the rest is proven when it is taken.
    match launch_with(fleet, &mut making, IncomingFrom::Deferred) {
        Ok(_) => {
            let (folder, record, child) = making.keep();
            Ok(PooledClone { name, folder, record, child })
        }
        Err(error) => Err(making.fail(error)),
    }
}
