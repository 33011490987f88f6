//! The main channel, read: bytes in, events out.
//!
//! The decoder never sees page payloads: after [`Event::Page`] the caller takes the page's 4096 bytes by itself, best
//! straight to where they belong, and goes on with what comes behind them. Its law is that **a page event is always
//! true**: the block exists and the page lies inside it. The step of a page that continues in its block allocates
//! nothing and looks nothing up.
//!
//! It decodes precopy, postcopy and background-snapshot streams up to the device sections, and the RAM part of a
//! mapped-ram file, where the caller jumps as [`Event::MappedRamBlock`] says.

use crate::command::Command;
use crate::configuration::{Configuration, IGNORE_SHARED, MAPPED_RAM};
use crate::cursor::{Cursor, Stop};
use crate::error::{Fault, Feature, StreamError};
use crate::mapped_ram::{MappedBlock, MappedHeader};
use crate::ram::{self, BLOCKS_LIMIT, FLAG_CONTINUE, FLAG_EOS, FLAG_PAGE, FLAG_ZERO, FLAGS_MASK, PAGE_SIZE, RamBlock};
use crate::section::{self, SectionHeader, SectionKind};
use std::borrow::Cow;
use std::collections::HashMap;

const PAGE: u64 = FLAG_PAGE;
const PAGE_CONTINUE: u64 = FLAG_PAGE | FLAG_CONTINUE;
const ZERO: u64 = FLAG_ZERO;
const ZERO_CONTINUE: u64 = FLAG_ZERO | FLAG_CONTINUE;
const NO_BLOCK: usize = usize::MAX;
const EARLY_VIRTIO_MEM: &str = "virtio-mem-device-early";

/// What one step of a [`Decoder`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing was consumed: come again with at least so many bytes, those of this call included.
    Need(usize),
    /// The first `consumed` bytes of the input are used up.
    Event {
        /// Bytes to drop from the front of the input; may be 0.
        consumed: usize,
        /// What they mean.
        event: Event,
    },
}

/// What stands in a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// File header and configuration.
    Configuration(Configuration),
    /// Header of the RAM START section.
    SectionStart(SectionHeader),
    /// Header of a PART section of RAM.
    SectionPart {
        /// Section id.
        id: u32,
    },
    /// Header of the END section of RAM.
    SectionEnd {
        /// Section id.
        id: u32,
    },
    /// One RAM block of the list (not in a mapped-ram file).
    RamBlock {
        /// Its index.
        block: usize,
    },
    /// One RAM block of a mapped-ram file. **The next input byte is the one at file offset
    /// [`end`](MappedBlock::end).**
    MappedRamBlock(MappedBlock),
    /// The list of RAM blocks is complete.
    RamStart(Vec<RamBlock>),
    /// A page: its 4096 bytes follow, and the caller takes them without showing them to the decoder.
    Page {
        /// Index of the RAM block.
        block: usize,
        /// Byte offset inside the block, page aligned; the whole page is inside.
        offset: u64,
    },
    /// A page of zeros.
    Zero {
        /// Index of the RAM block.
        block: usize,
        /// Byte offset inside the block, page aligned; the whole page is inside.
        offset: u64,
    },
    /// The EOS word: no more records in this section.
    EndOfSection,
    /// The footer behind it.
    SectionFooter {
        /// Section id.
        id: u32,
    },
    /// A command other than PACKAGED.
    Command(Command),
    /// The command PACKAGED: `length` bytes follow, and the caller takes them without showing them to the decoder.
    Package {
        /// Bytes of the package, at most [`Options::tail_limit`].
        length: u32,
    },
    /// The first device section begins: everything from the next byte on (consumed is 0) belongs to
    /// [`devices`](crate::devices). Further steps say the same again.
    DeviceTail,
    /// The byte that ends the sections, in a stream without device sections behind RAM (postcopy).
    EndOfStream,
}

/// Bounds and circumstances of a [`Decoder`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Offset in the file at which the stream begins: mapped-ram files store absolute offsets.
    pub base: u64,
    /// Longest package that is accepted, in bytes. At most 1 GiB is sensible.
    pub tail_limit: u64,
}

impl Default for Options {
    /// Stream at the beginning of the file, packages up to 1 GiB.
    fn default() -> Self {
        Self { base: 0, tail_limit: 1 << 30 }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Header,
    Outer,
    Total,
    Blocks { remaining: u64 },
    Records,
    Footer,
    Devices,
    Ended,
}

/// Decoder of a main channel. See the [module](self).
#[derive(Debug, Clone)]
pub struct Decoder {
    state: State,
    /// Length in bytes of the current block; 0 while there is none. With `current` all that a CONTINUE record needs.
    current_length: u64,
    current: usize,
    offset: u64,
    blocks: Vec<RamBlock>,
    indices: HashMap<Box<str>, usize>,
    options: Options,
    ram_id: u32,
    ram_started: bool,
    ram_listed: bool,
    pages_begun: bool,
    mapped: bool,
    addresses: bool,
    /// Announced summary of host page sizes beyond 4096: the block list may then hold page sizes.
    page_sizes: u64,
    /// Bare records: no header, no sections (the preempt channel).
    bare: bool,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Decoder {
    /// No step ever needs more bytes than this: a buffer of this size is enough to drive a decoder.
    pub const LARGEST_NEED: usize = 70_000;

    /// For a stream from its first byte.
    pub fn new() -> Self {
        Self::with_options(Options::default())
    }

    /// For a stream from its first byte.
    pub fn with_options(options: Options) -> Self {
        Self {
            state: State::Header,
            current_length: 0,
            current: NO_BLOCK,
            offset: 0,
            blocks: Vec::new(),
            indices: HashMap::new(),
            options,
            ram_id: 0,
            ram_started: false,
            ram_listed: false,
            pages_begun: false,
            mapped: false,
            addresses: false,
            page_sizes: 0,
            bare: false,
        }
    }

    /// For a channel of bare page records without sections: the preempt channel of postcopy. An EOS word ends it.
    ///
    /// # Errors
    /// A block name that occurs twice.
    pub fn for_records(blocks: &[RamBlock]) -> Result<Self, StreamError> {
        let mut decoder = Self { state: State::Records, bare: true, ..Self::new() };
        for block in blocks {
            decoder.add_block(block.clone()).map_err(|fault| StreamError::new(0, "RAM block list", fault))?;
        }
        Ok(decoder)
    }

    /// For a recovery of postcopy: the stream goes on between two sections, on a new connection, without a header, and
    /// with the layout that the broken one began with.
    ///
    /// # Errors
    /// A block name that occurs twice.
    pub fn for_recovery(blocks: &[RamBlock], ram_section_id: u32) -> Result<Self, StreamError> {
        Ok(Self {
            state: State::Outer,
            bare: false,
            ram_id: ram_section_id,
            ram_started: true,
            ram_listed: true,
            ..Self::for_records(blocks)?
        })
    }

    /// Bytes from the beginning of the stream to the next byte to be decoded (payloads that the caller takes are
    /// counted as soon as their event is out).
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The RAM blocks seen so far.
    pub fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    /// The source's number of the RAM section, once it began.
    pub fn ram_section_id(&self) -> Option<u32> {
        self.ram_started.then_some(self.ram_id)
    }

    /// The error to report when the input ends although the decoder needs `wanted` bytes and only `available` are left.
    pub fn truncated(&self, available: usize, wanted: usize) -> StreamError {
        let what = match self.state {
            State::Header => "file header and configuration",
            State::Outer => "the row of sections (a section or command has to follow)",
            State::Total | State::Blocks { .. } => "the RAM block list",
            State::Records => "RAM records",
            State::Footer => "a section footer",
            State::Devices => "device sections",
            State::Ended => "the end of the stream",
        };
        StreamError::new(self.offset, self.place(), Fault::Truncated { what: what.into(), wanted, available })
    }

    /// Decodes what stands at the beginning of `input`.
    ///
    /// # Errors
    /// What stands there is not what the format has there; the decoder must not be used after that.
    #[inline]
    pub fn step(&mut self, input: &[u8]) -> Result<Step, StreamError> {
        if self.state == State::Records
            && let Some(word) = input.first_chunk::<8>()
        {
            let word = u64::from_be_bytes(*word);
            let offset = word & !FLAGS_MASK;
            // Lengths are multiples of the page size: a page that begins inside a block ends inside it.
            if offset < self.current_length {
                match word & FLAGS_MASK {
                    PAGE_CONTINUE => {
                        self.offset += 8 + PAGE_SIZE;
                        return Ok(Step::Event { consumed: 8, event: Event::Page { block: self.current, offset } });
                    }
                    ZERO_CONTINUE if input.get(8) == Some(&0) => {
                        self.offset += 9;
                        return Ok(Step::Event { consumed: 9, event: Event::Zero { block: self.current, offset } });
                    }
                    _ => {}
                }
            }
        }
        self.step_slowly(input)
    }

    #[cold]
    fn step_slowly(&mut self, input: &[u8]) -> Result<Step, StreamError> {
        let mut cursor = Cursor::new(input);
        let next = match self.state {
            State::Header => self.header(&mut cursor),
            State::Outer => self.outer(&mut cursor),
            State::Total => self.total(&mut cursor),
            State::Blocks { remaining } => self.block(&mut cursor, remaining),
            State::Records => self.record(&mut cursor),
            State::Footer => self.footer(&mut cursor),
            State::Devices => Ok(Event::DeviceTail),
            State::Ended => Ok(Event::EndOfStream),
        };
        match next {
            Ok(event) => {
                let consumed = cursor.at();
                match &event {
                    Event::MappedRamBlock(block) => self.offset = block.end() - self.options.base,
                    other => {
                        let payload = match other {
                            Event::Page { .. } => PAGE_SIZE,
                            Event::Package { length } => u64::from(*length),
                            _ => 0,
                        };
                        let passed = crate::cursor::u64_from(consumed).saturating_add(payload);
                        self.offset = self.offset.saturating_add(passed);
                    }
                }
                Ok(Step::Event { consumed, event })
            }
            Err(Stop::Need(wanted)) => Ok(Step::Need(wanted)),
            Err(stop) => Err(stop.into_error(self.offset, self.place(), input.len())),
        }
    }

    fn place(&self) -> Cow<'static, str> {
        match self.state {
            State::Header => "file header".into(),
            State::Outer | State::Devices | State::Ended => "between sections".into(),
            State::Records if self.bare => "page channel".into(),
            State::Total | State::Blocks { .. } | State::Records | State::Footer => {
                format!("section \"ram\" (id {})", self.ram_id).into()
            }
        }
    }

    fn header(&mut self, cursor: &mut Cursor<'_>) -> Result<Event, Stop> {
        let configuration = Configuration::read(cursor)?;
        if let Some(bits) = configuration.target_page_bits.filter(|bits| *bits != 12) {
            return Err(Stop::Fail { at: 8, fault: Fault::Unsupported(Feature::TargetPageBits { bits }) });
        }
        self.mapped = configuration.has_capability(MAPPED_RAM);
        self.addresses = configuration.has_capability(IGNORE_SHARED);
        self.state = State::Outer;
        Ok(Event::Configuration(configuration))
    }

    fn outer(&mut self, cursor: &mut Cursor<'_>) -> Result<Event, Stop> {
        let byte = cursor.peek()?;
        match SectionKind::from_byte(byte) {
            Some(SectionKind::Start) => self.section_start(cursor),
            Some(kind @ (SectionKind::Part | SectionKind::End)) => {
                cursor.u8()?;
                let id = cursor.be32()?;
                if !self.ram_listed || id != self.ram_id {
                    let what = if self.ram_listed {
                        format!("the id {} of section \"ram\"", self.ram_id)
                    } else {
                        "the START of section \"ram\" before any PART or END".to_owned()
                    };
                    return Err(Stop::Fail { at: 1, fault: Fault::expected(what, format_args!("section id {id}")) });
                }
                self.pages_begun = true;
                self.state = State::Records;
                Ok(if kind == SectionKind::Part { Event::SectionPart { id } } else { Event::SectionEnd { id } })
            }
            Some(SectionKind::Full) => self.device_tail(cursor),
            None if byte == section::EOF => {
                cursor.u8()?;
                if !self.ram_listed {
                    let fault = Fault::expected("the START of section \"ram\"", "the end of the sections");
                    return Err(Stop::Fail { at: 0, fault });
                }
                self.state = State::Ended;
                Ok(Event::EndOfStream)
            }
            None if byte == section::COMMAND => self.command(cursor),
            None => {
                let what = "a section (0x01 to 0x04), a command (0x08) or the end (0x00)";
                Err(Stop::Fail { at: 0, fault: Fault::expected(what, format_args!("{byte:#04x}")) })
            }
        }
    }

    fn section_start(&mut self, cursor: &mut Cursor<'_>) -> Result<Event, Stop> {
        cursor.u8()?;
        let header = SectionHeader::read(SectionKind::Start, cursor)?;
        let fault = match header.name.as_str() {
            ram::RAM if self.ram_started => Fault::expected("one START of section \"ram\"", "a second one"),
            ram::RAM if header.instance != 0 => Fault::expected("instance 0 of section \"ram\"", header.instance),
            ram::RAM if header.version != ram::RAM_VERSION => {
                Fault::expected("version 4 of section \"ram\"", header.version)
            }
            ram::RAM => {
                self.ram_id = header.id;
                self.ram_started = true;
                self.state = State::Total;
                return Ok(Event::SectionStart(header));
            }
            "dirty-bitmap" => Fault::Unsupported(Feature::DirtyBitmaps),
            _ => Fault::Unsupported(Feature::IterableSection { name: header.name }),
        };
        Err(Stop::Fail { at: 0, fault })
    }

    /// A FULL section: the device tail, except for the one device that comes before the pages.
    fn device_tail(&mut self, cursor: &Cursor<'_>) -> Result<Event, Stop> {
        if !self.pages_begun {
            // Only looked at: the tail begins at the FULL byte.
            let mut ahead = cursor.fork();
            ahead.u8()?;
            let header = SectionHeader::read(SectionKind::Full, &mut ahead)?;
            if header.name.ends_with(EARLY_VIRTIO_MEM) {
                let fault = Fault::Unsupported(Feature::VirtioMem { name: header.name });
                return Err(Stop::Fail { at: 0, fault });
            }
            if !self.ram_listed {
                let found = format_args!("device section {:?}", header.name).to_string();
                return Err(Stop::Fail { at: 0, fault: Fault::expected("the START of section \"ram\"", found) });
            }
        }
        self.state = State::Devices;
        Ok(Event::DeviceTail)
    }

    fn command(&mut self, cursor: &mut Cursor<'_>) -> Result<Event, Stop> {
        let command = Command::read(cursor)?;
        match &command {
            Command::Packaged { length } => {
                if u64::from(*length) > self.options.tail_limit {
                    let (value, limit) = (u64::from(*length), self.options.tail_limit);
                    return Err(Stop::Fail {
                        at: 5,
                        fault: Fault::TooLarge { what: "length of the package", value, limit },
                    });
                }
                return Ok(Event::Package { length: *length });
            }
            Command::EnableColo => return Err(Stop::Fail { at: 0, fault: Fault::Unsupported(Feature::Colo) }),
            Command::PostcopyAdvise(Some(sizes)) => self.page_sizes = sizes.summary & !PAGE_SIZE,
            Command::RamDiscard { block, ranges } => {
                let known = self.indices.get(block.as_str()).and_then(|index| self.blocks.get(*index));
                let known =
                    known.ok_or_else(|| Stop::Fail { at: 0, fault: Fault::UnknownBlock { name: block.clone() } })?;
                if let Some(range) = ranges.iter().find(|range| range.end > known.used_length) {
                    return Err(Stop::Fail { at: 0, fault: outside(known, range.start) });
                }
            }
            Command::ReceiveBitmap { block } if !self.indices.contains_key(block.as_str()) => {
                return Err(Stop::Fail { at: 0, fault: Fault::UnknownBlock { name: block.clone() } });
            }
            _ => {}
        }
        Ok(Event::Command(command))
    }

    fn total(&mut self, cursor: &mut Cursor<'_>) -> Result<Event, Stop> {
        let word = cursor.be64()?;
        let (total, flags) = (word & !FLAGS_MASK, word & FLAGS_MASK);
        if flags != ram::FLAG_MEM_SIZE {
            let fault = Fault::expected("the total RAM size (flags 0x004)", format_args!("word {word:#x}"));
            return Err(Stop::Fail { at: 0, fault });
        }
        if total >= 1 << 62 {
            let fault = Fault::TooLarge { what: "total RAM size", value: total, limit: (1 << 62) - 1 };
            return Err(Stop::Fail { at: 0, fault });
        }
        if total == 0 {
            return Err(Stop::Fail { at: 0, fault: Fault::expected("RAM blocks", "a total RAM size of 0") });
        }
        // The word alone is no event: the first block comes with it.
        self.first_or_next_block(cursor, total)
    }

    fn block(&mut self, cursor: &mut Cursor<'_>, remaining: u64) -> Result<Event, Stop> {
        if remaining == 0 {
            self.state = State::Records;
            self.ram_listed = true;
            return Ok(Event::RamStart(self.blocks.clone()));
        }
        self.first_or_next_block(cursor, remaining)
    }

    fn first_or_next_block(&mut self, cursor: &mut Cursor<'_>, remaining: u64) -> Result<Event, Stop> {
        let begin = cursor.at();
        let name = cursor.name("a RAM block name")?.to_owned();
        let used_length = cursor.be64()?;
        let at = |fault| Stop::Fail { at: begin, fault };
        if used_length % PAGE_SIZE != 0 {
            let what = format!("a multiple of 4096 as length of RAM block {name:?}");
            return Err(at(Fault::expected(what, format_args!("{used_length:#x}"))));
        }
        let Some(remaining) = remaining.checked_sub(used_length) else {
            let what = format!("at most the {remaining:#x} bytes left of the total RAM size for block {name:?}");
            return Err(at(Fault::expected(what, format_args!("{used_length:#x}"))));
        };
        let page_size = self.page_size(cursor)?;
        let address = if self.addresses { Some(cursor.be64()?) } else { None };
        let header = if self.mapped { Some(MappedHeader::read(cursor)?) } else { None };
        let block = RamBlock { name, used_length, page_size, address };
        let event = match header {
            None => Event::RamBlock { block: self.blocks.len() },
            Some(header) => {
                let header_offset = self.offset.saturating_add(crate::cursor::u64_from(begin));
                let header_offset = self.options.base.saturating_add(header_offset);
                Event::MappedRamBlock(header.place(&block, header_offset, self.options.base).map_err(at)?)
            }
        };
        self.add_block(block).map_err(at)?;
        self.state = State::Blocks { remaining };
        Ok(event)
    }

    /// The optional page size of a block. Nothing announces it, but it cannot be mistaken: a name has a length of 1 or
    /// more where a page size has a zero byte, and the EOS or flush word behind the last block is no announced size.
    fn page_size(&self, cursor: &mut Cursor<'_>) -> Result<Option<u64>, Stop> {
        if self.page_sizes == 0 || cursor.peek()? != 0 {
            return Ok(None);
        }
        let value = cursor.fork().be64()?;
        if value.is_power_of_two() && value > PAGE_SIZE && value & self.page_sizes != 0 {
            cursor.be64()?;
            return Ok(Some(value));
        }
        Ok(None)
    }

    fn add_block(&mut self, block: RamBlock) -> Result<(), Fault> {
        if self.blocks.len() >= BLOCKS_LIMIT {
            let (value, limit) = (BLOCKS_LIMIT as u64 + 1, BLOCKS_LIMIT as u64);
            return Err(Fault::TooLarge { what: "number of RAM blocks", value, limit });
        }
        if self.indices.insert(block.name.as_str().into(), self.blocks.len()).is_some() {
            return Err(Fault::DuplicateBlock { name: block.name });
        }
        self.blocks.push(block);
        Ok(())
    }

    fn record(&mut self, cursor: &mut Cursor<'_>) -> Result<Event, Stop> {
        let word = cursor.be64()?;
        let (offset, flags) = (word & !FLAGS_MASK, word & FLAGS_MASK);
        let fail = |fault| Err(Stop::Fail { at: 0, fault });
        match flags {
            FLAG_EOS if offset == 0 => {
                self.state = if self.bare { State::Ended } else { State::Footer };
                return Ok(if self.bare { Event::EndOfStream } else { Event::EndOfSection });
            }
            PAGE | PAGE_CONTINUE | ZERO | ZERO_CONTINUE if self.mapped => {
                let found = format_args!("page record {word:#x}").to_string();
                return fail(Fault::expected("only EOS in the RAM sections of a mapped-ram file", found));
            }
            PAGE | PAGE_CONTINUE | ZERO | ZERO_CONTINUE if self.pages_begun || self.bare => {}
            _ => {
                return fail(match flags & !FLAG_CONTINUE {
                    ram::FLAG_XBZRLE => Fault::Unsupported(Feature::Xbzrle),
                    ram::FLAG_HOOK => Fault::Unsupported(Feature::RdmaHook),
                    ram::FLAG_COMPRESS_PAGE => Fault::Unsupported(Feature::CompressedPage),
                    ram::FLAG_MULTIFD_FLUSH => Fault::Unsupported(Feature::Multifd),
                    _ if self.pages_begun || self.bare => Fault::expected(
                        "a RAM record (flags 0x002, 0x008, each with or without 0x020, or the word 0x010)",
                        format_args!("word {word:#x}"),
                    ),
                    _ => Fault::expected("EOS (0x010) behind the RAM block list", format_args!("word {word:#x}")),
                });
            }
        }
        // Nothing of `self` changes before the whole record is there: it is read again if it is not.
        let block = if flags & FLAG_CONTINUE != 0 {
            if self.current == NO_BLOCK {
                let what = "a block name in the first page record of the channel";
                return fail(Fault::expected(what, format_args!("CONTINUE in word {word:#x}")));
            }
            self.current
        } else {
            let name = cursor.name("a RAM block name")?;
            match self.blocks.get(self.current) {
                Some(current) if current.name == name => self.current,
                _ => match self.indices.get(name) {
                    Some(index) => *index,
                    None => return fail(Fault::UnknownBlock { name: name.to_owned() }),
                },
            }
        };
        let used_length = self.blocks.get(block).map_or(0, |block| block.used_length);
        if offset >= used_length {
            return fail(match self.blocks.get(block) {
                Some(block) => outside(block, offset),
                None => Fault::expected("a RAM block", format_args!("index {block}")),
            });
        }
        let event = if flags & FLAG_ZERO != 0 {
            let at = cursor.at();
            let fill = cursor.u8()?;
            if fill != 0 {
                let fault = Fault::expected("fill byte 0 of a zero page", format_args!("{fill:#04x}"));
                return Err(Stop::Fail { at, fault });
            }
            Event::Zero { block, offset }
        } else {
            Event::Page { block, offset }
        };
        self.current = block;
        self.current_length = used_length;
        Ok(event)
    }

    fn footer(&mut self, cursor: &mut Cursor<'_>) -> Result<Event, Stop> {
        let byte = cursor.u8()?;
        if byte != section::FOOTER {
            let fault = Fault::expected("a section footer (0x7e)", format_args!("{byte:#04x}"));
            return Err(Stop::Fail { at: 0, fault });
        }
        let id = cursor.be32()?;
        if id != self.ram_id {
            let fault = Fault::expected(format!("section id {} in the footer", self.ram_id), id);
            return Err(Stop::Fail { at: 1, fault });
        }
        self.state = State::Outer;
        Ok(Event::SectionFooter { id })
    }
}

fn outside(block: &RamBlock, offset: u64) -> Fault {
    Fault::OutsideBlock { block: block.name.clone(), offset, used_length: block.used_length }
}
