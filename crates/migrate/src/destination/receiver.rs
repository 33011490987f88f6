//! A stream that arrives: its buffer, its decoder, and the answers to its source.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use limosa_channel::{Channel, Shutdown};
use limosa_stream::{
    Command, Decoder, DecoderOptions, ErrorKind, Event, PageSizes, ReturnMessage, StreamError, UnsupportedFeature,
};
use rustix::net::sockopt;

use super::buffer::Buffer;
use super::hooks::Hooks;
use super::multifd::MultifdOptions;
use super::options::{DestinationOptions, DestinationStats};
use super::page_writer::{Filled, PageWrites, WriterHandle};
use crate::control::{Control, Phase, Progress};
use crate::error::MigrateError;

/// All of a destination but its sink.
pub(super) struct Role {
    pub(super) channel: Arc<Channel>,
    pub(super) pages: Vec<Arc<Channel>>,
    pub(super) multifd: MultifdOptions,
    pub(super) control: Control,
    pub(super) progress: Progress,
    pub(super) options: DestinationOptions,
}

impl Role {
    /// The main channel and the multifd channels.
    pub(super) fn channels(&self) -> impl Iterator<Item = &Arc<Channel>> {
        std::iter::once(&self.channel).chain(&self.pages)
    }

    /// Closes all channels after a failure, so that the source learns of it.
    pub(super) fn close(&self) {
        self.control.unwatch();
        for channel in self.channels() {
            let _ = channel.shutdown(Shutdown::Both);
            // All that had come may have been read. Then nothing tells a source over TCP that waits for room here that
            // reading has ended: its kernel would probe for a minute or two. A reset does.
            let _ = sockopt::set_socket_linger(channel.as_ref(), Some(Duration::ZERO));
        }
    }
}

impl fmt::Debug for Receiver<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").field("offset", &self.decoder.offset()).finish_non_exhaustive()
    }
}

/// A stream that arrives, and everything that its phases need.
pub(super) struct Receiver<'a> {
    pub(super) role: Arc<Role>,
    pub(super) hooks: Option<&'a dyn Hooks>,
    pub(super) buffer: Buffer,
    pub(super) orders: PageWrites,
    pub(super) decoder: Decoder,
    pub(super) stats: DestinationStats,
    pub(super) return_path: bool,
    /// The page sizes that the source announced: postcopy may follow.
    pub(super) advised: Option<PageSizes>,
    /// The source was told that everything is in its place: it may have committed since.
    pub(super) answered: bool,
    /// Bytes that had come on the multifd channels when this one was last found silent.
    pub(super) heard: u64,
}

impl<'a> Receiver<'a> {
    pub(super) fn new(role: Arc<Role>, hooks: Option<&'a dyn Hooks>) -> Self {
        Self {
            hooks,
            buffer: Buffer::new(&role.options.first_bytes),
            orders: PageWrites::default(),
            decoder: Decoder::with_options(DecoderOptions { colo: role.options.colo, ..DecoderOptions::default() }),
            stats: DestinationStats::default(),
            return_path: false,
            advised: None,
            answered: false,
            heard: 0,
            role,
        }
    }

    /// Keeps the receiver for the checkpoints behind its stream. No VM waits here for them.
    pub(super) fn for_checkpoints(self) -> Receiver<'static> {
        let Self { role, buffer, orders, decoder, stats, return_path, advised, answered, heard, .. } = self;
        Receiver { role, hooks: None, buffer, orders, decoder, stats, return_path, advised, answered, heard }
    }

    /// The hooks of a VM that may run here before all its pages have come.
    pub(super) fn postcopy_hooks(&self) -> Option<&'a dyn Hooks> {
        self.hooks.filter(|hooks| self.return_path && hooks.postcopy())
    }

    pub(super) fn unsupported(&self, event: &Event) -> MigrateError {
        let offset = self.decoder.offset();
        if *event == Event::MultifdFlush && self.role.pages.is_empty() {
            return StreamError::new(offset, "section \"ram\"", ErrorKind::Unsupported(UnsupportedFeature::Multifd))
                .into();
        }
        let what = match event {
            Event::MappedRamBlock(_) => "mapped-ram, whose pages have places of their own in a file".to_owned(),
            other => format!("{other:?}"),
        };
        MigrateError::Unsupported { what, offset, role: "the precopy destination" }
    }

    pub(super) fn obey(&mut self, command: &Command, offset: u64) -> Result<(), MigrateError> {
        match command {
            Command::OpenReturnPath | Command::Ping(_) if self.role.options.recorded => {}
            Command::OpenReturnPath if !self.role.channel.has_direction(Shutdown::Write) => {
                return Err(MigrateError::NoReturnPath { peer: self.role.channel.peer().to_owned() });
            }
            Command::OpenReturnPath => self.return_path = true,
            // That postcopy may follow binds neither end; a source that finishes before it is asked to switch is
            // received.
            Command::PostcopyAdvise(sizes) => self.advised = *sizes,
            Command::RamDiscard { .. } | Command::PostcopyListen | Command::PostcopyRun => {
                return Err(MigrateError::SwitchedToPostcopy { offset });
            }
            Command::Ping(token) if self.return_path => {
                let mut bytes = Vec::new();
                ReturnMessage::Pong(*token).encode(&mut bytes)?;
                self.role.channel.write_all(&bytes)?;
            }
            // Newer sources do not say it.
            Command::EnableColo if self.role.options.colo => {}
            Command::SwitchoverStart => self.role.progress.set_phase(Phase::Device),
            other => {
                return Err(MigrateError::Unsupported {
                    what: format!("{other:?}"),
                    offset,
                    role: "the precopy destination",
                });
            }
        }
        Ok(())
    }

    /// Makes sure that `total` bytes have arrived behind the last decoded one, in another buffer if they do not fit.
    pub(super) fn refill(&mut self, total: usize, handle: &mut WriterHandle<'_>) -> Result<(), MigrateError> {
        if self.buffer.len() < total && self.buffer.is_short_of(total) {
            self.exchange(handle)?;
        }
        self.fill(total)
    }

    /// Reads until `total` bytes have arrived behind the last decoded one, or fails at the end of the stream.
    pub(super) fn fill(&mut self, total: usize) -> Result<(), MigrateError> {
        while self.buffer.len() < total {
            if self.buffer.is_short_of(total) {
                let offset = self.decoder.offset();
                return Err(MigrateError::Protocol(format!("a record of {total} bytes at stream offset {offset}")));
            }
            match self.buffer.fill(&self.role.channel) {
                Ok(0) => return Err(MigrateError::Stream(self.decoder.truncated_error(self.buffer.len(), total))),
                Ok(_) => {}
                // While pages come on the other channels there may be nothing to say on this one.
                Err(MigrateError::Channel(error)) if error.is_timeout() && self.others_moved() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether something has come on the other channels since this was last asked.
    fn others_moved(&mut self) -> bool {
        let heard = self.role.pages.iter().map(|channel| channel.counters().bytes_in).sum();
        std::mem::replace(&mut self.heard, heard) != heard
    }

    /// Hands the buffer over with its writes, and continues in an empty one.
    pub(super) fn exchange(&mut self, handle: &mut WriterHandle<'_>) -> Result<(), MigrateError> {
        let rest = self.buffer.arrived()?.to_vec();
        let full = std::mem::take(&mut self.buffer.bytes);
        let full = Filled { bytes: full, orders: std::mem::take(&mut self.orders) };
        let Filled { bytes: empty, orders } = handle.exchange(full)?;
        self.orders = orders;
        Ok(self.buffer.begin_with(empty, &rest)?)
    }
}
