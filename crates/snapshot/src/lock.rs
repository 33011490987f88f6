//! Who may use a snapshot file: many that serve it, or one that replaces it.
//!
//! The lock is `flock`, for three reasons. It belongs to the open file description, so a pager that forks into the
//! background keeps it by keeping the descriptor, and it is gone when the last holder is, however that one died; a
//! POSIX record lock would be lost at the fork, and again at any close of the same file. It is one lock for a whole
//! file, on a descriptor that need not be writable. And shell users have `flock(1)`. The open-file-description record
//! lock (`F_OFD`) has the first property too, but wants a writable descriptor for its exclusive form.
//!
//! A server holds the lock shared for as long as it answers faults. A save that will replace the file holds it
//! exclusively from before the VM is touched until the new file has the name, so that it is refused at once rather than
//! after gigabytes, and so that two saves never race for one name.

use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::error::SnapshotError;

const SERVED: &str = "it is being served to a restored VM, or another save is replacing it; \
                      wait for that to end, or save under another name";
const REPLACED: &str = "a save is replacing it; try again when that has ended";

/// Takes the lock of a server: shared, without waiting.
pub(crate) fn shared(file: impl AsFd, path: &Path) -> Result<(), SnapshotError> {
    take(file, path, FlockOperation::NonBlockingLockShared, REPLACED)
}

/// Takes the lock of a replacer: exclusive, without waiting.
pub(crate) fn exclusive(file: impl AsFd, path: &Path) -> Result<(), SnapshotError> {
    take(file, path, FlockOperation::NonBlockingLockExclusive, SERVED)
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
