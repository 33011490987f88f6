//! Whether a name in a command line leads each clone to a file of its own.
//!
//! Names are resolved, not compared as text: `{dir}/../scratch` is the same file for all clones, and so is a link of
//! each clone's to one file.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Component, Path, PathBuf};

use super::CommandTemplate;

/// Decides for the clones of one directory.
#[derive(Debug)]
pub(crate) struct Ownership<'a> {
    folder: &'a Path,
}

impl<'a> Ownership<'a> {
    /// For clones whose directories are in `folder`, which may not exist yet.
    pub(crate) fn new(folder: &'a Path) -> Self {
        Self { folder }
    }

    /// Whether the files that this name, with placeholders, gives two clones are different files. A name that is no
    /// path (`json:...`, `nbd://...`, a description of a node) is not looked into: a placeholder in it proves nothing.
    pub(crate) fn is_own(&self, name: &str) -> bool {
        let name = name.strip_prefix("file:").unwrap_or(name);
        // A protocol's name ends at the first colon, unless a slash comes before it.
        if name.starts_with('{') && !name.starts_with("{dir}") && !name.starts_with("{n") {
            return false;
        }
        if name.split('/').next().is_some_and(|first| first.contains([':', '='])) {
            return false;
        }
        let [one, other] = [1, 2].map(|number| resolved(&self.filled(name, number)));
        !is_same_file(&one, &other)
    }

    /// Returns the path that clone `number` gets for this name.
    fn filled(&self, name: &str, number: u64) -> PathBuf {
        let own = format!("{number:03}");
        let words = CommandTemplate::new(vec![name.into()]).fill(number, &own, &self.folder.join(&own));
        words.into_iter().next().unwrap_or_default().into()
    }
}

/// Whether a name is that of a device which takes what is written to it and keeps nothing: a terminal, /dev/null.
pub(crate) fn is_character_device(name: &str) -> bool {
    fs::metadata(name).is_ok_and(|found| found.file_type().is_char_device())
}

/// Whether two paths are the same text, or lead to one file, through links of either kind.
pub(crate) fn is_same_file(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    one == other || id(one).is_some_and(|one| id(other) == Some(one))
}

/// Resolves links and `..` in a path; parts that do not exist yet are kept as they are written.
fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    if let Ok(whole) = fs::canonicalize(&path) {
        return whole;
    }
    let mut found = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::ParentDir => {
                found.pop();
            }
            Component::Normal(name) => {
                let next = found.join(name);
                found = fs::canonicalize(&next).unwrap_or(next);
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_name_is_a_clones_own_if_it_leads_elsewhere_for_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("one"), "").unwrap();
        for link in ["link-1", "link-2", "apart-1"] {
            symlink(path("one"), path(link)).unwrap();
        }
        fs::write(path("apart-2"), "").unwrap();
        fs::hard_link(path("one"), path("hard-1")).unwrap();
        fs::hard_link(path("one"), path("hard-2")).unwrap();
        let clones = path("clones");
        let ownership = Ownership::new(&clones);
        let in_folder = |name: &str| path(name).to_str().unwrap().to_owned();
        for (name, is_own) in [
            ("{dir}/scratch".to_owned(), true),
            ("{dir}/a/../scratch".to_owned(), true),
            ("{dir}/../scratch".to_owned(), false),
            ("{dir}/../{name}.img".to_owned(), true),
            (in_folder("disk-{n}"), true),
            (in_folder("{name}/../disk"), false),
            (in_folder("link-{n}"), false),
            (in_folder("hard-{n}"), false),
            (in_folder("apart-{n}"), true),
            (in_folder("one"), false),
            ("relative".to_owned(), false),
            ("relative-{n}".to_owned(), true),
            ("file:{dir}/scratch".to_owned(), true),
            (format!("file:{}", in_folder("link-{n}")), false),
            ("nbd://host/{n}".to_owned(), false),
            (r#"json:{"driver":"file","filename":"/srv/{n}"}"#.to_owned(), false),
            ("driver=nbd,node-name=disk-{n},server.path=/s".to_owned(), false),
        ] {
            assert_eq!(ownership.is_own(&name), is_own, "{name}");
        }
        assert!(is_character_device("/dev/null") && !is_character_device(path("one").to_str().unwrap()));
    }
}
