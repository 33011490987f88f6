//! A channel of records, read while the guest runs.

use std::sync::Arc;

use limosa_channel::Channel;
use limosa_page::{BrokenInvariant, PAGE_LEN, PAGE_SIZE, PageNumber, broken_invariant};
use limosa_stream::{Decoder, Event, Step};

use super::placer::Placer;
use crate::error::MigrateError;

/// Room for what arrives at once. Smaller than a precopy's: a page that the guest waits for should not queue up behind
/// many that were read with it.
const ROOM: usize = 256 << 10;

/// A channel and what has arrived on it.
#[derive(Debug)]
pub(super) struct Records {
    channel: Arc<Channel>,
    decoder: Decoder,
    bytes: Vec<u8>,
    begin: usize,
    end: usize,
}

impl Records {
    /// A channel on which `arrived` has come already.
    pub(super) fn new(channel: Arc<Channel>, decoder: Decoder, arrived: &[u8]) -> Self {
        let mut bytes = arrived.to_vec();
        bytes.resize(arrived.len().max(ROOM), 0);
        Self { channel, decoder, bytes, begin: 0, end: arrived.len() }
    }

    /// The next event. A time-out of the channel is passed over while `still` says so.
    pub(super) fn next(&mut self, still: &dyn Fn() -> bool) -> Result<Event, MigrateError> {
        loop {
            match self.decoder.step(self.bytes.get(self.begin..self.end).ok_or_else(outside)?)? {
                Step::Need(total) => self.fill(total, still)?,
                Step::Event { consumed, event } => {
                    self.begin += consumed;
                    return Ok(event);
                }
            }
        }
    }

    /// Places what a page record brings; anything else is not expected.
    pub(super) fn place(
        &mut self,
        event: &Event,
        placer: &mut Placer<'_, '_>,
        still: &dyn Fn() -> bool,
    ) -> Result<(), MigrateError> {
        match event {
            Event::Page { block, offset } => {
                self.fill(PAGE_LEN, still)?;
                let page = self.bytes.get(self.begin..self.begin + PAGE_LEN).ok_or_else(outside)?;
                self.begin += PAGE_LEN;
                placer.page(*block, PageNumber(offset / PAGE_SIZE), Some(page))
            }
            Event::Zero { block, offset } => placer.page(*block, PageNumber(offset / PAGE_SIZE), None),
            other => Err(MigrateError::Unsupported {
                what: format!("{other:?}"),
                offset: self.decoder.offset(),
                role: "a destination whose VM runs",
            }),
        }
    }

    /// Whether everything that has arrived is used up.
    pub(super) fn is_between_records(&self) -> bool {
        self.begin == self.end
    }

    /// Reads until `total` bytes have arrived behind the last that is used up.
    fn fill(&mut self, total: usize, still: &dyn Fn() -> bool) -> Result<(), MigrateError> {
        while self.end - self.begin < total {
            if self.bytes.len() - self.begin < total {
                self.bytes.copy_within(self.begin..self.end, 0);
                (self.begin, self.end) = (0, self.end - self.begin);
                if self.bytes.len() < total {
                    return Err(MigrateError::Protocol(format!("a record of {total} bytes")));
                }
            }
            match self.channel.read(self.bytes.get_mut(self.end..).ok_or_else(outside)?) {
                Ok(0) => return Err(MigrateError::Stream(self.decoder.truncated_error(self.end - self.begin, total))),
                Ok(got) => self.end += got,
                Err(error) if error.is_timeout() && still() => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

#[track_caller]
fn outside() -> BrokenInvariant {
    broken_invariant("what has arrived on a channel of records is in its buffer")
}
