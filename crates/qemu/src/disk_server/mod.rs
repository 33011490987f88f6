//! A server of disks, steered: `limosa serve` with a control socket.
//!
//! The law: **a snapshot of a served disk is undone by one command, from every state.** The overlay is prepared while
//! the VM runs, and put on the image when the VM has stopped. The command that undoes it ([`DiskServer::undo`]) commits
//! an overlay that was put, and removes one that was not; a request to put it that arrives later is refused.

mod epochs;
mod find;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::job::JobError;
use crate::qmp::{MonitorAddress, Options, Qmp, QmpError};
pub use epochs::{DroppedDisk, EpochDisks, check_droppable, drop_after, find_unfenced_disks, refuse_changed};
pub(crate) use epochs::{check as check_epochs, check_served, end_epochs};
pub(crate) use find::{Remote, Served, find, is_nbd};

/// Time that the server gets while the VM runs: it makes durable what was written to the disk.
const PREPARED_WITHIN: Duration = Duration::from_secs(120);
/// Time that it gets while the VM is stopped: what was written since is made durable.
const PUT_WITHIN: Duration = Duration::from_secs(30);

/// A connection to the control socket of a server.
#[derive(Debug)]
pub(crate) struct DiskServer {
    control: PathBuf,
    qmp: Qmp,
}

/// An export of a server.
#[derive(Debug, Clone)]
pub(crate) struct ServedImage {
    /// The image, and the images that it stands on, the uppermost first.
    pub(crate) files: Vec<PathBuf>,
    /// Its format.
    pub(crate) format: String,
    /// Whether clients cannot write.
    pub(crate) read_only: bool,
    /// Whether clients see something else than the image has: a part of it, or an internal snapshot.
    pub(crate) is_other: bool,
}

impl DiskServer {
    /// Connects to a control socket.
    ///
    /// # Errors
    /// Nothing answers there.
    pub(crate) fn connect(control: &Path) -> Result<Self, JobError> {
        let control = std::path::absolute(control).map_err(|source| JobError::Io {
            what: "find the control socket",
            path: control.to_owned(),
            source,
        })?;
        let qmp = Qmp::connect(&MonitorAddress::Unix(control.clone()), &Options::default());
        Ok(Self { qmp: qmp.map_err(|error| unanswered(&control, &error))?, control })
    }

    /// Returns the path of its control socket.
    pub(crate) fn control(&self) -> &Path {
        &self.control
    }

    fn ask(&self, command: &str, arguments: Value) -> Result<Value, JobError> {
        self.ask_within(command, arguments, PUT_WITHIN)
    }

    fn ask_within(&self, command: &str, arguments: Value, within: Duration) -> Result<Value, JobError> {
        self.qmp.execute_within(command, arguments, within).map_err(|error| match error.desc() {
            Some(said) => JobError::refused(format!("the server of disks at {} says: {said}", self.control.display())),
            None => unanswered(&self.control, &error),
        })
    }

    /// Asks for the image of an export.
    ///
    /// # Errors
    /// It has no such export, or does not answer.
    pub(crate) fn image(&self, export: &str) -> Result<ServedImage, JobError> {
        let answer = self.ask("query-export", json!({ "name": export }))?;
        let files = answer.get("files").and_then(Value::as_array).into_iter().flatten();
        let files: Vec<_> = files.filter_map(|file| file.as_str().map(PathBuf::from)).collect();
        if files.is_empty() {
            return Err(JobError::refused(format!(
                "the server of disks at {} does not say which file the export {export:?} is",
                self.control.display()
            )));
        }
        let format = answer.get("format").and_then(Value::as_str).unwrap_or_default().to_owned();
        let is = |key: &str| answer.get(key).and_then(Value::as_bool).unwrap_or(false);
        let is_other = is("part") || is("snapshot");
        Ok(ServedImage { files, format, read_only: is("read-only"), is_other })
    }

    /// Has what was written to the export brought to its file.
    ///
    /// # Errors
    /// The server's.
    pub(crate) fn flush(&self, export: &str) -> Result<(), JobError> {
        self.ask("export-flush", json!({ "name": export })).map(drop)
    }

    /// Has an overlay created at `overlay` that is put on the export's image later, which must be `image`.
    ///
    /// # Errors
    /// The server's: it may not write there, for example, or the export has another image by now.
    pub(crate) fn prepare(&self, export: &str, image: &str, overlay: &str) -> Result<(), JobError> {
        let arguments = json!({ "name": export, "overlay": overlay, "image": image });
        self.ask_within("export-prepare-snapshot", arguments, PREPARED_WITHIN).map(drop)
    }

    /// Has the export continue on an overlay that was prepared. Its image is complete then, and not written any more.
    ///
    /// # Errors
    /// The server's.
    pub(crate) fn put(&self, export: &str, overlay: &str) -> Result<(), JobError> {
        let arguments = json!({ "name": export, "overlay": overlay, "prepared": true });
        self.ask("export-snapshot", arguments).map(drop)
    }

    /// Undoes a snapshot, however far it came: the export continues on the image below the overlay, with all that was
    /// written meanwhile, and the overlay is removed.
    ///
    /// # Errors
    /// The server's; then the export continues on the overlay, if it was put.
    pub(crate) fn undo(&self, export: &str, overlay: &str, within: Duration) -> Result<(), JobError> {
        self.ask_within("export-undo-snapshot", json!({ "name": export, "overlay": overlay }), within).map(drop)
    }
}

fn unanswered(control: &Path, error: &QmpError) -> JobError {
    JobError::refused(format!("the server of disks at {} does not answer: {error}", control.display()))
}
