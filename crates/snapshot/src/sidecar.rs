//! The name of the file beside a snapshot that holds its working set, and its removal.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

/// The first bytes of a working set's file.
pub(crate) const MAGIC: [u8; 8] = *b"limosa\x1aw";
/// The end of its name, behind the snapshot's.
const SUFFIX: &str = ".working-set";

/// Returns the name of the working set of a file.
pub(crate) fn name_for(name: &OsStr) -> OsString {
    let mut name = name.to_os_string();
    name.push(SUFFIX);
    name
}

/// Opens a working set's file; `None` if nothing has the name.
pub(crate) fn open(directory: impl AsFd, name: &OsStr) -> io::Result<Option<File>> {
    // Without O_NONBLOCK, opening a named pipe would wait for its other end.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(directory, name, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        // No file can have a name that is too long.
        Err(Errno::NOENT | Errno::NAMETOOLONG) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    match FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) {
        FileType::RegularFile => Ok(Some(file)),
        _ => Err(io::Error::other("it is not a regular file")),
    }
}

/// Returns whether the name is free, or that of a working set, so that a new one may take it.
pub(crate) fn is_free(directory: impl AsFd, name: &OsStr) -> io::Result<bool> {
    Ok(open(directory, name)?.is_none_or(|file| is_working_set(&file)))
}

fn is_working_set(file: &File) -> bool {
    let mut magic = [0; MAGIC.len()];
    file.read_exact_at(&mut magic, 0).is_ok_and(|()| magic == MAGIC)
}

/// Removes the working set of a file that had this name before: the name is a new snapshot's now. A file of another
/// program with that name stays. No failure counts, because a working set of another snapshot is never used.
pub(crate) fn remove_stale(directory: impl AsFd + Copy, snapshot: &OsStr) {
    let name = name_for(snapshot);
    if open(directory, &name).ok().flatten().is_some_and(|file| is_working_set(&file)) {
        let _ = rustix::fs::unlinkat(directory, name.as_os_str(), AtFlags::empty());
    }
}
