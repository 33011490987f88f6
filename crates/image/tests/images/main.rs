//! Images opened, read, created and described.

mod bitmaps;
mod chain;
mod create;
mod info;
mod qcow2_operations;
mod qcow2_reads;
