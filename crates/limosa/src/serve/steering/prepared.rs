//! Overlays for snapshots that are prepared and may be undone.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};

use crate::serve::overlay::Unused;

/// Snapshots that were undone and are remembered: more than can be under way.
const UNDONE_MOST: usize = 1024;

/// The overlays, by their paths.
#[derive(Debug, Default)]
pub(super) struct Prepared {
    unused: HashMap<PathBuf, Unused>,
    /// Those of snapshots that were undone: requests for them that come late are refused.
    undone: VecDeque<PathBuf>,
}

impl Prepared {
    /// Refuses a request for an overlay whose snapshot was undone.
    pub(super) fn refuse_undone(&self, overlay: &Path) -> anyhow::Result<()> {
        let is_undone = self.undone.iter().any(|undone| undone == overlay);
        anyhow::ensure!(!is_undone, "{}: its snapshot was undone", overlay.display());
        Ok(())
    }

    /// Adds an overlay that was created.
    pub(super) fn add(&mut self, overlay: PathBuf, unused: Unused) {
        self.unused.insert(overlay, unused);
    }

    /// Takes an overlay of this export.
    pub(super) fn take(&mut self, overlay: &Path, export: &str) -> Option<Unused> {
        self.unused.get(overlay).filter(|unused| unused.export == export)?;
        self.unused.remove(overlay)
    }

    /// Notes that its snapshot is undone.
    pub(super) fn undo(&mut self, overlay: &Path) {
        self.undone.truncate(UNDONE_MOST - 1);
        self.undone.push_front(overlay.to_owned());
    }
}
