//! Images opened, read, created, described and committed.

mod bitmaps;
mod chain;
mod commit;
mod create;
mod info;
mod layers;
mod qcow2_operations;
mod qcow2_reads;
