//! Operations on whole disks: converting, comparing, describing, resizing, and measuring their
//! space and their speed.

pub mod bench;
pub mod compare;
pub mod convert;
pub mod dd;
pub mod info;
pub mod measure;
mod operation;
pub mod resize;

pub use operation::{DiskOperation, OperationError, Progress, ProgressObserver};
