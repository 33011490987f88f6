//! A virtio-blk device over vhost-user (virtio 1.2, section 5.2).
//!
//! A queue belongs to a thread, and that thread has a ring of the kernel's: it takes requests out of the queue, starts
//! them on the export's disk, and gives all that are done back with one notification. Data goes between the guest's
//! memory and the disk without a copy here.
//!
//! ```no_run
//! use std::sync::Arc;
//! use limosa_export::Export;
//! use limosa_export::vhost_user_blk::{VhostUserBlk, VhostUserBlkOptions};
//! use limosa_image::chain::{OpenOptions, open};
//! use limosa_image::reference::Reference;
//! use limosa_storage::block_on;
//! use limosa_vhost::Server;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let disk = block_on(open(&Reference::file("disk.qcow2"), &OpenOptions::default()))?;
//! let export = Arc::new(Export::new("disk", disk)?);
//! let device = VhostUserBlk::new(export, &VhostUserBlkOptions::default());
//! let server = Server::bind("/run/disk.sock".as_ref(), Arc::new(device))?;
//! // Until another thread calls `server.stopper().stop()`.
//! server.serve()?;
//! # Ok(()) }
//! ```
//!
//! | module | subject |
//! |---|---|
//! | `config` | features and the configuration space, without I/O |
//! | `chain` | the parts of a request in guest memory, without I/O |
//! | `request` | what a request asks for, without I/O |
//! | `memory` | guest memory as buffers |
//! | `execute` | a request, carried out on a disk |
//! | `queue` | the requests of a queue |
//! | `device` | the device: its queues, threads and cache mode |

mod chain;
mod config;
mod device;
mod execute;
mod memory;
mod polling;
mod queue;
mod request;

pub use device::{VhostUserBlk, VhostUserBlkOptions};
