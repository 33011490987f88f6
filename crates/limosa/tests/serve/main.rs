//! `limosa serve`, used by stock clients: QEMU's tools and libnbd's.

#[path = "../stage/mod.rs"]
mod stage;

mod bed;
mod clients;
mod guest;
mod kills;
mod locks;
mod program;
mod tls;
