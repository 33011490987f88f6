//! Commands about overlays: one is put on an image, and committed into it.
//!
//! A save of a VM prepares an overlay while the VM runs, and has it put on the image at the instant at which it stops.
//! [`undo_snapshot`](Steering::undo_snapshot) leads back from every state between them. A request to put the overlay
//! that was sent before it and is carried out afterwards finds nothing to put.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use limosa_console::quantity;
use limosa_export::{Export, ExportError};
use parking_lot::MutexGuard;
use serde_json::{Map, Value, json};

use super::requests::{CommitRequest, PrepareRequest, QueryRequest, SnapshotRequest, UndoRequest};
use super::{QUIESCE, Steering};
use crate::serve::overlay;
use crate::serve::report;
use crate::serve::wanted::{Recovery, Wanted};

impl Steering {
    /// An export with the absolute paths of its image and of all below it.
    pub(super) fn with_files(&self, request: &QueryRequest) -> anyhow::Result<Value> {
        let (export, wanted) = self.served(&request.name)?;
        let mut answer = report::description(&export);
        answer.insert("files".into(), json!(overlay::paths(&wanted)?));
        // What clients see is something else than the image has.
        answer.insert("part".into(), (wanted.offset != 0 || wanted.size.is_some()).into());
        answer.insert("snapshot".into(), wanted.snapshot.is_some().into());
        // Who continues a VM from a checkpoint wants its disk as of that one, and unchanged since.
        if let Some(Recovery { log, epoch }) = wanted.recovery {
            let done = export.counters();
            // One that failed may have written a part.
            let is_written = done.writes > 0 || done.zeroes > 0 || done.failures > 0;
            // A server that was started since knows nobody.
            let is_refused = self.exports.refuses_dropped(&request.name);
            let recovered = json!({ "log": log, "epoch": epoch, "written": is_written, "vm-refused": is_refused });
            answer.insert("recovered".into(), recovered);
        }
        if let Some(protection) = report::protection(&export) {
            answer.insert("protection".into(), protection);
        }
        Ok(answer.into())
    }

    /// Creates an overlay that is put on the image later, and makes what was written to the image durable, so that
    /// little is left to be written then.
    pub(super) fn prepare_snapshot(&self, request: &PrepareRequest) -> anyhow::Result<Value> {
        let PrepareRequest { name, overlay, image } = request;
        let _kept = self.keep()?;
        let medium = self.medium(name);
        let alone = medium.lock();
        let (export, wanted) = self.served(name)?;
        let begun = Instant::now();
        self.prepared.lock().refuse_undone(overlay)?;
        let unused = overlay::create(&export, &wanted, overlay).map_err(|error| self.explained(error))?;
        if unused.image != *image {
            overlay::remove(overlay)?;
            anyhow::bail!("{name:?} is {} by now, and not {}", unused.image.display(), image.display());
        }
        self.prepared.lock().add(overlay.clone(), unused);
        drop(alone);
        export.flush()?;
        Ok(timed(report::description(&export), begun))
    }

    /// Has an export continue on an overlay: one that was prepared, or a new one.
    pub(super) fn snapshot(&self, request: &SnapshotRequest) -> anyhow::Result<Value> {
        let SnapshotRequest { name, overlay: path, clear, prepared, timeout } = request;
        let _kept = self.keep()?;
        // Of two overlays the second one is on top of the first.
        let medium = self.medium(name);
        let _alone = medium.lock();
        let (export, wanted) = self.served(name)?;
        let begun = Instant::now();
        let within = timeout.map_or(QUIESCE, Duration::from_millis);
        let frozen = Arc::clone(export.disk().name());
        let unused = if *prepared {
            let unused = self.prepared.lock().take(path, name);
            unused.with_context(|| format!("{}: it was not prepared, or was removed", path.display()))?
        } else {
            overlay::check_cleared(&export, clear)?;
            overlay::create(&export, &wanted, path).map_err(|error| self.explained(error))?
        };
        let overlay = overlay::put(&export, &wanted, (path, &unused, clear), within);
        self.replaced(&export, overlay.map_err(|error| self.explained(error))?);
        let mut answer = report::description(&export);
        answer.insert("frozen".into(), (&*frozen).into());
        Ok(timed(answer, begun))
    }

    /// Brings the contents of an export's overlay to the image below it, where the export continues.
    pub(super) fn commit(&self, request: &CommitRequest) -> anyhow::Result<Value> {
        let _kept = self.keep()?;
        let medium = self.medium(&request.name);
        let alone = medium.lock();
        self.commit_alone(&alone, request)
    }

    fn commit_alone(&self, _alone: &MutexGuard<'_, ()>, request: &CommitRequest) -> anyhow::Result<Value> {
        let (export, wanted) = self.served(&request.name)?;
        if let Some(overlay) = request.overlay.as_ref().filter(|overlay| !wanted.is_of(overlay)) {
            anyhow::bail!("{:?} is {}, and not {}", request.name, export.disk().name(), overlay.display());
        }
        let begun = Instant::now();
        let overlay = Arc::clone(export.disk().name());
        let within = request.timeout.map_or(QUIESCE, Duration::from_millis);
        let committed = overlay::commit(&export, &wanted, within).map_err(|error| self.explained(error))?;
        self.replaced(&export, committed.below);
        committed.removed?;
        let mut answer = report::description(&export);
        answer.insert("committed".into(), (&*overlay).into());
        answer.insert("bytes".into(), committed.bytes.into());
        Ok(timed(answer, begun))
    }

    /// Undoes a snapshot, however far it came: commits the overlay if the export continued on it, and removes it if it
    /// was prepared only.
    pub(super) fn undo_snapshot(&self, request: &UndoRequest) -> anyhow::Result<Value> {
        let UndoRequest { name, overlay, timeout } = request;
        let _kept = self.keep()?;
        let medium = self.medium(name);
        let alone = medium.lock();
        let unused = {
            let mut prepared = self.prepared.lock();
            prepared.undo(overlay);
            prepared.take(overlay, name)
        };
        if let Some(unused) = unused {
            return match overlay::remove(overlay) {
                Ok(()) => Ok(json!({})),
                Err(error) => {
                    self.prepared.lock().add(overlay.clone(), unused);
                    Err(error)
                }
            };
        }
        let (_, wanted) = self.served(name)?;
        if wanted.is_of(overlay) {
            let commit = CommitRequest { name: name.clone(), overlay: Some(overlay.clone()), timeout: *timeout };
            return self.commit_alone(&alone, &commit);
        }
        let is_below = overlay::paths(&wanted)?.iter().any(|path| Path::new(path) == overlay);
        anyhow::ensure!(!is_below, "{}: another overlay stands on it by now", overlay.display());
        // One that this server did not prepare is of a server before it, which may have written to it.
        let exists = overlay.try_exists()?;
        anyhow::ensure!(!exists, "{}: this server does not use it, and did not make it", overlay.display());
        Ok(json!({}))
    }

    /// The export of a name, and how its image was opened.
    pub(super) fn served(&self, name: &str) -> anyhow::Result<(Arc<Export>, Wanted)> {
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
