//! Folders that only their owner can enter, gone when the test is.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context as _, Result};
use tempfile::TempDir;

/// A new folder of mode 0700 whose path is short enough for unix sockets; removed when dropped.
///
/// # Errors
/// The temporary folder of the system cannot be written.
pub fn scratch() -> Result<TempDir> {
    let mode = Permissions::from_mode(0o700);
    tempfile::Builder::new().prefix("limosa-").permissions(mode).tempdir().context("making a temporary folder")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scratch_folder_is_closed_to_others_and_goes_away() {
        let folder = scratch().unwrap();
        let path = folder.path().to_path_buf();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        drop(folder);
        assert!(!path.exists());
    }
}
