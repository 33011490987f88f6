//! A gate between a VM and its network: frames leave when the checkpoint counts that knows of them.
//!
//! Laws: **no frame leaves before its checkpoint counts; the VM's socket is always read; memory is bounded.** A frame
//! that is delayed or dropped breaks no promise, as networks do that. So what is in doubt is kept for the next
//! epoch: a frame that has come in part, frames beyond the drain of a seal.
//!
//! ```text
//!  QEMU -netdev stream            Gate                     network
//!    frames ----> reader --> hold --commit--> queue ----> unix socket, tap
//!    frames <---- queue <-------------------- reader <---
//!                              ^ seal, commit, abort
//!                          GateClient (the keeper of checkpoints)
//! ```
//!
//! A gate is a process of its own, as it must live as long as the VM: QEMU's connection and with it the VM's network
//! end with it, while keepers come and go. Without a keeper frames leave at once. A keeper that connects changes
//! nothing until its first seal: it may be refused by others, and leave again.
//!
//! | event | frames that are held | later ones |
//! |---|---|---|
//! | the keeper ends the series | dropped | leave at once |
//! | the keeper is gone without a word, and the VM stays | held for the [grace](GateOptions::grace), then dropped | then leave at once |
//! | the VM is gone, the keeper commits its last checkpoint | those of it leave | dropped |
//! | the VM and the keeper are gone | those that are sealed are held for the grace, and dropped unless a failover's checkpoint has them; the others are dropped | leave at once |
//! | a failover [fences](fence_gate) the VM | those of its checkpoint leave, later ones are dropped | of its process: refused; of others: leave at once |
//! | the network is gone | dropped when they are let out | the same |
//!
//! Facts about QEMU 11.1 that it rests on: a stopped VM has everything that it sent in the socket; a back end with
//! `reconnect-ms` connects again after the gate was restarted.

mod client;
mod connect;
mod error;
mod fences;
mod fencing;
mod frame;
pub(crate) mod hold;
mod keeper;
mod message;
mod network;
mod queue;
mod server;
mod tap;
mod vm;

pub use client::{GateClient, GateKeeper};
pub use error::GateError;
pub use fencing::{GateFence, fence_gate, query_gate};
pub use frame::{FRAME_MAX, FrameError, FrameReader};
pub use network::{NetworkAddress, NetworkAddressError};
pub use server::{Gate, GateAddresses, GateOptions, GateReport};
