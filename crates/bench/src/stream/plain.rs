//! The floor: the same memory moved by plain write and read calls, over as many connections, and nothing looked at,
//! noted or announced.
//!
//! Both halves of the memory go at once, a thread and a connection each at either end. The calls are as long as
//! limosa's own.

use std::fs::File;
use std::os::fd::AsFd;
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use limosa_channel::{Channel, Listener, Options as ChannelOptions};
use rustix::io::{read, retry_on_intr, write};

use crate::raw::Mapping;

/// Connections, each for a part of the memory.
pub(super) const CONNECTIONS: usize = 2;

/// Bytes of a call: as many as 128 pages.
const CALL: usize = 512 << 10;

/// The source's memory: the first `memory` bytes of a file in memory.
pub(super) fn mapped(file: &File, memory: u64) -> Result<Mapping> {
    let len = usize::try_from(memory).context("--size")?;
    Mapping::of_file(file, len).with_context(|| format!("mapping {memory} bytes"))
}

/// Sends all of it, and waits until the other side has it; how many calls that took.
pub(super) fn send(memory: &Mapping, channels: &[Channel]) -> Result<u64> {
    let part = memory.bytes().len().div_ceil(CONNECTIONS);
    thread::scope(|scope| {
        let parts = channels.iter().zip(memory.bytes().chunks(part));
        let threads: Vec<_> = parts.map(|(channel, part)| scope.spawn(|| send_part(channel, part))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a sender panicked"))?).sum()
    })
}

fn send_part(channel: &Channel, part: &[u8]) -> Result<u64> {
    let mut calls = 0;
    for mut bytes in part.chunks(CALL) {
        while !bytes.is_empty() {
            let written = retry_on_intr(|| write(channel.as_fd(), bytes)).context("write")?;
            bytes = &bytes[written..];
            calls += 1;
        }
    }
    let got = channel.read(&mut [0]).context("the receiver's acknowledgement")?;
    ensure!(got == 1, "the receiver has not acknowledged all memory");
    Ok(calls)
}

/// Receives `memory` bytes into fresh memory, and says so over every connection.
pub(super) fn receive(listener: &Listener, memory: u64) -> Result<Mapping> {
    let len = usize::try_from(memory).context("--size")?;
    let mut fresh = Mapping::anonymous(len).with_context(|| format!("mapping {memory} bytes"))?;
    let channels = (0..CONNECTIONS).map(|_| listener.accept(None)).collect::<Result<Vec<_>, _>>()?;
    thread::scope(|scope| {
        let parts = channels.iter().zip(fresh.bytes_mut().chunks_mut(len.div_ceil(CONNECTIONS)));
        let threads: Vec<_> = parts.map(|(channel, part)| scope.spawn(|| receive_part(channel, part))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow!("a receiver panicked"))?)
    })?;
    Ok(fresh)
}

fn receive_part(channel: &Channel, part: &mut [u8]) -> Result<()> {
    for mut room in part.chunks_mut(CALL) {
        while !room.is_empty() {
            let got = retry_on_intr(|| read(channel.as_fd(), &mut *room)).context("read")?;
            ensure!(got > 0, "the source has ended early");
            room = &mut room[got..];
        }
    }
    Ok(channel.write_all(&[1])?)
}

/// The source's connections.
pub(super) fn connect(uri: &limosa_channel::Uri) -> Result<Vec<Channel>> {
    let connect = |_| Channel::connect(uri, &ChannelOptions::default());
    Ok((0..CONNECTIONS).map(connect).collect::<Result<_, _>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::random_memory;

    #[test]
    fn what_is_received_is_what_was_sent() {
        // Not a multiple of a call, nor of the number of connections.
        let len = (3 << 20) + 5;
        let memory = mapped(&random_memory(len).expect("memory"), len).expect("maps");
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().expect("a URI"), &ChannelOptions::default());
        let listener = listener.expect("listens");
        let uri = listener.local_uri().clone();
        let (received, calls) = thread::scope(|scope| {
            let received = scope.spawn(|| receive(&listener, len).expect("receives"));
            let calls = send(&memory, &connect(&uri).expect("connects")).expect("sends");
            (received.join().expect("ends"), calls)
        });
        assert!(received.bytes() == memory.bytes());
        assert!(calls >= 8, "{calls}");
    }
}
