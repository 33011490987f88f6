//! The structures of a qcow2 image, as they are in its file: decoded, checked, encoded.
//!
//! Nothing here knows an image that is in use. Source of the facts: QEMU's specification, docs/interop/qcow2.

pub(in crate::qcow2) mod bitmap_directory;
pub(in crate::qcow2) mod compressed;
pub(in crate::qcow2) mod entry;
pub(in crate::qcow2) mod extension;
pub(in crate::qcow2) mod feature;
pub(in crate::qcow2) mod field;
pub(in crate::qcow2) mod geometry;
pub(in crate::qcow2) mod header;
pub(in crate::qcow2) mod journal;
pub(in crate::qcow2) mod refcount_array;
pub(in crate::qcow2) mod snapshot_choice;
pub(in crate::qcow2) mod snapshot_table;
