//! Cuts the byte stream of a monitor into JSON objects.
//!
//! QEMU ends every message with a line feed, but with `pretty=on` a message spans several lines, so the framer counts
//! braces outside strings instead. A line feed is never raw inside a JSON string: meeting one there proves that the
//! reading began in the middle of a message, and the framer starts afresh behind it.

/// One cut of the stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// A complete object, not yet parsed.
    Object(Vec<u8>),
    /// Bytes that belong to no object, up to and including the next line feed.
    Garbage(Vec<u8>),
}

/// A message outgrew the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Overlong;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Position {
    Between,
    Object { depth: u32, string: bool, escaped: bool },
    Junk,
}

/// Incremental: bytes in, objects out, at most `limit` bytes held for one object.
#[derive(Debug)]
pub(super) struct Framer {
    limit: usize,
    position: Position,
    held: Vec<u8>,
    ready: std::collections::VecDeque<Frame>,
}

impl Framer {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, position: Position::Between, held: Vec::new(), ready: std::collections::VecDeque::new() }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<(), Overlong> {
        for &byte in bytes {
            self.step(byte)?;
        }
        Ok(())
    }

    pub(super) fn next(&mut self) -> Option<Frame> {
        self.ready.pop_front()
    }

    fn step(&mut self, byte: u8) -> Result<(), Overlong> {
        if self.held.len() >= self.limit {
            return Err(Overlong);
        }
        match self.position {
            Position::Between => match byte {
                b' ' | b'\t' | b'\r' | b'\n' => {}
                b'{' => {
                    self.held.push(byte);
                    self.position = Position::Object { depth: 1, string: false, escaped: false };
                }
                _ => {
                    self.held.push(byte);
                    self.position = Position::Junk;
                }
            },
            Position::Junk => {
                self.held.push(byte);
                if byte == b'\n' {
                    self.cut(Frame::Garbage);
                }
            }
            Position::Object { depth, string, escaped } => {
                self.held.push(byte);
                self.position = match (string, escaped, byte) {
                    (true, _, b'\n') => {
                        self.cut(Frame::Garbage);
                        Position::Between
                    }
                    (true, true, _) => Position::Object { depth, string: true, escaped: false },
                    (true, false, b'\\') => Position::Object { depth, string: true, escaped: true },
                    (true, false, b'"') => Position::Object { depth, string: false, escaped: false },
                    (true, false, _) => Position::Object { depth, string: true, escaped: false },
                    (false, _, b'"') => Position::Object { depth, string: true, escaped: false },
                    (false, _, b'{') => {
                        Position::Object { depth: depth.checked_add(1).ok_or(Overlong)?, string: false, escaped: false }
                    }
                    (false, _, b'}') if depth == 1 => {
                        self.cut(Frame::Object);
                        Position::Between
                    }
                    (false, _, b'}') => Position::Object { depth: depth - 1, string: false, escaped: false },
                    _ => Position::Object { depth, string: false, escaped: false },
                };
            }
        }
        Ok(())
    }

    fn cut(&mut self, frame: fn(Vec<u8>) -> Frame) {
        self.position = Position::Between;
        self.ready.push_back(frame(std::mem::take(&mut self.held)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(framer: &mut Framer) -> Vec<Frame> {
        std::iter::from_fn(|| framer.next()).collect()
    }

    #[test]
    fn objects_are_cut_wherever_the_bytes_happen_to_be_split() {
        let text = b"{\"a\": \"}{\\\"\"}\r\n{\n  \"b\": {\"c\": [{}]}\n}\n";
        let whole = vec![
            Frame::Object(b"{\"a\": \"}{\\\"\"}".to_vec()),
            Frame::Object(b"{\n  \"b\": {\"c\": [{}]}\n}".to_vec()),
        ];
        for split in 0..text.len() {
            let mut framer = Framer::new(1000);
            framer.push(&text[..split]).unwrap();
            framer.push(&text[split..]).unwrap();
            assert_eq!(frames(&mut framer), whole, "split at {split}");
        }
    }

    #[test]
    fn reading_that_begins_inside_a_message_finds_the_next_one() {
        let message = b"{\"event\": \"STOP\", \"data\": {\"x\": \"a{b\\\"}\"}}\r\n";
        for begin in 1..message.len() {
            let mut framer = Framer::new(1000);
            framer.push(&message[begin..]).unwrap();
            framer.push(b"{\"return\": {}, \"id\": 7}\r\n").unwrap();
            let last = frames(&mut framer).pop().unwrap();
            assert_eq!(last, Frame::Object(b"{\"return\": {}, \"id\": 7}".to_vec()), "begun at {begin}");
        }
    }

    #[test]
    fn a_message_longer_than_the_limit_is_refused_before_it_is_held() {
        let mut framer = Framer::new(64);
        assert_eq!(framer.push(&[b'{'; 64]), Ok(()));
        assert_eq!(framer.push(b"{"), Err(Overlong));
    }
}
