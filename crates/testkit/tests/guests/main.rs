//! The guests of the tests, tested.

mod heartbeat;
mod linux;
mod vm;
