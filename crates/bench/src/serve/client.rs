//! The client: a number of requests in flight on each connection, and nothing done with what comes.
//!
//! It speaks the oldest form of the protocol, which all servers have: its replies are the smallest.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::servers::{Address, EXPORT};

/// Time for a server to listen.
const SOON: Duration = Duration::from_secs(20);

/// A load.
#[derive(Debug, Clone)]
pub(super) struct Load {
    /// Bytes of the disk.
    pub(super) size: u64,
    /// Bytes of a request.
    pub(super) length: u32,
    /// Bytes from one request to the next; none: anywhere.
    pub(super) step: Option<u64>,
    pub(super) write: bool,
    /// Requests in flight, on each connection.
    pub(super) depth: u64,
    /// Requests on all connections.
    pub(super) count: u64,
    pub(super) connections: u64,
    /// Over TCP, or else a unix socket.
    pub(super) tcp: bool,
}

impl Load {
    /// Writes of 4 KiB anywhere on a disk of `size` bytes, 16 in flight on one connection; none yet.
    pub(super) const fn new(size: u64) -> Self {
        Self { size, length: 4096, step: None, write: true, depth: 16, count: 0, connections: 1, tcp: false }
    }
}

/// A connection.
pub(super) trait Stream: Read + Write + Send {}

impl<S: Read + Write + Send> Stream for S {}

/// The result of a load.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) wall: Duration,
    /// Nanoseconds from a request to its reply.
    pub(super) latencies: Vec<u64>,
}

/// Connects as often as the load asks for, and uses the export.
pub(super) fn connect(address: &Address, load: &Load) -> Result<Vec<Box<dyn Stream>>> {
    (0..load.connections).map(|_| connect_one(address)).collect()
}

fn open(address: &Address) -> io::Result<Box<dyn Stream>> {
    match address {
        Address::Unix(path) => Ok(Box::new(UnixStream::connect(path)?)),
        Address::Tcp(port) => {
            let stream = TcpStream::connect(("127.0.0.1", *port))?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream))
        }
    }
}

fn connect_one(address: &Address) -> Result<Box<dyn Stream>> {
    let begun = Instant::now();
    let mut stream = loop {
        match open(address) {
            Ok(stream) => break stream,
            Err(error) if begun.elapsed() > SOON => return Err(error).context("the server does not listen"),
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    };
    stream.read_exact(&mut [0; 18]).context("the greeting")?;
    let name = EXPORT.as_bytes();
    let length = u32::try_from(name.len())?;
    let bytes = [&3_u32.to_be_bytes()[..], b"IHAVEOPT", &1_u32.to_be_bytes(), &length.to_be_bytes(), name].concat();
    stream.write_all(&bytes).context("the name of the export")?;
    stream.read_exact(&mut [0; 10]).context("the export")?;
    Ok(stream)
}

/// Puts the load on the connections, each from a thread.
pub(super) fn run(connections: &mut [Box<dyn Stream>], load: &Load) -> Result<Outcome> {
    let begun = Instant::now();
    let results = thread::scope(|scope| {
        let mut threads = Vec::new();
        for (number, stream) in (0_u64..).zip(connections) {
            threads.push(scope.spawn(move || one(stream, load, number)));
        }
        threads.into_iter().map(thread::ScopedJoinHandle::join).collect::<Vec<_>>()
    });
    let wall = begun.elapsed();
    let mut latencies = Vec::new();
    for result in results {
        match result {
            Ok(result) => latencies.extend(result?),
            Err(_) => bail!("a thread of the client failed"),
        }
    }
    Ok(Outcome { wall, latencies })
}

/// The requests of one connection. Returns their latencies in nanoseconds.
fn one(stream: &mut Box<dyn Stream>, load: &Load, number: u64) -> Result<Vec<u64>> {
    let count = load.count / load.connections;
    let length = usize::try_from(load.length)?;
    let places = (load.size / u64::from(load.length)).max(1);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(number + 1);
    let mut place = move |request: u64| match load.step {
        Some(step) => (number * count + request) * step % load.size,
        None => {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % places * u64::from(load.length)
        }
    };
    let data = vec![0x5a; length];
    let mut begun = vec![Instant::now(); usize::try_from(count)?];
    let mut latencies = Vec::with_capacity(begun.len());
    let (mut sent, mut out) = (0, Vec::new());
    let mut ask = |out: &mut Vec<u8>, begun: &mut [Instant]| {
        let command = u16::from(load.write);
        out.extend_from_slice(&[0x25, 0x60, 0x95, 0x13, 0, 0]);
        out.extend_from_slice(&command.to_be_bytes());
        out.extend_from_slice(&u64::to_be_bytes(sent));
        out.extend_from_slice(&place(sent).to_be_bytes());
        out.extend_from_slice(&load.length.to_be_bytes());
        if load.write {
            out.extend_from_slice(&data);
        }
        if let Some(begun) = usize::try_from(sent).ok().and_then(|sent| begun.get_mut(sent)) {
            *begun = Instant::now();
        }
        sent += 1;
        sent < count
    };
    let mut more = count > 0;
    for _ in 0..load.depth {
        more = more && ask(&mut out, &mut begun);
    }
    let whole = 16 + if load.write { 0 } else { length };
    let mut room = vec![0; whole.max(256 << 10)];
    let mut filled = 0;
    while latencies.len() < begun.len() {
        stream.write_all(&out).context("sending")?;
        out.clear();
        let got = stream.read(room.get_mut(filled..).unwrap_or_default()).context("receiving")?;
        ensure!(got > 0, "the server closed the connection");
        filled += got;
        let mut at = 0;
        while let Some(reply) = room.get(at..filled).filter(|rest| rest.len() >= whole) {
            ensure!(reply.starts_with(&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]), "a request failed: {:?}", &reply[..16]);
            let cookie = u64::from_be_bytes(reply[8..16].try_into()?);
            let begun_at = begun.get(usize::try_from(cookie)?).context("an unknown cookie")?;
            latencies.push(crate::measure::nanoseconds(begun_at.elapsed()));
            at += whole;
            more = more && ask(&mut out, &mut begun);
        }
        room.copy_within(at..filled, 0);
        filled -= at;
    }
    Ok(latencies)
}
