//! Commands about overlays: one is put on an image, and committed into it.
//!
//! A save of a VM prepares an overlay while the VM runs, and has it put on the image at the instant at which it stops.
//! [`undo_snapshot`](Steering::undo_snapshot) leads back from every state between them. A request to put the overlay
//! that was sent before it and is carried out afterwards finds nothing to put.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use limosa_console::quantity;
use limosa_export::{Export, ExportError};
use parking_lot::MutexGuard;
use serde_json::{Map, Value, json};

use super::requests::{CommitRequest, PrepareRequest, QueryRequest, SnapshotRequest, UndoRequest};
use super::{QUIESCE, Steering};
use crate::serve::images::Wanted;
use crate::serve::overlay::{self, Unused};
use crate::serve::report;

type Prepared<'a> = MutexGuard<'a, HashMap<PathBuf, Unused>>;

impl Steering {
    /// An export with the absolute paths of its image and of all below it.
    pub(super) fn with_files(&self, request: &QueryRequest) -> anyhow::Result<Value> {
        let (export, wanted) = self.served(&request.name)?;
        let mut answer = report::description(&export);
        answer.insert("files".into(), json!(overlay::paths(&wanted)?));
        Ok(answer.into())
    }

    /// Creates an overlay that is put on the image later, and makes what was written to the image durable, so that
    /// little is left to be written then.
    pub(super) fn prepare_snapshot(&self, request: &PrepareRequest) -> anyhow::Result<Value> {
        let _kept = self.keep()?;
        let mut prepared = self.prepared.lock();
        let (export, wanted) = self.served(&request.name)?;
        let begun = Instant::now();
        let unused = overlay::create(&export, &wanted, &request.overlay).map_err(|error| self.explained(error))?;
        prepared.insert(request.overlay.clone(), unused);
        drop(prepared);
        export.flush()?;
        Ok(timed(report::description(&export), begun))
    }

    /// Has an export continue on an overlay: one that was prepared, or a new one.
    pub(super) fn snapshot(&self, request: &SnapshotRequest) -> anyhow::Result<Value> {
        let _kept = self.keep()?;
        // Of two overlays the second one is on top of the first.
        let mut prepared = self.prepared.lock();
        let (export, wanted) = self.served(&request.name)?;
        let begun = Instant::now();
        let within = request.timeout.map_or(QUIESCE, Duration::from_millis);
        let frozen = Arc::clone(export.disk().name());
        let path = &request.overlay;
        let unused = if request.prepared {
            let unused = prepared.remove(path).filter(|unused| unused.export == request.name);
            unused.with_context(|| format!("{}: it was not prepared, or was removed", path.display()))?
        } else {
            overlay::create(&export, &wanted, path).map_err(|error| self.explained(error))?
        };
        let overlay = overlay::put(&export, &wanted, (path, &unused, &request.clear), within);
        self.replaced(&export, overlay.map_err(|error| self.explained(error))?);
        let mut answer = report::description(&export);
        answer.insert("frozen".into(), (&*frozen).into());
        Ok(timed(answer, begun))
    }

    /// Brings the contents of an export's overlay to the image below it, where the export continues.
    pub(super) fn commit(&self, request: &CommitRequest) -> anyhow::Result<Value> {
        let _kept = self.keep()?;
        let alone = self.prepared.lock();
        self.commit_alone(&alone, &request.name, request.timeout)
    }

    fn commit_alone(&self, _alone: &Prepared<'_>, name: &str, timeout: Option<u64>) -> anyhow::Result<Value> {
        let (export, wanted) = self.served(name)?;
        let begun = Instant::now();
        let overlay = Arc::clone(export.disk().name());
        let within = timeout.map_or(QUIESCE, Duration::from_millis);
        let (below, bytes) = overlay::commit(&export, &wanted, within).map_err(|error| self.explained(error))?;
        self.replaced(&export, below);
        let mut answer = report::description(&export);
        answer.insert("committed".into(), (&*overlay).into());
        answer.insert("bytes".into(), bytes.into());
        Ok(timed(answer, begun))
    }

    /// Undoes a snapshot, however far it came: commits the overlay if the export continued on it, and removes it if it
    /// was prepared only.
    pub(super) fn undo_snapshot(&self, request: &UndoRequest) -> anyhow::Result<Value> {
        let _kept = self.keep()?;
        let mut prepared = self.prepared.lock();
        let overlay = &request.overlay;
        if prepared.get(overlay).is_some_and(|unused| unused.export == request.name) {
            overlay::remove(overlay)?;
            prepared.remove(overlay);
            return Ok(json!({}));
        }
        let (_, wanted) = self.served(&request.name)?;
        if wanted.is_of(overlay) {
            return self.commit_alone(&prepared, &request.name, request.timeout);
        }
        // One that this server did not prepare is of a server before it, which may have written to it.
        let exists = overlay.try_exists()?;
        anyhow::ensure!(!exists, "{}: this server does not use it; remove it if it has no data", overlay.display());
        Ok(json!({}))
    }

    /// The export of a name, and how its image was opened.
    fn served(&self, name: &str) -> anyhow::Result<(Arc<Export>, Wanted)> {
        let export = self.export(name)?;
        // Missing for a moment while it is added or removed.
        let wanted = self.images.wanted(&export).ok_or_else(|| ExportError::NotFound(name.to_owned()))?;
        Ok((export, wanted))
    }

    /// Notes that an export has another image.
    fn replaced(&self, export: &Arc<Export>, wanted: Wanted) {
        if self.exports.find(export.name()).is_some_and(|now| Arc::ptr_eq(&now, export)) {
            self.images.note(export, wanted);
        }
        self.servers.devices.iter().for_each(|device| device.notify_replaced(export));
    }
}

fn timed(mut answer: Map<String, Value>, begun: Instant) -> Value {
    answer.insert("ms".into(), quantity::millis(begun.elapsed()).into());
    answer.into()
}
