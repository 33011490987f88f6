//! The primary's half of the messages of COLO.

use std::time::{Duration, Instant};

use limosa_channel::Channel;
use limosa_page::{broken_invariant, to_u64};
use limosa_stream::colo::{COLO_MESSAGE_LIMIT, ColoMessage};

use crate::control::Control;
use crate::error::MigrateError;

/// How long a read takes at a stretch: what else ends a wait is looked at in between.
const TICK: Duration = Duration::from_millis(100);

/// The keeper, behind the base.
pub(super) struct Dialogue<'e> {
    channel: &'e Channel,
    control: &'e Control,
    /// Bytes that have come and were not taken.
    arrived: Vec<u8>,
    /// Stream offset of the first of them, as the keeper counts.
    offset: u64,
}

impl<'e> Dialogue<'e> {
    /// Continues on a channel whose reader has taken `arrived` already. A write may last `timeout`.
    pub(super) fn new(
        channel: &'e Channel,
        control: &'e Control,
        arrived: Vec<u8>,
        timeout: Duration,
    ) -> Result<Self, MigrateError> {
        channel.set_timeouts(Some(TICK), Some(timeout))?;
        Ok(Self { channel, control, arrived, offset: 0 })
    }

    /// Writes a message.
    pub(super) fn say(&self, message: ColoMessage) -> Result<(), MigrateError> {
        let mut bytes = Vec::with_capacity(COLO_MESSAGE_LIMIT);
        message.encode(&mut bytes);
        self.control.check()?;
        Ok(self.channel.write_all(&bytes)?)
    }

    /// Waits for a message, and for no other.
    pub(super) fn expect(
        &mut self,
        expected: ColoMessage,
        what: &'static str,
        timeout: Duration,
    ) -> Result<(), MigrateError> {
        let begun = Instant::now();
        loop {
            // A keeper announces no device sections.
            if let Some((message, length)) = ColoMessage::decode(&self.arrived, self.offset, 0)? {
                self.arrived.drain(..length);
                self.offset = self.offset.saturating_add(to_u64(length));
                if message == expected {
                    return Ok(());
                }
                return Err(MigrateError::Protocol(format!("the keeper says {message:?}, where {expected:?} is due")));
            }
            self.read(what, begun, timeout)?;
        }
    }

    fn read(&mut self, what: &'static str, begun: Instant, timeout: Duration) -> Result<(), MigrateError> {
        if begun.elapsed() >= timeout {
            return Err(MigrateError::AnswerTimedOut { what, waited: timeout });
        }
        let mut bytes = [0; 64];
        match self.channel.read(&mut bytes) {
            Ok(0) => Err(MigrateError::Protocol(format!("the keeper closed the channel before {what}"))),
            Ok(got) => {
                let got = bytes.get(..got);
                let got = got.ok_or_else(|| broken_invariant("a read fills no more than its buffer"))?;
                self.arrived.extend_from_slice(got);
                Ok(())
            }
            Err(error) if error.is_timeout() => self.control.check(),
            Err(error) => Err(error.into()),
        }
    }
}
