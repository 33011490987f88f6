//! Bytes that have arrived, cut into requests.
//!
//! Laws: the bytes of a payload are received where they are written from, except those that came along with a header,
//! which are copied. A payload's memory is allocated when there is room for it, and a request that has no room yet
//! stays in the receive buffer.

use limosa_channel::{Channel, ChannelError};
use limosa_storage::Buffer;

use super::admission::{Action, Admission, Disconnect, Facts, admit};
use super::buffers::Buffers;
use super::execute::{CACHE_PIECE, STATUS_MAX};
use super::output;
use limosa_nbd::protocol::error::ErrorCode;
use limosa_nbd::protocol::request::RequestHeader;

/// Size of the receive buffer: room for some two thousand headers, or for sixteen short writes.
const BUFFER: usize = 64 << 10;

/// A request that is complete.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) header: RequestHeader,
    pub(super) action: Result<Action, ErrorCode>,
    pub(super) payload: Option<Buffer>,
}

impl Incoming {
    /// Bytes that the request and its reply keep in memory.
    pub(super) fn held(&self) -> usize {
        held(&self.action, self.payload.as_ref().map_or(0, Buffer::len))
    }
}

fn held(action: &Result<Action, ErrorCode>, payload: usize) -> usize {
    match action {
        Ok(Action::Read { length, .. }) => *length,
        Ok(Action::BlockStatus { one: false, .. }) => STATUS_MAX,
        Ok(Action::Cache { .. }) => CACHE_PIECE,
        Ok(_) => payload,
        // It is skipped.
        Err(_) => 0,
    }
}

/// The next request, or the reason why it is not there.
#[derive(Debug)]
pub(super) enum Next {
    Request(Incoming),
    /// Bytes are missing.
    Incomplete,
    /// Its bytes have no room yet.
    NoRoom,
}

/// Why nothing more is taken from a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum InputError {
    #[error("a request does not begin as one")]
    Magic,
    #[error(transparent)]
    Disconnect(#[from] Disconnect),
}

/// A payload that is being received.
#[derive(Debug)]
enum Payload {
    Wanted {
        header: RequestHeader,
        action: Action,
        buffer: Buffer,
        filled: usize,
    },
    /// The request is refused, and its payload skipped.
    Refused {
        header: RequestHeader,
        error: ErrorCode,
        left: usize,
    },
}

/// The received bytes of a connection.
#[derive(Debug)]
pub(super) struct Input {
    /// Empty until the first bytes arrive.
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    payload: Option<Payload>,
    buffers: Buffers,
}

impl Input {
    /// Nothing has arrived yet.
    pub(super) fn new(buffers: Buffers) -> Self {
        Self { bytes: Vec::new(), start: 0, end: 0, payload: None, buffers }
    }

    /// Frees the receive buffer, if nothing is in it.
    pub(super) fn trim(&mut self) {
        if !self.is_amid() {
            (self.bytes, self.start, self.end) = (Vec::new(), 0, 0);
        }
    }

    /// Returns whether a request has begun to arrive.
    pub(super) fn is_amid(&self) -> bool {
        self.start < self.end || self.payload.is_some()
    }

    /// Takes the next request. `has_room` is asked once for each, with the bytes that it keeps in memory; if it agrees
    /// the request is taken, at once or when its payload has arrived.
    pub(super) fn next(&mut self, facts: &Facts, has_room: impl FnOnce(usize) -> bool) -> Result<Next, InputError> {
        if self.payload.is_none() {
            let Some(bytes) = self.bytes.get(self.start..self.end).filter(|b| b.len() >= facts.headers.request_len())
            else {
                return Ok(Next::Incomplete);
            };
            let header = RequestHeader::decode(facts.headers, bytes).ok_or(InputError::Magic)?;
            let Admission { payload, action } = admit(&header, facts)?;
            if !has_room(held(&action, payload)) {
                return Ok(Next::NoRoom);
            }
            self.start += facts.headers.request_len();
            if payload == 0 {
                let payload = matches!(action, Ok(Action::Write { .. })).then(|| Buffer::zeroed(0));
                return Ok(Next::Request(Incoming { header, action, payload }));
            }
            self.payload = Some(match action {
                Ok(action) => Payload::Wanted { header, action, buffer: self.buffers.take(payload), filled: 0 },
                Err(error) => Payload::Refused { header, error, left: payload },
            });
        }
        self.fill_from_buffer();
        match self.payload.take() {
            Some(Payload::Wanted { header, action, buffer, filled }) if filled == buffer.len() => {
                Ok(Next::Request(Incoming { header, action: Ok(action), payload: Some(buffer) }))
            }
            Some(Payload::Refused { header, error, left: 0 }) => {
                Ok(Next::Request(Incoming { header, action: Err(error), payload: None }))
            }
            incomplete => {
                self.payload = incomplete;
                Ok(Next::Incomplete)
            }
        }
    }

    /// Gives a payload the bytes of it that are in the receive buffer.
    fn fill_from_buffer(&mut self) {
        let rest = self.bytes.get(self.start..self.end).unwrap_or_default();
        match &mut self.payload {
            Some(Payload::Wanted { buffer, filled, .. }) => {
                let copied = buffer.copy_from(*filled, rest);
                *filled += copied;
                self.start += copied;
            }
            Some(Payload::Refused { left, .. }) => {
                let skipped = rest.len().min(*left);
                *left -= skipped;
                self.start += skipped;
            }
            None => {}
        }
    }

    /// Receives what has arrived, without waiting. Returns how many bytes (0: the client sends no more), and whether
    /// all of the room was filled, so that more may be there; `None` if nothing has arrived.
    pub(super) fn receive(&mut self, channel: &Channel) -> Result<Option<(usize, bool)>, ChannelError> {
        if self.bytes.is_empty() {
            self.bytes = vec![0; BUFFER];
        }
        // Less than a header is left when this is called, or nothing of a payload.
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let payload = match &self.payload {
            Some(Payload::Wanted { buffer, filled, .. }) => Some(buffer.slice(*filled..buffer.len())),
            _ => None,
        };
        let room = self.bytes.get_mut(self.end..).unwrap_or_default();
        let wanted = payload.as_ref().map_or(0, Buffer::len);
        let whole = wanted + room.len();
        let Some(got) = output::receive(channel, payload.as_ref(), room)? else { return Ok(None) };
        if let Some(Payload::Wanted { filled, .. }) = &mut self.payload {
            *filled += got.min(wanted);
        }
        self.end += got.saturating_sub(wanted);
        Ok(Some((got, got == whole)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use limosa_channel::Channel;
    use proptest::prelude::*;

    use super::*;
    use crate::nbd::Limits;
    use crate::nbd::budget::Budget;
    use limosa_nbd::protocol::Headers;
    use limosa_nbd::protocol::request::{Command, flag};

    const FACTS: Facts = Facts { headers: Headers::Extended, size: 1 << 30, read_only: false, has_contexts: true };

    fn input() -> Input {
        Input::new(Buffers::new(Arc::new(Budget::new(&Limits::default()))))
    }

    fn write(offset: u64, payload: &[u8]) -> Vec<u8> {
        let flags = flag::PAYLOAD_LEN;
        let length = payload.len() as u64;
        let header = RequestHeader { flags, command: Command::Write as u16, cookie: offset, offset, length };
        [&header.encode(Headers::Extended), payload].concat()
    }

    /// Sends bytes in pieces, and returns what comes out.
    fn requests(bytes: &[u8], pieces: &[usize]) -> Vec<Incoming> {
        let (near, far) = Channel::pair().unwrap();
        let far = Channel::from_fd(far).unwrap();
        near.set_nonblocking().unwrap();
        let (mut input, mut found) = (input(), Vec::new());
        let mut rest = bytes;
        for length in pieces.iter().copied().cycle() {
            let (piece, behind) = rest.split_at(length.clamp(1, 100 << 10).min(rest.len()));
            far.write_all(piece).unwrap();
            rest = behind;
            while input.receive(&near).unwrap().is_some() {
                loop {
                    match input.next(&FACTS, |_| true).unwrap() {
                        Next::Request(request) => found.push(request),
                        Next::Incomplete => break,
                        Next::NoRoom => panic!("there is room"),
                    }
                }
            }
            if rest.is_empty() {
                break;
            }
        }
        assert!(!input.is_amid());
        found
    }

    #[test]
    fn a_request_without_room_stays_until_there_is_some() {
        let (near, far) = Channel::pair().unwrap();
        near.set_nonblocking().unwrap();
        Channel::from_fd(far).unwrap().write_all(&write(512, &[7; 512])).unwrap();
        let mut input = input();
        assert!(matches!(input.receive(&near), Ok(Some((544, false)))));
        assert!(matches!(input.next(&FACTS, |bytes| bytes < 512), Ok(Next::NoRoom)));
        let Ok(Next::Request(request)) = input.next(&FACTS, |bytes| bytes == 512) else { panic!("it has room") };
        assert_eq!((request.held(), request.payload.unwrap().to_vec()), (512, vec![7; 512]));
        assert!(matches!(input.next(&FACTS, |_| true), Ok(Next::Incomplete)));
    }

    #[test]
    fn bytes_that_begin_no_request_are_an_error() {
        let (near, far) = Channel::pair().unwrap();
        near.set_nonblocking().unwrap();
        Channel::from_fd(far).unwrap().write_all(&[0; 32]).unwrap();
        let mut input = input();
        input.receive(&near).unwrap();
        assert_eq!(input.next(&FACTS, |_| true).unwrap_err(), InputError::Magic);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn the_pieces_in_which_requests_arrive_do_not_matter(
            lengths in prop::collection::vec(prop_oneof![0..2000_usize, 50_000..150_000_usize], 1..6),
            refused in prop::collection::vec(any::<bool>(), 6),
            pieces in prop::collection::vec(prop_oneof![1..40_usize, 1..100_000_usize], 1..5),
        ) {
            let mut bytes = Vec::new();
            for (number, length) in lengths.iter().enumerate() {
                // A refused request is past the end.
                let offset = if refused[number] { FACTS.size } else { number as u64 };
                let payload = vec![u8::try_from(number).unwrap() + 1; *length];
                bytes.extend_from_slice(&write(offset, &payload));
            }
            let found = requests(&bytes, &pieces);
            prop_assert_eq!(found.len(), lengths.len());
            for (number, (request, length)) in found.iter().zip(&lengths).enumerate() {
                let refused = refused[number] && *length > 0;
                prop_assert_eq!(request.action.is_err(), refused);
                if !refused {
                    let expected = vec![u8::try_from(number).unwrap() + 1; *length];
                    prop_assert!(request.payload.as_ref().unwrap().to_vec() == expected);
                }
            }
        }
    }
}
