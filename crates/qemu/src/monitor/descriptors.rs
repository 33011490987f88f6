//! File descriptors handed to QEMU.
//!
//! Two ways, with different lives (QEMU docs: QMP reference, `getfd`, `add-fd`):
//!
//! * [`Monitor::getfd`]: one descriptor under a name, used up by `migrate` to `fd:NAME`. It outlives the connection
//!   until it is used or [`Monitor::closefd`] closes it.
//! * [`Monitor::add_fd`]: a numbered set, opened by `/dev/fdset/N` as often as wanted, each time as a duplicate. It,
//!   too, outlives the connection until [`Monitor::remove_fd`].
//!
//! Facts found with QEMU 10.0.2:
//!
//! * Opening `/dev/fdset/N` takes the descriptor whose access mode is *exactly* the one asked for: a migration to a
//!   file wants a write-only one, a migration from a file a read-only one; a read-write one serves neither ("Failed to
//!   find file descriptor with matching flags"). `direct-io` with multifd wants a second one with `O_DIRECT` in the
//!   same set.
//! * One write-only descriptor serves mapped-ram with multifd: its channels write by position.
//! * The duplicates share the file offset. The stream begins where that offset is, and leaves it behind the stream's
//!   end: hand over a description that was opened for it, or one whose offset was set to 0. The file is cut to the
//!   stream's length.
//! * `fd:NAME` works with one half of a socket pair for `migrate` with a return path, and for `migrate-incoming` and
//!   `migrate-recover` of a postcopy destination. A name that was used is gone.

use std::os::fd::BorrowedFd;

use serde_json::{Value, json};

use super::{Monitor, need, need_list};
use crate::qmp::QmpError;

/// A set of descriptors inside QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescriptorSet {
    /// The set's number.
    pub id: u64,
    /// The descriptor's number inside the QEMU process.
    pub descriptor: u64,
}

impl DescriptorSet {
    /// The path by which QEMU opens it.
    #[must_use]
    pub fn path(&self) -> String {
        format!("/dev/fdset/{}", self.id)
    }
}

impl Monitor {
    /// Gives QEMU a duplicate of a descriptor under a name, for `fd:NAME`.
    ///
    /// # Errors
    /// [`QmpError::NoDescriptors`] if the monitor is no unix socket; QEMU's.
    pub fn getfd(&self, name: &str, descriptor: BorrowedFd<'_>) -> Result<(), QmpError> {
        self.qmp().execute_with_descriptors("getfd", json!({ "fdname": name }), &[descriptor]).map(|_| ())
    }

    /// Closes a named descriptor. A name that is not there (any more) is no error.
    ///
    /// # Errors
    /// The connection's.
    pub fn closefd(&self, name: &str) -> Result<(), QmpError> {
        match self.order("closefd", json!({ "fdname": name })) {
            Err(error) if error.is_refusal() => Ok(()),
            other => other,
        }
    }

    /// Adds a duplicate of a descriptor to a set: `set`, or a new one. `opaque` is a remark that
    /// [`Monitor::descriptor_sets`] gives back.
    ///
    /// # Errors
    /// [`QmpError::NoDescriptors`] if the monitor is no unix socket; QEMU's.
    pub fn add_fd(
        &self,
        descriptor: BorrowedFd<'_>,
        set: Option<u64>,
        opaque: &str,
    ) -> Result<DescriptorSet, QmpError> {
        const COMMAND: &str = "add-fd";
        let mut arguments = json!({ "opaque": opaque });
        if let (Some(set), Some(map)) = (set, arguments.as_object_mut()) {
            map.insert("fdset-id".to_owned(), set.into());
        }
        let answer = self.qmp().execute_with_descriptors(COMMAND, arguments, &[descriptor])?;
        let number = |key: &str| {
            let value = need(COMMAND, &answer, key)?;
            value.as_u64().ok_or_else(|| QmpError::unexpected(COMMAND, format!("a number in '{key}'"), &answer))
        };
        Ok(DescriptorSet { id: number("fdset-id")?, descriptor: number("fd")? })
    }

    /// Takes a set away. Duplicates that QEMU has open stay open until it closes them. A set that is not there (any
    /// more) is no error.
    ///
    /// # Errors
    /// The connection's.
    pub fn remove_fd(&self, set: u64) -> Result<(), QmpError> {
        match self.order("remove-fd", json!({ "fdset-id": set })) {
            Err(error) if error.is_refusal() => Ok(()),
            other => other,
        }
    }

    /// The sets that there are, each with the remarks of its descriptors.
    ///
    /// # Errors
    /// The connection's.
    pub fn descriptor_sets(&self) -> Result<Vec<(u64, Vec<String>)>, QmpError> {
        const COMMAND: &str = "query-fdsets";
        let answer = self.qmp().execute(COMMAND, Value::Null)?;
        let remarks = |set: &Value| {
            let list = set.get("fds").and_then(Value::as_array)?;
            Some(list.iter().filter_map(|fd| Some(fd.get("opaque")?.as_str()?.to_owned())).collect())
        };
        let one = |set: &Value| Some((set.get("fdset-id")?.as_u64()?, remarks(set).unwrap_or_default()));
        Ok(need_list(COMMAND, &answer)?.iter().filter_map(one).collect())
    }
}
