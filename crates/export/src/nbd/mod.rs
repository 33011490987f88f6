//! A server of the network block device protocol (NBD). Its messages are those of `limosa-nbd`.
//!
//! A connection has a thread, and that thread has a ring: it receives requests, starts them on the export's disk, and
//! sends the replies of all that are done with one call. A connection never waits for its client while requests of it
//! are in flight, so a slow client delays no other one that uses the same disk.
//!
//! | module | subject |
//! |---|---|
//! | `admission` | what is done about a request: a pure function |
//! | `context` | metadata contexts |
//! | `image_error` | errors of a disk, as replies have them |
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

mod admission;
mod budget;
mod buffers;
mod connection;
pub(crate) mod context;
mod execute;
mod handshake;
mod image_error;
mod input;
mod limits;
mod negotiation;
mod output;
mod server;
mod transmission;

pub use limits::{Limits, ServerCounters};
pub use server::{Server, ServerError, ServerOptions, Stopper};
