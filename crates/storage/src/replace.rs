//! Small files that are replaced as a whole.
//!
//! Law: **whoever reads such a file finds the contents before or after**, also after a power cut.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;

use limosa_page::directory_of;
use rustix::fs::{CWD, RenameFlags, renameat_with};

/// Ends the name of the file that takes the contents first.
const ASIDE: &str = ".new";

/// Replaces the file at `path` by one with these contents, durably; one that is missing is created. The contents are
/// first in a file beside it whose name ends in `.new`; one that a killed process has left there is overwritten. One
/// process at a time may replace it.
///
/// # Errors
/// The kernel's. The file has the contents before or after.
pub fn replace_file(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut aside = path.to_owned();
    aside.as_mut_os_string().push(ASIDE);
    let mut file = File::create(&aside)?;
    file.write_all(contents)?;
    // Before it has its name: otherwise a power cut may leave an empty file there.
    file.sync_all()?;
    // Not rename(2), which the seccomp filter of a server does not permit.
    renameat_with(CWD, &aside, CWD, path, RenameFlags::empty())?;
    sync_folder(path)
}

/// Makes the names in the folder of a file durable.
///
/// # Errors
/// The kernel's.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(directory_of(path))?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_has_all_of_its_contents_and_one_that_was_left_beside_it_is_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mark");
        fs::write(folder.path().join("mark.new"), "longer than what is written now").unwrap();
        for contents in ["first", ""] {
            replace_file(&path, contents.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), contents);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        replace_file(&folder.path().join("missing/mark"), b"").unwrap_err();
    }

    #[test]
    fn a_file_that_cannot_be_replaced_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mark");
        fs::write(&path, "before").unwrap();
        fs::create_dir(folder.path().join("mark.new")).unwrap();
        replace_file(&path, b"after").unwrap_err();
        assert_eq!(fs::read_to_string(&path).unwrap(), "before");
    }

    #[test]
    fn a_name_without_a_folder_is_in_the_current_one() {
        sync_folder(Path::new("mark")).unwrap();
    }
}
