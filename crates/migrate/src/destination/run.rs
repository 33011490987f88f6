//! A stream from its first byte to its end: the list of its phases.

use std::time::Instant;

use super::buffer::BUFFER_LEN;
use super::phase::Phase;
use super::receiver::Receiver;
use crate::error::MigrateError;
use crate::pages::PageSink;

impl Receiver<'_> {
    /// Receives the stream up to its end, or to the package of a postcopy.
    pub(super) fn run<S: PageSink + Send + ?Sized>(&mut self, sink: &mut S) -> Result<Phase, MigrateError> {
        let begun = Instant::now();
        self.check()?;
        let mut phase = Phase::Layout;
        loop {
            let before = phase.step();
            phase = match phase {
                Phase::Layout => self.layout(sink)?,
                Phase::Memory(start) => self.memory(start, sink)?,
                Phase::DeviceState(start) => self.device_state(start)?,
                Phase::Whole(_) | Phase::Package(_) => break,
            };
            phase.step().check_follows(before)?;
        }
        self.stats.elapsed = begun.elapsed();
        self.stats.channel = self.role.channels().map(|channel| channel.counters()).sum();
        Ok(phase)
    }

    /// Prepares the channels, and refuses options that cannot be met.
    fn check(&self) -> Result<(), MigrateError> {
        let options = &self.role.options;
        for channel in self.role.channels() {
            channel.set_timeouts(options.answer_timeout, options.answer_timeout)?;
        }
        if options.first_bytes.len() > BUFFER_LEN {
            let length = options.first_bytes.len();
            return Err(MigrateError::Protocol(format!("a head of {length} bytes, of at most {BUFFER_LEN}")));
        }
        Ok(())
    }
}
