//! The guests of the tests, tested.

mod beat;
mod linux;
mod vm;
