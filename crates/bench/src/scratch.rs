//! Directories of a bench that do not outlive it.
//!
//! Law: a directory is removed when its owner is dropped, also by a panic, and by [`remove_all`] when a signal ends
//! the program and nothing is dropped.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use parking_lot::{Mutex, MutexGuard};
use tempfile::TempDir;

use crate::process::{end_detached, end_naming};

static ALL: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn all() -> MutexGuard<'static, Vec<PathBuf>> {
    ALL.lock()
}

/// A new directory that only this user can enter.
#[derive(Debug)]
pub(crate) struct Scratch {
    directory: TempDir,
}

impl Scratch {
    pub(crate) fn new_in(parent: &Path) -> Result<Self> {
        // Listed before a signal can come in between.
        let mut all = all();
        let directory = tempfile::Builder::new()
            .prefix("limosa-bench-")
            .tempdir_in(parent)
            .with_context(|| format!("{}: cannot create a directory in it", parent.display()))?;
        all.push(directory.path().to_path_buf());
        Ok(Self { directory })
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(self.path());
        all().retain(|path| path != self.directory.path());
    }
}

/// Removes the directories of all benches of this process, and ends the processes that were left running in them: for a
/// handler that ends it. No new ones can be made then.
pub fn remove_all() {
    let all = all();
    end_detached();
    for path in all.iter() {
        end_naming(path);
        // A child may still be making files in it.
        for _ in 0..100 {
            if fs::remove_dir_all(path).is_ok() || !path.exists() {
                break;
            }
        }
    }
    std::mem::forget(all);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_scratch_directory_is_gone_with_what_is_in_it() {
        let scratch = Scratch::new_in(&std::env::temp_dir()).expect("makes");
        let path = scratch.path().to_path_buf();
        fs::write(path.join("file"), "x").expect("writes");
        drop(scratch);
        assert!(!path.exists());
    }
}
