//! The network block device protocol (NBD): its messages, and a client.
//!
//! A [`NbdStorage`] is an export of a server as a storage below disk images. The messages in [`protocol`] are those of
//! both ends; limosa's server is in `limosa-export`.
//!
//! ```no_run
//! use limosa_nbd::{ConnectOptions, NbdAddress, NbdStorage};
//! use limosa_storage::{Buffer, Storage as _, block_on};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let address: NbdAddress = "nbd://localhost/disk".parse()?;
//! let disk = NbdStorage::connect(&address, &ConnectOptions::default())?;
//! let start = Buffer::zeroed(4096);
//! block_on(disk.read(0, start.clone().into()))?;
//! # Ok(()) }
//! ```

mod address;
mod client;
pub mod protocol;

pub use address::{AddressError, NbdAddress};
pub use client::{ConnectOptions, ContextExtent, NbdError, NbdStorage, retire_threads};

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
