//! The main channel, read: bytes in, events out.

mod early;
mod records;
mod sections;

use crate::command::Command;
use crate::configuration::Configuration;
use crate::cursor::{Cursor, Stop};
use crate::error::{ErrorKind, StreamError};
use crate::mapped_ram::MappedBlock;
use crate::ram::{FLAG_CONTINUE, FLAG_PAGE, FLAG_ZERO, FLAGS_MASK, PAGE_SIZE, RamBlock};
use crate::section::SectionHeader;
use limosa_page::{invariant, to_u64};
use std::borrow::Cow;
use std::collections::HashMap;

const PAGE: u64 = FLAG_PAGE;
const PAGE_CONTINUE: u64 = FLAG_PAGE | FLAG_CONTINUE;
const ZERO: u64 = FLAG_ZERO;
const ZERO_CONTINUE: u64 = FLAG_ZERO | FLAG_CONTINUE;
const NO_BLOCK: usize = usize::MAX;

/// Result of one step of a [`Decoder`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// No byte was consumed: call again with at least this number of bytes, including those of this call.
    Need(usize),
    /// The first `consumed` bytes of the input are used up.
    Event {
        /// Bytes to drop from the front of the input; may be 0.
        consumed: usize,
        /// Meaning of these bytes.
        event: Event,
    },
}

/// An element of a stream.
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
    /// A device section that comes between the list of RAM blocks and the first page: of a virtio-mem device, which
    /// says what part of its memory is plugged. The whole section, header and footer included.
    EarlyDevice(Vec<u8>),
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
    /// A page delta: `length` bytes follow, and the caller takes them without showing them to the decoder. They are for
    /// [`xbzrle::decode`](crate::xbzrle::decode), on top of what the page holds so far.
    Xbzrle {
        /// Index of the RAM block.
        block: usize,
        /// Byte offset inside the block, page aligned; the whole page is inside.
        offset: u64,
        /// Bytes of the delta, at most 4096.
        length: u16,
    },
    /// Sync point with the [multifd](crate::multifd) channels: later data counts only when every channel has reached
    /// its next SYNC packet. A multifd stream has one in START, behind [`RamStart`](Self::RamStart); otherwise every
    /// [`RamEos`](Self::RamEos) is a sync point, including that of START.
    MultifdFlush,
    /// The EOS word: no more records in this section.
    RamEos,
    /// The footer behind it.
    SectionFooter {
        /// Section id.
        id: u32,
    },
    /// A command other than PACKAGED.
    Command(Command),
    /// The command PACKAGED: `length` bytes follow, and the caller takes them without showing them to the decoder.
    Package {
        /// Bytes of the package, at most [`DecoderOptions::tail_limit`].
        length: u32,
    },
    /// The first device section begins: everything from the next byte on (consumed is 0) belongs to
    /// [`devices`](crate::devices). Further steps say the same again.
    DeviceTail,
    /// The byte that ends the sections, in a stream without device sections behind RAM (postcopy), or in a checkpoint.
    EndOfStream,
}

/// Bounds and circumstances of a [`Decoder`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecoderOptions {
    /// Offset in the file at which the stream begins: mapped-ram files store absolute offsets.
    pub base: u64,
    /// Longest package that is accepted, in bytes. At most 1 GiB is sensible.
    pub tail_limit: u64,
    /// Whether checkpoints may follow the stream (COLO). Otherwise one that enables them is refused.
    pub colo: bool,
}

impl Default for DecoderOptions {
    /// Stream at the beginning of the file, packages up to 1 GiB, no COLO.
    fn default() -> Self {
        Self { base: 0, tail_limit: 1 << 30, colo: false }
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

/// Decoder of a main channel.
///
/// The decoder never sees page payloads: after [`Event::Page`] the caller reads the page's 4096 bytes itself, best
/// straight to their place, and continues behind them. Its law is that **a page event is always valid**: the block
/// exists and contains the page. The step of a page that continues in its block allocates nothing and looks nothing up.
///
/// It decodes precopy, postcopy and background-snapshot streams up to the device sections, and the RAM part of a
/// mapped-ram file, where the caller jumps as [`Event::MappedRamBlock`] says. Behind a base it decodes the pages of
/// each [checkpoint](Self::next_checkpoint).
#[derive(Debug, Clone)]
pub struct Decoder {
    state: State,
    /// Length in bytes of the current block, or 0. A CONTINUE record needs only this and `current`.
    current_length: u64,
    current: usize,
    offset: u64,
    blocks: Vec<RamBlock>,
    indices: HashMap<Box<str>, usize>,
    options: DecoderOptions,
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
    /// The RAM part of a checkpoint: no device sections in it.
    checkpoint: bool,
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
        Self::with_options(DecoderOptions::default())
    }

    /// For a stream from its first byte.
    pub fn with_options(options: DecoderOptions) -> Self {
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
            checkpoint: false,
        }
    }

    /// For a channel of bare page records without sections: the preempt channel of postcopy. An EOS word ends it.
    ///
    /// # Errors
    /// A block name that occurs twice.
    pub fn for_preempt_channel(blocks: &[RamBlock]) -> Result<Self, StreamError> {
        let mut decoder = Self { state: State::Records, bare: true, ..Self::new() };
        for block in blocks {
            decoder.add_block(block.clone()).map_err(|error_kind| StreamError::new(0, "RAM block list", error_kind))?;
        }
        Ok(decoder)
    }

    /// Creates a decoder for a postcopy recovery: the stream continues between two sections, on a new connection,
    /// without a header, and with the layout of the broken one.
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
            ..Self::for_preempt_channel(blocks)?
        })
    }

    /// Continues with the RAM part of a checkpoint, behind a base that ended with [`Event::DeviceTail`] or behind the
    /// checkpoint before. `passed` is the number of bytes between: those that the caller took without showing them to
    /// the decoder, up to and including the message [`VmstateSend`](crate::colo::ColoMessage::VmstateSend).
    /// [`Event::EndOfStream`] ends the part.
    ///
    /// The block of the last page stays the current one: the first page of a checkpoint may continue in it. (Fact, QEMU
    /// 10.0 and 11.1: it always does.)
    ///
    /// # Errors
    /// The decoder is in the middle of a part, or its stream may not enable COLO: a bug of the caller.
    pub fn next_checkpoint(&mut self, passed: u64) -> Result<(), StreamError> {
        let between = matches!(self.state, State::Devices | State::Ended) && !self.bare && !self.mapped;
        self.check(between && self.options.colo, "a checkpoint follows a base or a checkpoint")?;
        self.offset = self.offset.saturating_add(passed);
        self.state = State::Outer;
        self.checkpoint = true;
        Ok(())
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
    pub fn truncated_error(&self, available: usize, wanted: usize) -> StreamError {
        let what = match self.state {
            State::Header if available == 0 => "the first byte",
            State::Header => "it",
            State::Outer => "the row of sections (a section or command has to follow)",
            State::Total | State::Blocks { .. } => "the RAM block list",
            State::Records => "RAM records",
            State::Footer => "a section footer",
            State::Devices => "device sections",
            State::Ended => "the end of the stream",
        };
        StreamError::new(self.offset, self.place(), ErrorKind::Truncated { what: what.into(), wanted, available })
    }

    /// Decodes what is at the beginning of `input`.
    ///
    /// # Errors
    /// What is there does not follow the format; the decoder must not be used after that.
    #[inline]
    pub fn step(&mut self, input: &[u8]) -> Result<Step, StreamError> {
        if self.state == State::Records
            && let Some(word) = input.first_chunk::<8>()
        {
            let word = u64::from_be_bytes(*word);
            let offset = word & !FLAGS_MASK;
            // Lengths are multiples of the page size: a page that begins inside a block ends inside it.
            if offset < self.current_length {
                debug_assert!(
                    self.blocks.get(self.current).is_some_and(|block| block.used_length == self.current_length),
                    "a page of an event is inside its block"
                );
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
                self.check(consumed <= input.len(), "a decoder consumes no more than it was given")?;
                if let Event::Page { block, offset }
                | Event::Zero { block, offset }
                | Event::Xbzrle { block, offset, .. } = event
                {
                    let inside = self.blocks.get(block).is_some_and(|block| offset < block.used_length);
                    self.check(inside, "a page of an event is inside its block")?;
                }
                match &event {
                    Event::MappedRamBlock(block) => self.offset = block.end() - self.options.base,
                    other => {
                        let payload = match other {
                            Event::Page { .. } => PAGE_SIZE,
                            Event::Xbzrle { length, .. } => u64::from(*length),
                            Event::Package { length } => u64::from(*length),
                            _ => 0,
                        };
                        let passed = to_u64(consumed).saturating_add(payload);
                        self.offset = self.offset.saturating_add(passed);
                    }
                }
                Ok(Step::Event { consumed, event })
            }
            Err(Stop::Need(wanted)) => Ok(Step::Need(wanted)),
            Err(stop) => Err(stop.into_error(self.offset, self.place(), input.len())),
        }
    }

    fn check(&self, holds: bool, what: &'static str) -> Result<(), StreamError> {
        invariant(holds, what).map_err(|broken| StreamError::new(self.offset, self.place(), broken.into()))
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
}

fn outside(block: &RamBlock, offset: u64) -> ErrorKind {
    ErrorKind::OutsideBlock { block: block.name.clone(), offset, used_length: block.used_length }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "a page of an event is inside its block")]
    fn an_event_of_a_page_outside_its_block_is_a_broken_invariant() {
        let mut decoder = Decoder::for_preempt_channel(&[RamBlock::new("pc.ram", PAGE_SIZE)]).unwrap();
        (decoder.current, decoder.current_length) = (0, 3 * PAGE_SIZE);
        let _ = decoder.step(&((2 * PAGE_SIZE) | PAGE_CONTINUE).to_be_bytes());
    }

    #[test]
    #[should_panic(expected = "a decoder consumes no more than it was given")]
    fn more_bytes_consumed_than_given_are_a_broken_invariant() {
        let _ = Decoder::new().check(false, "a decoder consumes no more than it was given");
    }
}
