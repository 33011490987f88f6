//! A clone that is being made: its directory, its record and its process, until it is kept or undone.

use std::path::{Path, PathBuf};
use std::process::Child;

use limosa_qemu::SOCKET_PATH_MAX;
use rustix::process::Signal;

use crate::command_line::OverlayPlan;
use crate::directory::RemoveReport;
use crate::error::CloneError;
use crate::fleet::{FailedClone, Fleet};
use crate::home::Home;
use crate::overlay;
use crate::phase::Phase;
use crate::record::{MONITOR, OverlayRecord, Record, signal};

/// A clone that is being made. Dropping it ends its QEMU and removes what belongs to it.
pub(crate) struct Making {
    /// `None` once the clone is kept or removed.
    home: Option<Home>,
    pub(crate) record: Record,
    /// Its QEMU, if this process has started it.
    pub(crate) child: Option<Child>,
}

impl Making {
    /// Makes a clone's files: its record, then its overlays, all under a hidden name; then its own name.
    pub(crate) fn prepare(fleet: &Fleet<'_>, number: u64, name: &str) -> Result<Self, CloneError> {
        // Of the first numbers all fit; later ones are longer.
        let monitor = fleet.folder.join(name).join(MONITOR);
        if monitor.as_os_str().len() > SOCKET_PATH_MAX {
            let why = std::io::Error::other(format!("a unix socket's path has at most {SOCKET_PATH_MAX} bytes"));
            return Err(CloneError::path("listen at", monitor)(why));
        }
        let home = Home::new(&fleet.folder, name)?;
        let overlay = |plan: &OverlayPlan| OverlayRecord {
            name: (&plan.name).into(),
            backing: plan.disk.path().to_path_buf(),
            snapshots: Vec::new(),
        };
        let overlays = fleet.overlays.iter().map(overlay).collect();
        let outputs = fleet.template.file_names(number, name);
        let record = Record::prepared(number, fleet.identity.clone(), overlays, outputs);
        let mut making = Self { home: Some(home), record, child: None };
        // Written down before they are made, so that what a kill leaves can be removed.
        making.record.write(making.path())?;
        for plan in &fleet.overlays {
            overlay::make(&making.path().join(&plan.name), &plan.disk, fleet.options.backing)?;
        }
        if let Some(home) = &mut making.home {
            home.publish(name)?;
        }
        Ok(making)
    }

    /// A clone whose QEMU waits already, and whose directory is locked.
    pub(crate) fn waiting(home: Home, record: Record) -> Self {
        Self { home: Some(home), record, child: None }
    }

    pub(crate) fn path(&self) -> &Path {
        self.home.as_ref().map_or(Path::new(""), Home::path)
    }

    pub(crate) fn enter(&mut self, phase: Phase) -> Result<(), CloneError> {
        let folder = self.path().to_path_buf();
        self.record.enter(phase, &folder)
    }

    /// Keeps the clone.
    pub(crate) fn keep(mut self) -> (PathBuf, Record, Option<Child>) {
        let folder = self.path().to_path_buf();
        self.home = None;
        (folder, self.record.clone(), self.child.take())
    }

    /// Undoes the clone because of this error.
    pub(crate) fn fail(mut self, error: CloneError) -> FailedClone {
        FailedClone { leftover_files: self.undo(), ..FailedClone::new(self.record.number, error) }
    }

    /// Ends its QEMU and removes what belongs to the clone. Returns the files that stay.
    pub(crate) fn undo(&mut self) -> Vec<PathBuf> {
        let Some(home) = self.home.take() else { return Vec::new() };
        match (self.child.take(), &self.record.process) {
            (Some(mut child), _) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            // Another limosa has started it.
            (None, Some(process)) => signal(process, Signal::KILL),
            (None, None) => {}
        }
        let folder = home.path().to_path_buf();
        home.remove(&self.record).map_or_else(|_| vec![folder], RemoveReport::into_paths)
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        self.undo();
    }
}
