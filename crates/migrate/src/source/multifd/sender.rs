//! The thread of one channel: claims windows of pages and sends them in packets.
//!
//! Contents go out in one of three ways. *In place*, the kernel is told where they lie in their file and nothing is
//! read. *Out of guest memory*, they are looked at where they lie and gathered from there, packets full from one window
//! to the next; lent to the kernel, if that is how the channel was made, and back before the round's SYNC packet is
//! sent. *Read*, they come into the thread's buffer, one read a run, are looked at and compressed if that is wished,
//! and go out with their header in one vectored call.

use std::io::{ErrorKind, IoSlice};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, ChannelError, ZeroCopy, ZeroCopyWriter};
use limosa_memory::{MemoryBlock, PinnedPages};
use limosa_page::{
    BrokenInvariant, PAGE_LEN, PAGE_SIZE, PageKind, PageNumber, PageRange, PageRun, broken_invariant, to_usize,
};
use limosa_stream::multifd::{InitialPacket, PACKET_LEN, PACKET_PAGES, Packet};

use super::compressor::Compressor;
use super::{Multifd, RoundPlan};
use crate::error::MigrateError;
use crate::pages::PageSource;
use crate::source::dirty_page_queue::WINDOW_PAGES;
use crate::source::gather::Gather;
use crate::source::records::{Sent, Zeros, no_such_pages};

/// Runs shorter than this, in pages, are read even where they could go out in place: a call for each costs more than
/// copying them. (Measured: a call costs about as much as two pages' copies.)
const IN_PLACE_PAGES: u64 = 4;

/// The longest sleep for a limited rate.
const RATE_TICK: Duration = Duration::from_millis(20);

/// One channel, its buffers, and what it remembers from packet to packet.
#[derive(Debug)]
pub(super) struct ChannelSender<'a, S: PageSource + ?Sized> {
    multifd: &'a Multifd<'a, S>,
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
    /// The block whose pages `normal` and `zero` are, while a packet out of guest memory is being filled.
    open: Option<usize>,
    gather: Gather<'static>,
    lending: ZeroCopyWriter<'a, 'a>,
    /// While the kernel has been lent pages that it is to give back.
    pinned: Option<PinnedPages<'a>>,
    plan: Arc<RoundPlan>,
    /// Time in calls of the channel, and held back by the limit, in this round.
    busy: Duration,
}

impl<'a, S: PageSource + ?Sized> ChannelSender<'a, S> {
    pub(super) fn new(multifd: &'a Multifd<'a, S>, channel: &'a Channel, id: u8) -> Result<Self, MigrateError> {
        let options = multifd.options;
        Ok(Self {
            multifd,
            channel,
            id,
            in_place: multifd.in_place,
            compressor: Compressor::new(options.compression, options.level).map_err(MigrateError::Compress)?,
            buffer: Vec::new(),
            header: Box::new([0; PACKET_LEN]),
            compressed: Vec::new(),
            normal: Vec::with_capacity(PACKET_PAGES),
            zero: Vec::with_capacity(PACKET_PAGES),
            open: None,
            gather: Gather::default(),
            lending: channel.zero_copy_writer(),
            pinned: None,
            plan: Arc::default(),
            busy: Duration::ZERO,
        })
    }

    /// Sends from the first packet to the last.
    pub(super) fn run(mut self) -> Result<(), MigrateError> {
        let sent = self.send_rounds();
        if sent.is_err() {
            // What was lent need not be waited for.
            self.lending.abort();
        }
        sent
    }

    fn send_rounds(&mut self) -> Result<(), MigrateError> {
        let configured = self.multifd.source.setup().configuration.uuid;
        let uuid = self.multifd.options.uuid.or(configured).unwrap_or_default();
        self.put(&[IoSlice::new(&InitialPacket { uuid, id: self.id }.encode())])?;
        self.send_sync()?;
        let (mut runs, mut rounds) = (Vec::new(), 0);
        while let Some(plan) = self.multifd.next_round(&mut rounds) {
            self.plan = plan;
            while let Some(block) = self.multifd.queue.claim(&mut runs) {
                self.give_back_if_wanted()?;
                self.wait_for_rate()?;
                let memory = self.multifd.source.memory(block).filter(|_| self.compressor.is_none());
                if memory.is_none() {
                    // What is read goes into its own packets.
                    self.send_open()?;
                }
                match memory {
                    Some(memory) => self.send_memory(block, memory, &runs)?,
                    None if self.in_place => self.send_in_place(block, &runs)?,
                    None => {
                        // What is compressed goes out as fast as that: so will the rest.
                        let began = Instant::now();
                        self.send_read(block, &runs)?;
                        self.busy += began.elapsed();
                    }
                }
            }
            self.send_open()?;
            self.take_back()?;
            for _ in 0..self.plan.syncs {
                self.send_sync()?;
            }
            self.multifd.done(std::mem::take(&mut self.busy));
        }
        Ok(())
    }

    fn wait_for_rate(&mut self) -> Result<(), MigrateError> {
        self.multifd.check()?;
        if self.plan.limited && self.multifd.control.max_bandwidth().is_some() {
            let began = Instant::now();
            loop {
                let pause = self.multifd.control.rate_limit().delay();
                if pause.is_zero() || self.multifd.is_hurried() {
                    break;
                }
                self.give_back_if_wanted()?;
                thread::sleep(pause.min(RATE_TICK));
                self.multifd.check()?;
            }
            self.busy += began.elapsed();
        }
        Ok(())
    }

    /// Adds runs of pages of guest memory to the packet that is being filled, and sends it whenever it is full.
    fn send_memory(&mut self, block: usize, memory: &'a MemoryBlock, runs: &[PageRange]) -> Result<(), MigrateError> {
        if self.open != Some(block) {
            self.send_open()?;
            self.open = Some(block);
        }
        let zeros = self.zeros(block)?;
        let in_packet = self.multifd.tells_in_packet(block);
        let mut left_zero: Vec<PageRange> = Vec::new();
        let mut left_out = 0;
        for PageRun { pages, kind } in zeros.find(memory, runs, self.plan.method)? {
            if kind != PageKind::Data && zeros == Zeros::LeftOut {
                left_out += pages.len();
                continue;
            }
            if kind != PageKind::Data && !in_packet {
                left_zero.push(pages);
                continue;
            }
            for page in pages.iter() {
                let list = if kind == PageKind::Data { &mut self.normal } else { &mut self.zero };
                list.push(page.offset());
                if self.normal.len() + self.zero.len() == self.multifd.options.packet_pages {
                    self.send_gathered(block, memory)?;
                }
            }
        }
        self.multifd.leave_zero(block, &left_zero);
        self.multifd.count(Sent { left_out, ..Sent::default() });
        Ok(())
    }

    /// Sends the packet that is being filled, if there is anything in it.
    fn send_open(&mut self) -> Result<(), MigrateError> {
        let Some(block) = self.open.take() else { return Ok(()) };
        match self.multifd.source.memory(block) {
            Some(memory) if !(self.normal.is_empty() && self.zero.is_empty()) => self.send_gathered(block, memory),
            _ => Ok(()),
        }
    }

    fn send_gathered(&mut self, block: usize, memory: &'a MemoryBlock) -> Result<(), MigrateError> {
        let lends = self.borrow(memory)?;
        self.begin_packet(block, self.normal.len() * PAGE_LEN)?;
        let mut gather = std::mem::take(&mut self.gather).emptied();
        gather.bytes(&*self.header);
        let mut offsets = self.normal.iter().map(|offset| PageNumber(offset / PAGE_SIZE)).peekable();
        while let Some(first) = offsets.next() {
            let mut run = PageRange::starting_at(first, 1);
            while offsets.next_if_eq(&run.end).is_some() {
                run.end = run.end.saturating_add(1);
            }
            if !gather.pages(memory, run) {
                return Err(no_such_pages(memory, run));
            }
        }
        let began = Instant::now();
        let put = match lends {
            // The header is reused for the next packet.
            true => gather.lend(&mut self.lending, 1),
            false => gather.put(self.channel),
        };
        self.busy += began.elapsed();
        self.gather = gather.emptied();
        put.map_err(|error| self.failed(error))?;
        self.multifd.count(Sent { normal: self.normal.len() as u64, zero: self.zero.len() as u64, left_out: 0 });
        self.normal.clear();
        self.zero.clear();
        Ok(())
    }

    /// Whether pages of the block may be lent now. Pins it while the kernel has pages that it gives back.
    fn borrow(&mut self, memory: &'a MemoryBlock) -> Result<bool, MigrateError> {
        if self.pinned.as_ref().is_some_and(|pinned| !memory.is_pinned_by(pinned)) {
            self.take_back()?;
        }
        self.give_back_if_wanted()?;
        Ok(match self.channel.zero_copy() {
            ZeroCopy::Msg => {
                if self.pinned.is_none() {
                    self.pinned = memory.pin();
                }
                self.pinned.is_some()
            }
            // What is spliced is not known to be back. A page that a balloon gives back meanwhile stays with the kernel
            // that much longer, which matters only to a pool of huge pages that the next one is taken from.
            _ => memory.page_size() == PAGE_SIZE,
        })
    }

    /// Ends a pin that a discard waits for.
    fn give_back_if_wanted(&mut self) -> Result<(), MigrateError> {
        if self.pinned.as_ref().is_some_and(PinnedPages::blocks_discard) { self.take_back() } else { Ok(()) }
    }

    /// Waits until the kernel has given back what it was lent.
    fn take_back(&mut self) -> Result<(), MigrateError> {
        if self.pinned.is_some() {
            let began = Instant::now();
            let flushed = self.lending.flush();
            self.busy += began.elapsed();
            flushed.map_err(|error| self.failed(error))?;
            self.pinned = None;
        }
        Ok(())
    }

    /// Sends runs out of their file, where they have a place in one.
    fn send_in_place(&mut self, block: usize, runs: &[PageRange]) -> Result<(), MigrateError> {
        self.make_room();
        let mut packet = Vec::new();
        let most = self.multifd.options.packet_pages as u64;
        let mut room = most;
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
                    room = most;
                }
            }
        }
        if !packet.is_empty() {
            self.send_packet_in_place(block, &packet)?;
        }
        // At the end of all this decides; here it is a matter of noticing early.
        self.multifd.source.check_unchanged().map_err(MigrateError::Source)
    }

    fn send_packet_in_place(&mut self, block: usize, runs: &[PageRange]) -> Result<(), MigrateError> {
        self.normal.clear();
        self.zero.clear();
        self.normal.extend(runs.iter().flat_map(PageRange::iter).map(PageNumber::offset));
        self.begin_packet(block, self.normal.len() * PAGE_LEN)?;
        let (mut header, mut filled) = (true, 0);
        for run in runs {
            let source = self.multifd.source;
            let place = if run.len() < IN_PLACE_PAGES { None } else { source.file_location(block, run.start) };
            if let Some((file, offset)) = place.filter(|_| self.in_place) {
                self.flush(&mut header, &mut filled)?;
                match self.channel.send_file(file, offset, run.len().saturating_mul(PAGE_SIZE)) {
                    Ok(()) => continue,
                    Err(ChannelError::Unsupported { .. }) if self.multifd.options.zero_copy == ZeroCopy::Splice => {
                        let why = "the kernel cannot send this file over this channel without its being read";
                        return Err(MigrateError::ZeroCopy(why));
                    }
                    Err(ChannelError::Unsupported { .. }) => self.in_place = false,
                    Err(error) => {
                        // A file that has become shorter is the cause of all that followed.
                        source.check_unchanged().map_err(MigrateError::Source)?;
                        let short = error.io_kind() == Some(ErrorKind::UnexpectedEof);
                        return Err(if short { MigrateError::Source(error.into()) } else { self.failed(error) });
                    }
                }
            }
            filled = self.read(block, *run, filled)?;
        }
        self.flush(&mut header, &mut filled)?;
        self.multifd.count(Sent { normal: self.normal.len() as u64, ..Sent::default() });
        // What is mapped begins a new packet.
        self.normal.clear();
        Ok(())
    }

    /// Sends what waits: the header, if it was not sent yet, and contents.
    fn flush(&mut self, header: &mut bool, filled: &mut usize) -> Result<(), MigrateError> {
        let header: &[u8] = if std::mem::take(header) { &*self.header } else { &[] };
        let contents = self.buffer.get(..std::mem::take(filled)).ok_or_else(no_contents)?;
        self.put(&[IoSlice::new(header), IoSlice::new(contents)])
    }

    /// Reads runs and sends what is in them.
    fn send_read(&mut self, block: usize, runs: &[PageRange]) -> Result<(), MigrateError> {
        self.make_room();
        let mut filled = 0;
        for run in runs {
            filled = self.read(block, *run, filled)?;
        }
        let pages: Vec<PageNumber> = runs.iter().flat_map(PageRange::iter).collect();
        let buffer = std::mem::take(&mut self.buffer);
        let contents = buffer.get(..filled).ok_or_else(no_contents)?;
        let most = self.multifd.options.packet_pages;
        for (pages, contents) in pages.chunks(most).zip(contents.chunks(most * PAGE_LEN)) {
            self.send_packet(block, pages, contents)?;
        }
        self.buffer = buffer;
        Ok(())
    }

    /// Sends pages that were read, in one packet.
    fn send_packet(&mut self, block: usize, pages: &[PageNumber], contents: &[u8]) -> Result<(), MigrateError> {
        self.normal.clear();
        self.zero.clear();
        let multifd = self.multifd;
        let zeros = self.zeros(block)?;
        let in_packet = multifd.tells_in_packet(block);
        let mut left_out = 0;
        let mut left_zero = Vec::new();
        let mut slices: Vec<&[u8]> = Vec::new();
        let mut begin = 0;
        for (index, (page, bytes)) in pages.iter().zip(contents.chunks_exact(PAGE_LEN)).enumerate() {
            if zeros == Zeros::Unknown || !limosa_page::is_zero(bytes) {
                self.normal.push(page.offset());
                continue;
            }
            slices.push(contents.get(begin..index * PAGE_LEN).ok_or_else(no_contents)?);
            begin = (index + 1) * PAGE_LEN;
            if zeros == Zeros::LeftOut {
                left_out += 1;
            } else if in_packet {
                self.zero.push(page.offset());
            } else {
                left_zero.push(PageRange::starting_at(*page, 1));
            }
        }
        slices.push(contents.get(begin..).ok_or_else(no_contents)?);
        multifd.leave_zero(block, &left_zero);
        multifd.count(Sent { left_out, ..Sent::default() });
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
        multifd.count(Sent { normal: self.normal.len() as u64, zero: self.zero.len() as u64, left_out: 0 });
        self.normal.clear();
        self.zero.clear();
        Ok(())
    }

    /// Room for a window: only who reads needs it.
    fn make_room(&mut self) {
        self.buffer.resize(to_usize(WINDOW_PAGES) * PAGE_LEN, 0);
    }

    /// Reads a run into the buffer, from `filled` on; where it ends there.
    fn read(&mut self, block: usize, run: PageRange, filled: usize) -> Result<usize, MigrateError> {
        let end = filled.saturating_add(to_usize(run.len()).saturating_mul(PAGE_LEN));
        let into = self
            .buffer
            .get_mut(filled..end)
            .ok_or_else(|| broken_invariant("the runs of a window fit into the buffer"))?;
        self.multifd.source.read(block, run, into).map_err(MigrateError::Source)?;
        Ok(end)
    }

    /// Writes the header of a packet with the pages in `normal` and `zero`. The limit is charged with what goes out,
    /// before it does: the other channels are to know of it.
    fn begin_packet(&mut self, block: usize, payload: usize) -> Result<(), MigrateError> {
        let listed = self.multifd.source.setup().blocks.get(block);
        let listed = listed.ok_or_else(|| broken_invariant("pages of a round belong to blocks of the stream"))?;
        let packet = Packet {
            sync: false,
            compression: self.multifd.options.compression,
            packet_num: self.multifd.next_packet(),
            block: &listed.name,
            normal: &self.normal,
            zero: &self.zero,
            payload_len: u32::try_from(payload)
                .map_err(|_| broken_invariant("the payload of a packet has at most 32 bits"))?,
        };
        packet.encode(&mut self.header)?;
        if self.plan.limited {
            self.multifd.control.rate_limit().spend((PACKET_LEN + payload) as u64);
        }
        Ok(())
    }

    /// Returns the treatment of zero pages of a block in this round.
    fn zeros(&self, block: usize) -> Result<Zeros, BrokenInvariant> {
        self.plan.zeros.get(block).copied().ok_or_else(|| broken_invariant("the plan of a round covers every block"))
    }

    fn send_sync(&mut self) -> Result<(), MigrateError> {
        Packet::sync(self.multifd.next_packet()).encode(&mut self.header)?;
        self.put(&[IoSlice::new(&*self.header)])
    }

    fn put(&self, list: &[IoSlice<'_>]) -> Result<(), MigrateError> {
        self.channel.write_all_vectored(list).map_err(|error| self.failed(error))
    }

    fn failed(&self, error: ChannelError) -> MigrateError {
        MigrateError::Multifd { id: self.id, source: Box::new(error.into()) }
    }
}

#[track_caller]
fn no_contents() -> BrokenInvariant {
    broken_invariant("contents are read before they are sent")
}
