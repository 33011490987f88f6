//! A unix socket to listen at, and its file.
//!
//! The laws of this crate: the file is never accessible to others than the caller wants, not even for a moment (mode
//! 0600 from the first, and [`SocketAccess`] before a client can connect); a
//! file that is in use, or is no socket, is left alone, also when several processes start at once (the `lock` module);
//! what was made is removed with its [`SocketFile`], and nothing else is; a process that has connected is recognized
//! when it comes back, and none is taken for it that has got its number ([`PeerProcess`]).
//!
//! ```
//! # fn main() -> std::io::Result<()> {
//! # let folder = tempfile::tempdir()?;
//! let path = folder.path().join("vm.sock");
//! let (socket, file) = limosa_socket::listen(&path, 4)?;
//! let listener = std::os::unix::net::UnixListener::from(socket);
//! # drop(listener);
//! drop(file);
//! assert!(!path.exists());
//! # Ok(()) }
//! ```

mod lock;
mod peer;

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{self, AtFlags, CWD, FileType, Gid, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use lock::Lock;
pub use peer::PeerProcess;

/// How long others may be about to listen at the same path. Each of them needs a fraction of a millisecond.
const PATIENCE: Duration = Duration::from_secs(5);

/// A socket's file, removed with this value unless another one is there by then.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::lstat(&self.path).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (self.device, self.inode)) {
            // There is no caller left to report to.
            let _ = fs::unlink(&self.path);
        }
    }
}

/// Who may connect to a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SocketAccess {
    /// The mode of its file; the umask does not change it. To connect takes the right to write.
    pub mode: u32,
    /// The group of its file, if it is another one than this process's.
    pub group: Option<u32>,
}

impl Default for SocketAccess {
    /// The owner alone.
    fn default() -> Self {
        Self { mode: 0o600, group: None }
    }
}

impl SocketAccess {
    /// Sets the mode of the file.
    #[must_use]
    pub const fn mode(mut self, mode: u32) -> Self {
        self.mode = mode;
        self
    }

    /// Sets the group of the file.
    #[must_use]
    pub const fn group(mut self, group: Option<u32>) -> Self {
        self.group = group;
        self
    }

    /// Applies it to the file of a socket that does not listen yet, so that no client can connect.
    fn apply(self, socket: &SocketFile) -> io::Result<()> {
        if self == Self::default() {
            return Ok(());
        }
        let failed = |what: &str, errno: Errno| io::Error::new(errno.kind(), format!("{what}: {errno}"));
        // The file itself, and not where a link leads that takes its place.
        let file = fs::open(&socket.path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let found = fs::fstat(&file)?;
        if (found.st_dev, found.st_ino) != (socket.device, socket.inode)
            || FileType::from_raw_mode(found.st_mode) != FileType::Socket
        {
            return Err(io::Error::other("another file has taken the socket's place"));
        }
        if let Some(group) = self.group {
            let group = Some(Gid::from_raw(group));
            fs::chownat(&file, "", None, group, AtFlags::EMPTY_PATH)
                .map_err(|errno| failed("the socket's group cannot be set", errno))?;
        }
        let again = format!("/proc/self/fd/{}", file.as_raw_fd());
        fs::chmodat(CWD, again, Mode::from_raw_mode(self.mode), AtFlags::empty())
            .map_err(|errno| failed("the socket's mode cannot be set", errno))
    }
}

/// Listens at `path` as [`listen_with`] does, for the owner alone.
///
/// # Errors
/// As of [`listen_with`].
pub fn listen(path: &Path, backlog: i32) -> io::Result<(OwnedFd, SocketFile)> {
    listen_with(path, SocketAccess::default(), backlog)
}

/// Listens at `path`, where at most the socket of an ended process may exist, with this backlog. The socket does not
/// block.
///
/// While the path is checked and bound, a file of the same name with the suffix `.limosa-lock` exists next to it.
///
/// # Errors
/// The path is in use, too long, or cannot be; others were about to listen there for seconds; or the kernel refuses.
pub fn listen_with(path: &Path, access: SocketAccess, backlog: i32) -> io::Result<(OwnedFd, SocketFile)> {
    let address = SocketAddrUnix::new(path)?;
    // Absolute, as the working directory may have changed by the time it is removed.
    let path = std::path::absolute(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // On Linux bind gives the file the mode of the socket, less the umask (unix(7)): chmod after it would leave a gap.
    fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    // From before the first bind until it listens: a file whose socket is being bound looks as stale as one whose
    // process is gone.
    let _lock = Lock::take(&path, PATIENCE)?;
    match net::bind(&socket, &address) {
        Err(Errno::ADDRINUSE) if is_stale(&path, &address)? => {
            fs::unlink(&path)?;
            net::bind(&socket, &address)?;
        }
        answer => answer?,
    }
    let stat = fs::lstat(&path)?;
    let file = SocketFile { path, device: stat.st_dev, inode: stat.st_ino };
    access.apply(&file)?;
    net::listen(&socket, backlog)?;
    Ok((socket, file))
}

/// Whether a socket's file was left by a process that is gone. Asked with a datagram socket: a stream listener that
/// lives answers that the type is wrong, and does not get a connection that it would have to accept.
fn is_stale(path: &Path, address: &SocketAddrUnix) -> io::Result<bool> {
    if FileType::from_raw_mode(fs::lstat(path)?.st_mode) != FileType::Socket {
        return Ok(false);
    }
    let probe = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    Ok(net::connect(&probe, address) == Err(Errno::CONNREFUSED))
}

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
