//! Operations on whole disks: converting, comparing, describing, resizing, and measuring their speed.

pub mod bench;
pub mod compare;
pub mod convert;
pub mod info;
mod operation;
pub mod resize;

pub use operation::{DiskOperation, OperationError, Progress, ProgressObserver};
