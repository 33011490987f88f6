//! The folder of the cache: files that are the user's alone.
//!
//! **Law: no link is followed, and nothing is used that another user could write.**

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, RenameFlags, Stat};

/// The name of the file that is locked while old files are removed.
const LOCK: &str = "lock";

/// The end of the name of a file that is not complete.
const UNFINISHED: &str = ".new";

/// The age from which a file that was not completed is nobody's any more.
const ABANDONED: Duration = Duration::from_secs(3600);

/// A folder that is the user's alone.
#[derive(Debug)]
pub(crate) struct Directory(OwnedFd);

/// A file in it.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) name: Vec<u8>,
    /// Bytes that it takes.
    pub(super) space: u64,
    /// When it was last used, in seconds since 1970.
    pub(super) used: u64,
}

impl Directory {
    /// Opens a folder, and makes it if it is missing.
    ///
    /// # Errors
    /// The kernel's; [`io::ErrorKind::PermissionDenied`]: it is another user's, or others can write to it.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        if let Err(error) = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(error);
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
        let fd = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&fd)?;
        if stat.st_uid != rustix::process::geteuid().as_raw() || stat.st_mode & 0o022 != 0 {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the folder must be this user's, and no other may write to it",
            ));
        }
        Ok(Self(fd))
    }

    /// Opens a file that is there; `None`: there is no such file of this user.
    pub(crate) fn open_file(&self, name: &str) -> io::Result<Option<OwnedFd>> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        match rustix::fs::openat(&self.0, name, flags, Mode::empty()) {
            Ok(fd) if is_ours(&rustix::fs::fstat(&fd)?) => Ok(Some(fd)),
            // A link, or something else that is no file of ours.
            Ok(_) | Err(rustix::io::Errno::LOOP) => {
                self.remove(name.as_bytes());
                Ok(None)
            }
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes a file with this beginning. If another process was faster its file is opened.
    pub(crate) fn create_file(&self, name: &str, beginning: &[u8]) -> io::Result<Option<OwnedFd>> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let unfinished = format!("{name}.{}.{number}{UNFINISHED}", std::process::id());
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL;
        let fd = rustix::fs::openat(&self.0, &unfinished, flags, Mode::from_raw_mode(0o600))?;
        let named = write_all(&fd, beginning, 0)
            .and_then(|()| Ok(rustix::fs::renameat_with(&self.0, &unfinished, &self.0, name, RenameFlags::NOREPLACE)?));
        match named {
            Ok(()) => Ok(Some(fd)),
            Err(error) => {
                self.remove(unfinished.as_bytes());
                if error.kind() == io::ErrorKind::AlreadyExists { self.open_file(name) } else { Err(error) }
            }
        }
    }

    /// Removes a file, if it is there.
    pub(crate) fn remove(&self, name: &[u8]) {
        if let Err(error) = rustix::fs::unlinkat(&self.0, OsStr::from_bytes(name), AtFlags::empty()) {
            tracing::debug!(%error, "a file of the cache cannot be removed");
        }
    }

    /// Locks the folder for whoever removes files from it; `None`: another process does so.
    pub(super) fn try_lock(&self) -> io::Result<Option<OwnedFd>> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::CREATE;
        let fd = rustix::fs::openat(&self.0, LOCK, flags, Mode::from_raw_mode(0o600))?;
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(fd)),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Lists the files with blocks, and removes those that were never completed.
    pub(super) fn list(&self) -> io::Result<Vec<Listed>> {
        let mut files = Vec::new();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        for entry in Dir::read_from(self.0.as_fd())? {
            let name = entry?.file_name().to_bytes().to_vec();
            let Ok(stat) = rustix::fs::statat(&self.0, OsStr::from_bytes(&name), AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            if !is_ours(&stat) || name == LOCK.as_bytes() {
                continue;
            }
            let used = u64::try_from(stat.st_mtime).unwrap_or(0);
            if name.ends_with(UNFINISHED.as_bytes()) {
                if now.saturating_sub(Duration::from_secs(used)) > ABANDONED {
                    self.remove(&name);
                }
                continue;
            }
            files.push(Listed { name, space: u64::try_from(stat.st_blocks).unwrap_or(0) * 512, used });
        }
        Ok(files)
    }
}

fn is_ours(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && stat.st_uid == rustix::process::geteuid().as_raw()
        && stat.st_nlink <= 1
}

/// Writes all bytes at an offset.
pub(crate) fn write_all(fd: &OwnedFd, bytes: &[u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
        match rustix::io::pwrite(fd, rest, offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => done += written,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Reads bytes at an offset. Returns how many there were before the end.
pub(crate) fn read_all(fd: &OwnedFd, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match rustix::io::pread(fd, rest, offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(done)
}
