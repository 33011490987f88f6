//! The last phase of a stream: the device sections, up to the end that their own description proves.

use std::time::Instant;

use limosa_page::{broken_invariant, to_u64};
use limosa_stream::devices;
use limosa_stream::postcopy::PING_READY;
use limosa_stream::{Command, CompleteTail, DeviceTailFinder, FramedSections, TailStep};

use super::options::TAIL_TIMEOUT;
use super::phase::{Phase, Whole};
use super::receiver::Receiver;
use crate::control;
use crate::error::MigrateError;
use crate::pages::StreamSetup;

/// The kind of a source, as its device sections show it.
enum Source {
    /// Either kind is possible.
    Unknown(FramedSections),
    /// One of this kind, which was told that everything is in its place: its commit follows.
    Answered(FramedSections),
    /// Stock QEMU, which does not say where its sections end.
    Stock,
}

impl Source {
    /// Looks at the sections that have come.
    fn look(&mut self, tail: &[u8]) -> Result<TailStep, MigrateError> {
        match self {
            Self::Unknown(sections) | Self::Answered(sections) => Ok(sections.parse(tail)?),
            Self::Stock => Ok(TailStep::More),
        }
    }
}

impl Receiver<'_> {
    /// Reads the device sections and their description.
    pub(super) fn device_state(&mut self, start: StreamSetup) -> Result<Phase, MigrateError> {
        let begun = Instant::now();
        let (tail, devices) = self.read_devices(self.decoder.offset())?;
        self.stats.device_bytes = to_u64(tail.len());
        self.stats.device_elapsed = begun.elapsed();
        let next = if self.role.options.colo { control::Phase::Colo } else { control::Phase::Completing };
        self.role.progress.set_phase(next);
        Ok(Phase::Whole(Whole { start, tail, devices }))
    }

    /// Has the device sections loaded, with every page in its place, and tells the source.
    fn ready(&mut self, sections: &[u8]) -> Result<(), MigrateError> {
        if let Some(hooks) = self.hooks {
            hooks.load(sections)?;
        }
        let before = self.role.channel.counters().bytes_out;
        let said = self.obey(&Command::Ping(PING_READY), self.decoder.offset());
        // From the first byte of the answer on the source may have committed.
        self.answered = said.is_ok() || self.role.channel.counters().bytes_out != before;
        said?;
        Ok(self.role.channel.set_timeouts(self.role.options.answer_timeout, self.role.options.answer_timeout)?)
    }

    /// Reads the next bytes over those that were looked at; returns 0 if the connection has ended.
    ///
    /// Over TLS stock QEMU does not announce the end of its main channel, and where it has no return path its
    /// description alone proves that all has come. With one it waits for an answer, and does not go before: a
    /// connection that ends then was cut, perhaps by an attacker who knows that the guest has put what looks like an
    /// end just there.
    fn more(&mut self) -> Result<usize, MigrateError> {
        (self.buffer.start, self.buffer.end) = (0, 0);
        match self.buffer.fill(&self.role.channel) {
            Err(MigrateError::Channel(error)) if error.lacks_close_notify() && !self.return_path => Ok(0),
            read => read,
        }
    }

    /// Collects the sections up to their end.
    fn read_devices(&mut self, offset: u64) -> Result<(Vec<u8>, CompleteTail), MigrateError> {
        let limit = self.role.options.max_device_state;
        let mut search = DeviceTailFinder::new(offset, limit);
        let mut source = Source::Unknown(FramedSections::new(offset, limit));
        let mut tail = self.buffer.arrived()?.to_vec();
        loop {
            let step = source.look(&tail)?;
            source = match (source, step) {
                (Source::Unknown(framed) | Source::Answered(framed), TailStep::Ready { sections }) => {
                    let sections = tail.get(..sections);
                    self.ready(
                        sections
                            .ok_or_else(|| broken_invariant("device sections are among the bytes that have come"))?,
                    )?;
                    source = Source::Answered(framed);
                    continue;
                }
                (_, TailStep::Whole { state, pings, length }) => {
                    if tail.len() > length {
                        let rest = tail.len() - length;
                        return Err(MigrateError::Protocol(format!("{rest} bytes behind the description")));
                    }
                    tail.drain(pings);
                    return Ok((tail, state));
                }
                (Source::Answered(framed), TailStep::More) => {
                    if self.more()? == 0 {
                        let why = "the source ended its stream before it allowed the VM to run".into();
                        return Err(MigrateError::Protocol(why));
                    }
                    tail.extend_from_slice(self.buffer.arrived()?);
                    source = Source::Answered(framed);
                    continue;
                }
                (Source::Unknown(framed), TailStep::More) => Source::Unknown(framed),
                (Source::Unknown(_) | Source::Answered(_), TailStep::NotFramed) => Source::Stock,
                (Source::Stock, TailStep::Ready { .. } | TailStep::NotFramed | TailStep::More) => Source::Stock,
            };
            if let Some(devices) = self.search(&mut search, &tail)? {
                return Ok((tail, devices));
            }
            tail.extend_from_slice(self.buffer.arrived()?);
        }
    }

    /// Reads on, and returns the end of the sections of a stock source if nothing comes behind it.
    fn search(&mut self, search: &mut DeviceTailFinder, tail: &[u8]) -> Result<Option<CompleteTail>, MigrateError> {
        let options = &self.role.options;
        let (offset, limit) = (self.decoder.offset(), options.max_device_state);
        let found = search.find(tail)?;
        let silence = match (&found, self.return_path) {
            // The guest can put what looks like an end into a device's memory, so an end counts only if nothing comes
            // behind it. The source has nothing more to say until it is answered.
            (Some(_), true) => Some(options.end_of_stream_timeout),
            (Some(_), false) | (None, _) if options.recorded => options.answer_timeout,
            (Some(_), false) | (None, _) => Some(TAIL_TIMEOUT),
        };
        self.role.channel.set_timeouts(silence, options.answer_timeout)?;
        match (self.more(), found) {
            (Err(MigrateError::Channel(error)), Some(devices)) if error.is_timeout() => Ok(Some(devices)),
            (Ok(0), Some(devices)) => Ok(Some(devices)),
            (Err(MigrateError::Channel(error)), None) if error.is_timeout() => {
                // What is wrong with the bytes that came says more than the silence: a stream without a description,
                // for one, has no end that can be found.
                devices::find_tail_end(tail, offset, limit)?;
                Err(error.into())
            }
            (Ok(0), None) => {
                // With nothing to come, the search's own error says what is wrong with the bytes that came.
                let devices = devices::find_tail_end(tail, offset, limit)?;
                Err(MigrateError::Protocol(format!("{} bytes behind the description", tail.len() - devices.end)))
            }
            (Err(error), _) => Err(error),
            (Ok(_), _) => Ok(None),
        }
    }
}
