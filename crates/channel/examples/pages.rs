//! Two ends of a channel: one sends pages, each with a header, and the other receives them.
//!
//!     cargo run -p limosa-channel --example pages
//!
//! The ends are connected by a socket on the loopback interface; `unix:PATH` is used in the same way.

use std::io::{IoSlice, IoSliceMut};
use std::num::NonZeroU64;
use std::thread;
use std::time::Duration;

use limosa_channel::{Channel, ChannelError, Listener, Options, RateLimit, Uri};

const PAGE: usize = 4096;
const PAGES: u64 = 256;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options { read_timeout: Some(Duration::from_secs(10)), ..Options::default() };
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse()?, &options)?;
    // The port that the kernel has chosen.
    let uri = listener.local_uri().clone();
    println!("listening at {uri}");

    let sender = thread::spawn(move || send(&uri));
    let channel = listener.accept(Some(Duration::from_secs(10)))?;
    for expected in 0..PAGES {
        let mut header = [0; 8];
        let mut page = [0; PAGE];
        channel.read_exact_vectored(&mut [IoSliceMut::new(&mut header), IoSliceMut::new(&mut page)])?;
        assert_eq!(u64::from_be_bytes(header), expected * PAGE as u64, "offset of the page");
        assert!(page.iter().all(|byte| u64::from(*byte) == expected), "contents of page {expected}");
    }
    assert_eq!(channel.read(&mut [0])?, 0, "the sender has closed its end");
    sender.join().map_err(|_| "the sender panicked")??;
    println!("{} bytes received", channel.counters().bytes_in);
    Ok(())
}

/// Sends the header and the contents of each page with one call, without copying them together.
fn send(uri: &Uri) -> Result<(), ChannelError> {
    let options = Options { rate_limit: Some(RateLimit::new(NonZeroU64::new(100 << 20))), ..Options::default() };
    let channel = Channel::connect(uri, &options)?;
    for number in 0..PAGES {
        let page = [number.to_le_bytes()[0]; PAGE];
        channel.write_all_vectored(&[IoSlice::new(&(number * PAGE as u64).to_be_bytes()), IoSlice::new(&page)])?;
    }
    Ok(())
}
