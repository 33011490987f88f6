//! The device tail: everything from the first device section on.
//!
//! Nothing in the tail says how long a section is; only the description behind the sections does. So the tail is kept
//! as it came, and its end is found by searching for `00 06 length {` and **proving** the candidate: the JSON must
//! parse, and walking the sections with the sizes it names must end exactly on that `00`. Device bodies hold bytes
//! that a guest controls, so a candidate that is merely plausible is never believed, and neither is one that has bytes
//! behind it where the tail has to end.
//!
//! Offsets and ranges count from the first byte of the tail, the type byte 0x04 of the first section.

use limosa_page::{to_u64, to_usize};

use crate::cursor::{Cursor, Stop};
use crate::error::{EncodeError, ErrorKind, StreamError};
use crate::global_state::{self, GLOBAL_STATE_SECTION, GlobalState};
use crate::section::{self, FOOTER_LENGTH, SectionHeader, SectionKind};
use crate::vmdesc::{DeviceSize, VMDESC_LIMIT, Vmdesc};
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

/// Longest tail that is sensible to accept, in bytes: 1 GiB. A VM with 54 device sections has less than 1 MB.
pub const TAIL_LIMIT: u64 = 1 << 30;
/// Most candidates that may wait for their last byte.
const CANDIDATES_LIMIT: usize = 1 << 20;
/// Bytes of JSON that may be parsed for candidates that turn out false.
const PARSE_LIMIT: u64 = 4 << 30;
/// `00 06 L L L L`.
const MARK_LENGTH: usize = 6;

/// One device section of a tail.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceSection {
    /// Name of the section.
    pub name: String,
    /// Instance, telling apart sections of one name.
    pub instance: u32,
    /// Version of the body.
    pub version: u32,
    /// The source's section id.
    pub id: u32,
    /// The whole section, header and footer included.
    pub range: Range<usize>,
    /// Its body.
    pub body: Range<usize>,
}

/// A tail whose end was proven.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompleteTail {
    /// The sections in the order of the stream.
    pub sections: Vec<DeviceSection>,
    /// From the first section's type byte to the last footer: what a postcopy package carries.
    pub sections_range: Range<usize>,
    /// The JSON text.
    pub json_range: Range<usize>,
    /// Bytes of the tail.
    pub end: usize,
}

impl CompleteTail {
    /// The section `name` of instance 0.
    pub fn section(&self, name: &str) -> Option<&DeviceSection> {
        self.sections.iter().find(|section| section.name == name && section.instance == 0)
    }

    /// The run state in which the VM was saved, if the tail has that section.
    ///
    /// # Errors
    /// A section that is malformed, or a `tail` that is not the one this was found in.
    pub fn global_state(&self, tail: &[u8]) -> Result<Option<GlobalState>, StreamError> {
        let Some(section) = self.section(GLOBAL_STATE_SECTION) else { return Ok(None) };
        let body = tail.get(section.body.clone()).ok_or_else(|| {
            let (wanted, available) = (section.body.end, tail.len());
            let error_kind = ErrorKind::Truncated { what: "section \"globalstate\"".into(), wanted, available };
            StreamError::new(to_u64(section.body.start), "device sections", error_kind)
        })?;
        GlobalState::decode(body).map(Some)
    }

    /// Puts another run state into the tail, in place: no length changes.
    ///
    /// # Errors
    /// No such section, or a name that is no run state.
    pub fn replace_run_state(&self, tail: &mut [u8], run_state: &str) -> Result<(), EncodeError> {
        let body = self.section(GLOBAL_STATE_SECTION).and_then(|section| tail.get_mut(section.body.clone()));
        global_state::replace_run_state(body.unwrap_or(&mut []), run_state)
    }
}

/// Finds the end of a tail that is still arriving.
#[derive(Debug, Clone)]
pub struct DeviceTailFinder {
    offset: u64,
    limit: u64,
    scanned: usize,
    /// (end, begin) of what looks like a description and may still end the tail.
    candidates: BTreeSet<(usize, usize)>,
    parsed: u64,
}

impl DeviceTailFinder {
    /// For a tail that begins at stream offset `offset` (named in errors) and has at most `limit` bytes; see
    /// [`TAIL_LIMIT`].
    pub fn new(offset: u64, limit: u64) -> Self {
        Self { offset, limit, scanned: 0, candidates: BTreeSet::new(), parsed: 0 }
    }

    /// Looks whether `tail`, all bytes that came so far, is whole: its sections and description end exactly with its
    /// last byte. `None` means that bytes are missing.
    ///
    /// Call it again whenever the tail has grown, each time from its first byte; each byte is scanned once. Should more
    /// bytes come after it said that the tail is whole, then that was a forgery inside a device's memory: call again.
    /// (Over a socket nothing follows the true end, so look once more for bytes before answering SHUT.)
    ///
    /// # Errors
    /// A tail longer than the limit, or one full of false descriptions.
    pub fn find(&mut self, tail: &[u8]) -> Result<Option<CompleteTail>, StreamError> {
        self.scan(tail)?;
        // What ended before the last byte has bytes behind it: not the end.
        self.candidates = self.candidates.split_off(&(tail.len(), 0));
        let here: Vec<_> = self.candidates.range(..(tail.len() + 1, 0)).copied().collect();
        for (end, begin) in here {
            match self.prove(tail, begin, end)? {
                Some(state) => return Ok(Some(state)),
                None => self.candidates.remove(&(end, begin)),
            };
        }
        Ok(None)
    }

    /// Takes note of all new candidates.
    fn scan(&mut self, tail: &[u8]) -> Result<(), StreamError> {
        if to_u64(tail.len()) > self.limit {
            let error_kind = ErrorKind::TooLarge {
                what: "length of the device sections",
                value: to_u64(tail.len()),
                limit: self.limit,
            };
            return Err(StreamError::new(self.offset, "device sections", error_kind));
        }
        let Some(unseen) = tail.get(self.scanned..) else {
            let (wanted, available) = (self.scanned, tail.len());
            let error_kind =
                ErrorKind::Truncated { what: "device sections, which were longer before".into(), wanted, available };
            return Err(StreamError::new(self.offset, "device sections", error_kind));
        };
        // The window: a footer's mark, its id, then 00 06, a length, and the brace.
        for (at, window) in unseen.windows(FOOTER_LENGTH + MARK_LENGTH + 1).enumerate() {
            let &[section::FOOTER, _, _, _, _, section::EOF, section::DESCRIPTION, a, b, c, d, b'{'] = window else {
                continue;
            };
            let Ok(length) = usize::try_from(u32::from_be_bytes([a, b, c, d])) else { continue };
            if length > VMDESC_LIMIT {
                continue;
            }
            let begin = self.scanned + at + FOOTER_LENGTH;
            self.candidates.insert((begin + MARK_LENGTH + length, begin));
            if self.candidates.len() > CANDIDATES_LIMIT {
                return Err(self.too_many(begin));
            }
        }
        self.scanned = tail.len().saturating_sub(FOOTER_LENGTH + MARK_LENGTH).max(self.scanned);
        Ok(())
    }

    /// Parses and walks one candidate that is there as a whole.
    fn prove(&mut self, tail: &[u8], begin: usize, end: usize) -> Result<Option<CompleteTail>, StreamError> {
        let (Some(sections), Some(json)) = (tail.get(..begin), tail.get(begin + MARK_LENGTH..end)) else {
            return Ok(None);
        };
        if json.last() != Some(&b'}') {
            return Ok(None);
        }
        self.parsed = self.parsed.saturating_add(to_u64(json.len()));
        if self.parsed > PARSE_LIMIT {
            return Err(self.too_many(begin));
        }
        let proven = Vmdesc::decode(json).and_then(|description| walk_sections(sections, &description));
        Ok(proven.ok().map(|sections| CompleteTail {
            sections,
            sections_range: 0..begin,
            json_range: begin + MARK_LENGTH..end,
            end,
        }))
    }

    fn too_many(&self, at: usize) -> StreamError {
        let error_kind = ErrorKind::expected("one description of the device sections", "too many that look like one");
        StreamError::new(self.offset.saturating_add(to_u64(at)), "device sections", error_kind)
    }
}

/// Finds the end of a tail that is there as a whole, possibly with something else behind it (a file's trailer). Of
/// several proven ends the last counts: a forgery can only lie inside a device's memory, before the true one.
///
/// `offset` is the stream offset of the tail, for errors; `limit` its longest length up to the description's end.
///
/// # Errors
/// No description that fits the sections: the tail is cut off, damaged, or was written without a description
/// (`suppress-vmdesc`).
pub fn find_tail_end(tail: &[u8], offset: u64, limit: u64) -> Result<CompleteTail, StreamError> {
    let limited = &tail[..tail.len().min(to_usize(limit))];
    let mut search = DeviceTailFinder::new(offset, limit);
    search.scan(limited)?;
    let mut candidates: Vec<_> = search.candidates.iter().map(|(end, begin)| (*begin, *end)).collect();
    candidates.sort_unstable_by(|a, b| b.cmp(a));
    for (begin, end) in candidates {
        if let Some(state) = search.prove(limited, begin, end)? {
            return Ok(state);
        }
    }
    let error_kind = ErrorKind::expected(
        "a JSON description whose sizes match the device sections",
        format_args!("none in {} bytes", limited.len()),
    );
    Err(StreamError::new(offset, "device sections", error_kind))
}

/// Cuts a run of device sections into sections with the sizes of `description`; it must end with the last footer.
///
/// # Errors
/// A section that the description does not have, or whose footer is not where its size says.
pub fn walk_sections(sections: &[u8], description: &Vmdesc) -> Result<Vec<DeviceSection>, StreamError> {
    let mut devices: HashMap<(&str, u32), &DeviceSize> = HashMap::with_capacity(description.devices.len());
    for device in &description.devices {
        devices.insert((&device.name, device.instance), device);
    }
    let mut cursor = Cursor::new(sections);
    let mut walked = Vec::new();
    while !cursor.is_at_end() {
        let begin = cursor.at();
        let section = walk_one(&mut cursor, &devices);
        let section = section.map_err(|stop| {
            let rest = sections.len() - begin;
            match stop {
                Stop::Need(wanted) => {
                    let error_kind = ErrorKind::Truncated {
                        what: "a device section".into(),
                        wanted: wanted.saturating_sub(begin),
                        available: rest,
                    };
                    StreamError::new(to_u64(begin), "device sections", error_kind)
                }
                fail => fail.into_error(0, "device sections", rest),
            }
        })?;
        walked.push(section);
    }
    Ok(walked)
}

fn walk_one(cursor: &mut Cursor<'_>, devices: &HashMap<(&str, u32), &DeviceSize>) -> Result<DeviceSection, Stop> {
    let begin = cursor.at();
    let byte = cursor.u8()?;
    if byte != SectionKind::Full.byte() {
        let error_kind = ErrorKind::expected("a device section (0x04)", format_args!("{byte:#04x}"));
        return Err(Stop::Fail { at: begin, error_kind });
    }
    let header = SectionHeader::read(SectionKind::Full, cursor)?;
    let SectionHeader { id, name, instance, version, .. } = header;
    let Some(device) = devices.get(&(name.as_str(), instance)) else {
        let error_kind =
            ErrorKind::expected("a section of the description", format_args!("{name:?} instance {instance}"));
        return Err(Stop::Fail { at: begin, error_kind });
    };
    let body_begin = cursor.at();
    cursor.take(to_usize(device.body_length))?;
    let body = body_begin..cursor.at();
    let footer_at = cursor.at();
    let footer = cursor.array::<FOOTER_LENGTH>()?;
    let [mark, a, b, c, d] = footer;
    if mark != section::FOOTER || u32::from_be_bytes([a, b, c, d]) != id {
        let what = format!("the footer of section {name:?} (id {id})");
        return Err(Stop::Fail { at: footer_at, error_kind: ErrorKind::expected(what, format_args!("{footer:02x?}")) });
    }
    Ok(DeviceSection { name, instance, version, id, range: begin..cursor.at(), body })
}
