//! A server of the network block device protocol (NBD).
//!
//! A connection has a thread, and that thread has a ring: it receives requests, starts them on the export's disk, and
//! sends the replies of all that are done with one call. A connection never waits for its client while requests of it
//! are in flight, so a slow client delays no other one that uses the same disk.
//!
//! | module | subject |
//! |---|---|
//! | `protocol` | messages, without I/O |
//! | `negotiation` | the state of a handshake, without I/O |
//! | `handshake` | a handshake over a channel |
//! | `budget` | memory that all connections share |
//! | `buffers` | long buffers, used again |
//! | `input`, `output` | received bytes, and replies on their way |
//! | `execute` | a request, carried out on a disk |
//! | `transmission` | the requests of a connection |
//! | `connection` | one client, from its first byte to its last |
//! | `limits` | limits, and counters of a server |
//! | `server` | accepting clients, time limits, the end |

mod budget;
mod buffers;
mod connection;
mod execute;
mod handshake;
mod input;
mod limits;
mod negotiation;
mod output;
pub mod protocol;
mod server;
mod transmission;

pub use limits::{Limits, ServerCounters};
pub use server::{Server, ServerError, ServerOptions, Stopper};
