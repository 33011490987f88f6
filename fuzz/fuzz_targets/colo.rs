//! Any bytes as the checkpoints behind a base. Pages are inside their blocks, and a checkpoint has no more bytes than
//! came.

#![no_main]

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use limosa_channel::Channel;
use limosa_fuzz::colo::{ANSWER_LENGTH, Inside, base};
use limosa_migrate::checkpoints::NextCheckpoint;
use limosa_migrate::stored::{Destination, DestinationOptions};
use limosa_migrate::{Handle, MigrateError};

/// Keeps the checkpoints that come on a channel.
fn keep(channel: Channel, limit: u64) -> Result<(), MigrateError> {
    const TIMEOUT: Option<Duration> = Some(Duration::from_secs(5));
    let options = DestinationOptions { answer_timeout: TIMEOUT, colo: true, ..DestinationOptions::default() };
    let mut sink = Inside::default();
    let base = Destination::new(&mut sink, channel, &Handle::new()).options(options).run();
    let mut checkpoints = base.expect("the base is well-formed").into_checkpoints().expect("it enables COLO");
    checkpoints.begin()?;
    while checkpoints.wait_request(TIMEOUT)? == NextCheckpoint::Requested {
        checkpoints.reply()?;
        let checkpoint = checkpoints.receive(&mut sink, TIMEOUT)?;
        checkpoints.loaded()?;
        assert!(checkpoint.stats.bytes <= limit && checkpoint.stats.device_bytes < checkpoint.stats.bytes);
        assert!(checkpoint.stats.normal_pages * 4096 < checkpoint.stats.bytes);
    }
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    // What fits into the socket's buffer with nobody to read it.
    let data = &data[..data.len().min(64 << 10)];
    let (near, mut far) = UnixStream::pair().expect("a pair");
    thread::scope(|scope| {
        scope.spawn(move || {
            far.write_all(&base().expect("it is well-formed")).expect("the buffer has room");
            far.read_exact(&mut [0; ANSWER_LENGTH]).expect("the base is answered");
            // The other side closes where something is wrong.
            let _ = far.write_all(data);
            let _ = far.shutdown(Shutdown::Write);
            let mut room = [0; 4096];
            while far.read(&mut room).is_ok_and(|got| got > 0) {}
        });
        let _ = keep(Channel::from_fd(near.into()).expect("a socket"), data.len() as u64);
    });
});
