//! The exports of a server, by their names.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;

use crate::counters::ExportCounters;
use crate::export::{Export, ExportError};
use crate::peer::{Peer, Refusals, VmPeers};

/// The exports of a server. A clone is the same set.
#[derive(Debug, Clone, Default)]
pub struct Exports {
    all: Arc<RwLock<Vec<Arc<Export>>>>,
    refusals: Arc<RwLock<Refusals>>,
}

impl Exports {
    /// Creates an empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an export.
    ///
    /// # Errors
    /// [`ExportError::Exists`].
    pub fn add(&self, export: Export) -> Result<Arc<Export>, ExportError> {
        let mut exports = self.all.write();
        if exports.iter().any(|other| other.name() == export.name()) {
            return Err(ExportError::Exists(export.name().to_owned()));
        }
        let export = Arc::new(export);
        exports.push(Arc::clone(&export));
        Ok(export)
    }

    /// Returns the export with a name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<Arc<Export>> {
        self.all.read().iter().find(|export| export.name() == name).cloned()
    }

    /// Returns the export with a name, for a client that is not refused there.
    pub(crate) fn find_for(&self, name: &str, peer: &Peer) -> Option<Arc<Export>> {
        // In this order: an export that takes the place of a dropped one is found only after the refusal was added.
        let found = self.find(name);
        found.filter(|_| !self.refuses(name, peer))
    }

    /// Whether a client is refused at an export.
    pub(crate) fn refuses(&self, export: &str, peer: &Peer) -> bool {
        let is_refused = self.refusals.read().has(export, peer);
        if is_refused {
            tracing::info!(export, "a client is refused: its VM was dropped");
        }
        is_refused
    }

    /// Returns whether the VM that was [dropped](Self::drop_after) last under this name is refused, however it comes
    /// back. The exports of another process know nothing of it.
    #[must_use]
    pub fn refuses_dropped(&self, export: &str) -> bool {
        self.refusals.read().has_all(export)
    }

    /// Refuses the VM of an export from now on, also when another export gets the name; those of other hosts if
    /// `other_hosts`.
    pub(crate) fn refuse(&self, export: &str, peers: &VmPeers, other_hosts: bool) {
        self.refusals.write().add(export, peers, other_hosts);
    }

    /// Removes an export: no client finds it any more, those that it has are ended, and its disk is flushed, closed and
    /// unlocked. Requests in flight are carried out and answered, further ones refused. Clients that have not taken
    /// their last replies after `drain` lose them: with no time all do. Blocks until it is done. Returns what was done
    /// with it.
    ///
    /// # Errors
    /// [`ExportError::NotFound`]; [`ExportError::Attached`]; [`ExportError::Protected`]; the disk cannot be flushed:
    /// the export stays, unless `drain` is 0; the disk cannot be closed after that: the export is removed all the same.
    pub fn remove(&self, name: &str, drain: Duration) -> Result<ExportCounters, ExportError> {
        if !drain.is_zero()
            && let Some(export) = self.find(name)
        {
            export.flush()?;
        }
        let removed = {
            let mut exports = self.all.write();
            let at = exports.iter().position(|export| export.name() == name);
            let at = at.ok_or_else(|| ExportError::NotFound(name.to_owned()))?;
            if let Some(export) = exports.get(at) {
                export.refuse_protected()?;
                if export.has_queues() {
                    return Err(ExportError::Attached(name.to_owned()));
                }
            }
            exports.remove(at)
        };
        removed.close(drain)
    }

    /// Has no client find an export any more.
    pub(crate) fn forget(&self, export: &Arc<Export>) {
        self.all.write().retain(|other| !Arc::ptr_eq(other, export));
    }

    /// Returns all of them, in the order in which they were added.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Export>> {
        self.all.read().clone()
    }
}

#[cfg(test)]
mod tests {
    use limosa_image::raw::{Raw, RawOptions};
    use limosa_storage::MemoryStorage;

    use super::*;

    fn export(name: &str) -> Result<Export, ExportError> {
        let disk = Raw::open(Arc::new(MemoryStorage::with_contents(vec![0; 4096], 4096)), &RawOptions::default())?;
        Export::new(name, disk)
    }

    #[test]
    fn a_client_that_is_refused_meanwhile_does_not_find_the_export_that_takes_the_place_of_its_own() {
        let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = Arc::new(Peer::of(std::os::fd::AsFd::as_fd(&near)));
        let mut peers = VmPeers::default();
        peers.add(&peer);
        let exports = Exports::new();
        exports.add(export("vm").unwrap()).unwrap();
        let mut all = exports.all.write();
        std::thread::scope(|scope| {
            let looking = scope.spawn(|| exports.find_for("vm", &peer));
            // It waits for the exports.
            std::thread::sleep(Duration::from_millis(50));
            exports.refuse("vm", &peers, true);
            *all = vec![Arc::new(export("vm").unwrap())];
            drop(all);
            assert!(looking.join().unwrap().is_none(), "the VM that was dropped has its survivor's disk");
        });
    }

    #[test]
    fn names_are_unique_and_short() {
        let exports = Exports::new();
        exports.add(export("a").unwrap()).unwrap();
        exports.add(export("").unwrap()).unwrap();
        assert!(matches!(exports.add(export("a").unwrap()), Err(ExportError::Exists(name)) if name == "a"));
        assert!(exports.find("a").is_some() && exports.find("").is_some() && exports.find("b").is_none());
        assert!(export(&"x".repeat(4096)).is_ok());
        assert!(matches!(export(&"x".repeat(4097)), Err(ExportError::Text(_))));
        assert!(matches!(export("a\0b"), Err(ExportError::Text(_))));
    }
}
