//! Who may look at a socket's file and put another one in its place: one at a time.
//!
//! Law: at most one [`Lock`] of a path is held at any time, by whichever process. A file next to the socket is locked
//! (flock(2)), and not the folder: people lock folders for reasons of their own (systemd-tmpfiles(8) is kept from them
//! that way). The file is removed while it is locked, and a lock counts only if the file is still there, so a process
//! that had opened it before looks again. One that a killed process left behind is locked and removed by the next.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{self, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

/// Suffix of the lock's file name after that of the socket, so that no other program uses the file: it is removed.
const SUFFIX: &str = ".limosa-lock";
/// Interval of attempts to take a lock that another process holds.
const TICK: Duration = Duration::from_millis(1);

/// The right to replace what is at a path, until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    _file: OwnedFd,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // There is no caller left to report to; a file that stays locks nothing.
        let _ = fs::unlink(&self.path);
    }
}

impl Lock {
    /// Takes the lock of the socket at `socket`, or fails when another one has held it for `patience`.
    pub(crate) fn take(socket: &Path, patience: Duration) -> io::Result<Self> {
        let mut path = OsString::from(socket);
        path.push(SUFFIX);
        let path = PathBuf::from(path);
        let begun = Instant::now();
        loop {
            let flags = OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
            let file = match fs::open(&path, flags, Mode::RUSR | Mode::WUSR) {
                // Of a folder that nothing can be made in the socket would say the same.
                Err(error) if fs::lstat(&path).is_err() => return Err(error.into()),
                Err(error) => return Err(lock_error(&path, &error)),
                Ok(file) => file,
            };
            match fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    let mine = fs::fstat(&file)?;
                    if fs::lstat(&path).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (mine.st_dev, mine.st_ino)) {
                        return Ok(Self { path, _file: file });
                    }
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) => sleep(TICK),
                Err(error) => return Err(lock_error(&path, &error)),
            }
            if begun.elapsed() >= patience {
                let words = format!("another process has held {} for {} ms", path.display(), patience.as_millis());
                return Err(io::Error::new(io::ErrorKind::TimedOut, words));
            }
        }
    }
}

fn lock_error(path: &Path, error: &Errno) -> io::Error {
    io::Error::new(error.kind(), format!("cannot lock {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_has_it_at_a_time_and_the_next_does_not_wait_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let first = Lock::take(&socket, Duration::ZERO).unwrap();
        let error = Lock::take(&socket, Duration::from_millis(20)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().contains("socket.limosa-lock for 20 ms"), "{error}");
        drop(first);
        drop(Lock::take(&socket, Duration::ZERO).unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_lock_that_a_killed_process_left_is_taken_and_a_link_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (socket, lock) = (folder.path().join("socket"), folder.path().join("socket.limosa-lock"));
        std::fs::write(&lock, "").unwrap();
        drop(Lock::take(&socket, Duration::ZERO).unwrap());
        assert!(!lock.exists());
        std::os::unix::fs::symlink(folder.path().join("elsewhere"), &lock).unwrap();
        let error = Lock::take(&socket, Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("cannot lock"), "{error}");
        assert!(!folder.path().join("elsewhere").exists());
    }
}
