//! A file that has no name yet.
//!
//! Law of this module: under the target's name there is either nothing new or a whole file. A file being written has
//! no name at all (`O_TMPFILE`), so that a kill at any moment leaves nothing; where the file system cannot do that it
//! has the temporary name `.NAME.limosa-PID-RANDOM`, is removed when dropped, and the remains of a kill are removed
//! by the next save to the same target. Publishing is fsync, then the name, then fsync of the directory.
//!
//! Everything that can refuse a target refuses it in [`UnnamedFile::create`], before a VM is touched.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use limosa_page::directory_of;
use rustix::fs::{self, Access, AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::path::Arg;

use crate::attributes;
use crate::error::SnapshotError;
use crate::held::HeldSnapshot;
use crate::lock;
use crate::sidecar;

/// Guest memory is the owner's alone.
pub(crate) const MODE: Mode = Mode::RUSR.union(Mode::WUSR);
/// How often something is tried that only other saves to the same target can spoil.
const TRIES: usize = 100;

/// Whether publishing waits until the file would survive a power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// fsync of the file before it gets its name and of its directory afterwards.
    #[default]
    Synced,
    /// No fsync. The file is whole for every process that sees it, but a power cut may lose or tear it: for tmpfs and
    /// for benchmarks.
    Unsynced,
}

/// A file being written for a name it does not have yet; dropping it without [`publish`](UnnamedFile::publish) leaves
/// nothing behind.
#[derive(Debug)]
pub struct UnnamedFile {
    file: File,
    directory: OwnedFd,
    target: PathBuf,
    name: OsString,
    /// The temporary name, while it has one.
    temporary: Option<OsString>,
    /// Whether an existing file is replaced, or else an error.
    replace: bool,
    /// The file to be replaced, if there was one.
    held: Option<Held>,
}

/// A file that is open only for its exclusive lock.
#[derive(Debug)]
struct Held(File);

impl Drop for Held {
    fn drop(&mut self) {
        // Said aloud, because a child that was just forked may have a copy of the descriptor.
        lock::release(&self.0);
    }
}

impl UnnamedFile {
    /// A new, empty, nameless file beside `target`, mode 0600, open for reading and writing.
    ///
    /// With `replace`, [`publish`](UnnamedFile::publish) puts it in the place of an existing file.
    ///
    /// # Errors
    /// Refuses at once a target that exists (without `replace`), that is not a regular file, that is being served, or
    /// whose directory is missing or not writable.
    pub fn create(target: &Path, replace: bool) -> Result<Self, SnapshotError> {
        Self::create_in(target, replace, true)
    }

    /// A new, empty, nameless file that [`replace_held`](UnnamedFile::replace_held) puts in the place of a held one. It
    /// has the owner, the mode and the extended attributes of that, with them the ACL.
    ///
    /// # Errors
    /// The directory is not writable; one of these cannot be given to it.
    pub fn replacing(held: &HeldSnapshot) -> Result<Self, SnapshotError> {
        let target = held.path();
        let duplicated = held.directory().try_clone();
        let directory = duplicated.map_err(|e| SnapshotError::io("duplicate a descriptor", target, None, e))?;
        sweep(&directory, held.name());
        let (file, temporary) = open_hidden(&directory, held.name(), target, true)?;
        let (target, name) = (target.to_path_buf(), held.name().to_os_string());
        let pending = Self { file, directory, target, name, temporary, replace: true, held: None };
        attributes::keep(held.file(), &pending.file, &pending.target)?;
        Ok(pending)
    }

    /// `nameless` chooses between the two ways of not being seen, so that tests reach the second one everywhere.
    fn create_in(target: &Path, replace: bool, nameless: bool) -> Result<Self, SnapshotError> {
        let refused = |why: String| SnapshotError::Target { path: target.to_path_buf(), why };
        let ends_in_slash = target.as_os_str().as_bytes().last() == Some(&b'/');
        let name = match target.file_name() {
            Some(name) if !ends_in_slash => name.to_os_string(),
            _ => return Err(refused("is not the name of a file".to_owned())),
        };
        let parent = directory_of(target);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = fs::open(parent, flags, Mode::empty()).map_err(|errno| match errno {
            Errno::NOENT => refused(format!("directory {} does not exist", parent.display())),
            Errno::NOTDIR => refused(format!("{} is not a directory", parent.display())),
            errno => SnapshotError::io("open its directory", target, None, errno),
        })?;
        fs::accessat(&directory, ".", Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS).map_err(|errno| {
            refused(format!("directory {} cannot be written to: {}", parent.display(), std::io::Error::from(errno)))
        })?;
        let held = existing(&directory, &name, target, replace)?;
        sweep(&directory, &name);

        let (file, temporary) = open_hidden(&directory, &name, target, nameless)?;
        Ok(Self { file, directory, target: target.to_path_buf(), name, temporary, replace, held })
    }

    /// The file, open for reading and writing.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The name that it has until it is published, where the filesystem cannot do without one: what a kill would leave.
    pub fn temporary_path(&self) -> Option<PathBuf> {
        self.temporary.as_ref().map(|name| self.target.with_file_name(name))
    }

    /// The name it will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Another open file description of the same file, write-only, for a QEMU that writes it itself.
    ///
    /// QEMU takes a descriptor out of a set (`add-fd`, `file:/dev/fdset/N`) only if its access mode is exactly the one
    /// it would have opened the file with, and that is write-only for a save. A save with `direct-io` needs a second
    /// one in the same set with `O_DIRECT`, which is what `direct_io` asks for. A description of its own, because flags
    /// and position of this one must not move.
    ///
    /// # Errors
    /// If the file cannot be opened again, e.g. with `O_DIRECT` on a file system that has none.
    pub fn writer_descriptor(&self, direct_io: bool) -> Result<OwnedFd, SnapshotError> {
        let mut flags = OFlags::WRONLY | OFlags::CLOEXEC;
        if direct_io {
            flags |= OFlags::DIRECT;
        }
        let opened = match &self.temporary {
            Some(name) => fs::openat(&self.directory, name.as_os_str(), flags | OFlags::NOFOLLOW, Mode::empty()),
            None => fs::open(proc_path(&self.file), flags, Mode::empty()),
        };
        let operation = if direct_io { "open it for QEMU with O_DIRECT" } else { "open it for QEMU" };
        opened.map_err(|errno| SnapshotError::io(operation, &self.target, None, errno))
    }

    /// Makes the file durable (or not), gives it its name, and makes the name durable. A
    /// [working set](crate::WorkingSet) of a snapshot that had this name before is removed.
    ///
    /// # Errors
    /// [`SnapshotError::Exists`] if another process took the name meanwhile and `replace` was not given;
    /// [`SnapshotError::Locked`] if it was, and what has the name now is being served. After any error the target is
    /// what it was, with one exception that the error states: the directory's own fsync failed.
    pub fn publish(mut self, durability: Durability) -> Result<PathBuf, SnapshotError> {
        if durability == Durability::Synced {
            self.file.sync_all().map_err(|e| SnapshotError::io("make it durable (fsync)", &self.target, None, e))?;
        }
        if self.replace {
            self.name_it_or_replace()?;
        } else {
            self.name_it()?;
        }
        sidecar::remove_stale(&self.directory, &self.name);
        lock::release(&self.file);
        if durability == Durability::Synced {
            self.sync_directory()?;
        }
        Ok(std::mem::take(&mut self.target))
    }

    /// Makes the file durable, and puts it in the place of the held one, durably. A file that has the name meanwhile
    /// stays. The working set and the modification time stay those of the snapshot: what it holds is the same.
    ///
    /// # Errors
    /// [`SnapshotError::Changed`] if the held file has lost the name; as [`publish`](UnnamedFile::publish).
    pub fn replace_held(mut self, held: &HeldSnapshot) -> Result<PathBuf, SnapshotError> {
        attributes::keep_time(held.file(), &self.file, &self.target)?;
        self.file.sync_all().map_err(|e| SnapshotError::io("make it durable (fsync)", &self.target, None, e))?;
        held.check_named()?;
        self.take_over()?;
        lock::release(&self.file);
        self.sync_directory()?;
        Ok(std::mem::take(&mut self.target))
    }

    fn sync_directory(&self) -> Result<(), SnapshotError> {
        fs::fsync(&self.directory).map_err(|e| {
            let operation = "make its name durable (fsync of the directory); the file itself is whole and in place";
            SnapshotError::io(operation, &self.target, None, e)
        })
    }

    /// The file itself, which never gets its name: it is gone when it is closed.
    ///
    /// # Errors
    /// If its descriptor cannot be duplicated.
    pub fn into_nameless(self) -> Result<File, SnapshotError> {
        let copy = self.file.try_clone();
        let file = copy.map_err(|error| SnapshotError::io("duplicate its descriptor", &self.target, None, error))?;
        lock::release(&file);
        Ok(file)
    }

    /// Takes the target's name only if no file has it.
    fn name_it(&mut self) -> Result<(), SnapshotError> {
        let Some(temporary) = self.temporary.clone() else { return self.link(&self.name) };
        let directory = &self.directory;
        let renamed = fs::renameat_with(
            directory,
            temporary.as_os_str(),
            directory,
            self.name.as_os_str(),
            RenameFlags::NOREPLACE,
        );
        match renamed {
            Ok(()) => self.temporary = None,
            // File systems without the flag: a hard link refuses an existing name just as well.
            Err(Errno::INVAL | Errno::NOSYS) => {
                fs::linkat(directory, temporary.as_os_str(), directory, self.name.as_os_str(), AtFlags::empty())
                    .map_err(|errno| self.naming(errno))?;
            }
            Err(errno) => return Err(self.naming(errno)),
        }
        Ok(())
    }

    /// Takes the target's name, only from the file that is held.
    ///
    /// The name may have been free when this save began, or its file was moved away since; what another save has
    /// published there meanwhile may be in use.
    fn name_it_or_replace(&mut self) -> Result<(), SnapshotError> {
        for _ in 0..TRIES {
            if self.held.as_ref().is_some_and(|held| names_file(&self.directory, self.name.as_os_str(), &held.0)) {
                return self.take_over();
            }
            match self.name_it() {
                Err(SnapshotError::Exists { .. }) => {
                    self.held = existing(&self.directory, &self.name, &self.target, true)?;
                }
                done => return done,
            }
        }
        let why = "other programs create and remove it again and again".to_owned();
        Err(SnapshotError::Target { path: self.target.clone(), why })
    }

    /// Takes the target's name from the file that has it.
    fn take_over(&mut self) -> Result<(), SnapshotError> {
        let temporary = match self.temporary.clone() {
            Some(temporary) => temporary,
            None => {
                let temporary = temporary_name(&self.name);
                self.link(&temporary)?;
                self.temporary = Some(temporary.clone());
                temporary
            }
        };
        fs::renameat(&self.directory, temporary.as_os_str(), &self.directory, self.name.as_os_str())
            .map_err(|errno| self.naming(errno))?;
        self.temporary = None;
        Ok(())
    }

    /// Gives the nameless file a name that must be free.
    fn link(&self, name: &OsStr) -> Result<(), SnapshotError> {
        fs::linkat(fs::CWD, proc_path(&self.file), &self.directory, name, AtFlags::SYMLINK_FOLLOW)
            .map_err(|errno| self.naming(errno))
    }

    fn naming(&self, errno: Errno) -> SnapshotError {
        match errno {
            Errno::EXIST => SnapshotError::Exists { path: self.target.clone() },
            errno => SnapshotError::io("give it its name", &self.target, None, errno),
        }
    }
}

impl Drop for UnnamedFile {
    fn drop(&mut self) {
        if let Some(temporary) = self.temporary.take() {
            // Best effort: the next save to the same target sweeps what stays.
            let _ = fs::unlinkat(&self.directory, temporary.as_os_str(), AtFlags::empty());
        }
    }
}

impl AsFd for UnnamedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Opens the file that has the target's name now; the returned file is locked exclusively.
fn existing(directory: &OwnedFd, name: &OsStr, target: &Path, replace: bool) -> Result<Option<Held>, SnapshotError> {
    let stat = match fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(SnapshotError::io("look at it", target, None, errno)),
    };
    let refused = |why: &str| Err(SnapshotError::Target { path: target.to_path_buf(), why: why.to_owned() });
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {}
        FileType::Directory => return refused("is a directory; name a file in it"),
        FileType::Symlink => return refused("is a symbolic link; name the file that it leads to"),
        _ => return refused("is not a regular file"),
    }
    if !replace {
        return Err(SnapshotError::Exists { path: target.to_path_buf() });
    }
    let file = match lock::open_for_exclusive(directory, name) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(SnapshotError::io("open it to see whether it is in use", target, None, errno)),
    };
    lock::exclusive(&file, target)?;
    Ok(Some(Held(file)))
}

/// Whether the name is that of this open file.
pub(crate) fn names_file(directory: impl AsFd, name: impl Arg, file: impl AsFd) -> bool {
    match (fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW), fs::fstat(file)) {
        (Ok(named), Ok(open)) => (named.st_dev, named.st_ino) == (open.st_dev, open.st_ino),
        _ => false,
    }
}

/// A file that no one sees, locked, and its temporary name if it has one.
fn open_hidden(
    directory: &OwnedFd,
    name: &OsStr,
    target: &Path,
    nameless: bool,
) -> Result<(File, Option<OsString>), SnapshotError> {
    match if nameless { open_nameless(directory, target)? } else { None } {
        Some(file) => {
            // It may get a temporary name on its way to the target's.
            lock::exclusive(&file, target)?;
            Ok((file, None))
        }
        None => open_temporary(directory, name, target),
    }
}

/// A file with a temporary name, locked: that tells a later save's sweep that the name belongs to a running process.
///
/// Until it is locked, a sweep that runs at the same moment takes it for a dead save's.
fn open_temporary(directory: &OwnedFd, name: &OsStr, target: &Path) -> Result<(File, Option<OsString>), SnapshotError> {
    for _ in 0..TRIES {
        let temporary = temporary_name(name);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = fs::openat(directory, temporary.as_os_str(), flags, MODE)
            .map_err(|errno| SnapshotError::io("create a temporary file beside it", target, None, errno))?;
        let file = File::from(file);
        match lock::exclusive(&file, target) {
            Ok(()) if names_file(directory, temporary.as_os_str(), &file) => return Ok((file, Some(temporary))),
            // Swept, or about to be: the process that holds the lock removes it.
            Ok(()) | Err(SnapshotError::Locked { .. }) => {}
            Err(error) => {
                let _ = fs::unlinkat(directory, temporary.as_os_str(), AtFlags::empty());
                return Err(error);
            }
        }
    }
    let why = "other saves to it remove its temporary file again and again; try again".to_owned();
    Err(SnapshotError::Target { path: target.to_path_buf(), why })
}

/// A file without a name, or none where the file system (or a missing procfs) leaves no way to name it later.
fn open_nameless(directory: &OwnedFd, target: &Path) -> Result<Option<File>, SnapshotError> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match fs::openat(directory, ".", flags, MODE) {
        Ok(file) => {
            let file = File::from(file);
            let nameable = fs::stat(proc_path(&file)).is_ok();
            Ok(nameable.then_some(file))
        }
        // A kernel or file system without the flag sees an attempt to write to a directory, or says what it is.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT | Errno::NOSYS) => Ok(None),
        Err(errno) => Err(SnapshotError::io("create a file in its directory", target, None, errno)),
    }
}

/// The kernel's name for an open file, the only one that a nameless file has.
fn proc_path(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

fn temporary_prefix(name: &OsStr) -> Vec<u8> {
    // A name may have 255 bytes; what is added has at most 39 behind the name and one before it.
    let kept = name.as_bytes().get(..200).unwrap_or(name.as_bytes());
    [b".", kept, b".limosa-"].concat()
}

fn temporary_name(name: &OsStr) -> OsString {
    let (random, _) = uuid::Uuid::new_v4().as_u64_pair();
    let mut bytes = temporary_prefix(name);
    bytes.extend_from_slice(format!("{}-{random:016x}", std::process::id()).as_bytes());
    OsString::from_vec(bytes)
}

/// Returns whether a name is one that an [`UnnamedFile`] has before it is published, where the filesystem cannot do
/// without: such a file is nobody's, or will be gone soon.
#[must_use]
pub fn is_temporary_name(name: &OsStr) -> bool {
    const INFIX: &[u8] = b".limosa-";
    let name = name.as_bytes();
    let infix = name.windows(INFIX.len()).rposition(|window| window == INFIX);
    name.starts_with(b".") && infix.is_some_and(|at| is_temporary_of(name, &name[..at + INFIX.len()]))
}

/// Whether `found` is a temporary name for `name`, exactly as [`temporary_name`] makes them.
fn is_temporary_of(found: &[u8], prefix: &[u8]) -> bool {
    let Some(rest) = found.strip_prefix(prefix) else { return false };
    let Some(dash) = rest.iter().position(|&byte| byte == b'-') else { return false };
    let (process, random) = rest.split_at(dash);
    !process.is_empty()
        && process.iter().all(u8::is_ascii_digit)
        && random.len() == 17
        && random.iter().skip(1).all(u8::is_ascii_hexdigit)
}

/// Removes what killed saves to the same target have left; never fails, a stranger's file does not concern limosa.
fn sweep(directory: &OwnedFd, name: &OsStr) {
    let prefix = temporary_prefix(name);
    let Ok(entries) = fs::Dir::read_from(directory) else { return };
    for entry in entries.flatten() {
        let found = entry.file_name();
        if !is_temporary_of(found.to_bytes(), &prefix) {
            continue;
        }
        let Ok(file) = lock::open_for_exclusive(directory, found) else { continue };
        let regular = fs::fstat(&file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
        // Its writer holds the lock for as long as it lives.
        if regular && lock::exclusive(&file, Path::new("")).is_ok() {
            let _ = fs::unlinkat(directory, found, AtFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn names(directory: &Path) -> Vec<OsString> {
        let mut names: Vec<_> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_temporary_name_fits_and_is_known_again_for_its_target_only() {
        for name in ["vm", "a-b.c", &"x".repeat(255)] {
            let name = OsStr::new(name);
            let temporary = temporary_name(name);
            assert!(temporary.len() <= 255);
            assert!(is_temporary_of(temporary.as_bytes(), &temporary_prefix(name)));
            assert!(!is_temporary_of(temporary.as_bytes(), &temporary_prefix(OsStr::new("other"))));
            assert!(is_temporary_name(&temporary) && !is_temporary_name(name));
        }
        for stranger in
            ["vm", ".vm.limosa-", ".vm.limosa-12", ".vm.limosa--0123456789abcdef", ".vm.limosa-1-0123456789abcdefg"]
        {
            assert!(!is_temporary_of(stranger.as_bytes(), b".vm.limosa-"), "{stranger}");
            assert!(!is_temporary_name(OsStr::new(stranger)), "{stranger}");
        }
    }

    #[test]
    fn with_a_temporary_name_the_semantics_are_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("vm");
        let pending = UnnamedFile::create_in(&target, false, false).unwrap();
        assert_eq!(names(directory.path()).len(), 1, "the temporary name");
        assert!(!target.exists());
        drop(pending);
        assert!(names(directory.path()).is_empty());

        let pending = UnnamedFile::create_in(&target, false, false).unwrap();
        pending.file().write_all_at(b"first", 0).unwrap();
        pending.publish(Durability::Synced).unwrap();
        assert_eq!(names(directory.path()), ["vm"]);

        let pending = UnnamedFile::create_in(&target, true, false).unwrap();
        pending.file().write_all_at(b"second", 0).unwrap();
        assert!(pending.writer_descriptor(false).is_ok());
        pending.publish(Durability::Synced).unwrap();
        assert_eq!(names(directory.path()), ["vm"]);
        assert_eq!(std::fs::read(&target).unwrap(), b"second");

        let other = directory.path().join("other");
        let pending = UnnamedFile::create_in(&other, false, false).unwrap();
        std::fs::write(&other, b"theirs").unwrap();
        assert!(matches!(pending.publish(Durability::Unsynced), Err(SnapshotError::Exists { .. })));
        assert_eq!(std::fs::read(&other).unwrap(), b"theirs");
        assert_eq!(names(directory.path()), ["other", "vm"]);
    }

    #[test]
    fn saves_that_begin_at_the_same_moment_leave_each_other_their_temporary_files() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("vm");
        let begin_and_end = || {
            for _ in 0..3000 {
                let pending = UnnamedFile::create_in(&target, false, false).unwrap();
                assert!(pending.temporary_path().unwrap().exists(), "another save removed it");
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(begin_and_end);
            scope.spawn(begin_and_end);
        });
        assert!(names(directory.path()).is_empty());
    }

    #[test]
    fn leftovers_of_dead_saves_are_swept_and_those_of_living_ones_are_not() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("vm");
        let alive = UnnamedFile::create_in(&target, false, false).unwrap();
        let dead = directory.path().join(temporary_name(OsStr::new("vm")));
        let stranger = directory.path().join(".vm.limosa-notes");
        std::fs::write(&dead, b"half a VM").unwrap();
        std::fs::write(&stranger, b"a stranger's").unwrap();
        drop(UnnamedFile::create_in(&target, false, false).unwrap());
        assert!(!dead.exists());
        assert!(stranger.exists());
        assert_eq!(names(directory.path()).len(), 2);
        alive.publish(Durability::Unsynced).unwrap();
    }
}
