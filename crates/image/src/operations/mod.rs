//! Operations on whole disks: converting, comparing, describing, and measuring their speed.

pub mod bench;
pub mod compare;
pub mod convert;
pub mod info;
mod operation;

pub use operation::{Operation, OperationError, Progress, Watch};
