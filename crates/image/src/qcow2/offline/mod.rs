//! Work on an image that is not in use: creating, checking, repairing, resizing and emptying it, and changing its
//! version, its backing and data files, its snapshots and its bitmaps.

pub(in crate::qcow2) mod amend;
pub(in crate::qcow2) mod backing;
pub(in crate::qcow2) mod bitmaps;
pub(in crate::qcow2) mod check;
pub(in crate::qcow2) mod create;
pub(in crate::qcow2) mod data_file;
pub(in crate::qcow2) mod empty;
mod header_change;
pub(in crate::qcow2) mod layout;
pub(in crate::qcow2) mod replay;
pub(in crate::qcow2) mod resize;
pub(in crate::qcow2) mod snapshots;
pub(in crate::qcow2) mod streamed;
pub(in crate::qcow2) mod table_digest;
pub(in crate::qcow2) mod vm_state;
