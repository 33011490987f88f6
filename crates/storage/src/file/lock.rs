//! QEMU's image locks.
//!
//! **Law: QEMU and limosa never open an image that the other writes.** QEMU locks bytes of an image file with open file
//! description locks (OFD locks, fcntl(2)), regardless of the file's contents there: byte 100 + n, shared, for each
//! permission n that it uses, and byte 200 + n, shared, for each permission n that it denies to others. Before a
//! permission is used, its byte 200 + n must not be locked by others; before one is denied, its byte 100 + n must not
//! be. The bytes are those of QEMU 2.10 and later (`RAW_LOCK_PERM_BASE`, `RAW_LOCK_SHARED_BASE`); the permissions are
//! numbered as in [`Permissions`].
//!
//! The kernel releases the locks when the last descriptor of the open file description is closed, however a process
//! ends. They are released explicitly before a file is closed: a forked process has copies of all descriptors until it
//! calls exec, and would keep the locks. Requests of a killed process that are in flight in a ring keep their files
//! open and locked until the kernel has cancelled them.
#![allow(unsafe_code, reason = "OFD locks are taken with fcntl")]

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::MetadataExt;

use parking_lot::Mutex;

use crate::file::open_error::{ANOTHER, LockHolders, OpenError};

/// The byte for use of permission 0.
const USED: libc::off_t = 100;
/// The byte for denial of permission 0.
const DENIED: libc::off_t = 200;
/// Number of permissions.
const COUNT: u8 = 4;

/// The bytes that this process has locked, by descriptor.
static LOCKED: Mutex<BTreeMap<RawFd, Vec<libc::off_t>>> = Mutex::new(BTreeMap::new());

/// Whether QEMU's image locks are taken and respected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockPolicy {
    /// As in QEMU: a writer excludes all others, and readers exclude writers. Without effect where the filesystem does
    /// not support such locks.
    #[default]
    Auto,
    /// The same; opening fails where locks are not supported.
    Required,
    /// Locks are neither taken nor respected (`-U` of qemu-img). Data that is read while others write may be
    /// inconsistent.
    None,
}

/// Permissions on an image, as QEMU numbers them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Permissions {
    /// Consistent reads (permission 0).
    pub consistent_read: bool,
    /// Writes (permission 1).
    pub write: bool,
    /// Writes that do not change the guest-visible contents (permission 2).
    pub write_unchanged: bool,
    /// Resizing (permission 3).
    pub resize: bool,
}

impl Permissions {
    /// The permissions that are used by opening an image; the same as those of QEMU's qcow2 driver.
    pub(crate) fn used(read_only: bool) -> Self {
        Self { consistent_read: true, write: !read_only, write_unchanged: false, resize: !read_only }
    }

    /// The permissions that are denied to others by opening an image: all that change it.
    pub(crate) fn denied() -> Self {
        Self { consistent_read: false, write: true, write_unchanged: false, resize: true }
    }

    fn has(self, number: u8) -> bool {
        [self.consistent_read, self.write, self.write_unchanged, self.resize].get(usize::from(number)) == Some(&true)
    }

    fn numbers(self) -> impl Iterator<Item = u8> {
        (0..COUNT).filter(move |&number| self.has(number))
    }
}

/// A conflict with another process's locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Conflict {
    number: u8,
    /// Whether the other process uses a permission that we deny; else it denies one that we use.
    used: bool,
}

impl Conflict {
    /// The byte that the other one has locked.
    fn byte(self) -> libc::off_t {
        libc::off_t::from(self.number) + if self.used { USED } else { DENIED }
    }
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done = ["reads", "writes", "moves", "resizes"].get(usize::from(self.number)).copied().unwrap_or("uses");
        let doing = ["reading", "writing", "moving", "resizing"].get(usize::from(self.number)).copied();
        match self.used {
            true => write!(f, "has it open and {done} it"),
            false => write!(f, "has it open and allows no {}", doing.unwrap_or("use")),
        }
    }
}

/// Locks a file, and fails if another process holds a conflicting lock.
///
/// # Errors
/// [`OpenError::Locked`] with the processes that have it open; else the kernel's error.
pub(crate) fn lock(fd: BorrowedFd<'_>, read_only: bool, policy: LockPolicy) -> io::Result<()> {
    if policy == LockPolicy::None {
        return Ok(());
    }
    let (used, denied) = (Permissions::used(read_only), Permissions::denied());
    // Our locks first, then the check: of two concurrent openers at least one sees the other.
    let bytes = used.numbers().map(|number| USED + libc::off_t::from(number));
    let bytes: Vec<_> = bytes.chain(denied.numbers().map(|number| DENIED + libc::off_t::from(number))).collect();
    for &byte in &bytes {
        match take(fd, byte) {
            Ok(()) => {}
            Err(error) if policy == LockPolicy::Auto && is_unsupported(&error) => return Ok(()),
            Err(error) => return Err(failed(fd, read_only, error, None)),
        }
    }
    match conflict(fd, used, denied).map_err(|error| failed(fd, read_only, error, None))? {
        None => {
            LOCKED.lock().insert(fd.as_raw_fd(), bytes);
            Ok(())
        }
        Some(conflict) => {
            let error = io::Error::new(io::ErrorKind::ResourceBusy, conflict.to_string());
            Err(failed(fd, read_only, error, Some(conflict.byte())))
        }
    }
}

fn conflict(fd: BorrowedFd<'_>, used: Permissions, denied: Permissions) -> io::Result<Option<Conflict>> {
    for number in used.numbers() {
        if is_taken(fd, DENIED + libc::off_t::from(number))? {
            return Ok(Some(Conflict { number, used: false }));
        }
    }
    for number in denied.numbers() {
        if is_taken(fd, USED + libc::off_t::from(number))? {
            return Ok(Some(Conflict { number, used: true }));
        }
    }
    Ok(None)
}

/// Whether the filesystem or the kernel does not support such locks.
fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOLCK | libc::ENOSYS | libc::EOPNOTSUPP))
}

/// Releases our locks. Returns the error, which names the processes that have the file open.
fn failed(fd: BorrowedFd<'_>, read_only: bool, error: io::Error, byte: Option<libc::off_t>) -> io::Error {
    release(fd);
    let busy = [io::ErrorKind::ResourceBusy, io::ErrorKind::WouldBlock, io::ErrorKind::PermissionDenied];
    if !busy.contains(&error.kind()) {
        return error;
    }
    let holders = holders(fd, byte);
    let holder = if holders == LockHolders::ThisProcess { "this process" } else { ANOTHER };
    let done = if error.raw_os_error().is_some() { "has locked it".into() } else { error.to_string() };
    OpenError::Locked { conflict: format!("{holder} {done}"), holders, read_only }.into()
}

/// Returns the processes that have a file open: this one if it holds the lock of `byte`, others if /proc shows them.
fn holders(fd: BorrowedFd<'_>, byte: Option<libc::off_t>) -> LockHolders {
    let Ok(file) = identity(fd) else { return LockHolders::Unknown };
    // Known without /proc, which a process that is confined cannot read.
    let is_locked_here = || {
        LOCKED.lock().iter().any(|(&number, bytes)| {
            // SAFETY: nothing is done to what is open by this number; if it was closed without being unlocked, nothing
            // is, or another file.
            let other = unsafe { BorrowedFd::borrow_raw(number) };
            byte.is_some_and(|byte| bytes.contains(&byte)) && identity(other).is_ok_and(|other| other == file)
        })
    };
    if is_locked_here() {
        // Others that have it open, a copy that reads it, say, are not in the way.
        return LockHolders::ThisProcess;
    }
    match other_holders(file) {
        Some(processes) if processes.is_empty() => LockHolders::NoneVisible,
        Some(processes) => LockHolders::Processes(processes),
        None => LockHolders::Unknown,
    }
}

/// Returns the other processes that have a file open and are visible in /proc, at most four; `None`: it cannot be read.
fn other_holders(file: (u64, u64)) -> Option<Vec<String>> {
    let own = std::process::id().to_string();
    let processes = fs::read_dir("/proc").ok()?;
    let has_it = |process: &fs::DirEntry| {
        fs::read_dir(process.path().join("fd")).is_ok_and(|files| {
            files.flatten().any(|entry| fs::metadata(entry.path()).is_ok_and(|it| (it.dev(), it.ino()) == file))
        })
    };
    let mut names: Vec<_> = processes
        .flatten()
        .filter_map(|process| Some((process.file_name().into_string().ok()?, process)))
        .filter(|(pid, process)| *pid != own && pid.bytes().all(|byte| byte.is_ascii_digit()) && has_it(process))
        .map(|(pid, process)| {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            format!("{} (process {pid})", name.trim())
        })
        .take(4)
        .collect();
    names.sort();
    Some(names)
}

/// Device and inode of an open file.
fn identity(fd: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let found = rustix::fs::fstat(fd)?;
    Ok((found.st_dev, found.st_ino))
}

/// Returns a lock type, or where its range is counted from, as the structure has it.
#[expect(clippy::cast_possible_truncation, reason = "all of them are from 0 to 2")]
const fn short(number: libc::c_int) -> libc::c_short {
    number as libc::c_short
}

fn byte_range(kind: libc::c_int, start: libc::off_t, len: libc::off_t) -> libc::flock {
    // SAFETY: a structure of numbers, so all zeros is a valid value.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    (range.l_type, range.l_whence) = (short(kind), short(libc::SEEK_SET));
    (range.l_start, range.l_len) = (start, len);
    range
}

/// Takes a shared lock of a byte.
fn take(fd: BorrowedFd<'_>, byte: libc::off_t) -> io::Result<()> {
    let range = byte_range(libc::F_RDLCK, byte, 1);
    // SAFETY: reads the structure, which outlives the call.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether a byte is locked through another open file description.
fn is_taken(fd: BorrowedFd<'_>, byte: libc::off_t) -> io::Result<bool> {
    let mut range = byte_range(libc::F_WRLCK, byte, 1);
    // SAFETY: reads and writes the structure, which outlives the call.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(libc::c_int::from(range.l_type) != libc::F_UNLCK)
}

/// Releases all locks.
pub(crate) fn release(fd: BorrowedFd<'_>) {
    LOCKED.lock().remove(&fd.as_raw_fd());
    let range = byte_range(libc::F_UNLCK, USED, DENIED + libc::off_t::from(COUNT) - USED);
    // SAFETY: reads the structure, which outlives the call.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    fn opened() -> (tempfile::NamedTempFile, impl Fn() -> File) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_owned();
        (file, move || File::options().read(true).write(true).open(&path).unwrap())
    }

    #[test]
    fn readers_share_and_a_writer_is_alone() {
        let (_kept, open) = opened();
        let (first, second, third) = (open(), open(), open());
        let auto = LockPolicy::Auto;
        lock(first.as_fd(), true, auto).unwrap();
        lock(second.as_fd(), true, auto).unwrap();
        let error = lock(third.as_fd(), false, auto).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        assert!(error.to_string().starts_with("this process has it open and allows no writing"), "{error}");
        // A refused opener leaves no locks behind.
        lock(open().as_fd(), true, auto).unwrap();
        drop((first, second));
        lock(third.as_fd(), false, auto).unwrap();
        let error = lock(open().as_fd(), true, auto).unwrap_err();
        assert!(error.to_string().starts_with("this process has it open and writes it"), "{error}");
        lock(open().as_fd(), false, auto).unwrap_err();
        lock(open().as_fd(), false, LockPolicy::None).unwrap();
    }
}
