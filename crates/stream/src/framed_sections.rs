//! The device tail of a live source, whose parts have lengths.

use crate::command::Command;
use crate::device_sections;
use crate::devices::{CompleteTail, DeviceSection, walk_sections};
use crate::error::{ErrorKind, StreamError};
use crate::postcopy::{PING_COMMIT, PING_READY};
use crate::section::{self, SectionKind};
use crate::vmdesc::{VMDESC_LIMIT, Vmdesc};
use limosa_page::{invariant, to_u64};
use std::ops::Range;

/// How far a tail is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TailStep {
    /// Bytes are missing.
    More,
    /// It is not a tail of this kind. Said before [`Ready`](Self::Ready) or never.
    NotFramed,
    /// The sections are there as a whole, and the source waits for the answer to its PING. Said once.
    Ready {
        /// Bytes of the sections, from the front of the tail.
        sections: usize,
    },
    /// The source has given its word and the tail is there to its last byte.
    Whole {
        /// Where everything lies once `pings` have been taken out of the tail.
        state: CompleteTail,
        /// The two PINGs, between the sections and the end byte.
        pings: Range<usize>,
        /// Bytes of the tail, `pings` included.
        length: usize,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Sections,
    Go,
    End,
    Whole,
}

/// Reads a tail that is still arriving.
///
/// Device sections with [lengths](crate::DeviceSections), PING [`PING_READY`], and after the answer PING
/// [`PING_COMMIT`], the end byte and the description. Nothing has to be searched for here, and a guest, whose bytes lie
/// inside counted lengths, cannot forge an end. What does not begin like this is some other source's tail:
/// [`TailStep::NotFramed`], for [`DeviceTailFinder`](crate::devices::DeviceTailFinder).
#[derive(Debug, Clone)]
pub struct FramedSections {
    offset: u64,
    limit: u64,
    at: usize,
    stage: Stage,
    sections: Vec<DeviceSection>,
    sections_end: usize,
}

impl FramedSections {
    /// For a tail that begins at stream offset `offset` (named in errors) and has at most `limit` bytes.
    pub fn new(offset: u64, limit: u64) -> Self {
        Self { offset, limit, at: 0, stage: Stage::Sections, sections: Vec::new(), sections_end: 0 }
    }

    /// Looks at `tail`, all bytes that came so far. Call it again whenever the tail has grown, and after
    /// [`TailStep::Ready`], each time from its first byte; each section is read once.
    ///
    /// # Errors
    /// A tail longer than the limit. After [`TailStep::Ready`]: anything but the source's word, the end byte and a
    /// description that fits the sections.
    pub fn parse(&mut self, tail: &[u8]) -> Result<TailStep, StreamError> {
        if to_u64(tail.len()) > self.limit {
            let (what, value) = ("length of the device sections", to_u64(tail.len()));
            return Err(self.fail(0, ErrorKind::TooLarge { what, value, limit: self.limit }));
        }
        loop {
            let rest = self.unseen(tail)?;
            let Some(byte) = rest.first() else { return Ok(TailStep::More) };
            match (self.stage, *byte) {
                (Stage::Sections, byte) if byte == SectionKind::Full.byte() => match device_sections::read_one(rest) {
                    Ok(Some((id, found, length))) => {
                        let range = self.at..self.at + length;
                        // Behind the state is the footer; before it its length, which belongs to the body.
                        let end = range.end - section::FOOTER_LENGTH;
                        let body = end - found.state.len() - size_of::<u32>()..end;
                        let (name, instance, version) = (found.name.to_owned(), found.instance, found.version);
                        self.sections.push(DeviceSection { name, instance, version, id, range, body });
                        self.at += length;
                    }
                    Ok(None) => return Ok(TailStep::More),
                    Err(_) => return Ok(TailStep::NotFramed),
                },
                (Stage::Sections, byte) if byte == section::COMMAND => match Command::decode(rest) {
                    Ok(None) => return Ok(TailStep::More),
                    Ok(Some((Command::Ping(PING_READY), length))) => {
                        let end = self.sections.last().map_or(0, |section| section.range.end);
                        let whole = "consumed bytes are those of the device sections";
                        invariant(end == self.at, whole).map_err(|broken| self.fail(self.at, broken.into()))?;
                        self.sections_end = self.at;
                        self.at += length;
                        self.stage = Stage::Go;
                        return Ok(TailStep::Ready { sections: self.sections_end });
                    }
                    _ => return Ok(TailStep::NotFramed),
                },
                (Stage::Sections, _) => return Ok(TailStep::NotFramed),
                (Stage::Go, byte) if byte == section::COMMAND => match Command::decode(rest) {
                    Ok(None) => return Ok(TailStep::More),
                    Ok(Some((Command::Ping(PING_COMMIT), length))) => {
                        self.at += length;
                        self.stage = Stage::End;
                    }
                    Ok(Some((other, _))) => return Err(self.unexpected(self.at, format!("{other:?}"))),
                    Err(error) => return Err(self.unexpected(self.at, error.to_string())),
                },
                (Stage::Go, byte) => return Err(self.unexpected(self.at, format!("{byte:#04x}"))),
                (Stage::End, _) => return self.end(tail),
                (Stage::Whole, _) => return Err(self.unexpected(self.at, "bytes behind the description".into())),
            }
        }
    }

    /// Returns the bytes of `tail` that were not decoded yet: `tail` only grows from call to call.
    fn unseen<'t>(&self, tail: &'t [u8]) -> Result<&'t [u8], StreamError> {
        tail.get(self.at..).ok_or_else(|| {
            let what = "device sections, which were longer before".into();
            self.fail(0, ErrorKind::Truncated { what, wanted: self.at, available: tail.len() })
        })
    }

    /// The end byte and the description.
    fn end(&mut self, tail: &[u8]) -> Result<TailStep, StreamError> {
        let rest = self.unseen(tail)?;
        let begin = match *rest {
            [section::EOF, section::DESCRIPTION, a, b, c, d, ..] => u32::from_be_bytes([a, b, c, d]),
            [] | [section::EOF] | [section::EOF, section::DESCRIPTION, ..] => return Ok(TailStep::More),
            _ => {
                let found = format!("{:02x?}", rest.get(..2).unwrap_or(rest));
                return Err(self.unexpected(self.at, found));
            }
        };
        let length = usize::try_from(begin).ok().filter(|length| *length <= VMDESC_LIMIT).ok_or_else(|| {
            let (value, limit) = (begin.into(), to_u64(VMDESC_LIMIT));
            self.fail(self.at, ErrorKind::TooLarge { what: "length of the description", value, limit })
        })?;
        let json_at = self.at + 2 + size_of::<u32>();
        let Some(json) = tail.get(json_at..json_at + length) else { return Ok(TailStep::More) };
        // Before the command that ended them, so inside the tail.
        let sections = &tail[..self.sections_end];
        Vmdesc::decode(json).and_then(|description| walk_sections(sections, &description))?;
        let pings = self.sections_end..self.at;
        self.at = json_at + length;
        self.stage = Stage::Whole;
        let json_range = json_at - pings.len()..json_at - pings.len() + length;
        let end = json_range.end;
        let state = CompleteTail {
            sections: std::mem::take(&mut self.sections),
            sections_range: 0..self.sections_end,
            json_range,
            end,
        };
        Ok(TailStep::Whole { state, pings, length: self.at })
    }

    fn unexpected(&self, at: usize, found: String) -> StreamError {
        let what = "the source's permission to run the VM (PING 7), the end byte and a description";
        self.fail(at, ErrorKind::Unexpected { what: what.into(), found })
    }

    fn fail(&self, at: usize, error_kind: ErrorKind) -> StreamError {
        StreamError::new(self.offset.saturating_add(to_u64(at)), "behind the device sections", error_kind)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::DeviceSections;

    fn tail(states: &[Vec<u8>]) -> (Vec<u8>, usize, usize) {
        let mut sections = DeviceSections::new();
        for (instance, state) in (0..).zip(states) {
            sections.push("timer", instance, 3, state).unwrap();
        }
        let mut tail = sections.bytes().to_vec();
        let end = tail.len();
        Command::Ping(PING_READY).encode(&mut tail).unwrap();
        let ready = tail.len();
        Command::Ping(PING_COMMIT).encode(&mut tail).unwrap();
        section::encode_eof(&mut tail);
        let json = sections.description();
        tail.push(section::DESCRIPTION);
        tail.extend_from_slice(&u32::try_from(json.len()).unwrap().to_be_bytes());
        tail.extend_from_slice(&json);
        (tail, end, ready)
    }

    proptest! {
        #[test]
        fn a_tail_that_comes_in_pieces_is_ready_once_and_whole_with_its_last_byte(
            states in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 0..5), step in 1usize..40,
        ) {
            let (tail, sections, ready) = tail(&states);
            let mut search = FramedSections::new(0, 1 << 20);
            let (mut said, mut end) = (None, 0);
            while end < tail.len() {
                end = tail.len().min(end + step);
                match search.parse(&tail[..end]).unwrap() {
                    TailStep::Ready { sections: found } => {
                        prop_assert!(end >= ready && said.replace(found).is_none());
                        if search.parse(&tail[..end]).unwrap() != TailStep::More {
                            prop_assert_eq!(end, tail.len());
                            return Ok(());
                        }
                    }
                    TailStep::More => prop_assert!(end < tail.len()),
                    TailStep::NotFramed => prop_assert!(false, "foreign at {end}"),
                    TailStep::Whole { state, pings, length } => {
                        prop_assert_eq!((end, length), (tail.len(), tail.len()));
                        let mut kept = tail.clone();
                        kept.drain(pings);
                        prop_assert_eq!(state.end, kept.len());
                        let located = crate::devices::find_tail_end(&kept, 0, 1 << 20);
                        prop_assert!(states.is_empty() || located.unwrap() == state);
                    }
                }
            }
            prop_assert_eq!(said, Some(sections));
        }

        #[test]
        fn whatever_changes_is_foreign_refused_or_read_but_never_a_panic(
            state in prop::collection::vec(any::<u8>(), 0..40), at in any::<prop::sample::Index>(), flip in any::<u8>(),
        ) {
            let (mut tail, ..) = tail(&[state]);
            let at = at.index(tail.len());
            tail[at] ^= flip;
            let mut search = FramedSections::new(0, 1 << 20);
            while let Ok(TailStep::Ready { .. }) = search.parse(&tail) {}
        }
    }

    #[test]
    fn sections_without_lengths_are_some_other_sources() {
        let stock = b"\x04\0\0\0\x03\x05timer\0\0\0\0\0\0\0\x0112345678\x7e\0\0\0\x03\0";
        let mut search = FramedSections::new(0, 1 << 30);
        // Bytes that look like a length may announce more bytes: the other search continues beside this one.
        assert_ne!(search.parse(stock).unwrap(), TailStep::Ready { sections: stock.len() });
        assert_eq!(FramedSections::new(0, 1 << 30).parse(b"\0").unwrap(), TailStep::NotFramed);
    }

    #[test]
    fn an_end_without_the_word_is_refused() {
        let (mut tail, _, ready) = tail(&[vec![1, 2, 3]]);
        tail.truncate(ready);
        section::encode_eof(&mut tail);
        let mut search = FramedSections::new(0, 1 << 20);
        assert!(matches!(search.parse(&tail), Ok(TailStep::Ready { .. })));
        assert!(search.parse(&tail).unwrap_err().to_string().contains("the source's permission"));
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "consumed bytes are those of the device sections")]
    fn bytes_between_the_sections_and_the_command_are_a_broken_invariant() {
        let mut tail = vec![0; 3];
        Command::Ping(PING_READY).encode(&mut tail).unwrap();
        let mut search = FramedSections::new(0, 1 << 20);
        search.at = 3;
        let _ = search.parse(&tail);
    }
}
