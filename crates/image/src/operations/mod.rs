//! Operations on whole disks: converting, committing, comparing, describing, resizing, and measuring their
//! space and their speed.

pub mod bench;
pub mod commit;
pub mod compare;
pub mod convert;
pub mod dd;
pub mod info;
pub mod measure;
mod operation;
pub mod resize;

pub use operation::{DiskOperation, OperationError, Progress, ProgressObserver};
