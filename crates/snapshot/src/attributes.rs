//! The owner, the mode, the extended attributes and the time of a file that takes another one's place.
//!
//! Law: who could read the file before can read it after, and nobody else. What cannot be kept is an error.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{Gid, Mode, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;

use crate::error::SnapshotError;

/// The most bytes of the names of a file's attributes, and of the value of one: the kernel's limits.
const MOST: usize = 64 << 10;
/// The attribute that is the ACL.
const ACL: &CStr = c"system.posix_acl_access";

/// Gives a new file the owner, the mode and the extended attributes of another; the ACL is one of these.
pub(crate) fn keep(from: &File, to: &File, path: &Path) -> Result<(), SnapshotError> {
    let failed = |operation: &str| {
        let operation = operation.to_owned();
        move |errno: Errno| SnapshotError::io(operation, path, None, errno)
    };
    let stat = rustix::fs::fstat(from).map_err(failed("look at it"))?;
    let new = rustix::fs::fstat(to).map_err(failed("look at its new file"))?;
    if (stat.st_uid, stat.st_gid) != (new.st_uid, new.st_gid) {
        let owner = (Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)));
        rustix::fs::fchown(to, owner.0, owner.1).map_err(failed("give its new file its owner"))?;
    }
    let (wanted, present) = (names(from).map_err(failed("list its attributes"))?, names(to).map_err(failed("list"))?);
    for name in &wanted {
        let value = value(from, name).map_err(failed("read an attribute of it"))?;
        if present.contains(name) && self::value(to, name).is_ok_and(|there| there == value) {
            continue;
        }
        let set = rustix::fs::fsetxattr(to, name.as_c_str(), &value, XattrFlags::empty());
        set.map_err(failed(&format!("give its new file the attribute {}", name.to_string_lossy())))?;
    }
    // A new file inherits the ACL of its directory, which may let others read it.
    if present.contains(ACL) && !wanted.contains(ACL) {
        rustix::fs::fremovexattr(to, ACL).map_err(failed("take the inherited ACL from its new file"))?;
    }
    // The owner of a file takes bits of its mode away, and an ACL sets some.
    rustix::fs::fchmod(to, Mode::from_raw_mode(stat.st_mode)).map_err(failed("give its new file its mode"))
}

/// Gives a new file the modification time of another.
pub(crate) fn keep_time(from: &File, to: &File, path: &Path) -> Result<(), SnapshotError> {
    let metadata = from.metadata().map_err(|error| SnapshotError::io("look at it", path, None, error))?;
    let last_modification = Timespec { tv_sec: metadata.mtime(), tv_nsec: metadata.mtime_nsec() };
    let times = Timestamps { last_access: last_modification, last_modification };
    let set = rustix::fs::futimens(to, &times);
    set.map_err(|errno| SnapshotError::io("give its new file its time", path, None, errno))
}

/// The names of a file's extended attributes; none where the filesystem has no attributes.
fn names(file: &File) -> Result<BTreeSet<CString>, Errno> {
    let mut bytes = vec![0; MOST];
    let length = match rustix::fs::flistxattr(file, &mut bytes[..]) {
        Ok(length) => length,
        Err(Errno::OPNOTSUPP) => 0,
        Err(errno) => return Err(errno),
    };
    let names = bytes.get(..length).unwrap_or_default().split(|byte| *byte == 0).filter(|name| !name.is_empty());
    Ok(names.filter_map(|name| CString::new(name).ok()).collect())
}

fn value(file: &File, name: &CString) -> Result<Vec<u8>, Errno> {
    let mut bytes = vec![0; MOST];
    let length = rustix::fs::fgetxattr(file, name.as_c_str(), &mut bytes[..])?;
    bytes.truncate(length);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_new_file_gets_the_mode_the_attributes_and_the_time() {
        let directory = tempfile::tempdir().unwrap();
        let (old, new) = (directory.path().join("old"), directory.path().join("new"));
        let (from, to) = (File::create(&old).unwrap(), File::create(&new).unwrap());
        let has_attributes = rustix::fs::fsetxattr(&from, c"user.kept", b"by the old one", XattrFlags::empty()).is_ok();
        std::fs::set_permissions(&old, std::fs::Permissions::from_mode(0o640)).unwrap();
        from.set_modified(std::time::UNIX_EPOCH + std::time::Duration::new(1_700_000_000, 5)).unwrap();
        keep(&from, &to, &new).unwrap();
        keep_time(&from, &to, &new).unwrap();
        let metadata = to.metadata().unwrap();
        assert_eq!(metadata.mode() & 0o7777, 0o640);
        assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (1_700_000_000, 5));
        assert_eq!(names(&to).unwrap(), names(&from).unwrap());
        assert!(!has_attributes || value(&to, &c"user.kept".to_owned()).unwrap() == b"by the old one");
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&old, Some(12), Some(34)).unwrap();
            keep(&from, &to, &new).unwrap();
            assert_eq!((to.metadata().unwrap().uid(), to.metadata().unwrap().gid()), (12, 34));
        }
    }
}
