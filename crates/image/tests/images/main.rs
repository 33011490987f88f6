//! Images opened, read, created, described, committed, rebased, and with snapshots.

mod amend;
mod bitmaps;
mod chain;
mod commit;
mod create;
mod info;
mod key_slots;
mod layers;
mod luks;
mod luks_create;
mod qcow2_operations;
mod qcow2_reads;
mod rebase;
mod snapshots;
