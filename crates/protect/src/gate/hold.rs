//! The frames that wait for their checkpoints, in bounded memory.
//!
//! ```text
//!  Free --seal--> Holding --seal--> Holding ...
//!   ^                 |  |
//!   +------abort------+  +--detach--> Detached: what is sealed waits, later frames pass
//!   +------abort--------------------------+
//! ```

use std::collections::VecDeque;
use std::time::Instant;

use limosa_migrate::output::OutputCounters;
use limosa_page::to_u64;

use super::frame::{PREFIX, cost};
use crate::times::Times;

/// Most epochs that are sealed and not yet let out.
const SEALED_MAX: usize = 1024;

/// Frames in the order in which they came, each behind its length.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    pub(crate) bytes: Vec<u8>,
    pub(crate) count: u64,
}

impl Frames {
    /// Appends a frame with its length.
    pub(crate) fn push(&mut self, frame: &[u8]) {
        self.bytes.extend_from_slice(frame);
        self.count += 1;
    }

    /// Bytes of the frames without their lengths.
    fn payload(&self) -> u64 {
        to_u64(self.bytes.len()).saturating_sub(self.count * to_u64(PREFIX))
    }
}

/// An epoch: the frames between two seals.
#[derive(Debug, Default)]
struct Epoch {
    frames: Frames,
    cost: u64,
    /// When frames came, and how many.
    came: Vec<(Instant, u64)>,
}

/// The way of a frame that the VM has sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Offered {
    /// It may leave at once.
    Passed,
    /// It waits.
    Held,
    /// It waits, and is the first of its epoch.
    First,
    /// It was dropped, as there is no room for it.
    Dropped,
}

/// An order that a keeper must not give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OrderError {
    #[error("epoch {epoch} is sealed after epoch {last}")]
    Order { epoch: u64, last: u64 },
    #[error("epoch {epoch} is sealed, and {SEALED_MAX} before it have not been let out")]
    Many { epoch: u64 },
    #[error("epoch {epoch} is let out, and has not been sealed")]
    Unsealed { epoch: u64 },
}

/// The frames of all epochs that wait.
#[derive(Debug)]
pub(crate) struct Hold {
    limit: u64,
    holding: bool,
    open: Epoch,
    sealed: VecDeque<(u64, Epoch)>,
    last: Option<u64>,
    cost: u64,
    counters: OutputCounters,
    times: Times,
}

impl Hold {
    /// Creates a hold that lets everything pass, and later keeps frames of up to `limit` bytes.
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            limit,
            holding: false,
            open: Epoch::default(),
            sealed: VecDeque::new(),
            last: None,
            cost: 0,
            counters: OutputCounters::default(),
            times: Times::new(),
        }
    }

    /// Whether frames wait for a checkpoint.
    pub(crate) fn is_holding(&self) -> bool {
        self.holding
    }

    /// Whether more than half of the room is taken.
    pub(crate) fn is_nearly_full(&self) -> bool {
        self.cost > self.limit / 2
    }

    pub(crate) fn counters(&self) -> OutputCounters {
        let mut counters = self.counters;
        counters.median_hold = self.times.percentiles().median;
        counters
    }

    /// Begins a series with counters of its own; frames pass until its first seal.
    pub(crate) fn begin(&mut self) {
        self.abort();
        self.counters = OutputCounters::default();
        self.times.reset();
    }

    /// Takes a frame with its length, unless it passes.
    pub(crate) fn offer(&mut self, frame: &[u8], now: Instant) -> Offered {
        if !self.holding {
            return Offered::Passed;
        }
        let cost = cost(frame);
        if self.cost.saturating_add(cost) > self.limit {
            self.counters.overflow_packets += 1;
            return Offered::Dropped;
        }
        let Epoch { frames, cost: of_epoch, came } = &mut self.open;
        let first = frames.count == 0;
        frames.push(frame);
        *of_epoch += cost;
        self.cost += cost;
        match came.last_mut() {
            // Frames that are read together have one time.
            Some((time, count)) if *time == now => *count += 1,
            _ => came.push((now, 1)),
        }
        self.counters.held_packets += 1;
        self.counters.held_bytes += to_u64(frame.len().saturating_sub(PREFIX));
        if first { Offered::First } else { Offered::Held }
    }

    /// Ends the open epoch as number `epoch`; holds frames from now on.
    pub(crate) fn seal(&mut self, epoch: u64) -> Result<(), OrderError> {
        if let Some(last) = self.last.filter(|last| epoch <= *last) {
            return Err(OrderError::Order { epoch, last });
        }
        if self.sealed.len() >= SEALED_MAX {
            return Err(OrderError::Many { epoch });
        }
        self.holding = true;
        self.last = Some(epoch);
        self.sealed.push_back((epoch, std::mem::take(&mut self.open)));
        Ok(())
    }

    /// Lets the frames of all epochs up to this one out, in their order.
    pub(crate) fn commit(&mut self, epoch: u64, now: Instant, mut out: impl FnMut(Frames)) -> Result<(), OrderError> {
        if self.last.is_none_or(|last| epoch > last) {
            return Err(OrderError::Unsealed { epoch });
        }
        while self.sealed.front().is_some_and(|(number, _)| *number <= epoch) {
            let Some((_, Epoch { frames, cost, came })) = self.sealed.pop_front() else { break };
            self.cost -= cost;
            for (time, count) in came {
                let held = now.saturating_duration_since(time);
                self.counters.longest_hold = self.counters.longest_hold.max(held);
                self.times.add(held, count);
            }
            self.counters.released_packets += frames.count;
            self.counters.released_bytes += frames.payload();
            if frames.count > 0 {
                out(frames);
            }
        }
        Ok(())
    }

    /// Drops the frames that no seal has, and holds those that one has; everything passes from now on.
    pub(crate) fn detach(&mut self) {
        let Epoch { frames, cost, .. } = std::mem::take(&mut self.open);
        self.counters.aborted_packets += frames.count;
        self.cost -= cost;
        self.holding = false;
    }

    /// Drops all frames that wait; everything passes from now on.
    pub(crate) fn abort(&mut self) {
        let sealed = self.sealed.iter().map(|(_, epoch)| epoch.frames.count).sum::<u64>();
        self.counters.aborted_packets += sealed + self.open.frames.count;
        self.sealed.clear();
        (self.open, self.cost, self.last, self.holding) = (Epoch::default(), 0, None, false);
    }

    /// Counts frames that were let out and not delivered.
    pub(crate) fn undelivered(&mut self, count: u64) {
        self.counters.undelivered_packets = self.counters.undelivered_packets.saturating_add(count);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn frame(number: u8) -> Vec<u8> {
        [&[0, 0, 0, 2][..], &[number, number]].concat()
    }

    fn released(hold: &mut Hold, epoch: u64, now: Instant) -> Result<Vec<u8>, OrderError> {
        let mut bytes = Vec::new();
        hold.commit(epoch, now, |frames| bytes.extend(frames.bytes))?;
        Ok(bytes.chunks_exact(6).map(|frame| frame[5]).collect())
    }

    #[test]
    fn frames_pass_until_the_first_seal_and_after_an_abort() {
        let (mut hold, now) = (Hold::new(1000), Instant::now());
        assert_eq!(hold.offer(&frame(1), now), Offered::Passed);
        hold.seal(0).unwrap();
        assert_eq!(hold.offer(&frame(2), now), Offered::First);
        assert_eq!(hold.offer(&frame(3), now), Offered::Held);
        hold.abort();
        assert_eq!(hold.offer(&frame(4), now), Offered::Passed);
        let counters = hold.counters();
        assert_eq!((counters.held_packets, counters.held_bytes, counters.aborted_packets), (2, 4, 2));
    }

    #[test]
    fn a_hold_that_is_detached_keeps_what_is_sealed_and_lets_everything_else_pass() {
        let (mut hold, now) = (Hold::new(1000), Instant::now());
        hold.seal(0).unwrap();
        hold.offer(&frame(1), now);
        hold.seal(1).unwrap();
        hold.offer(&frame(2), now);
        hold.detach();
        assert_eq!(hold.offer(&frame(3), now), Offered::Passed);
        assert_eq!(released(&mut hold, 1, now).unwrap(), [1]);
        assert_eq!((hold.counters().aborted_packets, hold.cost), (1, 0));
        hold.detach();
        hold.abort();
        assert_eq!(released(&mut hold, 1, now), Err(OrderError::Unsealed { epoch: 1 }));
    }

    #[test]
    fn an_epoch_leaves_with_its_checkpoint_and_no_frame_of_the_next_one_does() {
        let (mut hold, now) = (Hold::new(1000), Instant::now());
        hold.seal(0).unwrap();
        hold.offer(&frame(1), now);
        hold.offer(&frame(2), now);
        hold.seal(1).unwrap();
        hold.offer(&frame(3), now);
        assert_eq!(released(&mut hold, 0, now).unwrap(), [0_u8; 0]);
        let later = now + Duration::from_millis(5);
        assert_eq!(released(&mut hold, 1, later).unwrap(), [1, 2]);
        assert_eq!(released(&mut hold, 1, later).unwrap(), [0_u8; 0]);
        hold.abort();
        let counters = hold.counters();
        assert_eq!((counters.released_packets, counters.released_bytes, counters.aborted_packets), (2, 4, 1));
        assert_eq!(counters.longest_hold, Duration::from_millis(5));
        assert!(counters.median_hold.abs_diff(counters.longest_hold) < Duration::from_micros(50), "{counters:?}");
    }

    #[test]
    fn frames_beyond_the_limit_are_dropped_and_counted_and_half_of_it_is_said_to_be_nearly_full() {
        let (mut hold, now) = (Hold::new(4 * 70), Instant::now());
        hold.seal(0).unwrap();
        for number in 0..6 {
            assert_eq!(hold.is_nearly_full(), number > 2, "{number}");
            let expected = match number {
                0 => Offered::First,
                1..4 => Offered::Held,
                _ => Offered::Dropped,
            };
            assert_eq!(hold.offer(&frame(number), now), expected);
        }
        hold.seal(1).unwrap();
        assert_eq!(hold.offer(&frame(9), now), Offered::Dropped, "a sealed epoch still takes its room");
        assert_eq!(released(&mut hold, 1, now).unwrap(), [0, 1, 2, 3]);
        assert_eq!(hold.offer(&frame(10), now), Offered::First);
        assert_eq!(hold.counters().overflow_packets, 3);
    }

    #[test]
    fn seals_and_commits_out_of_order_are_refused() {
        let (mut hold, now) = (Hold::new(1000), Instant::now());
        assert_eq!(released(&mut hold, 0, now), Err(OrderError::Unsealed { epoch: 0 }));
        hold.seal(3).unwrap();
        assert_eq!(hold.seal(3), Err(OrderError::Order { epoch: 3, last: 3 }));
        assert_eq!(released(&mut hold, 4, now), Err(OrderError::Unsealed { epoch: 4 }));
        for epoch in 4..1027 {
            hold.seal(epoch).unwrap();
        }
        assert_eq!(hold.seal(1027), Err(OrderError::Many { epoch: 1027 }));
        hold.begin();
        hold.seal(0).unwrap();
    }

    #[derive(Debug, Clone)]
    enum Step {
        Offer,
        Seal,
        Commit(u64),
        Abort,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => Just(Step::Offer),
            2 => Just(Step::Seal),
            2 => (0_u64..3).prop_map(Step::Commit),
            1 => Just(Step::Abort),
        ]
    }

    proptest! {
        #[test]
        fn nothing_leaves_before_its_epoch_and_everything_else_is_counted(
            steps in prop::collection::vec(step(), 0..200),
            limit in 0_u64..1500,
        ) {
            let (mut hold, now) = (Hold::new(limit), Instant::now());
            // The model: frames by number, with the epoch that they belong to.
            let (mut waiting, mut epoch, mut sealed) = (Vec::<(u64, u8)>::new(), 0, None);
            let (mut out, mut kept, mut dropped) = (0, 0, 0);
            for (number, step) in (0..=u8::MAX).zip(steps) {
                match step {
                    Step::Offer => match hold.offer(&frame(number), now) {
                        Offered::Passed => prop_assert_eq!(sealed, None),
                        Offered::Dropped => dropped += 1,
                        offered => {
                            let first = !waiting.iter().any(|(of, _)| *of == epoch);
                            prop_assert_eq!(offered == Offered::First, first);
                            waiting.push((epoch, number));
                            kept += 1;
                        }
                    },
                    Step::Seal => {
                        hold.seal(epoch).unwrap();
                        sealed = Some(epoch);
                        epoch += 1;
                    }
                    Step::Commit(behind) => {
                        let Some(wanted) = sealed.and_then(|sealed: u64| sealed.checked_sub(behind)) else { continue };
                        let left = released(&mut hold, wanted, now).unwrap();
                        let expected: Vec<u8> =
                            waiting.iter().filter(|(of, _)| *of <= wanted).map(|(_, number)| *number).collect();
                        waiting.retain(|(of, _)| *of > wanted);
                        prop_assert_eq!(&left, &expected);
                        out += left.len() as u64;
                    }
                    Step::Abort => {
                        hold.abort();
                        waiting.clear();
                        (epoch, sealed) = (0, None);
                    }
                }
                prop_assert!(waiting.len() as u64 * 70 <= limit);
            }
            let counters = hold.counters();
            prop_assert_eq!((counters.held_packets, counters.overflow_packets), (kept, dropped));
            prop_assert_eq!(counters.released_packets, out);
            prop_assert_eq!(counters.aborted_packets, kept - out - waiting.len() as u64);
        }
    }
}
