//! Whether a name in a command line leads each clone to a file of its own.
//!
//! Names are resolved, not compared as text: `{dir}/../scratch` is the same file for all clones, and so is a link of
//! each clone's to one file.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Component, Path, PathBuf};

use limosa_qemu::{FileId, is_same_file};

use super::CommandTemplate;

/// Decides for the clones of one directory, and collects the names that are each clone's own.
#[derive(Debug)]
pub(crate) struct Ownership<'a> {
    folder: &'a Path,
    own: RefCell<BTreeSet<String>>,
}

impl<'a> Ownership<'a> {
    /// For clones whose directories are in `folder`, which may not exist yet.
    pub(crate) fn new(folder: &'a Path) -> Self {
        Self { folder, own: RefCell::default() }
    }

    /// Returns the names, with placeholders, that were found to be each clone's own.
    pub(crate) fn into_names(self) -> Vec<String> {
        self.own.into_inner().into_iter().collect()
    }

    /// Whether the files that this name, with placeholders, gives two clones are different files. [`Claims`] compares
    /// those of all clones. A name that is no path (`json:...`, `nbd://...`, a description of a node) is not looked
    /// into: a placeholder in it proves nothing.
    pub(crate) fn is_own(&self, name: &str) -> bool {
        let name = name.strip_prefix("file:").unwrap_or(name);
        // A protocol's name ends at the first colon, unless a slash comes before it.
        if name.starts_with('{') && !name.starts_with("{dir}") && !name.starts_with("{n") {
            return false;
        }
        if name.split('/').next().is_some_and(|first| first.contains([':', '='])) {
            return false;
        }
        let [one, other] = [1, 2].map(|number| resolved(&filled(name, number, self.folder)));
        let is_own = !is_same_file(&one, &other);
        if is_own {
            self.own.borrow_mut().insert(name.to_owned());
        }
        is_own
    }
}

/// Returns the path that clone `number` of `folder` gets for this name.
fn filled(name: &str, number: u64, folder: &Path) -> PathBuf {
    let own = format!("{number:03}");
    let args = CommandTemplate::new(vec![name.into()]).fill(number, &own, &folder.join(&own));
    args.into_iter().next().unwrap_or_default().into()
}

/// The files that clones have for themselves, by their resolved names and by what these lead to.
#[derive(Debug)]
pub(crate) struct Claims<'a> {
    names: &'a [String],
    folder: &'a Path,
    paths: HashMap<PathBuf, u64>,
    files: HashMap<FileId, u64>,
}

impl<'a> Claims<'a> {
    /// For the clones of `folder`, each with the files of these names.
    pub(crate) fn new(names: &'a [String], folder: &'a Path) -> Self {
        Self { names, folder, paths: HashMap::new(), files: HashMap::new() }
    }

    /// Claims the files of a clone. What another clone has claimed stays that clone's, and the rest is claimed.
    ///
    /// # Errors
    /// Another clone has one of them: the first such name, and that clone.
    pub(crate) fn claim(&mut self, number: u64) -> Result<(), String> {
        let mut conflict = None;
        for name in self.names {
            let path = resolved(&filled(name, number, self.folder));
            let by_file = FileId::of_path(&path).ok().map(|file| *self.files.entry(file).or_insert(number));
            let by_path = *self.paths.entry(path.clone()).or_insert(number);
            let others = [Some(by_path), by_file].into_iter().flatten().find(|owner| *owner != number);
            if let Some(other) = others.filter(|_| conflict.is_none()) {
                let path = path.display();
                conflict = Some(format!("{name}: clones {other:03} and {number:03} would both write to {path}"));
            }
        }
        conflict.map_or(Ok(()), Err)
    }

    /// Gives back what a clone has claimed that was not started.
    pub(crate) fn release(&mut self, number: u64) {
        self.paths.retain(|_, owner| *owner != number);
        self.files.retain(|_, owner| *owner != number);
    }
}

/// Whether a name is that of a device which takes what is written to it and keeps nothing: a terminal, /dev/null.
pub(crate) fn is_character_device(name: &str) -> bool {
    fs::metadata(name).is_ok_and(|found| found.file_type().is_char_device())
}

/// Links that are followed at most, as in the kernel.
const LINKS_MAX: u32 = 40;

/// Resolves links and `..` in a path; parts that do not exist yet are kept as they are written. A link to a file that
/// does not exist leads to that file: QEMU would create it.
fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    resolved_within(&path, LINKS_MAX)
}

fn resolved_within(path: &Path, links: u32) -> PathBuf {
    if let Ok(whole) = fs::canonicalize(path) {
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
                found = match (fs::canonicalize(&next), fs::read_link(&next), links.checked_sub(1)) {
                    (Ok(whole), ..) => whole,
                    (Err(_), Ok(target), Some(links)) => resolved_within(&found.join(target), links),
                    (Err(_), ..) => next,
                };
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
        let names = ownership.into_names();
        assert!(names.contains(&"{dir}/scratch".to_owned()) && !names.contains(&in_folder("one")), "{names:?}");
        assert!(is_character_device("/dev/null") && !is_character_device(path("one").to_str().unwrap()));
    }

    #[test]
    fn the_files_of_all_clones_are_compared_and_not_only_of_the_first_two() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for number in [1, 2, 3] {
            fs::write(path(&format!("disk-{number}")), "").unwrap();
        }
        symlink(path("disk-2"), path("disk-4")).unwrap();
        fs::hard_link(path("disk-3"), path("disk-5")).unwrap();
        symlink(path("disk-7"), path("disk-6")).unwrap();
        let names = [path("disk-{n}").to_str().unwrap().to_owned(), "{dir}/log".to_owned()];
        let clones = path("clones");
        let mut claims = Claims::new(&names, &clones);
        for (number, other) in
            [(1, None), (2, None), (3, None), (4, Some("002")), (5, Some("003")), (6, None), (7, Some("006"))]
        {
            let refused = claims.claim(number).err();
            assert_eq!(refused.is_some(), other.is_some(), "{number}: {refused:?}");
            assert!(other.is_none_or(|other| refused.is_some_and(|why| why.contains(other))), "{number}");
        }
        assert!(claims.claim(1).is_ok(), "a clone may claim its own files again");
    }
}
