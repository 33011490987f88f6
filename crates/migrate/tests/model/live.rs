//! A VM that writes its memory while it is moved, and a destination that behaves as limosa's does, or worse.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use std::thread::{self, Scope};
use std::time::Duration;

use limosa_channel::{Channel, Shutdown};
use limosa_memory::dirty::{DirtyLog, DirtyLogs, DirtyPages, LogError, SoftwareDirtyBitmap, SoftwareDirtyLog, Writers};
use limosa_memory::{BlockOptions, BlockRole, GuestMemory};
use limosa_migrate::{LiveVm, VmError};
use limosa_page::{PAGE_LEN, PageNumber, PageRange};
use limosa_stream::{
    Command, Configuration, Decoder, DeviceSections, Event, OpaqueSection, ReturnMessage, Step, postcopy, section,
};

/// A VM in a test. It runs as soon as it is made.
pub struct TestVm {
    pub memory: Arc<GuestMemory>,
    pub stopped: RwLock<bool>,
    pub throttled: AtomicUsize,
    pub pauses: AtomicU64,
    pub resumes: AtomicU64,
    pub over: AtomicBool,
    /// The device's state is its number of writes; makes every attempt's state its own.
    pub writes: AtomicU64,
    pub fail: Option<&'static str>,
    pub machine: &'static str,
    /// Devices that it has, two at least.
    pub devices: u32,
    /// Who it says writes its memory.
    pub writers: Writers,
}

impl TestVm {
    /// Blocks of these numbers of pages: of RAM, and the last one of firmware if there are two or more.
    pub fn new(blocks: &[u64]) -> Self {
        let map = |(index, pages): (usize, &u64)| {
            let role = if index > 0 && index + 1 == blocks.len() { BlockRole::Rom } else { BlockRole::Ram };
            BlockOptions::memfd(format!("block{index}"), pages * 4096).role(role).map().unwrap()
        };
        Self {
            memory: Arc::new(GuestMemory::new(blocks.iter().enumerate().map(map).collect()).unwrap()),
            stopped: RwLock::new(false),
            throttled: AtomicUsize::new(0),
            pauses: AtomicU64::new(0),
            resumes: AtomicU64::new(0),
            over: AtomicBool::new(false),
            writes: AtomicU64::new(0),
            fail: None,
            machine: "pc-q35-10.0",
            devices: 2,
            writers: Writers::VCPUS,
        }
    }

    /// With these blocks.
    pub fn of(blocks: Vec<BlockOptions>) -> Self {
        let memory = GuestMemory::new(blocks.into_iter().map(|options| options.map().unwrap()).collect()).unwrap();
        Self { memory: Arc::new(memory), ..Self::new(&[1]) }
    }

    /// Logs that see what [`write`](Self::write) writes, and the mark to write with.
    pub fn logs(&self) -> (DirtyLogs, SoftwareDirtyBitmap) {
        let log = SoftwareDirtyLog::new(&self.memory, Writers::VCPUS);
        let marker = log.bitmap();
        (DirtyLogs::new(Writers::VCPUS, vec![Box::new(log)]).unwrap(), marker)
    }

    /// The same of a guest that has also written this number of pages whenever it is looked at.
    pub fn restless_logs(&self, pages: u64) -> (DirtyLogs, SoftwareDirtyBitmap) {
        let log = SoftwareDirtyLog::new(&self.memory, Writers::VCPUS);
        let marker = log.bitmap();
        (DirtyLogs::new(Writers::VCPUS, vec![Box::new(log), Box::new(Restless(pages))]).unwrap(), marker)
    }

    pub fn runs(&self) -> bool {
        !*self.stopped.read().unwrap()
    }

    /// Fills a page as the guest does, if the VM runs.
    pub fn write(&self, marker: &SoftwareDirtyBitmap, block: usize, page: u64, fill: u8) -> bool {
        let stopped = self.stopped.read().unwrap();
        if *stopped {
            return false;
        }
        self.memory.block(block).unwrap().write(page * 4096, &[fill; PAGE_LEN]).unwrap();
        marker.mark(block, PageRange::starting_at(PageNumber(page), 1));
        self.writes.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Gives a page back as a balloon does, if the VM runs.
    pub fn discard(&self, block: usize, page: u64) -> bool {
        let stopped = self.stopped.read().unwrap();
        if *stopped {
            return false;
        }
        let page = PageRange::starting_at(PageNumber(page), 1);
        self.memory.block(block).unwrap().discard(page).unwrap();
        self.writes.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Writes random pages, a fifth of them with zeros, and gives some back, until the VM is over, with `pause` between
    /// two.
    pub fn write_on<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        marker: SoftwareDirtyBitmap,
        mut seed: u64,
        pause: Duration,
    ) {
        scope.spawn(move || {
            while !self.over.load(Ordering::Relaxed) {
                seed = random(seed);
                let block = usize::try_from(seed >> 60).unwrap() % self.memory.blocks().len();
                let page = (seed >> 20) % self.memory.block(block).unwrap().pages().len();
                let fill = if seed.is_multiple_of(5) { 0 } else { u8::try_from(seed >> 8 & 0xff).unwrap() };
                let done = match seed.is_multiple_of(7) {
                    true => self.discard(block, page),
                    false => self.write(&marker, block, page, fill),
                };
                if !done || !pause.is_zero() {
                    thread::sleep(pause.max(Duration::from_micros(20)));
                }
            }
        });
    }

    pub fn contents(&self, block: usize) -> Vec<u8> {
        let block = self.memory.block(block).unwrap();
        let mut bytes = vec![0; usize::try_from(block.len()).unwrap()];
        block.read(0, &mut bytes).unwrap();
        bytes
    }

    /// Contents for pages that a test says, each of its own.
    pub fn fill(&self, block: usize, wanted: impl Fn(u64) -> bool) {
        let memory = self.memory.block(block).unwrap();
        for page in memory.pages().iter().filter(|page| wanted(page.0)) {
            memory.write(page.offset() + page.0 % 4089, &(page.0 + 1).to_le_bytes()[..7]).unwrap();
        }
    }
}

/// A log that always reports this number of pages, and sees no writer.
pub struct Restless(pub u64);

impl DirtyLog for Restless {
    fn name(&self) -> &'static str {
        "a log of a restless guest"
    }

    fn writers(&self) -> Writers {
        Writers::VCPUS
    }

    fn start(&mut self) -> Result<(), LogError> {
        Ok(())
    }

    fn fetch(&mut self, into: &mut DirtyPages) -> Result<(), LogError> {
        into.add(0, PageRange::whole_block(self.0));
        Ok(())
    }

    fn stop(&mut self) -> Result<(), LogError> {
        Ok(())
    }
}

pub fn random(seed: u64) -> u64 {
    let mut seed = seed ^ seed << 13;
    seed ^= seed >> 7;
    seed ^ seed << 17
}

impl LiveVm for TestVm {
    fn configuration(&self) -> Configuration {
        Configuration::new(self.machine)
    }

    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    fn writers(&self) -> Writers {
        self.writers
    }

    fn pause(&self) -> Result<(), VmError> {
        self.pauses.fetch_add(1, Ordering::SeqCst);
        if self.fail == Some("pause") {
            return Err("a vCPU does not stop".into());
        }
        *self.stopped.write().unwrap() = true;
        Ok(())
    }

    fn resume(&self) -> Result<(), VmError> {
        self.resumes.fetch_add(1, Ordering::SeqCst);
        if self.fail == Some("resume") {
            return Err("a vCPU does not continue".into());
        }
        *self.stopped.write().unwrap() = false;
        Ok(())
    }

    fn device_sections(&self) -> Result<DeviceSections, VmError> {
        if self.fail == Some("devices") {
            return Err("a device does not answer".into());
        }
        let mut sections = DeviceSections::new();
        sections.push("cpu", 0, 1, &self.writes.load(Ordering::SeqCst).to_le_bytes())?;
        for instance in 1..self.devices {
            sections.push("cpu", instance, 1, &[7; 300])?;
        }
        Ok(sections)
    }

    fn throttle(&self, percent: u8) -> Result<(), VmError> {
        self.throttled.store(percent.into(), Ordering::SeqCst);
        Ok(())
    }
}

/// A VM without devices: QEMU's have states of their own form.
pub struct Bare(pub TestVm);

impl LiveVm for Bare {
    fn configuration(&self) -> Configuration {
        self.0.configuration()
    }

    fn memory(&self) -> &GuestMemory {
        &self.0.memory
    }

    fn writers(&self) -> Writers {
        self.0.writers()
    }

    fn pause(&self) -> Result<(), VmError> {
        self.0.pause()
    }

    fn resume(&self) -> Result<(), VmError> {
        self.0.resume()
    }

    fn device_sections(&self) -> Result<DeviceSections, VmError> {
        Ok(DeviceSections::new())
    }
}

/// Where a destination does something else than it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// Instead of the answer to the first PING.
    Greeting,
    /// Behind the layout.
    Layout,
    /// After this number of pages.
    Pages(u64),
    /// Behind the last page.
    End,
    /// Behind the device sections, instead of the answer to the PING there.
    Devices,
    /// Behind the answer to it: what comes then is not read.
    Gone,
    /// Behind the go and the end of the stream.
    Go,
}

/// The mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Does {
    /// Closes the channel.
    Close,
    /// Says this and closes.
    Shut(u32),
    /// Says that all is well and listens on.
    Lie,
    /// Sends what is no message.
    Garbage,
    /// Says nothing any more, and reads on.
    Silence,
    /// Says nothing any more, and reads nothing any more.
    Deaf,
}

/// The result of a destination.
#[derive(Debug, Default)]
pub struct Arrived {
    /// The memory, by block.
    pub memory: Vec<Vec<u8>>,
    /// Pages that were mentioned, as contents and as zero.
    pub normal: u64,
    pub zero: u64,
    /// States of the devices.
    pub devices: Vec<Vec<u8>>,
    /// Names of device sections in the description.
    pub described: usize,
    /// The go came, and the end of the stream: it runs the VM.
    pub runs: bool,
    /// All has come.
    pub ready: bool,
}

/// A destination.
pub struct Destination {
    channel: Channel,
    buffer: Vec<u8>,
    trouble: Option<(At, Does)>,
    silent: bool,
    /// The destination's memory before.
    pub dirt: u8,
    /// Bytes that it reads and says before it closes the channel.
    pub reads: usize,
    pub says: Cell<usize>,
    pub arrived: Arrived,
}

/// The channel is over, or the destination has stopped.
struct Over;

impl Destination {
    pub fn new(channel: Channel, trouble: Option<(At, Does)>) -> Self {
        Self {
            channel,
            buffer: Vec::new(),
            trouble,
            silent: false,
            dirt: 0,
            reads: usize::MAX,
            says: Cell::new(usize::MAX),
            arrived: Arrived::default(),
        }
    }

    pub fn run(mut self) -> Arrived {
        let _ = self.receive();
        self.arrived
    }

    fn fill(&mut self, total: usize) -> Result<(), Over> {
        let mut room = [0; 64 << 10];
        while self.buffer.len() < total {
            let most = self.reads.min(room.len());
            match self.channel.read(&mut room[..most]) {
                Ok(got) if got > 0 => {
                    self.buffer.extend_from_slice(&room[..got]);
                    self.reads -= got;
                }
                _ => return Err(Over),
            }
        }
        Ok(())
    }

    fn say(&self, message: &ReturnMessage) {
        if self.silent {
            return;
        }
        let mut bytes = Vec::new();
        message.encode(&mut bytes).unwrap();
        let most = self.says.get().min(bytes.len());
        self.says.set(self.says.get() - most);
        let _ = self.channel.write_all(&bytes[..most]);
        if most < bytes.len() {
            // The way back is gone.
            let _ = self.channel.shutdown(Shutdown::Write);
        }
    }

    /// The place for trouble. Returns whether it continues.
    fn at(&mut self, at: At) -> Result<(), Over> {
        let Some((_, does)) = self.trouble.filter(|(when, _)| *when == at) else { return Ok(()) };
        match does {
            Does::Close => Err(Over),
            Does::Shut(status) => {
                self.say(&ReturnMessage::Shut(status));
                Err(Over)
            }
            Does::Lie => {
                self.say(&ReturnMessage::Shut(0));
                Ok(())
            }
            Does::Garbage => {
                let _ = self.channel.write_all(&[0xee; 600]);
                self.silent = true;
                Ok(())
            }
            Does::Silence => {
                self.silent = true;
                Ok(())
            }
            Does::Deaf => {
                // Until the source has given up: its end of the stream is seen without reading it.
                for _ in 0..4000 {
                    thread::sleep(Duration::from_millis(5));
                    if self.channel.write_all(&[]).is_err() || self.channel.peek(&mut [0; 1]).is_err() || self.ended() {
                        break;
                    }
                }
                Err(Over)
            }
        }
    }

    fn ended(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, poll};
        let mut fds = [PollFd::new(&self.channel, PollFlags::RDHUP)];
        let now = rustix::fs::Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok_and(|_| fds[0].revents().contains(PollFlags::RDHUP))
    }

    fn receive(&mut self) -> Result<(), Over> {
        let mut decoder = Decoder::new();
        let mut blocks = Vec::new();
        loop {
            match decoder.step(&self.buffer).map_err(|error| panic!("{error}"))? {
                Step::Need(total) => self.fill(total)?,
                Step::Event { consumed, event } => {
                    self.buffer.drain(..consumed);
                    match event {
                        Event::Command(Command::Ping(token)) => {
                            self.at(At::Greeting)?;
                            self.say(&ReturnMessage::Pong(token));
                        }
                        Event::RamStart(layout) => {
                            let length = |bytes| usize::try_from(bytes).unwrap();
                            self.arrived.memory =
                                layout.iter().map(|block| vec![self.dirt; length(block.used_length)]).collect();
                            blocks = layout;
                            self.at(At::Layout)?;
                        }
                        Event::Page { block, offset } => {
                            self.at(At::Pages(self.arrived.normal + self.arrived.zero))?;
                            self.fill(PAGE_LEN)?;
                            let place = usize::try_from(offset).unwrap();
                            self.arrived.memory[block][place..place + PAGE_LEN]
                                .copy_from_slice(&self.buffer[..PAGE_LEN]);
                            self.buffer.drain(..PAGE_LEN);
                            self.arrived.normal += 1;
                        }
                        Event::Zero { block, offset } => {
                            self.at(At::Pages(self.arrived.normal + self.arrived.zero))?;
                            let place = usize::try_from(offset).unwrap();
                            self.arrived.memory[block][place..place + PAGE_LEN].fill(0);
                            self.arrived.zero += 1;
                        }
                        Event::DeviceTail => break,
                        _ => {}
                    }
                }
            }
        }
        assert!(!blocks.is_empty());
        self.at(At::End)?;
        self.tail()
    }

    /// Device sections, the PINGs between them, the end.
    fn tail(&mut self) -> Result<(), Over> {
        let mut go = false;
        loop {
            self.fill(1)?;
            match self.buffer[0] {
                section::COMMAND => match Command::decode(&self.buffer).unwrap() {
                    None => self.fill(self.buffer.len() + 1)?,
                    Some((Command::Ping(token), length)) => {
                        self.buffer.drain(..length);
                        go |= token == postcopy::PING_COMMIT;
                        if token == postcopy::PING_READY {
                            self.arrived.ready = true;
                            self.at(At::Devices)?;
                            self.say(&ReturnMessage::Pong(token));
                            self.at(At::Gone)?;
                        }
                    }
                    Some(other) => panic!("{other:?}"),
                },
                section::EOF => {
                    assert!(go, "the end without a go");
                    self.arrived.runs = true;
                    self.fill(6)?;
                    assert_eq!(self.buffer[1], section::DESCRIPTION);
                    let length = u32::from_be_bytes(self.buffer[2..6].try_into().unwrap());
                    let length = usize::try_from(length).unwrap();
                    self.fill(6 + length)?;
                    let json: serde_json::Value = serde_json::from_slice(&self.buffer[6..6 + length]).unwrap();
                    self.arrived.described = json["devices"].as_array().unwrap().len();
                    self.at(At::Go)?;
                    self.say(&ReturnMessage::Shut(0));
                    let _ = self.channel.shutdown(Shutdown::Write);
                    return Ok(());
                }
                _ => {
                    // Sections in front of something else: whole as soon as that is there.
                    match OpaqueSection::decode_all(&self.buffer) {
                        Ok((found, length)) if length > 0 => {
                            let states: Vec<_> = found.iter().map(|one| one.state.to_vec()).collect();
                            self.arrived.devices.extend(states);
                            self.buffer.drain(..length);
                        }
                        _ => self.fill(self.buffer.len() + 1)?,
                    }
                }
            }
        }
    }
}
