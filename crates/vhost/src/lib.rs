//! vhost-user server plumbing shared by devices.
//!
//! A [`Device`] says what it is and what it does with a queue. It sees the guest's memory as [`Ram`], a queue as a [`Vring`],
//! and whoever drives the guest as a [`FrontEnd`]. [`message`] is the protocol on the wire.
//!
//! Rings come from rust-vmm's `virtio-queue`, over `vm-memory`; everything else of the protocol is here, so that front ends work
//! that others refuse: user-mode Linux sends a memory table with room to spare, and wants to be told of configuration changes.

mod device;
mod error;
mod front_end;
pub mod message;
mod ram;
mod vring;

pub use device::{Device, More};
pub use error::{QueueError, RamError};
pub use front_end::FrontEnd;
pub use ram::{MAX_REGIONS, Ram, RamRegion};
pub use vring::{Chain, Vring};

/// Most queues of a device.
pub const MAX_QUEUES: usize = 64;
