//! Byte streams for VM migration: URIs, vectored reads and writes, rate limit, time-outs, counters.
//!
//! A [`Channel`] is a connected byte stream (socket or pipe), a [`FileChannel`] a file with offsets; a [`Listener`]
//! accepts peers, an [`Exec`] is a command at the other end, a [`Uri`] names an end point. Transfers are blocking and
//! complete: a gather list of hundreds of pages is one call here, and as few system calls as the kernel allows. Nothing
//! is copied on the way, unless it is encrypted ([`Tls`]).
//!
//! ```
//! use std::io::IoSlice;
//! use std::thread;
//! use std::time::Duration;
//! use limosa_channel::{Channel, Listener, Options};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let options = Options { read_timeout: Some(Duration::from_secs(10)), ..Options::default() };
//! let listener = Listener::bind(&"tcp:127.0.0.1:0".parse()?, &options)?;
//! let uri = listener.local_uri().clone();
//!
//! let sender = thread::spawn(move || -> Result<(), limosa_channel::ChannelError> {
//!     let channel = Channel::connect(&uri, &Options::default())?;
//!     let page = [7_u8; 4096];
//!     // A header and a page at a time, gathered from where they are.
//!     let pages = [IoSlice::new(b"page"), IoSlice::new(&page), IoSlice::new(b"page"), IoSlice::new(&page)];
//!     channel.write_all_vectored(&pages)
//! });
//!
//! let channel = listener.accept(Some(Duration::from_secs(10)))?;
//! let mut received = vec![0; 2 * 4100];
//! channel.read_exact(&mut received)?;
//! sender.join().expect("the sender does not panic")?;
//! assert_eq!((&received[..4], received[4104 + 4095]), (&b"page"[..], 7));
//! assert_eq!(channel.read(&mut received)?, 0, "the peer is done");
//! assert_eq!(channel.counters().bytes_in, 8200);
//! # Ok(()) }
//! ```

mod acceptor;
mod channel;
mod connect;
mod counters;
mod descriptor;
mod direction;
mod error;
mod exec;
mod file;
mod listener;
mod options;
mod passed_descriptors;
mod rate;
mod system_call;
mod tls;
mod transport;
mod uri;
mod vector;
mod vsock;
pub mod zero_copy;

pub use acceptor::{Acceptor, RefusalLog};
pub use channel::{Channel, Shutdown};
pub use counters::Counters;
#[cfg(feature = "testing")]
pub use direction::TransferHook;
pub use error::{ChannelError, Operation};
pub use exec::Exec;
pub use file::{Access, FileChannel};
pub use listener::Listener;
pub use options::Options;
pub use rate::RateLimit;
pub use tls::{Tls, TlsAlert, TlsFailure};
pub use uri::{Uri, UriError};
pub use zero_copy::{ZeroCopy, ZeroCopyWriter};

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
