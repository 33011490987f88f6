//! Memory that tests send and receive, and a destination that behaves as QEMU's does in postcopy.

#![allow(dead_code, unreachable_pub, missing_docs)]

pub mod ballooned;
pub mod encrypted;
pub mod heap;
pub mod live;
pub mod live_postcopy;
pub mod multifd;
pub mod network;
pub mod relay;
pub mod vm;

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use limosa_channel::{Channel, Options, ZeroCopy};
use limosa_migrate::live::AcceptPreempt;
use limosa_migrate::stored::{PageError, PageSink, PageSource, StreamSetup};
use limosa_page::{PAGE_LEN, PageBitmap, PageNumber, PageRange};
use limosa_stream::{Configuration, Decoder, Event, RamBlock, ReturnMessage, Step};

/// An error with its causes.
pub trait InOneLine {
    fn in_one_line(&self) -> String;
}

impl<E: std::error::Error> InOneLine for E {
    fn in_one_line(&self) -> String {
        let mut line = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            let said = error.to_string();
            if !line.contains(&said) {
                line = format!("{line}: {said}");
            }
            cause = error.source();
        }
        line
    }
}

/// A channel for requested pages that is there already.
pub fn here(channel: Channel) -> AcceptPreempt<'static> {
    let mut channel = Some(channel);
    Box::new(move |_| Ok(channel.take()))
}

/// A VM's memory in a test: every page is zero or filled with its own pattern.
#[derive(Debug)]
pub struct Memory {
    pub start: StreamSetup,
    pub pages: Vec<Vec<[u8; 8]>>,
    stored: Vec<PageBitmap>,
    devices: Vec<u8>,
    description: Vec<u8>,
    /// Reads of this many pages succeed; the next one fails.
    pub reads_left: AtomicU64,
}

/// Device sections that a description accounts for: one `timer` of 8 bytes.
pub fn device_tail() -> (Vec<u8>, Vec<u8>) {
    let sections = b"\x04\0\0\0\x03\x05timer\0\0\0\0\0\0\0\x0112345678\x7e\0\0\0\x03".to_vec();
    let json = br#"{"devices":[{"name":"timer","instance_id":0,"fields":[{"name":"t","type":"b","size":8}]}]}"#;
    (sections, json.to_vec())
}

impl Memory {
    /// `blocks` of these numbers of pages; page `i` of a block has contents where `contents(block, i)` says so.
    pub fn new(blocks: &[u64], contents: impl Fn(usize, u64) -> bool) -> Self {
        let layout =
            blocks.iter().enumerate().map(|(index, pages)| RamBlock::new(format!("block{index}"), pages * 4096));
        let start =
            StreamSetup { configuration: Configuration::new("pc-q35-10.0"), section_id: 2, blocks: layout.collect() };
        let mut memory = Vec::new();
        let mut stored = Vec::new();
        for (block, pages) in blocks.iter().enumerate() {
            let mut bitmap = PageBitmap::new(*pages);
            let mut filled = Vec::new();
            for page in 0..*pages {
                let word = if contents(block, page) {
                    bitmap.set(PageNumber(page));
                    ((u64::try_from(block).unwrap() + 1) << 32 | (page + 1)).to_le_bytes()
                } else {
                    [0; 8]
                };
                filled.push(word);
            }
            memory.push(filled);
            stored.push(bitmap);
        }
        let (devices, description) = device_tail();
        Self { start, pages: memory, stored, devices, description, reads_left: AtomicU64::new(u64::MAX) }
    }

    /// With device sections that carry their lengths.
    #[must_use]
    pub fn with_devices(mut self, devices: &limosa_stream::DeviceSections) -> Self {
        (self.devices, self.description) = (devices.bytes().to_vec(), devices.description());
        self
    }

    /// The bytes of one page.
    pub fn page(&self, block: usize, page: u64) -> [u8; PAGE_LEN] {
        let mut bytes = [0; PAGE_LEN];
        for piece in bytes.chunks_exact_mut(8) {
            piece.copy_from_slice(&self.pages[block][usize::try_from(page).unwrap()]);
        }
        bytes
    }
}

impl PageSource for Memory {
    fn setup(&self) -> &StreamSetup {
        &self.start
    }

    fn stored_bitmap(&self, block: usize) -> &PageBitmap {
        &self.stored[block]
    }

    fn read(&self, block: usize, pages: PageRange, into: &mut [u8]) -> Result<(), PageError> {
        let left =
            self.reads_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(pages.len()));
        if left.is_err() {
            return Err("the medium has failed".into());
        }
        for (page, bytes) in pages.iter().zip(into.chunks_exact_mut(PAGE_LEN)) {
            bytes.copy_from_slice(&self.page(block, page.0));
        }
        Ok(())
    }

    fn device_sections(&self) -> &[u8] {
        &self.devices
    }

    fn description(&self) -> &[u8] {
        &self.description
    }
}

/// A sink that keeps everything.
#[derive(Debug, Default)]
pub struct Kept {
    pub start: Option<StreamSetup>,
    pub pages: Vec<Vec<Option<Vec<u8>>>>,
    pub fail_after: Option<u64>,
    pub taken: u64,
}

impl PageSink for Kept {
    fn begin(&mut self, start: &StreamSetup) -> Result<(), PageError> {
        self.pages = start.blocks.iter().map(|block| vec![None; usize::try_from(block.pages()).unwrap()]).collect();
        self.start = Some(start.clone());
        Ok(())
    }

    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<(), PageError> {
        for (at, page) in pages.iter().enumerate() {
            if self.fail_after == Some(self.taken) {
                return Err("no space left on device".into());
            }
            self.taken += 1;
            assert_eq!(page.len(), PAGE_LEN);
            self.pages[block][usize::try_from(first.0).unwrap() + at] = Some(page.to_vec());
        }
        Ok(())
    }

    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<(), PageError> {
        for page in pages.iter() {
            self.pages[block][usize::try_from(page.0).unwrap()] = None;
        }
        Ok(())
    }

    fn read_back(&mut self, block: usize, page: PageNumber, into: &mut [u8; PAGE_LEN]) -> Result<(), PageError> {
        match &self.pages[block][usize::try_from(page.0).unwrap()] {
            Some(contents) => into.copy_from_slice(contents),
            None => into.fill(0),
        }
        Ok(())
    }
}

/// The pages and messages of a postcopy destination.
#[derive(Debug)]
pub struct Landed {
    pub received: Vec<PageBitmap>,
    pub wrong: Vec<String>,
    pub ended: bool,
}

/// Reads records of one channel as a postcopy destination does: every page at most once, with the right contents, and
/// all pages of a host page one behind the other.
///
/// `lands` is called for each page that arrived and may say to stop (cut the channel).
pub struct Records<'a> {
    pub memory: &'a Memory,
    pub decoder: Decoder,
    buffer: Vec<u8>,
    /// Pages of a host page, by block.
    each: Vec<u64>,
    /// The host page that is being collected: its block, its number, how many of its pages are there.
    open: Option<(usize, u64, u64)>,
}

impl<'a> Records<'a> {
    pub fn new(memory: &'a Memory, decoder: Decoder) -> Self {
        let each = vec![1; memory.start.blocks.len()];
        Self { memory, decoder, buffer: Vec::new(), each, open: None }
    }

    /// With this number of pages a host page in each block.
    pub fn with_host_pages(mut self, each: &[u64]) -> Self {
        self.each = each.to_vec();
        self
    }

    /// Handles what comes until the stream ends, the channel closes, or `lands` returns false.
    pub fn run(&mut self, channel: &Channel, landed: &mut Landed, mut lands: impl FnMut(&Event) -> bool) {
        let mut room = vec![0; 64 << 10];
        loop {
            match self.decoder.step(&self.buffer) {
                Err(error) => {
                    landed.wrong.push(error.to_string());
                    return;
                }
                Ok(Step::Need(total)) => {
                    while self.buffer.len() < total {
                        match channel.read(&mut room) {
                            Ok(got) if got > 0 => self.buffer.extend_from_slice(&room[..got]),
                            _ => return,
                        }
                    }
                }
                Ok(Step::Event { consumed, event }) => {
                    self.buffer.drain(..consumed);
                    match &event {
                        Event::Page { block, offset } => {
                            while self.buffer.len() < PAGE_LEN {
                                match channel.read(&mut room) {
                                    Ok(got) if got > 0 => self.buffer.extend_from_slice(&room[..got]),
                                    _ => return,
                                }
                            }
                            let bytes: Vec<u8> = self.buffer.drain(..PAGE_LEN).collect();
                            self.land(landed, *block, offset / 4096, &bytes);
                        }
                        Event::Zero { block, offset } => self.land(landed, *block, offset / 4096, &[0; PAGE_LEN]),
                        Event::Package { length } => {
                            while self.buffer.len() < usize::try_from(*length).unwrap() {
                                match channel.read(&mut room) {
                                    Ok(got) if got > 0 => self.buffer.extend_from_slice(&room[..got]),
                                    _ => return,
                                }
                            }
                            self.buffer.drain(..usize::try_from(*length).unwrap());
                        }
                        Event::EndOfStream => {
                            self.nothing_open(landed, &event);
                            landed.ended = true;
                            lands(&event);
                            return;
                        }
                        event => self.nothing_open(landed, event),
                    }
                    if !lands(&event) {
                        return;
                    }
                }
            }
        }
    }

    fn nothing_open(&self, landed: &mut Landed, event: &Event) {
        if let Some(open) = self.open {
            landed.wrong.push(format!("{event:?} inside of host page {open:?}"));
        }
    }

    /// Takes one page. What is received is whole host pages.
    fn land(&mut self, landed: &mut Landed, block: usize, page: u64, bytes: &[u8]) {
        let each = self.each[block];
        let (_, host_page, had) = *self.open.get_or_insert((block, page / each, 0));
        if self.open != Some((block, page / each, had)) || page != host_page * each + had {
            landed.wrong.push(format!("page {page} of block {block} inside of host page {:?}", self.open));
        }
        self.open = (had + 1 < each).then_some((block, host_page, had + 1));
        if landed.received[block].get(PageNumber(page)) {
            landed.wrong.push(format!("page {page} of block {block} came twice"));
        }
        if self.open.is_none() {
            landed.received[block].set_range(PageRange::starting_at(PageNumber(host_page * each), each));
        }
        if bytes != self.memory.page(block, page) {
            landed.wrong.push(format!("page {page} of block {block} has other contents"));
        }
    }
}

impl Landed {
    pub fn new(memory: &Memory) -> Self {
        let received = memory.start.blocks.iter().map(|block| PageBitmap::new(block.pages())).collect();
        Self { received, wrong: Vec::new(), ended: false }
    }

    /// Stored pages that have not arrived.
    pub fn missing(&self, memory: &Memory) -> u64 {
        let mut missing = 0;
        for (block, received) in self.received.iter().enumerate() {
            let mut wanted = memory.stored_bitmap(block).clone();
            wanted.subtract(received);
            missing += wanted.count();
        }
        missing
    }
}

/// Says something on the return path.
pub fn say(channel: &Channel, message: &ReturnMessage) {
    let mut bytes = Vec::new();
    message.encode(&mut bytes).unwrap();
    let _ = channel.write_all(&bytes);
}

/// Asks for one page.
pub fn ask(channel: &Channel, memory: &Memory, block: usize, page: u64) {
    ask_host_page(channel, memory, block, page, 1);
}

/// Asks for one host page of `each` pages.
pub fn ask_host_page(channel: &Channel, memory: &Memory, block: usize, host_page: u64, each: u64) {
    let block = Some(memory.start.blocks[block].name.clone());
    let (start, length) = (host_page * each * 4096, u32::try_from(each * 4096).unwrap());
    say(channel, &ReturnMessage::RequestPages { block, start, length });
}

/// Two connected channels with a time-out, so that a test that hangs fails.
pub fn pair() -> (Channel, Channel) {
    let (near, far) = Channel::pair().unwrap();
    with_timeout(near, Channel::from_fd(far).unwrap())
}

/// Two ends; the near one lends pages in this way, over TCP or a unix socket.
pub fn lending_pair(zero_copy: ZeroCopy, tcp: bool) -> (Channel, Channel) {
    let (near, far): (OwnedFd, OwnedFd) = if tcp {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near.into(), listener.accept().unwrap().0.into())
    } else {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        (near.into(), far.into())
    };
    let options = Options { zero_copy, ..Options::default() };
    with_timeout(Channel::from_fd_with(near, &options).unwrap(), Channel::from_fd(far).unwrap())
}

fn with_timeout(near: Channel, far: Channel) -> (Channel, Channel) {
    for channel in [&near, &far] {
        channel.set_timeouts(Some(Duration::from_secs(20)), Some(Duration::from_secs(20))).unwrap();
    }
    (near, far)
}
