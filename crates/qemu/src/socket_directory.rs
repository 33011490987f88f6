//! A private directory with the sockets over which QEMU and limosa talk: no other user can enter it.
//!
//! Law: **it belongs to the user that QEMU runs as, with mode 0700, and QEMU is known to see it** (it may run as
//! another user, in a chroot, in a mount namespace of its own), or it is refused with what to do instead.
//!
//! That user may put anything in its place, and this process may be root's: so a socket is made before the directory is
//! given away, and what is removed is removed through a descriptor of the directory that was made.

use std::fs::DirBuilder;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, lchown};
use std::path::{Path, PathBuf};

use limosa_channel::{Listener, Options, Uri};
use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use uuid::Uuid;

use crate::conflict::{Conflict, MissingPermission, RendezvousConflict};
use crate::job::JobError;
use crate::monitor::Monitor;
use crate::process;
use crate::qmp::Peer;

/// Longest path of a unix socket, in bytes (unix(7)).
pub const SOCKET_PATH_MAX: usize = 107;

/// The longest name of a socket in the directory. A socket's address has room for 107 bytes; `/limosa-`, the
/// directory's number, `/` and this are 57.
const LONGEST_NAME: usize = 16;

/// The directory; it is removed when this is dropped.
#[derive(Debug)]
pub struct SocketDirectory {
    directory: PathBuf,
    /// The directory itself, even if another has its name by now.
    opened: OwnedFd,
    /// User and group of QEMU, where they are not this process's own.
    other: Option<(u32, u32)>,
}

impl SocketDirectory {
    /// Makes a directory for QEMU to listen in, in `$XDG_RUNTIME_DIR`, the temporary directory, or `/tmp` if QEMU's
    /// user cannot get there.
    ///
    /// # Errors
    /// If QEMU is, or may be, elsewhere, or runs as another user and this process is not root.
    pub fn new(monitor: &Monitor) -> Result<Self, JobError> {
        let made = Self::make(monitor)?;
        made.give()?;
        Ok(made)
    }

    /// Makes a directory in which this process listens, under `name`, which has at most 16 bytes, for QEMU to connect.
    ///
    /// # Errors
    /// As [`new`](Self::new), and the kernel's.
    pub fn with_listener(monitor: &Monitor, name: &str, options: &Options) -> Result<(Self, Listener), JobError> {
        let made = Self::make(monitor)?;
        let listener = Listener::bind(&made.uri(name), options)?;
        if let Some((uid, gid)) = made.other {
            // The socket is this user's alone, and QEMU has to be able to write to it.
            let path = made.directory.join(name);
            lchown(&path, Some(uid), Some(gid)).map_err(|_| made.refused(uid))?;
        }
        made.give()?;
        Ok((made, listener))
    }

    /// Makes the directory, which still belongs to this user.
    fn make(monitor: &Monitor) -> Result<Self, JobError> {
        if !monitor.qmp().passes_descriptors() {
            return Err(JobError::conflict(
                "QEMU's monitor is reached over tcp, so QEMU may be on another host",
                Conflict::Rendezvous(RendezvousConflict::RemoteMonitor),
            ));
        }
        let peer = Peer::of(monitor.qmp().descriptor().as_fd()).ok();
        let elsewhere = |what: String| JobError::conflict(what, Conflict::Rendezvous(RendezvousConflict::Container));
        let Some(pid) = monitor.qmp().process() else {
            return Err(elsewhere("QEMU runs in a container whose processes and files are not seen from here".into()));
        };
        // The process itself knows best: it may have changed its user since it made its socket (-run-with user=...).
        let user = process::user(pid).or_else(|| peer.map(|peer| (peer.uid, peer.gid)));
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let other = user.filter(|user| user.0 != own.0);
        let directory = parent_for(other.is_none()).join(format!("limosa-{}", Uuid::new_v4().simple()));
        let failed = |what| {
            let path = directory.clone();
            move |source| JobError::Io { what, path, source }
        };
        DirBuilder::new().mode(0o700).create(&directory).map_err(failed("make the directory"))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&directory, flags, Mode::empty());
        let opened = opened.map_err(|errno| failed("open the directory")(errno.into()))?;
        let made = Self { directory, opened, other };
        if sees(pid, &made.directory) == Some(false) {
            let place = made.directory.display();
            return Err(elsewhere(format!("QEMU runs in a container or a chroot, where there is no {place}")));
        }
        Ok(made)
    }

    /// Returns the address of this name there. `name` has at most 16 bytes.
    #[must_use]
    pub fn uri(&self, name: &str) -> Uri {
        debug_assert!(name.len() <= LONGEST_NAME);
        Uri::Unix(self.directory.join(name))
    }

    /// Gives the directory to QEMU's user, if that is another one.
    fn give(&self) -> Result<(), JobError> {
        let Some((uid, gid)) = self.other else { return Ok(()) };
        lchown(&self.directory, Some(uid), Some(gid)).map_err(|_| self.refused(uid))
    }

    fn refused(&self, uid: u32) -> JobError {
        let own = rustix::process::geteuid().as_raw();
        JobError::conflict(
            format!("QEMU runs as user {uid} and limosa as user {own}, who cannot give it a private directory"),
            Conflict::Permission(MissingPermission::SocketDirectory),
        )
    }

    /// Removes the directory: once all are connected the names are not needed any more, and a kill would leave them.
    pub fn remove(&self) {
        for entry in Dir::read_from(&self.opened).into_iter().flatten().flatten() {
            let _ = rustix::fs::unlinkat(&self.opened, entry.file_name(), AtFlags::empty());
        }
        // Neither follows a link nor takes what is not empty.
        let _ = std::fs::remove_dir(&self.directory);
    }
}

impl Drop for SocketDirectory {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Where private directories are made: the user's own place is closed to others.
fn parent_for(own_user: bool) -> PathBuf {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|_| own_user);
    let place = own.unwrap_or_else(std::env::temp_dir);
    let place = std::path::absolute(&place).unwrap_or(place);
    let taken = "/limosa-".len() + 32 + 1 + LONGEST_NAME;
    let fits = place.as_os_str().len() <= SOCKET_PATH_MAX - taken;
    if fits && (own_user || is_open(&place)) { place } else { PathBuf::from("/tmp") }
}

/// Whether every user can pass through this directory.
fn is_open(place: &Path) -> bool {
    place.ancestors().all(|part| std::fs::metadata(part).is_ok_and(|found| found.mode() & 0o001 != 0))
}

/// Whether the process finds this very directory under this name; `None` if that cannot be found out.
fn sees(pid: u32, directory: &Path) -> Option<bool> {
    let ours = std::fs::metadata(directory).ok()?;
    let root = format!("/proc/{pid}/root");
    // Without the right to look into that process even this fails.
    std::fs::metadata(format!("{root}/")).ok()?;
    match std::fs::metadata(format!("{root}{}", directory.display())) {
        Ok(theirs) => Some((theirs.dev(), theirs.ino()) == (ours.dev(), ours.ino())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Some(false),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_process_sees_what_is_there_and_not_what_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let own = std::process::id();
        assert_eq!(sees(own, folder.path()), Some(true));
        let gone = folder.path().to_path_buf();
        drop(folder);
        assert_eq!(sees(own, &gone), None);
    }

    #[test]
    fn a_folder_of_mode_0700_is_open_to_nobody_else() {
        assert!(is_open(Path::new("/tmp")));
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        assert!(!is_open(folder.path()));
    }

    #[test]
    fn what_is_put_in_its_place_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let (made, moved, others) =
            (folder.path().join("made"), folder.path().join("moved"), folder.path().join("others"));
        for directory in [&made, &others] {
            std::fs::create_dir(directory).unwrap();
            std::fs::write(directory.join("socket"), "").unwrap();
        }
        let opened = std::fs::File::open(&made).unwrap().into();
        let directory = SocketDirectory { directory: made.clone(), opened, other: None };
        std::fs::rename(&made, &moved).unwrap();
        std::os::unix::fs::symlink(&others, &made).unwrap();
        drop(directory);
        assert!(others.join("socket").exists());
        assert!(!moved.join("socket").exists());
    }

    #[test]
    fn every_place_leaves_room_for_a_sockets_name() {
        for own in [true, false] {
            let longest =
                parent_for(own).join(format!("limosa-{}", Uuid::nil().simple())).join("x".repeat(LONGEST_NAME));
            assert!(longest.is_absolute() && longest.as_os_str().len() <= SOCKET_PATH_MAX, "{}", longest.display());
        }
    }
}
