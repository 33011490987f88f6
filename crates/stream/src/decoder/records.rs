//! The bodies of RAM sections: the block list of START, and the records of pages.

use super::{Decoder, Event, NO_BLOCK, PAGE, PAGE_CONTINUE, State, ZERO, ZERO_CONTINUE, outside};
use crate::cursor::{Cursor, Stop};
use crate::error::{ErrorKind, UnsupportedFeature};
use crate::mapped_ram::MappedHeader;
use crate::ram::{
    self, BLOCKS_LIMIT, FLAG_CONTINUE, FLAG_EOS, FLAG_MULTIFD_FLUSH, FLAG_XBZRLE, FLAG_ZERO, FLAGS_MASK, PAGE_LEN,
    PAGE_SIZE, RamBlock,
};
use limosa_page::to_u64;

const XBZRLE: u64 = FLAG_XBZRLE;
const XBZRLE_CONTINUE: u64 = FLAG_XBZRLE | FLAG_CONTINUE;
const XBZRLE_METHOD: u8 = 1;

impl Decoder {
    pub(super) fn total(&mut self, cursor: &mut Cursor<'_>) -> Result<Event, Stop> {
        let word = cursor.be64()?;
        let (total, flags) = (word & !FLAGS_MASK, word & FLAGS_MASK);
        if flags != ram::FLAG_MEM_SIZE {
            let error_kind = ErrorKind::expected("the total RAM size (flags 0x004)", format_args!("word {word:#x}"));
            return Err(Stop::Fail { at: 0, error_kind });
        }
        if total >= 1 << 62 {
            let error_kind = ErrorKind::TooLarge { what: "total RAM size", value: total, limit: (1 << 62) - 1 };
            return Err(Stop::Fail { at: 0, error_kind });
        }
        if total == 0 {
            return Err(Stop::Fail { at: 0, error_kind: ErrorKind::expected("RAM blocks", "a total RAM size of 0") });
        }
        // The word alone is no event: the first block comes with it.
        self.first_or_next_block(cursor, total)
    }

    pub(super) fn block(&mut self, cursor: &mut Cursor<'_>, remaining: u64) -> Result<Event, Stop> {
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
        let at = |error_kind| Stop::Fail { at: begin, error_kind };
        if used_length % PAGE_SIZE != 0 {
            let what = format!("a multiple of 4096 as length of RAM block {name:?}");
            return Err(at(ErrorKind::expected(what, format_args!("{used_length:#x}"))));
        }
        let Some(remaining) = remaining.checked_sub(used_length) else {
            let what = format!("at most the {remaining:#x} bytes left of the total RAM size for block {name:?}");
            return Err(at(ErrorKind::expected(what, format_args!("{used_length:#x}"))));
        };
        let page_size = self.page_size(cursor)?;
        let address = if self.addresses { Some(cursor.be64()?) } else { None };
        let header = if self.mapped { Some(MappedHeader::read(cursor)?) } else { None };
        let block = RamBlock { name, used_length, page_size, address };
        let event = match header {
            None => Event::RamBlock { block: self.blocks.len() },
            Some(header) => {
                let header_offset = self.offset.saturating_add(to_u64(begin));
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

    pub(super) fn add_block(&mut self, block: RamBlock) -> Result<(), ErrorKind> {
        if self.blocks.len() >= BLOCKS_LIMIT {
            let (value, limit) = (BLOCKS_LIMIT as u64 + 1, BLOCKS_LIMIT as u64);
            return Err(ErrorKind::TooLarge { what: "number of RAM blocks", value, limit });
        }
        if self.indices.insert(block.name.as_str().into(), self.blocks.len()).is_some() {
            return Err(ErrorKind::DuplicateBlock { name: block.name });
        }
        self.blocks.push(block);
        Ok(())
    }

    pub(super) fn record(&mut self, cursor: &mut Cursor<'_>) -> Result<Event, Stop> {
        let word = cursor.be64()?;
        let (offset, flags) = (word & !FLAGS_MASK, word & FLAGS_MASK);
        let fail = |error_kind| Err(Stop::Fail { at: 0, error_kind });
        match flags {
            FLAG_EOS if offset == 0 => {
                self.state = if self.bare { State::Ended } else { State::Footer };
                return Ok(if self.bare { Event::EndOfStream } else { Event::RamEos });
            }
            FLAG_MULTIFD_FLUSH if offset == 0 && !self.mapped && !self.bare => return Ok(Event::MultifdFlush),
            PAGE | PAGE_CONTINUE | ZERO | ZERO_CONTINUE if self.mapped => {
                let found = format_args!("page record {word:#x}").to_string();
                return fail(ErrorKind::expected("only EOS in the RAM sections of a mapped-ram file", found));
            }
            PAGE | PAGE_CONTINUE | ZERO | ZERO_CONTINUE if self.pages_begun || self.bare => {}
            XBZRLE | XBZRLE_CONTINUE if self.pages_begun && !self.mapped => {}
            _ => {
                return fail(match flags & !FLAG_CONTINUE {
                    FLAG_XBZRLE => ErrorKind::Unsupported(UnsupportedFeature::Xbzrle),
                    ram::FLAG_HOOK => ErrorKind::Unsupported(UnsupportedFeature::RdmaHook),
                    ram::FLAG_COMPRESS_PAGE => ErrorKind::Unsupported(UnsupportedFeature::CompressedPage),
                    FLAG_MULTIFD_FLUSH => ErrorKind::Unsupported(UnsupportedFeature::Multifd),
                    _ if self.pages_begun || self.bare => ErrorKind::expected(
                        "a RAM record (flags 0x002, 0x008, each with or without 0x020, or the word 0x010)",
                        format_args!("word {word:#x}"),
                    ),
                    _ => ErrorKind::expected("EOS (0x010) behind the RAM block list", format_args!("word {word:#x}")),
                });
            }
        }
        // Nothing of `self` changes before the whole record is there: it is read again if it is not.
        let block = if flags & FLAG_CONTINUE != 0 {
            if self.current == NO_BLOCK {
                let what = "a block name in the first page record of the channel";
                return fail(ErrorKind::expected(what, format_args!("CONTINUE in word {word:#x}")));
            }
            self.current
        } else {
            let name = cursor.name("a RAM block name")?;
            match self.blocks.get(self.current) {
                Some(current) if current.name == name => self.current,
                _ => match self.indices.get(name) {
                    Some(index) => *index,
                    None => return fail(ErrorKind::UnknownBlock { name: name.to_owned() }),
                },
            }
        };
        let used_length = self.blocks.get(block).map_or(0, |block| block.used_length);
        if offset >= used_length {
            return fail(match self.blocks.get(block) {
                Some(block) => outside(block, offset),
                None => ErrorKind::expected("a RAM block", format_args!("index {block}")),
            });
        }
        let event = if flags & FLAG_XBZRLE != 0 {
            let at = cursor.at();
            let (method, length) = (cursor.u8()?, cursor.be16()?);
            if method != XBZRLE_METHOD {
                let error_kind =
                    ErrorKind::expected("the method byte 0x01 of a page delta", format_args!("{method:#04x}"));
                return Err(Stop::Fail { at, error_kind });
            }
            if usize::from(length) > PAGE_LEN {
                let (value, limit) = (length.into(), PAGE_SIZE);
                let error_kind = ErrorKind::TooLarge { what: "length of a page delta", value, limit };
                return Err(Stop::Fail { at: at + 1, error_kind });
            }
            Event::Xbzrle { block, offset, length }
        } else if flags & FLAG_ZERO != 0 {
            let at = cursor.at();
            let fill = cursor.u8()?;
            if fill != 0 {
                let error_kind = ErrorKind::expected("fill byte 0 of a zero page", format_args!("{fill:#04x}"));
                return Err(Stop::Fail { at, error_kind });
            }
            Event::Zero { block, offset }
        } else {
            Event::Page { block, offset }
        };
        self.current = block;
        self.current_length = used_length;
        Ok(event)
    }
}
