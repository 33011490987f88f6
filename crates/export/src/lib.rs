//! Servers for disk images.
//!
//! An [`Export`] is a disk under a name. The server of the module [`nbd`] gives exports to clients of the network block
//! device protocol: stock QEMU, libnbd's tools, the Linux kernel. The device of the module [`vhost_user_blk`] is a disk
//! of a virtual machine, whose memory it shares.
//!
//! ```no_run
//! use limosa_channel::{Listener, Options};
//! use limosa_export::{Export, Exports};
//! use limosa_export::nbd::{Server, ServerOptions};
//! use limosa_image::chain::{OpenOptions, open};
//! use limosa_image::reference::Reference;
//! use limosa_storage::block_on;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let disk = block_on(open(&Reference::file("disk.qcow2"), &OpenOptions::default()))?;
//! let exports = Exports::new();
//! exports.add(Export::new("", disk)?)?;
//! let listener = Listener::bind(&"unix:/run/disk.sock".parse()?, &Options::default())?;
//! let server = Server::new(exports, ServerOptions::default())?;
//! // Until another thread calls `server.stopper().stop()`.
//! server.serve(&listener)?;
//! # Ok(()) }
//! ```

mod clients;
mod counters;
mod export;
mod exports;
mod failure_log;
mod gathered;
mod medium;
pub mod nbd;
mod peer;
mod protection;
pub mod vhost_user_blk;

pub use counters::{ExportCounters, Latencies, RequestKind};
pub use export::{Export, ExportError};
pub use exports::Exports;
pub use peer::VmPeers;
pub use protection::ProtectionStatus;

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
