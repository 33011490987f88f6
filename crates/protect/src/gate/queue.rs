//! Frames on their way into a socket or an interface that may be slow, in bounded memory.

use std::collections::VecDeque;
use std::io;

use limosa_page::{to_u64, to_usize};

use super::frame::PREFIX;
use super::hold::Frames;

/// Capacity of a buffer that is kept for the frames to come.
const REUSED: usize = 256 << 10;

/// A receiver of frames.
pub(super) trait FrameSink {
    /// Writes bytes of the stream of frames, or one frame if it [takes packets](Self::takes_packets). Does not block.
    fn send(&self, bytes: &[u8]) -> io::Result<usize>;

    /// Whether each write is one frame without its length.
    fn takes_packets(&self) -> bool;
}

/// The frames that a sink has not taken yet.
#[derive(Debug)]
pub(super) struct FrameQueue {
    runs: VecDeque<Frames>,
    /// Bytes of the first run that the sink has.
    written: usize,
    bytes: u64,
    limit: u64,
}

impl FrameQueue {
    /// Creates a queue for frames of up to `limit` bytes.
    pub(super) const fn new(limit: u64) -> Self {
        Self { runs: VecDeque::new(), written: 0, bytes: 0, limit }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether it has no room for another frame.
    pub(super) const fn is_full(&self) -> bool {
        self.bytes >= self.limit
    }

    /// Appends a frame with its length. Returns whether there was room.
    pub(super) fn push(&mut self, frame: &[u8]) -> bool {
        if self.is_full() {
            return false;
        }
        self.bytes = self.bytes.saturating_add(to_u64(frame.len()));
        match self.runs.back_mut().filter(|run| run.bytes.len() < REUSED) {
            Some(run) => run.push(frame),
            None => {
                let mut run = Frames::default();
                run.push(frame);
                self.runs.push_back(run);
            }
        }
        true
    }

    /// Appends frames. Returns the number of those that there was no room for.
    pub(super) fn push_all(&mut self, frames: Frames) -> u64 {
        let length = to_u64(frames.bytes.len());
        if self.bytes.saturating_add(length) <= self.limit {
            self.bytes = self.bytes.saturating_add(length);
            self.runs.push_back(frames);
            return 0;
        }
        let (mut rest, mut dropped) = (&frames.bytes[..], 0);
        while let Some((frame, after)) = split_frame(rest) {
            dropped += u64::from(!self.push(frame));
            rest = after;
        }
        dropped
    }

    /// Writes until the sink takes no more. Returns the number of frames that it has refused: an interface does that
    /// with one that is too long, and with all while it is down.
    ///
    /// # Errors
    /// The sink takes no frame any more.
    pub(super) fn write_to(&mut self, sink: &impl FrameSink) -> io::Result<u64> {
        let mut refused = 0;
        while let Some(run) = self.runs.front_mut() {
            let rest = run.bytes.get(self.written..).unwrap_or_default();
            if rest.is_empty() {
                self.written = 0;
                let last = self.runs.len() == 1;
                match self.runs.front_mut().filter(|run| last && run.bytes.capacity() <= REUSED) {
                    Some(run) => {
                        run.bytes.clear();
                        run.count = 0;
                        return Ok(refused);
                    }
                    None => drop(self.runs.pop_front()),
                }
                continue;
            }
            let taken = if sink.takes_packets() {
                let frame = split_frame(rest).map_or(rest, |(frame, _)| frame);
                let payload = frame.get(PREFIX..).unwrap_or_default();
                sink.send(payload).map(|_| frame.len()).or_else(|error| match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Err(error),
                    _ => {
                        refused += 1;
                        Ok(frame.len())
                    }
                })
            } else {
                sink.send(rest)
            };
            match taken {
                Ok(count) => {
                    self.written += count;
                    self.bytes = self.bytes.saturating_sub(to_u64(count));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(refused),
                Err(error) => return Err(error),
            }
        }
        Ok(refused)
    }

    /// Drops everything, since the sink is gone. Returns the number of frames that it does not have as a whole.
    pub(super) fn clear(&mut self) -> u64 {
        let mut dropped = 0;
        for (index, run) in self.runs.iter().enumerate() {
            let written = if index == 0 { self.written } else { 0 };
            let (mut rest, mut end) = (&run.bytes[..], 0);
            while let Some((frame, after)) = split_frame(rest) {
                end += frame.len();
                dropped += u64::from(end > written);
                rest = after;
            }
        }
        self.runs.clear();
        (self.written, self.bytes) = (0, 0);
        dropped
    }
}

/// Splits the first frame off, with its length.
fn split_frame(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = u32::from_be_bytes(*bytes.first_chunk::<PREFIX>()?);
    bytes.split_at_checked(PREFIX + to_usize(length.into()))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Takes `room` bytes or packets in all, `at_once` bytes at most at a time.
    struct Narrow {
        packets: bool,
        room: RefCell<usize>,
        at_once: usize,
        taken: RefCell<Vec<Vec<u8>>>,
    }

    impl Narrow {
        fn new(packets: bool, room: usize, at_once: usize) -> Self {
            Self { packets, room: room.into(), at_once, taken: RefCell::default() }
        }
    }

    impl FrameSink for Narrow {
        fn send(&self, bytes: &[u8]) -> io::Result<usize> {
            if self.packets && bytes.len() < 3 {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let mut room = self.room.borrow_mut();
            if *room == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let count = if self.packets { bytes.len() } else { bytes.len().min(self.at_once).min(*room) };
            *room -= if self.packets { 1 } else { count };
            self.taken.borrow_mut().push(bytes[..count].to_vec());
            Ok(count)
        }

        fn takes_packets(&self) -> bool {
            self.packets
        }
    }

    fn frame(length: u8) -> Vec<u8> {
        [&[0, 0, 0, length][..], &vec![length; length.into()]].concat()
    }

    fn run(lengths: &[u8]) -> Frames {
        let mut frames = Frames::default();
        lengths.iter().for_each(|length| frames.push(&frame(*length)));
        frames
    }

    #[test]
    fn a_stream_gets_all_bytes_in_order_however_few_it_takes_at_a_time() {
        let (mut queue, sink) = (FrameQueue::new(1000), Narrow::new(false, 20, 3));
        assert!(queue.push(&frame(5)));
        assert_eq!(queue.push_all(run(&[6, 7])), 0);
        assert!(queue.push(&frame(8)));
        assert_eq!(queue.write_to(&sink).unwrap(), 0);
        assert!(!queue.is_empty());
        *sink.room.borrow_mut() = 1000;
        queue.write_to(&sink).unwrap();
        assert!(queue.is_empty());
        assert_eq!(sink.taken.borrow().concat(), run(&[5, 6, 7, 8]).bytes);
        assert_eq!(queue.clear(), 0);
    }

    #[test]
    fn an_interface_gets_a_frame_a_write_and_those_that_it_refuses_are_counted() {
        let (mut queue, sink) = (FrameQueue::new(1000), Narrow::new(true, 2, 0));
        assert_eq!(queue.push_all(run(&[9, 1, 4, 2, 5])), 0);
        assert_eq!(queue.write_to(&sink).unwrap(), 2);
        assert_eq!(*sink.taken.borrow(), [vec![9; 9], vec![4; 4]]);
        assert_eq!(queue.clear(), 1);
        assert!(queue.is_empty());
    }

    #[test]
    fn frames_beyond_the_limit_are_dropped_whole() {
        let mut queue = FrameQueue::new(20);
        assert_eq!(queue.push_all(run(&[6, 6, 6, 6])), 2);
        assert!(queue.is_full() && !queue.push(&frame(1)));
        let sink = Narrow::new(false, 1000, 1000);
        queue.write_to(&sink).unwrap();
        assert_eq!(sink.taken.borrow().concat(), run(&[6, 6]).bytes);
        assert!(queue.push(&frame(1)));
    }

    #[test]
    fn frames_that_a_lost_sink_has_not_or_half_are_counted() {
        let (mut queue, sink) = (FrameQueue::new(1000), Narrow::new(false, 15, 1000));
        queue.push_all(run(&[6, 6]));
        queue.push_all(run(&[6]));
        queue.write_to(&sink).unwrap();
        assert_eq!(queue.clear(), 2);
        assert!(queue.push(&frame(1)));
        *sink.room.borrow_mut() = 1000;
        sink.taken.borrow_mut().clear();
        queue.write_to(&sink).unwrap();
        assert_eq!(sink.taken.borrow().concat(), frame(1), "it begins at a frame");
    }
}
