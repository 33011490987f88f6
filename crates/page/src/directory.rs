//! The directory of a file, by its path.

use std::path::Path;

/// Returns the directory of a file: `.` for a path that is a name alone.
#[must_use]
pub fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_alone_is_in_the_working_directory() {
        for (path, directory) in [("vm", "."), ("./vm", "."), ("a/vm", "a"), ("/vm", "/"), ("/", ".")] {
            assert_eq!(directory_of(Path::new(path)), Path::new(directory), "{path}");
        }
    }
}
