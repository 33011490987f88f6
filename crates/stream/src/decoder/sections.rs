//! Decoding the parts between section bodies: file header, section headers and footers, commands, the first device
//! section.

use super::{Decoder, Event, State, early, outside};
use crate::command::Command;
use crate::configuration::{Configuration, IGNORE_SHARED, MAPPED_RAM};
use crate::cursor::{Cursor, Stop};
use crate::error::{ErrorKind, UnsupportedFeature};
use crate::ram::{self, PAGE_SIZE};
use crate::section::{self, SectionHeader, SectionKind};

impl Decoder {
    pub(super) fn header(&mut self, cursor: &mut Cursor<'_>) -> Result<Event, Stop> {
        let configuration = Configuration::read(cursor)?;
        if let Some(bits) = configuration.target_page_bits.filter(|bits| *bits != 12) {
            return Err(Stop::Fail {
                at: 8,
                error_kind: ErrorKind::Unsupported(UnsupportedFeature::TargetPageBits { bits }),
            });
        }
        self.mapped = configuration.has_capability(MAPPED_RAM);
        self.addresses = configuration.has_capability(IGNORE_SHARED);
        self.state = State::Outer;
        Ok(Event::Configuration(configuration))
    }

    pub(super) fn outer(&mut self, cursor: &mut Cursor<'_>) -> Result<Event, Stop> {
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
                    return Err(Stop::Fail {
                        at: 1,
                        error_kind: ErrorKind::expected(what, format_args!("section id {id}")),
                    });
                }
                self.pages_begun = true;
                self.state = State::Records;
                Ok(if kind == SectionKind::Part { Event::SectionPart { id } } else { Event::SectionEnd { id } })
            }
            Some(SectionKind::Full) if self.checkpoint => {
                let what = "a RAM section (0x03), a command (0x08) or the end (0x00) of a checkpoint's pages";
                Err(Stop::Fail { at: 0, error_kind: ErrorKind::expected(what, format_args!("{byte:#04x}")) })
            }
            Some(SectionKind::Full) => self.device_tail(cursor),
            None if byte == section::EOF => {
                cursor.u8()?;
                if !self.ram_listed {
                    let error_kind = ErrorKind::expected("the START of section \"ram\"", "the end of the sections");
                    return Err(Stop::Fail { at: 0, error_kind });
                }
                self.state = State::Ended;
                Ok(Event::EndOfStream)
            }
            None if byte == section::COMMAND => self.command(cursor),
            None => {
                let what = "a section (0x01 to 0x04), a command (0x08) or the end (0x00)";
                Err(Stop::Fail { at: 0, error_kind: ErrorKind::expected(what, format_args!("{byte:#04x}")) })
            }
        }
    }

    fn section_start(&mut self, cursor: &mut Cursor<'_>) -> Result<Event, Stop> {
        cursor.u8()?;
        let header = SectionHeader::read(SectionKind::Start, cursor)?;
        let error_kind = match header.name.as_str() {
            ram::RAM if self.ram_started => ErrorKind::expected("one START of section \"ram\"", "a second one"),
            ram::RAM if header.instance != 0 => ErrorKind::expected("instance 0 of section \"ram\"", header.instance),
            ram::RAM if header.version != ram::RAM_VERSION => {
                ErrorKind::expected("version 4 of section \"ram\"", header.version)
            }
            ram::RAM => {
                self.ram_id = header.id;
                self.ram_started = true;
                self.state = State::Total;
                return Ok(Event::SectionStart(header));
            }
            "dirty-bitmap" => ErrorKind::Unsupported(UnsupportedFeature::DirtyBitmaps),
            _ => ErrorKind::Unsupported(UnsupportedFeature::IterableSection { name: header.name }),
        };
        Err(Stop::Fail { at: 0, error_kind })
    }

    /// A FULL section: the device tail, except for the one kind of device that comes before the pages.
    fn device_tail(&mut self, cursor: &mut Cursor<'_>) -> Result<Event, Stop> {
        if !self.pages_begun {
            // Only looked at: the tail begins at the FULL byte.
            let mut ahead = cursor.fork();
            ahead.u8()?;
            let header = SectionHeader::read(SectionKind::Full, &mut ahead)?;
            if !self.ram_listed {
                let found = format_args!("device section {:?}", header.name).to_string();
                return Err(Stop::Fail {
                    at: 0,
                    error_kind: ErrorKind::expected("the START of section \"ram\"", found),
                });
            }
            if early::is_early(&header) {
                return early::section(cursor).map(|section| Event::EarlyDevice(section.to_vec()));
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
                        error_kind: ErrorKind::TooLarge { what: "length of the package", value, limit },
                    });
                }
                return Ok(Event::Package { length: *length });
            }
            Command::EnableColo if !self.options.colo => {
                return Err(Stop::Fail { at: 0, error_kind: ErrorKind::Unsupported(UnsupportedFeature::Colo) });
            }
            Command::PostcopyAdvise(Some(sizes)) => self.page_sizes = sizes.summary & !PAGE_SIZE,
            Command::RamDiscard { block, ranges } => {
                let known = self.indices.get(block.as_str()).and_then(|index| self.blocks.get(*index));
                let known = known
                    .ok_or_else(|| Stop::Fail { at: 0, error_kind: ErrorKind::UnknownBlock { name: block.clone() } })?;
                if let Some(range) = ranges.iter().find(|range| range.end > known.used_length) {
                    return Err(Stop::Fail { at: 0, error_kind: outside(known, range.start) });
                }
            }
            Command::ReceiveBitmap { block } if !self.indices.contains_key(block.as_str()) => {
                return Err(Stop::Fail { at: 0, error_kind: ErrorKind::UnknownBlock { name: block.clone() } });
            }
            _ => {}
        }
        Ok(Event::Command(command))
    }

    pub(super) fn footer(&mut self, cursor: &mut Cursor<'_>) -> Result<Event, Stop> {
        let byte = cursor.u8()?;
        if byte != section::FOOTER {
            let error_kind = ErrorKind::expected("a section footer (0x7e)", format_args!("{byte:#04x}"));
            return Err(Stop::Fail { at: 0, error_kind });
        }
        let id = cursor.be32()?;
        if id != self.ram_id {
            let error_kind = ErrorKind::expected(format!("section id {} in the footer", self.ram_id), id);
            return Err(Stop::Fail { at: 1, error_kind });
        }
        self.state = State::Outer;
        Ok(Event::SectionFooter { id })
    }
}
