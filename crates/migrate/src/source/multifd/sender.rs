//! The thread of one channel: claims windows of pages and sends them in packets.
//!
//! Contents go out in one of two ways. *In place*, the kernel is told where they lie in their file and nothing is read.
//! *Read*, they come into the thread's buffer, one read a run, are looked at and compressed if that is wished, and go out
//! with their header in one vectored call.

use std::io::{ErrorKind, IoSlice};

use limosa_channel::{Channel, ChannelError};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageNumber, PageRange};
use limosa_stream::multifd::{InitialPacket, PACKET_LEN, PACKET_PAGES, Packet};

use super::Multifd;
use super::compressor::Compressor;
use super::windows::WINDOW_PAGES;
use crate::error::MigrateError;
use crate::pages::PageSource;
use crate::source::precopy::wait_for_rate;

/// Runs shorter than this, in pages, are read even where they could go out in place: a call for each costs more than
/// copying them. (Measured: a call costs about as much as two pages' copies.)
const IN_PLACE_PAGES: u64 = 4;

/// One channel, its buffers, and what it remembers from packet to packet.
#[derive(Debug)]
pub(super) struct ChannelSender<'a, S: PageSource + ?Sized> {
    shared: &'a Multifd<'a, S>,
    channel: &'a Channel,
    id: u8,
    in_place: bool,
    compressor: Compressor,
    /// Contents of a window, or of the short runs of a packet.
    buffer: Vec<u8>,
    header: Box<[u8; PACKET_LEN]>,
    compressed: Vec<u8>,
    /// Offsets of the packet's pages with contents, and of its zero pages.
    normal: Vec<u64>,
    zero: Vec<u64>,
}

impl<'a, S: PageSource + ?Sized> ChannelSender<'a, S> {
    pub(super) fn new(shared: &'a Multifd<'a, S>, channel: &'a Channel, id: u8) -> Result<Self, MigrateError> {
        let options = shared.options;
        Ok(Self {
            shared,
            channel,
            id,
            in_place: shared.in_place,
            compressor: Compressor::new(options.compression, options.level).map_err(MigrateError::Compress)?,
            buffer: vec![0; usize::try_from(WINDOW_PAGES).unwrap_or(PACKET_PAGES) * PAGE_LEN],
            header: Box::new([0; PACKET_LEN]),
            compressed: Vec::new(),
            normal: Vec::with_capacity(PACKET_PAGES),
            zero: Vec::with_capacity(PACKET_PAGES),
        })
    }

    /// Sends from the first packet to the last.
    pub(super) fn run(mut self) -> Result<(), MigrateError> {
        let configured = self.shared.source.start().configuration.uuid;
        let uuid = self.shared.options.uuid.or(configured).unwrap_or_default();
        self.put(&[IoSlice::new(&InitialPacket { uuid, id: self.id }.encode())])?;
        self.send_sync()?;
        let mut runs = Vec::new();
        while let Some(block) = self.shared.windows.claim(&mut runs) {
            let pages: u64 = runs.iter().map(PageRange::len).sum();
            wait_for_rate(self.shared.control, || self.shared.check())?;
            self.shared.control.rate().spend(pages.saturating_mul(PAGE_SIZE));
            if self.in_place { self.send_in_place(block, &runs)? } else { self.send_read(block, &runs)? }
        }
        for _ in 0..self.shared.last_syncs() {
            self.send_sync()?;
        }
        Ok(())
    }

    /// Sends runs out of their file, as far as they have a place in one.
    fn send_in_place(&mut self, block: usize, runs: &[PageRange]) -> Result<(), MigrateError> {
        let mut packet = Vec::new();
        let mut room = PACKET_PAGES as u64;
        for run in runs {
            let mut rest = *run;
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.start.saturating_add(room));
                packet.push(now);
                room -= now.len();
                rest = later;
                if room == 0 {
                    self.send_packet_in_place(block, &packet)?;
                    packet.clear();
                    room = PACKET_PAGES as u64;
                }
            }
        }
        if !packet.is_empty() {
            self.send_packet_in_place(block, &packet)?;
        }
        // At the end of all this decides; here it is a matter of noticing early.
        self.shared.source.still_whole().map_err(MigrateError::Source)
    }

    fn send_packet_in_place(&mut self, block: usize, runs: &[PageRange]) -> Result<(), MigrateError> {
        self.normal.clear();
        self.zero.clear();
        self.normal.extend(runs.iter().flat_map(PageRange::iter).map(PageNumber::offset));
        self.begin_packet(block, self.normal.len() * PAGE_LEN)?;
        let (mut header, mut filled) = (true, 0);
        for run in runs {
            let source = self.shared.source;
            let place = if run.len() < IN_PLACE_PAGES { None } else { source.place(block, run.start) };
            if let Some((file, offset)) = place.filter(|_| self.in_place) {
                self.flush(&mut header, &mut filled)?;
                match self.channel.put_file(file, offset, run.len().saturating_mul(PAGE_SIZE)) {
                    Ok(()) => continue,
                    Err(ChannelError::Unsupported { .. }) => self.in_place = false,
                    Err(error) => {
                        // A file that has become shorter is the cause, whatever it led to.
                        source.still_whole().map_err(MigrateError::Source)?;
                        let short = error.io_kind() == Some(ErrorKind::UnexpectedEof);
                        return Err(if short { MigrateError::Source(error.into()) } else { self.failed(error) });
                    }
                }
            }
            filled = self.read(block, *run, filled)?;
        }
        self.flush(&mut header, &mut filled)?;
        self.shared.count(self.normal.len() as u64, 0);
        Ok(())
    }

    /// Sends what waits: the header, if it was not sent yet, and contents.
    fn flush(&mut self, header: &mut bool, filled: &mut usize) -> Result<(), MigrateError> {
        let header: &[u8] = if std::mem::take(header) { &*self.header } else { &[] };
        let contents = self.buffer.get(..std::mem::take(filled)).unwrap_or_default();
        self.put(&[IoSlice::new(header), IoSlice::new(contents)])
    }

    /// Reads runs and sends what is in them.
    fn send_read(&mut self, block: usize, runs: &[PageRange]) -> Result<(), MigrateError> {
        let mut filled = 0;
        for run in runs {
            filled = self.read(block, *run, filled)?;
        }
        let pages: Vec<PageNumber> = runs.iter().flat_map(PageRange::iter).collect();
        let buffer = std::mem::take(&mut self.buffer);
        let contents = buffer.get(..filled).unwrap_or_default();
        for (pages, contents) in pages.chunks(PACKET_PAGES).zip(contents.chunks(PACKET_PAGES * PAGE_LEN)) {
            self.send_packet(block, pages, contents)?;
        }
        self.buffer = buffer;
        Ok(())
    }

    /// Sends pages that were read, in one packet.
    fn send_packet(&mut self, block: usize, pages: &[PageNumber], contents: &[u8]) -> Result<(), MigrateError> {
        self.normal.clear();
        self.zero.clear();
        let shared = self.shared;
        // Elsewhere QEMU would believe it, and must not: see the module above.
        let in_packet = !shared.rules.zero_pages_on_main && shared.fresh.get(block) == Some(&true);
        let mut left_zero = Vec::new();
        let mut slices: Vec<&[u8]> = Vec::new();
        let mut begin = 0;
        for (index, (page, bytes)) in pages.iter().zip(contents.chunks_exact(PAGE_LEN)).enumerate() {
            if !(shared.options.detect_zero && limosa_page::zero::is_zero(bytes)) {
                self.normal.push(page.offset());
                continue;
            }
            slices.push(contents.get(begin..index * PAGE_LEN).unwrap_or_default());
            begin = (index + 1) * PAGE_LEN;
            if in_packet {
                self.zero.push(page.offset());
            } else {
                left_zero.push(PageRange::starting_at(*page, 1));
            }
        }
        slices.push(contents.get(begin..).unwrap_or_default());
        shared.leave_zero(block, &left_zero);
        if self.normal.is_empty() && self.zero.is_empty() {
            return Ok(());
        }
        if self.compressor.is_none() || self.normal.is_empty() {
            self.begin_packet(block, self.normal.len() * PAGE_LEN)?;
        } else {
            self.compressed.clear();
            let compressed = self.compressor.append(slices.drain(..), &mut self.compressed);
            compressed.map_err(MigrateError::Compress)?;
            self.begin_packet(block, self.compressed.len())?;
            slices = vec![&self.compressed];
        }
        let header = std::iter::once(IoSlice::new(&*self.header));
        let list: Vec<_> = header.chain(slices.into_iter().map(IoSlice::new)).collect();
        self.put(&list)?;
        shared.count(self.normal.len() as u64, self.zero.len() as u64);
        Ok(())
    }

    /// Reads a run into the buffer, from `filled` on; where it ends there.
    fn read(&mut self, block: usize, run: PageRange, filled: usize) -> Result<usize, MigrateError> {
        let length = usize::try_from(run.len()).unwrap_or(usize::MAX).saturating_mul(PAGE_LEN);
        let end = filled.saturating_add(length);
        let too_long = || MigrateError::Protocol("a window too long".into());
        let into = self.buffer.get_mut(filled..end).ok_or_else(too_long)?;
        self.shared.source.read(block, run, into).map_err(MigrateError::Source)?;
        Ok(end)
    }

    /// Writes the header of a packet with the pages in `normal` and `zero`.
    fn begin_packet(&mut self, block: usize, payload: usize) -> Result<(), MigrateError> {
        let name = self.shared.source.start().blocks.get(block).map_or("", |block| block.name.as_str());
        let packet = Packet {
            sync: false,
            compression: self.shared.options.compression,
            packet_num: self.shared.next_packet(),
            block: name,
            normal: &self.normal,
            zero: &self.zero,
            payload_len: u32::try_from(payload).unwrap_or(u32::MAX),
        };
        Ok(packet.encode(&mut self.header)?)
    }

    fn send_sync(&mut self) -> Result<(), MigrateError> {
        Packet::sync(self.shared.next_packet()).encode(&mut self.header)?;
        self.put(&[IoSlice::new(&*self.header)])
    }

    fn put(&self, list: &[IoSlice<'_>]) -> Result<(), MigrateError> {
        self.channel.put_vector(list).map_err(|error| self.failed(error))
    }

    fn failed(&self, error: ChannelError) -> MigrateError {
        MigrateError::Multifd { id: self.id, source: Box::new(error.into()) }
    }
}
