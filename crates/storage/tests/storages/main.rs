//! Files and block devices under images.

mod block_device;
mod files;
mod qemu_locks;
mod registered;
