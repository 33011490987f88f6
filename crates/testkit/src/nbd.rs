//! A client of NBD for tests: it sends what it is told, also what no honest client sends.
//!
//! Its facts are those of the protocol's document (NetworkBlockDevice/nbd, doc/proto.md), and none of limosa's code.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

/// For what should take moments on any machine: a limit for a server that hangs, not a measure.
const SOON: Duration = Duration::from_secs(120);

/// A stream that bytes go through in both directions.
trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// A command, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum NbdCommand {
    /// Read.
    Read = 0,
    /// Write.
    Write = 1,
    /// Disconnect.
    Disconnect = 2,
    /// Flush.
    Flush = 3,
    /// Trim.
    Trim = 4,
    /// Cache.
    Cache = 5,
    /// Write zeroes.
    WriteZeroes = 6,
    /// Block status.
    BlockStatus = 7,
}

/// A part of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NbdChunk {
    /// Bytes at an offset.
    Data(u64, Vec<u8>),
    /// Zeros at an offset.
    Hole(u64, u32),
    /// The extents of a context: lengths and statuses.
    Status(u32, Vec<(u64, u64)>),
}

/// The reply to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdReply {
    /// The request's cookie.
    pub cookie: u64,
    /// 0, or the error.
    pub error: u32,
    /// Its parts.
    pub chunks: Vec<NbdChunk>,
}

impl NbdReply {
    /// Puts the bytes that were read at `offset` together. Gaps and overlaps are errors.
    ///
    /// # Errors
    /// The request failed, or a byte is missing or there twice.
    pub fn bytes(&self, offset: u64, length: usize) -> Result<Vec<u8>> {
        ensure!(self.error == 0, "the request failed with {}", self.error);
        let (mut bytes, mut seen) = (vec![0; length], vec![false; length]);
        for chunk in &self.chunks {
            let (at, len, data) = match chunk {
                NbdChunk::Data(at, data) => (*at, data.len(), Some(data)),
                NbdChunk::Hole(at, len) => (*at, usize::try_from(*len)?, None),
                NbdChunk::Status(..) => bail!("a read has a status"),
            };
            let at = usize::try_from(at.checked_sub(offset).context("a chunk before the request")?)?;
            ensure!(len > 0 && at + len <= length, "a chunk of {len} bytes at {at}");
            ensure!(!seen[at..at + len].contains(&true), "chunks overlap at {at}");
            seen[at..at + len].fill(true);
            if let Some(data) = data {
                bytes[at..at + len].copy_from_slice(data);
            }
        }
        ensure!(!seen.contains(&false), "bytes are missing");
        Ok(bytes)
    }
}

/// A client, in its handshake or after it.
pub struct NbdClient {
    stream: Box<dyn Stream>,
    structured: bool,
    extended: bool,
    /// Length of the export in bytes.
    pub size: u64,
    /// Transmission flags of the export.
    pub flags: u16,
    cookie: u64,
    /// Requests in flight: the command and the length.
    asked: HashMap<u64, (u16, u64)>,
}

impl std::fmt::Debug for NbdClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NbdClient").field("size", &self.size).field("asked", &self.asked).finish_non_exhaustive()
    }
}

impl NbdClient {
    /// Connects to a unix socket, and is greeted.
    ///
    /// # Errors
    /// Nobody listens, or the greeting is wrong.
    pub fn unix(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| format!("connecting to {}", path.display()))?;
        stream.set_read_timeout(Some(SOON))?;
        Self::over(stream)
    }

    /// Connects to a TCP port of this machine, and is greeted.
    ///
    /// # Errors
    /// As of [`unix`](Self::unix).
    pub fn tcp(port: u16) -> Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).context("connecting")?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SOON))?;
        Self::over(stream)
    }

    /// Is greeted over a stream.
    ///
    /// # Errors
    /// The greeting is wrong.
    pub fn over(stream: impl Read + Write + Send + 'static) -> Result<Self> {
        let stream = Box::new(stream);
        let (asked, cookie) = (HashMap::new(), 0);
        let mut client = Self { stream, structured: false, extended: false, size: 0, flags: 0, cookie, asked };
        let mut greeting = [0; 18];
        client.stream.read_exact(&mut greeting).context("the greeting")?;
        ensure!(greeting.starts_with(b"NBDMAGICIHAVEOPT\0"), "the greeting is {greeting:?}");
        // Fixed newstyle, no zeroes.
        client.raw(&3_u32.to_be_bytes())?;
        Ok(client)
    }

    /// Connects to a unix socket and uses an export with extended headers and these contexts.
    ///
    /// # Errors
    /// The server refuses something.
    pub fn open(path: &Path, export: &str, contexts: &[&str]) -> Result<Self> {
        let mut client = Self::unix(path)?;
        client.use_extended()?;
        client.set_contexts(export, contexts)?;
        client.go(export)?;
        Ok(client)
    }

    /// Sends bytes as they are.
    ///
    /// # Errors
    /// The server is gone.
    pub fn raw(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).context("sending")
    }

    /// Reads bytes as they are.
    ///
    /// # Errors
    /// The server is gone.
    pub fn raw_read(&mut self, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).context("receiving")?;
        Ok(bytes)
    }

    /// Waits until the server closes the connection. Bytes before that are returned.
    ///
    /// # Errors
    /// It does not.
    pub fn wait_closed(&mut self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        match self.stream.read_to_end(&mut bytes) {
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(bytes),
            read => read.map(|_| bytes).context("waiting for the end"),
        }
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).context("receiving")?;
        Ok(bytes)
    }

    fn u16(&mut self) -> Result<u16> {
        self.number().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        self.number().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.number().map(u64::from_be_bytes)
    }

    /// Sends an option without waiting for replies.
    ///
    /// # Errors
    /// The server is gone.
    pub fn send_option(&mut self, option: u32, data: &[u8]) -> Result<()> {
        let length = u32::try_from(data.len())?;
        let bytes = [&b"IHAVEOPT"[..], &option.to_be_bytes(), &length.to_be_bytes(), data].concat();
        self.raw(&bytes)
    }

    /// Reads one reply to an option: its kind and its data.
    ///
    /// # Errors
    /// It is not one.
    pub fn option_reply(&mut self, option: u32) -> Result<(u32, Vec<u8>)> {
        ensure!(self.u64()? == 0x0003_e889_0455_65a9, "a reply to an option begins as one");
        ensure!(self.u32()? == option, "a reply to another option");
        let (kind, length) = (self.u32()?, self.u32()?);
        ensure!(length <= 1 << 20, "a reply of {length} bytes");
        Ok((kind, self.raw_read(usize::try_from(length)?)?))
    }

    /// Sends an option. Returns all replies to it; the last one is an acknowledgement or an error.
    ///
    /// # Errors
    /// The server is gone, or its replies are wrong.
    pub fn option(&mut self, option: u32, data: &[u8]) -> Result<Vec<(u32, Vec<u8>)>> {
        self.send_option(option, data)?;
        let mut replies = Vec::new();
        loop {
            let (kind, data) = self.option_reply(option)?;
            replies.push((kind, data));
            if kind == 1 || kind >> 31 == 1 {
                return Ok(replies);
            }
        }
    }

    fn agreed(&mut self, option: u32, data: &[u8]) -> Result<Vec<(u32, Vec<u8>)>> {
        let replies = self.option(option, data)?;
        let kind = replies.last().map(|(kind, _)| *kind);
        ensure!(kind == Some(1), "option {option} is answered by {kind:x?}");
        Ok(replies)
    }

    /// Agrees on structured replies.
    ///
    /// # Errors
    /// The server refuses.
    pub fn use_structured(&mut self) -> Result<()> {
        self.agreed(8, b"")?;
        self.structured = true;
        Ok(())
    }

    /// Agrees on extended headers.
    ///
    /// # Errors
    /// The server refuses.
    pub fn use_extended(&mut self) -> Result<()> {
        self.agreed(11, b"")?;
        self.extended = true;
        Ok(())
    }

    /// Chooses contexts of an export. Returns their numbers and names.
    ///
    /// # Errors
    /// The server refuses.
    pub fn set_contexts(&mut self, export: &str, contexts: &[&str]) -> Result<Vec<(u32, String)>> {
        let string =
            |text: &str| Ok::<_, anyhow::Error>([&u32::try_from(text.len())?.to_be_bytes(), text.as_bytes()].concat());
        let mut data = string(export)?;
        data.extend_from_slice(&u32::try_from(contexts.len())?.to_be_bytes());
        for context in contexts {
            data.extend_from_slice(&string(context)?);
        }
        let mut replies = self.agreed(10, &data)?;
        replies.pop();
        let context = |(_, data): (u32, Vec<u8>)| {
            let (id, name) = data.split_first_chunk().context("a context without a number")?;
            Ok((u32::from_be_bytes(*id), String::from_utf8(name.to_vec())?))
        };
        replies.into_iter().map(context).collect()
    }

    /// Uses an export.
    ///
    /// # Errors
    /// The server refuses.
    pub fn go(&mut self, export: &str) -> Result<()> {
        let length = u32::try_from(export.len())?;
        let data = [&length.to_be_bytes(), export.as_bytes(), &0_u16.to_be_bytes()[..]].concat();
        for (kind, data) in self.agreed(7, &data)? {
            if kind == 3 && data.starts_with(&[0, 0]) {
                self.size = u64::from_be_bytes(data[2..10].try_into()?);
                self.flags = u16::from_be_bytes(data[10..12].try_into()?);
            }
        }
        Ok(())
    }

    /// Returns the header of a request.
    pub fn header(&self, flags: u16, command: u16, cookie: u64, range: (u64, u64)) -> Vec<u8> {
        let magic: u32 = if self.extended { 0x21e4_1c71 } else { 0x2560_9513 };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend_from_slice(&flags.to_be_bytes());
        bytes.extend_from_slice(&command.to_be_bytes());
        bytes.extend_from_slice(&cookie.to_be_bytes());
        bytes.extend_from_slice(&range.0.to_be_bytes());
        bytes.extend_from_slice(&range.1.to_be_bytes()[if self.extended { 0 } else { 4 }..]);
        bytes
    }

    /// Sends a request for `length` bytes at `offset`. Returns its cookie.
    ///
    /// # Errors
    /// The server is gone.
    pub fn send(&mut self, command: NbdCommand, flags: u16, offset: u64, length: u64) -> Result<u64> {
        self.cookie += 1;
        let header = self.header(flags, command as u16, self.cookie, (offset, length));
        self.asked.insert(self.cookie, (command as u16, length));
        self.raw(&header)?;
        Ok(self.cookie)
    }

    /// Sends a write. Returns its cookie.
    ///
    /// # Errors
    /// The server is gone.
    pub fn send_write(&mut self, flags: u16, offset: u64, data: &[u8]) -> Result<u64> {
        self.cookie += 1;
        let flags = if self.extended { flags | 1 << 5 } else { flags };
        let header = self.header(flags, NbdCommand::Write as u16, self.cookie, (offset, data.len() as u64));
        self.asked.insert(self.cookie, (NbdCommand::Write as u16, data.len() as u64));
        self.raw(&[&header, data].concat())?;
        Ok(self.cookie)
    }

    /// Receives the next complete reply, of any request.
    ///
    /// # Errors
    /// The server is gone, or the reply is wrong.
    pub fn receive(&mut self) -> Result<NbdReply> {
        let mut begun: HashMap<u64, NbdReply> = HashMap::new();
        loop {
            let magic = self.u32()?;
            if magic == 0x6744_6698 {
                ensure!(!self.extended, "a simple reply with extended headers");
                let (error, cookie) = (self.u32()?, self.u64()?);
                let (command, length) = self.asked.remove(&cookie).context("an unknown cookie")?;
                let mut chunks = Vec::new();
                if command == 0 {
                    ensure!(!self.structured, "a simple reply to a read");
                    if error == 0 && length > 0 {
                        // Its offset is the request's, which the caller knows.
                        chunks.push(NbdChunk::Data(0, self.raw_read(usize::try_from(length)?)?));
                    }
                }
                return Ok(NbdReply { cookie, error, chunks });
            }
            ensure!(magic == if self.extended { 0x6e8a_278c } else { 0x668e_33ef }, "a reply begins with {magic:x}");
            let (flags, kind, cookie) = (self.u16()?, self.u16()?, self.u64()?);
            let length = if self.extended {
                self.u64()?;
                usize::try_from(self.u64()?)?
            } else {
                usize::try_from(self.u32()?)?
            };
            ensure!(length <= 33 << 20, "a chunk of {length} bytes");
            ensure!(self.asked.contains_key(&cookie), "an unknown cookie");
            let data = self.raw_read(length)?;
            let empty = NbdReply { cookie, error: 0, chunks: Vec::new() };
            let reply = begun.entry(cookie).or_insert(empty);
            parse_chunk(kind, &data, reply)?;
            if flags & 1 != 0 {
                self.asked.remove(&cookie);
                return begun.remove(&cookie).context("a reply");
            }
        }
    }

    /// Sends a request and receives its reply. No other request may be in flight.
    ///
    /// # Errors
    /// As of [`receive`](Self::receive).
    pub fn request(&mut self, command: NbdCommand, flags: u16, offset: u64, length: u64) -> Result<NbdReply> {
        let cookie = self.send(command, flags, offset, length)?;
        let mut reply = self.receive()?;
        ensure!(reply.cookie == cookie, "the reply of another request");
        for chunk in &mut reply.chunks {
            if let NbdChunk::Data(at @ 0, _) = chunk {
                *at = if self.structured || self.extended { 0 } else { offset };
            }
        }
        Ok(reply)
    }

    /// Reads bytes.
    ///
    /// # Errors
    /// As of [`receive`](Self::receive); the request failed.
    pub fn read(&mut self, offset: u64, length: usize) -> Result<Vec<u8>> {
        self.request(NbdCommand::Read, 0, offset, length as u64)?.bytes(offset, length)
    }

    /// Writes bytes. Returns 0, or the error.
    ///
    /// # Errors
    /// As of [`receive`](Self::receive).
    pub fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> Result<u32> {
        let cookie = self.send_write(flags, offset, data)?;
        let reply = self.receive()?;
        ensure!(reply.cookie == cookie, "the reply of another request");
        Ok(reply.error)
    }

    /// Sends any other request. Returns 0, or the error.
    ///
    /// # Errors
    /// As of [`receive`](Self::receive).
    pub fn simple(&mut self, command: NbdCommand, flags: u16, offset: u64, length: u64) -> Result<u32> {
        Ok(self.request(command, flags, offset, length)?.error)
    }

    /// Disconnects, and waits for the end.
    ///
    /// # Errors
    /// The server sends something more, or does not close.
    pub fn disconnect(mut self) -> Result<()> {
        let header = self.header(0, NbdCommand::Disconnect as u16, 0, (0, 0));
        self.raw(&header)?;
        let rest = self.wait_closed()?;
        ensure!(rest.is_empty(), "{} bytes after the end", rest.len());
        Ok(())
    }
}

fn parse_chunk(kind: u16, data: &[u8], reply: &mut NbdReply) -> Result<()> {
    let u32_at =
        |at: usize| Ok::<_, anyhow::Error>(u32::from_be_bytes(data.get(at..at + 4).context("short")?.try_into()?));
    let u64_at =
        |at: usize| Ok::<_, anyhow::Error>(u64::from_be_bytes(data.get(at..at + 8).context("short")?.try_into()?));
    match kind {
        0 => ensure!(data.is_empty(), "an empty chunk with data"),
        1 => reply.chunks.push(NbdChunk::Data(u64_at(0)?, data[8..].to_vec())),
        2 => reply.chunks.push(NbdChunk::Hole(u64_at(0)?, u32_at(8)?)),
        5 => {
            let extents = (4..data.len()).step_by(8).map(|at| Ok((u32_at(at)?.into(), u32_at(at + 4)?.into())));
            reply.chunks.push(NbdChunk::Status(u32_at(0)?, extents.collect::<Result<_>>()?));
        }
        6 => {
            let extents = (8..data.len()).step_by(16).map(|at| Ok((u64_at(at)?, u64_at(at + 8)?)));
            let extents: Vec<_> = extents.collect::<Result<_>>()?;
            ensure!(extents.len() == usize::try_from(u32_at(4)?)?, "a wrong number of extents");
            reply.chunks.push(NbdChunk::Status(u32_at(0)?, extents));
        }
        0x8001 => reply.error = u32_at(0)?,
        _ => bail!("a chunk of kind {kind:x}"),
    }
    Ok(())
}
