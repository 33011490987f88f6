//! Operations on whole disks: converting, committing, rebasing, comparing, describing, resizing, amending, and
//! measuring their space and their speed.

pub mod amend;
pub mod bench;
pub mod commit;
pub mod compare;
pub mod convert;
pub mod dd;
pub mod info;
pub mod measure;
mod operation;
pub mod rebase;
pub mod resize;

pub use operation::{DiskOperation, OperationError, Progress, ProgressObserver};
