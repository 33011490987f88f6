//! The vhost-user server, with front ends of the tests, of rust-vmm and of user-mode Linux.

mod peer;

mod dirty_log;
mod in_flight;
mod inflight;
mod messages;
mod postcopy;
mod rings;
mod rust_vmm;
mod uml;
