//! The process at the other end of a unix socket, recognized again when it comes back.
#![allow(unsafe_code)] // rustix's call cannot express a peer without a number, and has none for its descriptor.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FsWord, fstat, fstatfs};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// `SO_PEERPIDFD` (Linux 6.5): the same number on all architectures that limosa is for.
const PEER_PIDFD: i32 = 77;
/// The file system of process descriptors (Linux 6.9), where each process has an inode number that is not used again.
const PIDFS_MAGIC: FsWord = 0x5049_4446;

/// A process that has made a connection: it is told apart from every other one, also from a later one that has its
/// number. Of a socket that was inherited or passed, it is the process that has connected it.
#[derive(Debug)]
pub struct PeerProcess {
    identity: Identity,
    /// Keeps its number from being taken for that of a later process.
    pidfd: OwnedFd,
}

/// The numbers of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    /// Its number here, which is used again when it has ended; `None`: it has none in this process's pid namespace.
    pid: Option<u32>,
    /// Its number that is never used again, where the kernel has one.
    unique: Option<u64>,
}

impl Identity {
    /// Whether another process is this one, which `lives` or has ended.
    fn is(self, lives: bool, other: Self) -> bool {
        match (self.unique, other.unique) {
            (Some(one), Some(other)) => one == other,
            // As long as it lives, its number is its own.
            _ => self.pid.is_some() && self.pid == other.pid && lives,
        }
    }
}

impl PeerProcess {
    /// Asks the kernel for the process that has connected a socket.
    ///
    /// # Errors
    /// It is no unix socket, or the process has ended and the kernel does not know it any more; or nothing tells it
    /// from others: the kernel is older than Linux 6.9, and it is in another container.
    pub fn of(socket: BorrowedFd<'_>) -> io::Result<Self> {
        let pid = credentials(socket)?;
        let pidfd = match option(socket, PEER_PIDFD, -1) {
            // SAFETY: the kernel has just made this descriptor for the caller, and nobody else has it.
            Ok(fd) if fd >= 0 => unsafe { OwnedFd::from_raw_fd(fd) },
            Ok(_) => return Err(io::ErrorKind::NotFound.into()),
            // An older kernel finds the process by its number. If it has ended meanwhile another process may have that
            // number; the connection is at its end then.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOPROTOOPT.raw_os_error()) => {
                let pid = pid.and_then(|pid| Pid::from_raw(pid.cast_signed())).ok_or(io::ErrorKind::NotFound)?;
                pidfd_open(pid, PidfdFlags::empty())?
            }
            Err(error) => return Err(error),
        };
        let unique = match fstatfs(&pidfd) {
            Ok(found) if found.f_type == PIDFS_MAGIC => Some(fstat(&pidfd)?.st_ino),
            _ => None,
        };
        if pid.is_none() && unique.is_none() {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the process is in another container"));
        }
        Ok(Self { identity: Identity { pid, unique }, pidfd })
    }

    /// Returns its number; `None` if it has none here, as it is in another container.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.identity.pid
    }

    /// Returns whether it has not ended. One whose parent has not heard of its end has.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.pidfd.as_fd(), PollFlags::IN)];
        // In doubt it lives.
        !poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Returns whether both are one process.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        self.identity.is(self.is_alive(), other.identity)
    }
}

/// Returns the number of the process that has connected a socket; `None`: it has none here.
fn credentials(socket: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let mut found = libc::ucred { pid: 0, uid: libc::uid_t::MAX, gid: libc::gid_t::MAX };
    get(socket, libc::SO_PEERCRED, &mut found)?;
    Ok(u32::try_from(found.pid).ok().filter(|pid| *pid > 0))
}

/// Returns a socket option that is a number.
fn option(socket: BorrowedFd<'_>, name: i32, mut value: i32) -> io::Result<i32> {
    get(socket, name, &mut value)?;
    Ok(value)
}

/// Values of socket options: any bytes that the kernel puts there are valid.
trait Plain {}

impl Plain for i32 {}
impl Plain for libc::ucred {}

/// Reads a socket option.
fn get<T: Plain>(socket: BorrowedFd<'_>, name: i32, value: &mut T) -> io::Result<()> {
    let mut length = libc::socklen_t::try_from(size_of::<T>()).map_err(io::Error::other)?;
    // SAFETY: both pointers are to live values, `length` says how long the first is, and any bytes are a valid `T`.
    let answer = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, std::ptr::from_mut(value).cast(), &raw mut length)
    };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_process_is_itself_however_often_it_connects() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let accept = || {
            let near = UnixStream::connect(&path).unwrap();
            (near, PeerProcess::of(listener.accept().unwrap().0.as_fd()).unwrap())
        };
        let ((_one, first), (_two, second)) = (accept(), accept());
        assert_eq!(first.pid(), Some(std::process::id()));
        assert!(first.is_alive() && first.is(&second) && second.is(&first));
    }

    #[test]
    fn what_is_no_unix_socket_has_no_process() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(PeerProcess::of(near.as_fd()).is_err());
    }

    const CONNECTS: &str = "LIMOSA_TEST_CONNECTS";

    /// The other process of a test: connects, and waits until it is killed.
    #[test]
    #[ignore = "started by another test"]
    fn connects_and_waits() {
        if let Some(path) = std::env::var_os(CONNECTS) {
            let _stream = UnixStream::connect(path).unwrap();
            std::thread::sleep(Duration::from_secs(600));
        }
    }

    fn other(listener: &UnixListener, path: &Path) -> (Child, UnixStream) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "peer::tests::connects_and_waits"]).env(CONNECTS, path);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        (child, listener.accept().unwrap().0)
    }

    #[test]
    fn another_process_is_another_one_and_its_end_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let own = UnixStream::connect(&path).unwrap();
        let own = (PeerProcess::of(listener.accept().unwrap().0.as_fd()).unwrap(), own);
        let (mut child, stream) = other(&listener, &path);
        let found = PeerProcess::of(stream.as_fd()).unwrap();
        assert_eq!(found.pid(), Some(child.id()));
        assert!(found.is_alive() && !found.is(&own.0) && !own.0.is(&found));
        child.kill().unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while found.is_alive() {
            assert!(Instant::now() < until, "its end is not seen");
        }
        child.wait().unwrap();
        assert!(!found.is_alive());
    }

    #[test]
    fn a_number_that_is_used_again_is_that_of_another_process() {
        let named = |pid, unique| Identity { pid, unique };
        // With a number that is never used again, that alone decides.
        assert!(named(Some(7), Some(1)).is(false, named(Some(7), Some(1))));
        assert!(!named(Some(7), Some(1)).is(true, named(Some(7), Some(2))));
        assert!(named(None, Some(1)).is(true, named(None, Some(1))));
        // Without it the number counts for as long as the process lives.
        assert!(named(Some(7), None).is(true, named(Some(7), None)));
        assert!(!named(Some(7), None).is(false, named(Some(7), None)));
        assert!(!named(Some(7), None).is(true, named(Some(8), None)));
        assert!(!named(None, None).is(true, named(None, None)));
    }
}
