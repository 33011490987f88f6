//! The directory of a demonstration.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use crate::error::DemoError;

/// A private directory that goes with the demonstration.
pub(crate) struct Folder(PathBuf);

/// Removes the folders of all demonstrations of this process: for a handler that ends it.
pub fn remove_folders() {
    let prefix = Folder::prefix();
    for entry in std::fs::read_dir(Folder::base()).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

impl Folder {
    /// In memory where there is such a place: the witness is written while the guest is paused.
    fn base() -> PathBuf {
        let memory = PathBuf::from("/dev/shm");
        if memory.is_dir() { memory } else { std::env::temp_dir() }
    }

    fn prefix() -> String {
        format!("limosa-demo-{}-", std::process::id())
    }

    /// Makes it.
    pub(crate) fn new() -> Result<Self, DemoError> {
        let (base, prefix) = (Self::base(), Self::prefix());
        for number in 0..1000_u32 {
            let path = base.join(format!("{prefix}{number}"));
            match std::fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(DemoError::system(format!("cannot make {}", path.display()))(error)),
            }
        }
        Err(DemoError::Settings(format!("{} is full of old demonstrations", base.display())))
    }
}

impl Folder {
    /// Its path.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left behind is empty sockets.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
