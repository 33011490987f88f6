//! A destination that takes multifd as QEMU does, rule by rule, and remembers what was wrong.

use std::io::{Read, Write};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use limosa_channel::Channel;
use limosa_migrate::stored::PageSource as _;
use limosa_page::{PAGE_LEN, PageBitmap, PageNumber};
use limosa_stream::multifd::{Compression, INITIAL_LEN, InitialPacket, PACKET_LEN, PACKET_PAGES, Packet};
use limosa_stream::{Command, Decoder, Event, ReturnMessage, Step};

use super::{Memory, say};

/// A destination's mistake, instead of taking everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// Closes this channel after this number of packets.
    Close { id: u8, packets: u32 },
    /// Takes nothing more from this channel after this number of packets.
    Stall { id: u8, packets: u32 },
    /// Says SHUT 1 on the main channel when this channel has brought this number of packets, and takes nothing more
    /// from it.
    TimeoutStrategy { id: u8, packets: u32 },
    /// Takes everything and then says SHUT 1.
    RefuseAtTheEnd,
}

/// Memory as it was before the stream and as it is now.
#[derive(Debug)]
struct Ram {
    bytes: Vec<Vec<u8>>,
    received: Vec<PageBitmap>,
    twice: Vec<String>,
}

/// A channel's message to the main one.
enum Notice {
    /// It waits at a SYNC.
    Sync(u8),
    /// It ended.
    Ended,
}

/// The result of the stream.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Rules that were broken.
    pub wrong: Vec<String>,
    /// Whether the device sections began.
    pub devices: bool,
    /// Packets with pages, per channel.
    pub packets: Vec<u64>,
    /// Pages in packets with contents, pages of the packets' zero lists, ZERO records of the main channel.
    pub normal: u64,
    pub zero_listed: u64,
    pub zero_records: u64,
    /// UUIDs of the initial packets.
    pub uuids: Vec<[u8; 16]>,
    /// Bytes that came as payload.
    pub payload: u64,
}

/// The destination.
#[derive(Debug)]
pub struct MultifdModel<'a> {
    memory: &'a Memory,
    compression: Compression,
    trouble: Option<Trouble>,
    /// The contents of memory outside the fresh blocks before.
    ram: Mutex<Ram>,
    outcome: Mutex<Outcome>,
}

/// The main channel as a channel's thread knows it.
#[derive(Clone, Copy)]
struct MainLink<'m> {
    main: &'m Channel,
    notices: &'m Sender<Notice>,
    /// A join point was passed.
    released: &'m Receiver<()>,
}

impl<'a> MultifdModel<'a> {
    /// `fresh` blocks are zero before the stream, those that are `in_place` are there, others are full of something
    /// else.
    pub fn new(
        memory: &'a Memory,
        (fresh, in_place): (&[String], &[String]),
        compression: Compression,
        trouble: Option<Trouble>,
    ) -> Self {
        let blocks = &memory.start.blocks;
        let bytes = blocks.iter().enumerate().map(|(index, block)| {
            if in_place.contains(&block.name) {
                let stored = memory.stored_bitmap(index);
                let page = |page| if stored.get(PageNumber(page)) { memory.page(index, page) } else { [0; PAGE_LEN] };
                return (0..block.pages()).flat_map(page).collect();
            }
            let fill = if fresh.contains(&block.name) { 0 } else { 0xee };
            vec![fill; usize::try_from(block.used_length).unwrap()]
        });
        let received = blocks.iter().map(|block| PageBitmap::new(block.pages())).collect();
        let ram = Ram { bytes: bytes.collect(), received, twice: Vec::new() };
        Self { memory, compression, trouble, ram: Mutex::new(ram), outcome: Mutex::default() }
    }

    /// Takes a stream until its device sections begin, or it ends.
    pub fn run(&self, main: Channel, page_channels: Vec<Channel>) -> Outcome {
        self.outcome.lock().unwrap().packets = vec![0; page_channels.len()];
        let (notices, noticed) = channel();
        thread::scope(|scope| {
            let mut releases = Vec::new();
            for (id, channel) in (0_u8..).zip(page_channels) {
                let (release, released) = std::sync::mpsc::channel();
                releases.push(release);
                let (notices, main) = (notices.clone(), &main);
                scope.spawn(move || {
                    let ended =
                        self.take_channel(id, channel, MainLink { main, notices: &notices, released: &released });
                    if let Err(what) = ended {
                        self.wrong(format!("channel {id}: {what}"));
                    }
                    let _ = notices.send(Notice::Ended);
                });
            }
            drop(notices);
            self.take_main(&main, &noticed, &releases);
            if self.trouble.is_none_or(|trouble| trouble == Trouble::RefuseAtTheEnd) {
                let _ = main.shutdown(limosa_channel::Shutdown::Both);
            } else {
                // It is the source that is to end it.
                wait_end(&main);
            }
            drop(releases);
        });
        let mut outcome = std::mem::take(&mut *self.outcome.lock().unwrap_or_else(PoisonError::into_inner));
        outcome.wrong.append(&mut self.ram.lock().unwrap().twice);
        outcome
    }

    /// Expects the very memory that was sent.
    #[track_caller]
    pub fn assert_memory(&self) {
        let ram = self.ram.lock().unwrap();
        for (block, layout) in self.memory.start.blocks.iter().enumerate() {
            for page in 0..layout.pages() {
                let at = usize::try_from(page).unwrap() * PAGE_LEN;
                let found = &ram.bytes[block][at..at + PAGE_LEN];
                assert!(found == self.memory.page(block, page), "page {page} of block {block}");
            }
        }
    }

    fn wrong(&self, what: String) {
        self.outcome.lock().unwrap().wrong.push(what);
    }

    fn block(&self, name: &str) -> Option<usize> {
        self.memory.start.blocks.iter().position(|block| block.name == name)
    }

    fn land(&self, block: usize, offset: u64, contents: Option<&[u8]>) {
        let mut ram = self.ram.lock().unwrap();
        let (page, at) = (PageNumber(offset / 4096), usize::try_from(offset).unwrap());
        let again = ram.received[block].set(page);
        if again {
            ram.twice.push(format!("page {page} of block {block} came twice"));
        }
        let place = &mut ram.bytes[block][at..at + PAGE_LEN];
        match contents {
            Some(contents) => place.copy_from_slice(contents),
            // As QEMU does: a zero page in a packet is cleared only if it had come before.
            None if again => place.fill(0),
            None => {}
        }
    }

    /// One channel, until it ends.
    fn take_channel(&self, id: u8, channel: Channel, link: MainLink<'_>) -> Result<(), String> {
        let MainLink { main, notices, released } = link;
        let mut initial = [0; INITIAL_LEN];
        channel.read_exact(&mut initial).map_err(|error| error.to_string())?;
        let initial = InitialPacket::decode(&initial).map_err(|error| error.to_string())?;
        self.outcome.lock().unwrap().uuids.push(initial.uuid);
        if initial.id != id {
            return Err(format!("says that it is {}", initial.id));
        }
        let mut pages = Decompressor::new(self.compression);
        let (mut first, mut taken) = (true, 0);
        loop {
            match self.trouble {
                Some(Trouble::Close { id: of, packets }) if of == id && packets == taken => return Ok(()),
                Some(Trouble::Stall { id: of, packets }) if of == id && packets == taken => {
                    wait_end(main);
                    return Ok(());
                }
                Some(Trouble::TimeoutStrategy { id: of, packets }) if of == id && packets == taken => {
                    say(main, &ReturnMessage::Shut(1));
                    wait_end(main);
                    return Ok(());
                }
                _ => {}
            }
            let mut header = [0; PACKET_LEN];
            match channel.read(&mut header[..1]) {
                Ok(0) | Err(_) => return Ok(()),
                Ok(_) => {}
            }
            if channel.read_exact(&mut header[1..]).is_err() {
                return Ok(());
            }
            taken += 1;
            let mut offsets = [0; PACKET_PAGES];
            let packet = Packet::decode(&header, 0, &mut offsets).map_err(|error| error.to_string())?.unwrap();
            if packet.sync {
                if !(packet.normal.is_empty() && packet.zero.is_empty()) {
                    return Err("a SYNC packet with pages".into());
                }
                let _ = notices.send(Notice::Sync(id));
                if released.recv().is_err() {
                    return Ok(());
                }
            } else {
                if first {
                    return Err("the first packet is no SYNC".into());
                }
                self.take_packet(id, &channel, &packet, &mut pages)?;
            }
            first = false;
        }
    }

    fn take_packet(
        &self,
        id: u8,
        channel: &Channel,
        packet: &Packet<'_>,
        pages: &mut Decompressor,
    ) -> Result<(), String> {
        let block = self.block(packet.block).ok_or_else(|| format!("a packet of block {:?}", packet.block))?;
        if packet.compression != self.compression {
            return Err(format!("compressed by {:?}", packet.compression));
        }
        if packet.normal.is_empty() && packet.zero.is_empty() {
            return Err("a packet without pages".into());
        }
        let mut payload = vec![0; usize::try_from(packet.payload_len).unwrap()];
        if channel.read_exact(&mut payload).is_err() {
            return Ok(());
        }
        let contents = pages.take(&payload, packet.normal.len() * PAGE_LEN)?;
        for (offset, contents) in packet.normal.iter().zip(contents.chunks_exact(PAGE_LEN)) {
            self.land(block, *offset, Some(contents));
        }
        for offset in packet.zero {
            self.land(block, *offset, None);
        }
        let mut outcome = self.outcome.lock().unwrap();
        outcome.packets[usize::from(id)] += 1;
        outcome.normal += packet.normal.len() as u64;
        outcome.zero_listed += packet.zero.len() as u64;
        outcome.payload += u64::from(packet.payload_len);
        Ok(())
    }

    fn take_main(&self, main: &Channel, noticed: &Receiver<Notice>, releases: &[Sender<()>]) {
        let legacy = self.memory.start.configuration.multifd_rules().sync_at_every_section;
        let mut decoder = Decoder::new();
        let (mut buffer, mut room) = (Vec::new(), vec![0; 64 << 10]);
        let mut joins = 0;
        loop {
            let event = match decoder.step(&buffer) {
                Err(error) => return self.wrong(error.to_string()),
                Ok(Step::Need(total)) => {
                    while buffer.len() < total {
                        match main.read(&mut room) {
                            Ok(got) if got > 0 => buffer.extend_from_slice(&room[..got]),
                            _ => return,
                        }
                    }
                    continue;
                }
                Ok(Step::Event { consumed, event }) => {
                    buffer.drain(..consumed);
                    event
                }
            };
            match event {
                Event::Command(Command::Ping(token)) => say(main, &ReturnMessage::Pong(token)),
                Event::Page { .. } => self.wrong("a page on the main channel".into()),
                Event::Zero { block, offset } => {
                    self.land(block, offset, Some(&[0; PAGE_LEN]));
                    self.outcome.lock().unwrap().zero_records += 1;
                }
                Event::MultifdFlush if legacy => self.wrong("a join word that this machine does not know".into()),
                Event::RamEos if !legacy => {}
                Event::MultifdFlush | Event::RamEos => {
                    joins += 1;
                    if !join(noticed, releases) {
                        return;
                    }
                }
                Event::DeviceTail => {
                    if joins != if legacy { 3 } else { 2 } {
                        self.wrong(format!("{joins} join points"));
                    }
                    self.outcome.lock().unwrap().devices = true;
                    let status = u32::from(self.trouble == Some(Trouble::RefuseAtTheEnd));
                    // Not before the whole tail is there, or the source would still be writing it.
                    while !buffer.ends_with(b"]}") {
                        match main.read(&mut room) {
                            Ok(got) if got > 0 => buffer.extend_from_slice(&room[..got]),
                            _ => return,
                        }
                    }
                    return say(main, &ReturnMessage::Shut(status));
                }
                _ => {}
            }
        }
    }
}

/// Waits until the source has closed the main channel.
fn wait_end(main: &Channel) {
    while main.read(&mut [0; 4096]).is_ok_and(|got| got > 0) {}
}

/// Waits until every channel waits, and lets all go on. `false` if one has ended.
fn join(noticed: &Receiver<Notice>, releases: &[Sender<()>]) -> bool {
    let mut waiting = vec![false; releases.len()];
    while waiting.contains(&false) {
        match noticed.recv() {
            Ok(Notice::Sync(id)) => waiting[usize::from(id)] = true,
            Ok(Notice::Ended) | Err(_) => return false,
        }
    }
    releases.iter().all(|release| release.send(()).is_ok())
}

/// The pages of one channel, as its one stream brings them.
enum Decompressor {
    None,
    Zlib(flate2::write::ZlibDecoder<Vec<u8>>),
    Zstd(zstd::stream::write::Decoder<'static, Vec<u8>>),
}

impl Decompressor {
    fn new(compression: Compression) -> Self {
        match compression {
            Compression::None => Self::None,
            Compression::Zlib => Self::Zlib(flate2::write::ZlibDecoder::new(Vec::new())),
            Compression::Zstd => Self::Zstd(zstd::stream::write::Decoder::new(Vec::new()).unwrap()),
        }
    }

    /// Returns the contents of this payload, which must have this length.
    fn take(&mut self, mut payload: &[u8], length: usize) -> Result<Vec<u8>, String> {
        let mut out = Vec::new();
        match self {
            Self::None => payload.read_to_end(&mut out).map(drop).unwrap(),
            Self::Zlib(stream) => {
                stream.write_all(payload).and_then(|()| stream.flush()).map_err(|error| error.to_string())?;
                out.append(stream.get_mut());
            }
            Self::Zstd(stream) => {
                stream.write_all(payload).and_then(|()| stream.flush()).map_err(|error| error.to_string())?;
                out.append(stream.get_mut());
            }
        }
        if out.len() == length { Ok(out) } else { Err(format!("{} bytes of pages instead of {length}", out.len())) }
    }
}
