//! One multifd channel, read on its own thread.
//!
//! A packet's header says how many pages follow and where they belong; the payload is read by one call into the
//! thread's buffer (or unpacked into it), and the buffer goes to the writer when it is full and at every SYNC packet.
//! No page is copied, and nothing is allocated for one. Where the sink is memory, pages that are not compressed need no
//! buffer: the one call reads each of them to where it belongs.

use std::collections::HashMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use limosa_channel::{Channel, Shutdown};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageNumber, broken_invariant, to_usize};
use limosa_stream::multifd::{Compression, PACKET_LEN, PACKET_PAGES, PAYLOAD_LIMIT, Packet};
use limosa_stream::{ErrorKind, RamBlock, StreamError};

use super::page_writer::{Filled, PageWrites, WriterHandle};
use super::scatter::Scatter;
use super::sync::{MultifdSync, Over};
use super::unpack::Unpacker;
use crate::control::Control;
use crate::error::MigrateError;

/// Room for the pages of two full packets.
pub(super) const BUFFER_LEN: usize = 2 * PACKET_PAGES * PAGE_LEN;

/// Page writes after which a buffer is given away although it is not full: packets of zero pages take no room in it.
const ORDERS: usize = 4096;

/// Every packet that was decoded keeps it.
const PAGES_OF_A_PACKET: &str = "a packet that was decoded has at most 128 pages";

/// How the multifd channels are read.
#[derive(Debug, Clone, Copy, Default)]
pub struct MultifdOptions {
    /// How their pages are compressed: what the source has set as `multifd-compression`.
    pub compression: Compression,
}

/// RAM blocks by name: index and length in bytes.
pub(super) type Blocks<'a> = HashMap<&'a str, (usize, u64)>;

pub(super) fn by_name(blocks: &[RamBlock]) -> Blocks<'_> {
    blocks.iter().enumerate().map(|(index, block)| (block.name.as_str(), (index, block.used_length))).collect()
}

/// The state that all channels have in common.
pub(super) struct ReaderContext<'a> {
    pub(super) blocks: Blocks<'a>,
    pub(super) join: MultifdSync,
    /// Becomes readable when no more is expected of the channels.
    pub(super) over: OwnedFd,
    pub(super) options: MultifdOptions,
    pub(super) answer_timeout: Option<std::time::Duration>,
    pub(super) main: &'a Channel,
    pub(super) channels: &'a [Arc<Channel>],
    pub(super) control: &'a Control,
}

impl ReaderContext<'_> {
    /// Ends the synchronization points, and wakes every thread that waits for a packet; what has arrived already is
    /// still read.
    ///
    /// The channels stay open: QEMU before 9.0 may send an empty packet behind its last SYNC packet, and if that cannot
    /// be written (a unix socket's peer notices a shutdown of the reading direction) the migration fails there.
    pub(super) fn end(&self) {
        self.join.end();
        // Eight bytes have always room in it.
        let _ = rustix::io::write(&self.over, &1_u64.to_ne_bytes());
    }

    /// The main channel has failed. Where the other side must not lose its channels yet, they are read until it can.
    pub(super) fn give_up(&self) {
        self.control.note_failure();
        self.join.end();
        self.control.wait_undeferred();
        self.stop_reading();
    }

    /// Wakes every thread that reads, amid a packet, too; the source can notice it.
    pub(super) fn stop_reading(&self) {
        for channel in self.channels {
            let _ = channel.shutdown(Shutdown::Read);
        }
    }

    fn fail(&self, error: MigrateError) {
        let is_deferred = self.control.note_failure();
        self.join.fail(error);
        if is_deferred {
            // The main channel ends when the other side has given up.
            return;
        }
        for channel in self.channels.iter().map(Arc::as_ref).chain([self.main]) {
            let _ = channel.shutdown(Shutdown::Both);
        }
    }
}

/// The reader of one channel.
pub(super) struct PageChannel<'a> {
    context: &'a ReaderContext<'a>,
    id: usize,
    channel: &'a Channel,
    handle: WriterHandle<'a>,
    buffer: Box<[u8]>,
    used: usize,
    orders: PageWrites,
    packed: Vec<u8>,
    unpacker: Unpacker,
    scatter: Scatter,
    /// Pages have come since the last synchronization point.
    loose: bool,
}

impl<'a> PageChannel<'a> {
    pub(super) fn new(
        context: &'a ReaderContext<'a>,
        id: usize,
        channel: &'a Channel,
        handle: WriterHandle<'a>,
    ) -> Result<Self, MigrateError> {
        let compression = context.options.compression;
        let unpacker = Unpacker::new(compression).map_err(MigrateError::Protocol)?;
        let packed = if compression == Compression::None { 0 } else { to_usize(PAYLOAD_LIMIT.into()) };
        let unbuffered = compression == Compression::None && handle.memory().is_some();
        let buffer = vec![0; if unbuffered { 0 } else { BUFFER_LEN }].into_boxed_slice();
        let packed = vec![0; packed];
        Ok(Self {
            context,
            id,
            channel,
            handle,
            buffer,
            used: 0,
            orders: PageWrites::default(),
            packed,
            unpacker,
            scatter: Scatter::default(),
            loose: false,
        })
    }

    /// Reads packets to the end of the channel. Whether pages came behind the last synchronization point.
    pub(super) fn run(mut self) -> bool {
        if let Err(source) = self.take_packets() {
            let (id, source) = (u8::try_from(self.id).unwrap_or(u8::MAX), Box::new(source));
            self.context.fail(MigrateError::Multifd { id, source });
        }
        self.drain();
        self.loose
    }

    /// After a failure, for as long as the other side must not lose its channels: reads what comes, and throws it
    /// away. When that is over, all channels are shut down ([`Control::defer_stop`]).
    fn drain(&self) {
        let control = self.context.control;
        if !control.has_failed() {
            return;
        }
        let mut waste = vec![0; BUFFER_LEN];
        while control.is_deferred() {
            match self.channel.read(&mut waste) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) if error.is_timeout() => {}
                Err(_) => break,
            }
        }
    }

    fn take_packets(&mut self) -> Result<(), MigrateError> {
        let (mut header, mut offsets) = ([0; PACKET_LEN], [0; PACKET_PAGES]);
        let mut position = self.channel.counters().bytes_in;
        loop {
            if !self.get_header(&mut header, position)? {
                self.context.join.ended(self.id);
                return Ok(());
            }
            let packet = Packet::decode(&header, position, &mut offsets)?;
            let packet = packet.ok_or_else(|| MigrateError::Protocol("an incomplete packet".into()))?;
            if self.context.join.is_over() {
                self.loose |= !packet.normal.is_empty() || !packet.zero.is_empty();
                return Ok(());
            }
            self.take_pages(&packet, position)?;
            position = self.channel.counters().bytes_in;
            if packet.sync {
                if !self.orders.is_empty() {
                    self.exchange()?;
                }
                match self.context.join.arrive(self.id) {
                    Ok(()) => self.loose = false,
                    Err(Over) => return Ok(()),
                }
            }
        }
    }

    /// Reads a header; false if the channel has ended before it.
    fn get_header(&mut self, header: &mut [u8; PACKET_LEN], position: u64) -> Result<bool, MigrateError> {
        let mut got = 0;
        while got < PACKET_LEN {
            let missing =
                header.get_mut(got..).ok_or_else(|| broken_invariant("a header that is read is not complete"))?;
            let read = match self.channel.wait_to_read(self.context.over.as_fd()) {
                Ok(true) => self.channel.read(missing),
                // A part of a header may be that of a packet with pages.
                Ok(false) => {
                    self.loose |= got != 0;
                    return Ok(false);
                }
                Err(error) => Err(error),
            };
            let more = match read {
                Ok(more) => more,
                // Between packets a channel may be silent for as long as the main channel does not wait for it.
                Err(error) if error.is_timeout() && got == 0 && !self.is_overdue() => continue,
                Err(error) if error.is_shut_down() && got == 0 => return Ok(false),
                // QEMU before 10.0 does not announce the end over TLS. Whether it was one the synchronization points
                // tell.
                Err(error) if error.lacks_close_notify() && got == 0 => return Ok(false),
                Err(error) => return Err(error.into()),
            };
            if more == 0 {
                if got == 0 {
                    return Ok(false);
                }
                let fault =
                    ErrorKind::Truncated { what: "a packet's header".into(), wanted: PACKET_LEN, available: got };
                return Err(StreamError::new(position, "packet of a multifd channel", fault).into());
            }
            got += more;
            if got < PACKET_LEN && self.context.join.is_over() {
                // The rest is not needed.
                self.loose = true;
                return Ok(false);
            }
            // Its first bytes may say already that the rest will not come.
            let begun = header.get(..got).ok_or_else(|| broken_invariant("a read fills no more than the header"))?;
            Packet::decode(begun, position, &mut [0; PACKET_PAGES])?;
        }
        Ok(true)
    }

    /// Whether the main channel has waited for this one longer than it may.
    fn is_overdue(&self) -> bool {
        self.context.answer_timeout.is_some_and(|answer_timeout| self.context.join.waits_for(self.id) >= answer_timeout)
    }

    fn take_pages(&mut self, packet: &Packet<'_>, position: u64) -> Result<(), MigrateError> {
        if packet.normal.is_empty() && packet.zero.is_empty() {
            return Ok(());
        }
        self.loose = true;
        if self.orders.len() > ORDERS {
            self.exchange()?;
        }
        let wrong = |fault| MigrateError::from(StreamError::new(position, "packet of a multifd channel", fault));
        let wanted = self.context.options.compression;
        if packet.compression != wanted {
            let (what, found) = (format!("pages compressed by {}", wanted.name()), packet.compression.name());
            let fault = ErrorKind::Unexpected {
                what: what.into(),
                found: format!("{found} (multifd-compression at the source)"),
            };
            return Err(wrong(fault));
        }
        let unknown = || wrong(ErrorKind::UnknownBlock { name: packet.block.to_owned() });
        let &(block, used_length) = self.context.blocks.get(packet.block).ok_or_else(unknown)?;
        if let Some(&offset) = packet.normal.iter().chain(packet.zero).find(|offset| **offset >= used_length) {
            return Err(wrong(ErrorKind::OutsideBlock { block: packet.block.to_owned(), offset, used_length }));
        }
        if let Some(direct) = self.handle.memory()
            && packet.compression == Compression::None
        {
            self.scatter.take(self.channel, direct, block, packet.normal)?;
        } else if !packet.normal.is_empty() {
            let begin = self.get_payload(packet, position)?;
            let mut places = [(0, 0); PACKET_PAGES];
            for (number, (place, &offset)) in places.iter_mut().zip(packet.normal).enumerate() {
                *place = (offset, begin + number * PAGE_LEN);
            }
            // Zero pages are sorted out by swapping, so the rest is in no order, and its runs are worth finding.
            let places = places.get_mut(..packet.normal.len()).ok_or_else(|| broken_invariant(PAGES_OF_A_PACKET))?;
            places.sort_unstable();
            for (offset, place) in places {
                self.orders.page(block, PageNumber(*offset / PAGE_SIZE), *place);
            }
        }
        let mut zero = [0; PACKET_PAGES];
        let zero = zero.get_mut(..packet.zero.len()).ok_or_else(|| broken_invariant(PAGES_OF_A_PACKET))?;
        zero.copy_from_slice(packet.zero);
        zero.sort_unstable();
        for offset in zero {
            self.orders.zero(block, PageNumber(*offset / PAGE_SIZE));
        }
        Ok(())
    }

    /// Reads the pages of a packet into the buffer: where they begin there.
    fn get_payload(&mut self, packet: &Packet<'_>, position: u64) -> Result<usize, MigrateError> {
        let length = packet.normal.len() * PAGE_LEN;
        if self.buffer.len() - self.used < length {
            self.exchange()?;
        }
        let begin = self.used;
        self.used += length;
        let pages = self
            .buffer
            .get_mut(begin..self.used)
            .ok_or_else(|| broken_invariant("an empty buffer has room for a packet"))?;
        if packet.compression == Compression::None {
            self.channel.read_exact(pages)?;
            return Ok(begin);
        }
        // Not more than the limit, which is as much as there is room for.
        let packed = self.packed.get_mut(..to_usize(packet.payload_len.into()));
        let packed =
            packed.ok_or_else(|| broken_invariant("a packet that was decoded keeps the limit of its payload"))?;
        self.channel.read_exact(packed)?;
        self.unpacker.unpack(packed, pages).map_err(|found| {
            let what = format!("{} pages compressed by {}", packet.normal.len(), packet.compression.name()).into();
            StreamError::new(position, "packet of a multifd channel", ErrorKind::Unexpected { what, found })
        })?;
        Ok(begin)
    }

    /// Hands the buffer over with its writes, and continues in an empty one.
    fn exchange(&mut self) -> Result<(), MigrateError> {
        let full = Filled { bytes: std::mem::take(&mut self.buffer), orders: std::mem::take(&mut self.orders) };
        Filled { bytes: self.buffer, orders: self.orders } = self.handle.exchange(full)?;
        self.used = 0;
        Ok(())
    }
}

impl Drop for PageChannel<'_> {
    /// Pages behind the last SYNC packet count as received; and in whichever way the thread ended, no thread waits for
    /// it.
    fn drop(&mut self) {
        let _ = self.exchange();
        self.context.join.ended(self.id);
    }
}
