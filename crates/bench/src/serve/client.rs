//! The client: a number of requests in flight on each connection, and nothing done with what comes.
//!
//! Over NBD it speaks the oldest form of the protocol, which all servers have: its replies are the smallest. Over
//! vhost-user-blk it is the testkit's driver, with a thread for all queues.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use limosa_testkit::{BLK_SLOTS, BlkClient, BlkCommand, BlkSettings};

use super::servers::{Address, EXPORT};

/// Time for a server to listen.
const SOON: Duration = Duration::from_secs(20);

/// A load.
#[derive(Debug, Clone)]
pub(crate) struct Load {
    /// Bytes of the disk.
    pub(crate) size: u64,
    /// Bytes of a request.
    pub(crate) length: u32,
    /// Bytes from one request to the next; none: anywhere.
    pub(crate) step: Option<u64>,
    pub(crate) write: bool,
    /// Requests in flight, on each connection.
    pub(crate) depth: u64,
    /// Requests of the same load that came before.
    pub(crate) first: u64,
    /// Requests on all connections.
    pub(crate) count: u64,
    /// Connections, or queues of a device.
    pub(crate) connections: u64,
    pub(crate) front: Front,
}

/// How the disk is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Front {
    /// NBD over a unix socket.
    Unix,
    /// NBD over TCP.
    Tcp,
    /// vhost-user-blk.
    Device,
}

impl Load {
    /// Writes of 4 KiB anywhere on a disk of `size` bytes, 16 in flight on one connection; none yet.
    pub(crate) const fn new(size: u64) -> Self {
        let (length, depth, connections, front) = (4096, 16, 1, Front::Unix);
        Self { size, length, step: None, write: true, depth, first: 0, count: 0, connections, front }
    }
}

/// A connection.
pub(crate) trait Stream: Read + Write + Send {}

impl<S: Read + Write + Send> Stream for S {}

/// The result of a load.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) wall: Duration,
    /// Nanoseconds from a request to its reply.
    pub(crate) latencies: Vec<u64>,
}

/// Those who use the disk.
pub(crate) enum Clients {
    Connections(Vec<Box<dyn Stream>>),
    Driver(Box<BlkClient>),
}

/// Connects as often as the load asks for, and uses the export.
pub(crate) fn connect(address: &Address, load: &Load) -> Result<Clients> {
    if let Address::Device(path, queues) = address {
        let settings = BlkSettings { queues: *queues, without: 0 };
        return Ok(Clients::Driver(Box::new(when_it_listens(|| BlkClient::connect(path, settings))?)));
    }
    let connections = (0..load.connections).map(|_| connect_one(address)).collect::<Result<_>>()?;
    Ok(Clients::Connections(connections))
}

/// Tries until the server listens.
fn when_it_listens<T, E: Into<anyhow::Error>>(mut connect: impl FnMut() -> Result<T, E>) -> Result<T> {
    let begun = Instant::now();
    loop {
        match connect() {
            Ok(connected) => return Ok(connected),
            Err(error) if begun.elapsed() > SOON => return Err(error.into()).context("the server does not listen"),
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn open(address: &Address) -> io::Result<Box<dyn Stream>> {
    match address {
        Address::Device(..) => Err(io::ErrorKind::Unsupported.into()),
        Address::Unix(path) => Ok(Box::new(UnixStream::connect(path)?)),
        Address::Tcp(port) => {
            let stream = TcpStream::connect(("127.0.0.1", *port))?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream))
        }
    }
}

fn connect_one(address: &Address) -> Result<Box<dyn Stream>> {
    let mut stream = when_it_listens(|| open(address))?;
    stream.read_exact(&mut [0; 18]).context("the greeting")?;
    let name = EXPORT.as_bytes();
    let length = u32::try_from(name.len())?;
    let bytes = [&3_u32.to_be_bytes()[..], b"IHAVEOPT", &1_u32.to_be_bytes(), &length.to_be_bytes(), name].concat();
    stream.write_all(&bytes).context("the name of the export")?;
    stream.read_exact(&mut [0; 10]).context("the export")?;
    Ok(stream)
}

/// Puts the load on the server.
pub(crate) fn run(clients: &mut Clients, load: &Load) -> Result<Outcome> {
    match clients {
        Clients::Connections(connections) => run_connections(connections, load),
        Clients::Driver(driver) => run_driver(driver, load),
    }
}

/// Puts the load on the queues of a device.
fn run_driver(driver: &mut BlkClient, load: &Load) -> Result<Outcome> {
    const SECTOR: u64 = 512;
    let depth = usize::try_from(load.depth)?.min(BLK_SLOTS.into());
    let queues = u16::try_from(load.connections)?;
    let length = usize::try_from(load.length)?;
    let data = vec![0x5a; length];
    let mut places: Vec<_> = (0..load.connections).map(|number| Places::new(load, number)).collect();
    let mut left = vec![load.count / load.connections; usize::from(queues)];
    let mut begun_at = vec![[Instant::now(); BLK_SLOTS as usize]; usize::from(queues)];
    let mut latencies = Vec::with_capacity(usize::try_from(load.count)?);
    let begun = Instant::now();
    loop {
        let mut is_done = true;
        let mut moved = false;
        for (queue, ((places, left), begun_at)) in (0..queues).zip(places.iter_mut().zip(&mut left).zip(&mut begun_at))
        {
            while let Some(reply) = driver.try_reply(queue)? {
                ensure!(reply.status == 0, "a request failed: {}", reply.status);
                let begun = begun_at.get(usize::from(reply.slot)).context("an unknown slot")?;
                latencies.push(crate::measure::nanoseconds(begun.elapsed()));
                moved = true;
            }
            let mut has_new = false;
            while *left > 0 && driver.in_flight(queue) < depth {
                let sector = places.next_place() / SECTOR;
                let command =
                    if load.write { BlkCommand::Write(sector, data.clone()) } else { BlkCommand::Read(sector, length) };
                let now = Instant::now();
                let slot = driver.submit(queue, &command, usize::MAX, false)?;
                if let Some(begun) = begun_at.get_mut(usize::from(slot)) {
                    *begun = now;
                }
                *left -= 1;
                has_new = true;
            }
            if has_new {
                driver.kick(queue)?;
            }
            is_done &= driver.in_flight(queue) == 0;
        }
        if is_done {
            return Ok(Outcome { wall: begun.elapsed(), latencies });
        }
        if !moved {
            driver.wait(0..queues)?;
        }
    }
}

/// Puts the load on the connections, each from a thread.
fn run_connections(connections: &mut [Box<dyn Stream>], load: &Load) -> Result<Outcome> {
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

/// The places of the requests of a connection.
struct Places<'a> {
    load: &'a Load,
    next: u64,
    state: u64,
}

impl<'a> Places<'a> {
    fn new(load: &'a Load, number: u64) -> Self {
        let next = load.first + number * (load.count / load.connections);
        let mut places = Self { load, next, state: 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(number + 1) };
        (0..load.first / load.connections).for_each(|_| places.step());
        places
    }

    /// Makes the next random number.
    const fn step(&mut self) {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
    }

    fn next_place(&mut self) -> u64 {
        let Load { size, length, step, .. } = *self.load;
        if let Some(step) = step {
            self.next += 1;
            return (self.next - 1) * step % size;
        }
        self.step();
        self.state % (size / u64::from(length)).max(1) * u64::from(length)
    }
}

/// The requests of one connection. Returns their latencies in nanoseconds.
fn one(stream: &mut Box<dyn Stream>, load: &Load, number: u64) -> Result<Vec<u64>> {
    let count = load.count / load.connections;
    let length = usize::try_from(load.length)?;
    let mut places = Places::new(load, number);
    let data = vec![0x5a; length];
    let mut begun = vec![Instant::now(); usize::try_from(count)?];
    let mut latencies = Vec::with_capacity(begun.len());
    let (mut sent, mut out) = (0, Vec::new());
    let mut ask = |out: &mut Vec<u8>, begun: &mut [Instant]| {
        let command = u16::from(load.write);
        out.extend_from_slice(&[0x25, 0x60, 0x95, 0x13, 0, 0]);
        out.extend_from_slice(&command.to_be_bytes());
        out.extend_from_slice(&u64::to_be_bytes(sent));
        out.extend_from_slice(&places.next_place().to_be_bytes());
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
