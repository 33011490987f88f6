//! Where the images that are written have their journals: what was acknowledged survives there that the server is
//! killed.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use limosa_console::say;
use limosa_image::qcow2::JournalFolder;
use rustix::process::geteuid;

use crate::args::JournalArg;

/// Opens the folder of journals; `None`: images have no journal.
///
/// # Errors
/// The folder that was asked for cannot be used.
pub(super) fn open(wanted: Option<&JournalArg>) -> anyhow::Result<Option<JournalFolder>> {
    match wanted {
        Some(JournalArg::Off) => Ok(None),
        Some(JournalArg::Folder(path)) => {
            let option = || format!("--journal {}", path.display());
            let is_new = !path.try_exists().with_context(option)?;
            // A wrong path would be a folder that no other server looks into.
            let above = path.parent().filter(|above| !above.as_os_str().is_empty());
            if let Some(above) = above.filter(|above| !above.is_dir()) {
                anyhow::bail!("{}: there is no folder {} to make it in", option(), above.display());
            }
            anyhow::ensure!(is_new || path.is_dir(), "{}: it is no folder", option());
            let folder = JournalFolder::open(path).with_context(option)?;
            if is_new {
                say!("limosa: {}: the folder did not exist, and was made", option());
            }
            Ok(Some(folder))
        }
        None => Ok(usual()),
    }
}

/// Returns the folders that servers of this user find without being told, those that exist.
pub(crate) fn existing() -> Vec<JournalFolder> {
    // In a folder that cannot be used no server has a journal.
    own_places().iter().filter_map(|path| JournalFolder::find(path).ok().flatten()).collect()
}

/// The folder that every server of this user finds without being told.
fn usual() -> Option<JournalFolder> {
    let mut reasons = Vec::new();
    for path in own_places() {
        match JournalFolder::open(&path) {
            Ok(folder) => return Some(folder),
            Err(error) => reasons.push(format!("{}: {error}", path.display())),
        }
    }
    let why = reasons.join("; ");
    say!("limosa: without a journal, because no folder for it can be used ({why}); give one with --journal DIR");
    None
}

/// The places of this process's user.
fn own_places() -> Vec<PathBuf> {
    places(geteuid().as_raw(), std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from))
}

/// Folders in memory, the best one first: one that a login session takes away at its end is not for root.
fn places(user: u32, runtime: Option<PathBuf>) -> Vec<PathBuf> {
    let own = if user == 0 { Some(PathBuf::from("/run")) } else { runtime.filter(|path| path.is_absolute()) };
    let shared = Path::new("/dev/shm").join(format!("limosa-{user}"));
    own.map(|path| path.join("limosa")).into_iter().chain([shared]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_does_not_use_the_folder_of_a_session() {
        let named = |user, runtime: Option<&str>| {
            let places = places(user, runtime.map(PathBuf::from));
            places.iter().map(|path| path.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(named(0, Some("/run/user/0")), ["/run/limosa", "/dev/shm/limosa-0"]);
        assert_eq!(named(7, Some("/run/user/7")), ["/run/user/7/limosa", "/dev/shm/limosa-7"]);
        assert_eq!(named(7, Some("relative")), ["/dev/shm/limosa-7"]);
        assert_eq!(named(7, None), ["/dev/shm/limosa-7"]);
    }
}
