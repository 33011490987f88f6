//! Locks of a snapshot file: many processes may serve it, or one may replace it.
//!
//! The lock is `flock`, for three reasons. It belongs to the open file description, so a pager that forks into the
//! background keeps it by keeping the descriptor, and it is gone when the last holder is, however that one died; a
//! POSIX record lock would be lost at the fork, and again at any close of the same file. It is one lock for a whole
//! file, and a server takes it shared on a descriptor that is only readable. And shell users have `flock(1)`.
//!
//! The exclusive form wants a writable descriptor on NFS, which makes a record lock of it. Elsewhere it does not, and a
//! file that its owner may not write is replaced all the same: that is a matter of its directory. So
//! [`open_for_exclusive`] opens for writing where that is allowed.
//!
//! A mapped file is another matter: who maps it keeps the file that it has, even when another gets its name. So a VM
//! that maps it holds a second lock, of the open file description (OFD locks, fcntl(2)), which only what writes into
//! the file takes exclusively.
//!
//! A server holds the lock shared for as long as it answers faults. A save that will replace the file holds it
//! exclusively from before the VM is touched until the new file has the name, so that it is refused at once rather than
//! after gigabytes, and so that two saves never race for one name.

#![allow(unsafe_code, reason = "OFD locks are taken with fcntl")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::path::Arg;

use crate::error::SnapshotError;

const SERVED: &str = "it is being served to a restored VM, or another save is replacing it; \
                      wait for that to end, or save under another name";
const MAPPED: &str = "a VM maps it as its memory; wait for its end, or work on a copy";
const WRITTEN: &str = "limosa is writing to it; try again when that has ended";
const OPENED: &str = "a VM or another program has it open; try again when that has ended";
const KEPT: &str = "another process keeps checkpoints in it; end that one, or use another directory";
const REPLACED: &str = "a save is replacing it; try again when that has ended";

/// How long it may take to ask whether a directory is locked.
const ASKED_WITHIN: Duration = Duration::from_millis(20);

/// Takes the lock of a server: shared, without waiting.
pub(crate) fn shared(file: impl AsFd, path: &Path) -> Result<(), SnapshotError> {
    take(file, path, FlockOperation::NonBlockingLockShared, REPLACED)
}

/// Opens a file for [`exclusive`]: for writing, although nothing is written, and only for reading where it has to be.
pub(crate) fn open_for_exclusive(directory: impl AsFd, name: impl Arg + Copy) -> Result<File, Errno> {
    let open = |access: OFlags| {
        let flags = access | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        rustix::fs::openat(&directory, name, flags, Mode::empty()).map(File::from)
    };
    match open(OFlags::RDWR) {
        Err(Errno::ACCESS | Errno::ROFS) => open(OFlags::RDONLY),
        opened => opened,
    }
}

/// Takes the lock of a replacer: exclusive, without waiting.
pub(crate) fn exclusive(file: impl AsFd, path: &Path) -> Result<(), SnapshotError> {
    take(file, path, FlockOperation::NonBlockingLockExclusive, SERVED)
}

/// Takes the lock of a VM that maps the file: shared, for as long as the description is open in any process.
pub(crate) fn mapping(file: impl AsFd, path: &Path) -> Result<(), SnapshotError> {
    take_whole(file, path, libc::F_RDLCK, WRITTEN)
}

/// Takes the lock for writing into the file, on a writable description.
pub(crate) fn writing(file: impl AsFd, path: &Path) -> Result<(), SnapshotError> {
    take_whole(file, path, libc::F_WRLCK, MAPPED)
}

/// Gives the lock of [`writing`] back.
pub(crate) fn end_writing(file: impl AsFd, path: &Path) -> Result<(), SnapshotError> {
    take_whole(file, path, libc::F_UNLCK, WRITTEN)
}

/// Takes the lock of [`writing`] from programs that map the file, and from those that have it open as a disk image:
/// QEMU and its tools lock bytes of it then. On a description that is only readable, it is only asked for.
pub(crate) fn alone(file: impl AsFd, path: &Path) -> Result<(), SnapshotError> {
    let taken = set_whole(&file, libc::F_OFD_SETLK, libc::F_WRLCK);
    match taken.as_ref().map_err(io::Error::raw_os_error) {
        Err(Some(libc::EBADF)) => match set_whole(&file, libc::F_OFD_GETLK, libc::F_WRLCK) {
            Ok(libc::F_UNLCK) => Ok(()),
            Ok(_) => Err(SnapshotError::Locked { path: path.to_path_buf(), by: OPENED }),
            Err(error) => after_lock(Err(error), path, OPENED),
        },
        _ => after_lock(taken, path, OPENED),
    }
}

/// Takes the lock of the one process that makes files in a directory. Waits for those who only ask whether it is taken:
/// they have it for a moment.
pub(crate) fn directory(directory: impl AsFd, path: &Path) -> Result<(), SnapshotError> {
    let begun = Instant::now();
    loop {
        match take(&directory, path, FlockOperation::NonBlockingLockExclusive, KEPT) {
            Err(SnapshotError::Locked { .. }) if begun.elapsed() < ASKED_WITHIN => thread::sleep(ASKED_WITHIN / 10),
            taken => return taken,
        }
    }
}

fn take_whole(file: impl AsFd, path: &Path, kind: libc::c_int, by: &'static str) -> Result<(), SnapshotError> {
    after_lock(set_whole(file, libc::F_OFD_SETLK, kind), path, by)
}

/// Takes or asks for a lock of the whole file, and returns its kind as the kernel left it.
fn set_whole(file: impl AsFd, command: libc::c_int, kind: libc::c_int) -> io::Result<libc::c_int> {
    // SAFETY: all fields are integers, and zero is a value of each: the whole file, from its beginning.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    #[expect(clippy::cast_possible_truncation, reason = "both are small numbers, of which the C library makes ints")]
    {
        (range.l_type, range.l_whence) = (kind as libc::c_short, libc::SEEK_SET as libc::c_short);
    }
    // SAFETY: reads and writes the structure, which outlives the call.
    match unsafe { libc::fcntl(file.as_fd().as_raw_fd(), command, &raw mut range) } {
        0 => Ok(libc::c_int::from(range.l_type)),
        _ => Err(io::Error::last_os_error()),
    }
}

fn after_lock(taken: io::Result<libc::c_int>, path: &Path, by: &'static str) -> Result<(), SnapshotError> {
    let Err(error) = taken else { return Ok(()) };
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Err(SnapshotError::Locked { path: path.to_path_buf(), by }),
        // A filesystem without such locks: nobody can be kept from anything there.
        Some(libc::ENOLCK | libc::EINVAL | libc::EOPNOTSUPP) => Ok(()),
        _ => Err(SnapshotError::io("lock it", path, None, error)),
    }
}

/// Gives the lock back at once, also if a forked child still holds a copy of the descriptor.
pub(crate) fn release(file: impl AsFd) {
    // Nothing to do about a failure: the lock goes with the last descriptor at the latest.
    let _ = rustix::fs::flock(file, FlockOperation::Unlock);
}

fn take(file: impl AsFd, path: &Path, operation: FlockOperation, by: &'static str) -> Result<(), SnapshotError> {
    loop {
        match rustix::fs::flock(&file, operation) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) => return Err(SnapshotError::Locked { path: path.to_path_buf(), by }),
            Err(errno) => return Err(SnapshotError::io("lock it", path, None, errno)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exclusive_lock_is_taken_on_a_writable_descriptor_where_there_can_be_one() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("vm"), b"contents").unwrap();
        let writable = |path: &Path, name: &str| {
            let file = open_for_exclusive(File::open(path).unwrap(), name).unwrap();
            exclusive(&file, Path::new(name)).unwrap();
            rustix::fs::fcntl_getfl(&file).unwrap().contains(OFlags::RDWR)
        };
        assert!(writable(directory.path(), "vm"));
        // No user may write here, not even root.
        assert!(!writable(Path::new("/sys/kernel"), "uevent_seqnum"));
        let missing = open_for_exclusive(File::open(directory.path()).unwrap(), "missing");
        assert_eq!(missing.unwrap_err(), Errno::NOENT);
    }
}
