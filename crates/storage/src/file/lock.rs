//! QEMU's image locks.
//!
//! **Law: neither opens what the other writes.** QEMU locks bytes of an image file, with locks that belong to an open file (OFD
//! locks, fcntl(2)), whatever the file contains there: byte 100 + n, shared, for each permission n it uses, and byte 200 + n, shared,
//! for each permission n it does not grant to others. Whoever uses a permission looks first whether somebody has locked its
//! byte 200 + n, and whoever does not grant one whether somebody has locked its byte 100 + n. The bytes are QEMU's since its
//! version 2.10 (`RAW_LOCK_PERM_BASE`, `RAW_LOCK_SHARED_BASE`); the permissions are numbered as in [`Permissions`].
//!
//! The kernel lets go of them when the last descriptor of the open file is closed: however a process ends. Who closes a file lets go
//! itself before: a process that is being started has a copy of every descriptor until it runs its program, and would keep the locks.
//! What a killed process had under way in a ring keeps its files open, and locked, until the kernel has ended it: a moment.
#![allow(unsafe_code, reason = "OFD locks are taken by fcntl")]

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

/// The byte that stands for using the first permission.
const USED: libc::off_t = 100;
/// The byte that stands for not granting the first permission.
const DENIED: libc::off_t = 200;
/// Permissions there are.
const COUNT: u8 = 4;

/// Whether others are kept from a file, and whether we keep away from one that others use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LockPolicy {
    /// As QEMU does: who writes is the only one who does, and who reads is sure that nobody writes. Where the filesystem has no
    /// such locks nobody is kept away.
    #[default]
    Auto,
    /// The same; without such locks opening fails.
    Required,
    /// No locks, and no regard for any (`-U` of qemu-img). What is read while others write may be inconsistent.
    None,
}

/// What is done with an image, as QEMU counts it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Permissions {
    /// Reading what is consistent (permission 0).
    pub consistent_read: bool,
    /// Writing (permission 1).
    pub write: bool,
    /// Writing what was there, in another place (permission 2).
    pub write_unchanged: bool,
    /// Changing the length (permission 3).
    pub resize: bool,
}

impl Permissions {
    /// What is used by one who opens an image for writing, or only for reading: QEMU's qcow2 driver uses the same.
    pub(crate) fn used(read_only: bool) -> Self {
        Self { consistent_read: true, write: !read_only, write_unchanged: false, resize: !read_only }
    }

    /// What one who opens an image does not grant to others: that it changes under them.
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

/// What kept us away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Conflict {
    number: u8,
    /// Whether somebody uses what we do not grant; else somebody does not grant what we use.
    used: bool,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done = ["reads", "writes", "moves", "resizes"].get(usize::from(self.number)).copied().unwrap_or("uses");
        let doing = ["reading", "writing", "moving", "resizing"].get(usize::from(self.number)).copied();
        match self.used {
            true => write!(f, "another process has it open and {done} it"),
            false => write!(f, "another process has it open and allows no {}", doing.unwrap_or("use")),
        }
    }
}

/// Locks a file for its opener, and fails if others have it open in a way that does not go with ours.
///
/// # Errors
/// [`io::ErrorKind::ResourceBusy`] names who may have it; else the kernel's reason.
pub(crate) fn lock(fd: BorrowedFd<'_>, read_only: bool, policy: LockPolicy) -> io::Result<()> {
    if policy == LockPolicy::None {
        return Ok(());
    }
    let (used, denied) = (Permissions::used(read_only), Permissions::denied());
    // First ours, then what others have: of two who come at a time at least one sees the other.
    let places = used.numbers().map(|number| USED + libc::off_t::from(number));
    for byte in places.chain(denied.numbers().map(|number| DENIED + libc::off_t::from(number))) {
        match take(fd, byte) {
            Ok(()) => {}
            Err(error) if policy == LockPolicy::Auto && is_without_locks(&error) => return Ok(()),
            Err(error) => return Err(failed(fd, read_only, error)),
        }
    }
    match conflict(fd, used, denied).map_err(|error| failed(fd, read_only, error))? {
        None => Ok(()),
        Some(conflict) => Err(failed(fd, read_only, io::Error::new(io::ErrorKind::ResourceBusy, conflict.to_string()))),
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

/// Whether the filesystem or the kernel has no such locks.
fn is_without_locks(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOLCK | libc::ENOSYS | libc::EOPNOTSUPP))
}

/// A failure that says who may be in the way, and lets go of what was locked.
fn failed(fd: BorrowedFd<'_>, read_only: bool, error: io::Error) -> io::Error {
    release(fd);
    let busy = [io::ErrorKind::ResourceBusy, io::ErrorKind::WouldBlock, io::ErrorKind::PermissionDenied];
    if !busy.contains(&error.kind()) {
        return error;
    }
    let reason =
        if error.raw_os_error().is_some() { "another process has locked it".into() } else { error.to_string() };
    let who = match holders(fd) {
        names if names.is_empty() => String::from("none of this machine's processes that we may see has it open"),
        names => format!("it is open in {}", names.join(", ")),
    };
    let advice = if read_only { "; to read it all the same, in a state that may be inconsistent, use -U" } else { "" };
    io::Error::new(io::ErrorKind::ResourceBusy, format!("{reason} ({who}){advice}"))
}

/// Processes that have the file open, as far as we may know.
fn holders(fd: BorrowedFd<'_>) -> Vec<String> {
    let own = std::process::id().to_string();
    let Ok(file) = fs::metadata(format!("/proc/self/fd/{}", fd.as_raw_fd())) else { return Vec::new() };
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let has_it = |process: &fs::DirEntry| {
        fs::read_dir(process.path().join("fd")).is_ok_and(|files| {
            files.flatten().any(|entry| {
                fs::metadata(entry.path()).is_ok_and(|it| (it.dev(), it.ino()) == (file.dev(), file.ino()))
            })
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
    names
}

fn place(kind: libc::c_int, start: libc::off_t, len: libc::off_t) -> libc::flock {
    // SAFETY: a structure of numbers, for which zeros are a value.
    let mut place: libc::flock = unsafe { std::mem::zeroed() };
    // The three kinds are 0, 1 and 2.
    place.l_type = libc::c_short::try_from(kind).unwrap_or_default();
    place.l_whence = libc::c_short::try_from(libc::SEEK_SET).unwrap_or_default();
    (place.l_start, place.l_len) = (start, len);
    place
}

/// Locks a byte, shared.
fn take(fd: BorrowedFd<'_>, byte: libc::off_t) -> io::Result<()> {
    let place = place(libc::F_RDLCK, byte, 1);
    // SAFETY: reads the structure, which lives.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const place) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether another open file has locked a byte.
fn is_taken(fd: BorrowedFd<'_>, byte: libc::off_t) -> io::Result<bool> {
    let mut place = place(libc::F_WRLCK, byte, 1);
    // SAFETY: reads and writes the structure, which lives.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &raw mut place) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(libc::c_int::from(place.l_type) != libc::F_UNLCK)
}

/// Lets go of all.
pub(crate) fn release(fd: BorrowedFd<'_>) {
    let place = place(libc::F_UNLCK, USED, DENIED + libc::off_t::from(COUNT) - USED);
    // SAFETY: reads the structure, which lives.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const place) };
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
        assert!(error.to_string().starts_with("another process has it open and allows no writing"), "{error}");
        // One that was refused is in nobody's way.
        lock(open().as_fd(), true, auto).unwrap();
        drop((first, second));
        lock(third.as_fd(), false, auto).unwrap();
        let error = lock(open().as_fd(), true, auto).unwrap_err();
        assert!(error.to_string().starts_with("another process has it open and writes it"), "{error}");
        assert!(error.to_string().contains("-U"), "{error}");
        lock(open().as_fd(), false, auto).unwrap_err();
        lock(open().as_fd(), false, LockPolicy::None).unwrap();
    }
}
