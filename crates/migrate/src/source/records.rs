//! Page records of one channel: headers gathered with the pages they announce, in one vectored call, or by its [plain
//! twin](super::stream_buffer).
//!
//! A channel has a *current block*; a record that stays in it carries no name. Each channel has its own, so each
//! sending thread has its own [`RecordWriter`].

use std::io::IoSlice;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, ChannelError};
use limosa_memory::MemoryBlock;
use limosa_page::{
    BrokenInvariant, PAGE_LEN, PageBitmap, PageKind, PageNumber, PageRange, PageRun, ScanRanges, ZeroMethod,
    broken_invariant, invariant, to_usize,
};
use limosa_stream::{RamBlock, RecordEncoder, RecordKind};

use super::gather::Gather;
use super::stream_buffer::StreamBuffer;
use crate::error::MigrateError;
use crate::live::RecordWriteMode;

/// Most pages with contents that go out in one call: each with its header, as many entries as the kernel takes at a
/// time, 1024 (`UIO_MAXIOV`, include/uapi/linux/uio.h).
const PAGES_A_CALL: usize = 512;

/// With room for fewer pages than this a call is full: what is looked at next, most of it perhaps zero, would be too
/// little to be worth a look.
const ROOM_LEAST: usize = 32;

/// Zero records that go out in one call at most: 9 bytes each, so a few tens of KiB.
const ZEROS_A_CALL: usize = 4096;

const PLACED_IS_PUT: &str = "what was placed is put before other records";

/// Bytes of the record of a zero page.
pub(crate) const ZERO_RECORD: u64 = 9;

/// Writes PAGE and ZERO records to one channel.
#[derive(Debug)]
pub(crate) struct RecordWriter<'a> {
    channel: &'a Channel,
    encoder: RecordEncoder,
    headers: Vec<u8>,
    /// For each record, where its header ends and whether a page follows.
    records: Vec<(usize, RecordKind)>,
    /// As `records`, with the page of each, where pages come out of guest memory.
    placed: Vec<(usize, RecordKind, PageNumber)>,
    /// Those of them with contents.
    contents: usize,
    gather: Gather<'static>,
    /// How guest memory is looked at.
    method: ZeroMethod,
    /// For [`RecordWriteMode::Buffered`].
    buffer: Option<StreamBuffer>,
    busy: Duration,
}

/// The treatment of zero pages of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zeros {
    /// They are looked for, and told.
    Told,
    /// They are looked for, and left out: the destination's memory is zeroed, and nothing was sent for them yet.
    LeftOut,
    /// They are not looked for, and sent as they are.
    Unknown,
}

impl Zeros {
    /// Runs of pages of guest memory, cut into runs of one kind each by looking at them; what is not looked at passes
    /// for pages with contents.
    ///
    /// # Errors
    /// The block has no such pages.
    pub(crate) fn find<'r>(
        self,
        memory: &'r MemoryBlock,
        runs: &'r [PageRange],
        method: ZeroMethod,
    ) -> Result<impl Iterator<Item = PageRun> + 'r, MigrateError> {
        if let Some(run) = runs.iter().find(|run| run.end > memory.pages().end) {
            return Err(no_such_pages(memory, *run));
        }
        let (looked_at, unseen) = if self == Self::Unknown { (&[][..], runs) } else { (runs, &[][..]) };
        let unseen = unseen.iter().map(|pages| PageRun { pages: *pages, kind: PageKind::Data });
        Ok(ScanRanges::new(memory.guest_pages(), looked_at, method).chain(unseen))
    }
}

/// Returns the error of a source that is asked for pages which its block does not have.
pub(crate) fn no_such_pages(memory: &MemoryBlock, run: PageRange) -> MigrateError {
    MigrateError::Source(format!("RAM block {} has no {run}", memory.name()).into())
}

/// Runs of pages of guest memory to send.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GuestPages<'r> {
    /// Index of the RAM block.
    pub(crate) block: usize,
    /// Its memory.
    pub(crate) memory: &'r MemoryBlock,
    pub(crate) runs: &'r [PageRange],
    /// The treatment of zero pages.
    pub(crate) zeros: Zeros,
}

/// Counters of some pages that were sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    /// Pages with contents.
    pub(crate) normal: u64,
    /// Pages told to be zero.
    pub(crate) zero: u64,
    /// Pages that are zero and were left out.
    pub(crate) left_out: u64,
}

impl Sent {
    /// Pages of either kind.
    pub(crate) fn total(&self) -> u64 {
        self.normal + self.zero + self.left_out
    }

    /// Adds what was sent of others.
    pub(crate) fn add(&mut self, other: Self) {
        self.normal += other.normal;
        self.zero += other.zero;
        self.left_out += other.left_out;
    }
}

impl<'a> RecordWriter<'a> {
    /// A writer whose first record will carry its block's name.
    pub(crate) fn new(channel: &'a Channel, blocks: &[RamBlock]) -> Result<Self, MigrateError> {
        Ok(Self {
            channel,
            encoder: RecordEncoder::new(blocks)?,
            headers: Vec::new(),
            records: Vec::new(),
            placed: Vec::new(),
            contents: 0,
            gather: Gather::default(),
            method: ZeroMethod::best(),
            buffer: None,
            busy: Duration::ZERO,
        })
    }

    /// Looks at guest memory by this method.
    pub(crate) fn looking_by(self, method: ZeroMethod) -> Self {
        Self { method, ..self }
    }

    /// Has pages of guest memory go out that way; vectored, if nothing is said.
    pub(crate) fn writing_by(mut self, record_write: RecordWriteMode) -> Self {
        self.buffer = match record_write {
            RecordWriteMode::Vectored => None,
            RecordWriteMode::Buffered => Some(StreamBuffer::new()),
        };
        self
    }

    /// Sends a run of pages of one block, `contents` being theirs; those that are not `stored`, which are not looked
    /// at, or turn out to be zero go as ZERO records.
    ///
    /// Returns how many went with contents and how many as zero.
    pub(crate) fn send(
        &mut self,
        block: usize,
        pages: PageRange,
        stored: &PageBitmap,
        contents: &[u8],
    ) -> Result<(u64, u64), MigrateError> {
        invariant(self.placed.is_empty(), PLACED_IS_PUT)?;
        self.headers.clear();
        self.records.clear();
        let mut zeros = 0;
        for (page, bytes) in pages.iter().zip(contents.chunks_exact(PAGE_LEN)) {
            let zero = !stored.get(page) || limosa_page::is_zero(bytes);
            zeros += u64::from(zero);
            let kind = if zero { RecordKind::Zero } else { RecordKind::Page };
            self.encoder.append(kind, block, page.offset(), &mut self.headers)?;
            self.records.push((self.headers.len(), kind));
        }
        let mut slices = Vec::with_capacity(2 * self.records.len());
        let mut begin = 0;
        // Headers with no page between them lie side by side, and are one slice.
        for (&(end, kind), bytes) in self.records.iter().zip(contents.chunks_exact(PAGE_LEN)) {
            if kind == RecordKind::Page {
                slices.push(IoSlice::new(self.headers.get(begin..end).ok_or_else(no_header)?));
                slices.push(IoSlice::new(bytes));
                begin = end;
            }
        }
        if let Some(last @ [_, ..]) = self.headers.get(begin..) {
            slices.push(IoSlice::new(last));
        }
        self.channel.write_all_vectored(&slices)?;
        self.headers.clear();
        Ok((pages.len() - zeros, zeros))
    }

    /// Sends runs of pages out of guest memory, from where they live. Pages may be written meanwhile: the caller that
    /// lets that happen sends them again.
    pub(crate) fn send_memory(&mut self, pages: GuestPages<'_>) -> Result<Sent, MigrateError> {
        let sent = self.place(pages, |_| {})?;
        self.put_placed(pages.memory).map(|()| sent)
    }

    /// How many pages may be placed before what is placed has to be [put](Self::put_placed); 0: now.
    pub(crate) fn room(&self) -> usize {
        let room = PAGES_A_CALL.saturating_sub(self.contents);
        if room < ROOM_LEAST || self.placed.len() >= ZEROS_A_CALL { 0 } else { room }
    }

    /// Looks at runs of pages of guest memory, and writes their headers. Nothing goes out before it is
    /// [put](Self::put_placed); until then all that is placed has to be of one block. `left_out` is called for each run
    /// of pages that is left out.
    pub(crate) fn place(
        &mut self,
        pages: GuestPages<'_>,
        mut left_out: impl FnMut(PageRange),
    ) -> Result<Sent, MigrateError> {
        let GuestPages { block, memory, runs, zeros } = pages;
        let mut sent = Sent::default();
        for PageRun { pages, kind } in zeros.find(memory, runs, self.method)? {
            let kind = match kind {
                PageKind::Data => {
                    sent.normal += pages.len();
                    RecordKind::Page
                }
                _ if zeros == Zeros::LeftOut => {
                    sent.left_out += pages.len();
                    left_out(pages);
                    continue;
                }
                _ => {
                    sent.zero += pages.len();
                    RecordKind::Zero
                }
            };
            for page in pages.iter() {
                self.encoder.append(kind, block, page.offset(), &mut self.headers)?;
                self.placed.push((self.headers.len(), kind, page));
            }
        }
        self.contents += to_usize(sent.normal);
        Ok(sent)
    }

    /// Sends what was placed, pages of this block.
    pub(crate) fn put_placed(&mut self, memory: &MemoryBlock) -> Result<(), MigrateError> {
        let mut buffer = self.buffer.take();
        let put = match &mut buffer {
            None => self.put_vectored(memory),
            Some(buffer) => self.put_buffered(buffer, memory),
        };
        self.buffer = buffer;
        self.headers.clear();
        self.placed.clear();
        self.contents = 0;
        put
    }

    /// Sends the records that were placed, from guest memory, in one call.
    fn put_vectored(&mut self, memory: &MemoryBlock) -> Result<(), MigrateError> {
        let mut gather = std::mem::take(&mut self.gather).emptied();
        let last = announce(&self.headers, &self.placed, |headers, page| {
            gather.bytes(headers);
            let page = PageRange::starting_at(page, 1);
            if gather.pages(memory, page) { Ok(()) } else { Err(no_such_pages(memory, page)) }
        })?;
        gather.bytes(last);
        let began = Instant::now();
        let put = gather.put(self.channel);
        self.busy += began.elapsed();
        self.gather = gather.emptied();
        Ok(put?)
    }

    /// The same bytes by way of a buffer, which is empty again when this returns: others use the channel, too.
    fn put_buffered(&mut self, buffer: &mut StreamBuffer, memory: &MemoryBlock) -> Result<(), MigrateError> {
        let began = Instant::now();
        let last = announce(&self.headers, &self.placed, |headers, page| {
            buffer.bytes(self.channel, headers)?;
            buffer.page(self.channel, memory, page)
        })?;
        buffer.bytes(self.channel, last)?;
        buffer.flush(self.channel)?;
        self.busy += began.elapsed();
        Ok(())
    }

    /// Time in calls of the channel since it was asked for last.
    pub(crate) fn take_busy(&mut self) -> Duration {
        std::mem::take(&mut self.busy)
    }

    fn put_headers(&mut self) -> Result<(), ChannelError> {
        let began = Instant::now();
        let put = self.channel.write_all(&self.headers);
        self.busy += began.elapsed();
        put
    }

    /// Says of a run of pages of one block that they are zero.
    pub(crate) fn send_zero(&mut self, block: usize, pages: PageRange) -> Result<(), MigrateError> {
        invariant(self.placed.is_empty(), PLACED_IS_PUT)?;
        let mut waiting = 0;
        self.headers.clear();
        for page in pages.iter() {
            self.encoder.append(RecordKind::Zero, block, page.offset(), &mut self.headers)?;
            waiting += 1;
            if waiting == ZEROS_A_CALL {
                self.put_headers()?;
                self.headers.clear();
                waiting = 0;
            }
        }
        self.put_headers()?;
        self.headers.clear();
        Ok(())
    }
}

#[track_caller]
fn no_header() -> BrokenInvariant {
    broken_invariant("the header of each record is written before the record is sent")
}

/// Tells `with`, in order, of each page with contents among what was placed, and of the headers since the one before
/// it; returns the headers behind the last one.
fn announce<'h>(
    headers: &'h [u8],
    placed: &[(usize, RecordKind, PageNumber)],
    mut with: impl FnMut(&'h [u8], PageNumber) -> Result<(), MigrateError>,
) -> Result<&'h [u8], MigrateError> {
    let mut begin = 0;
    for &(end, kind, page) in placed {
        if kind == RecordKind::Page {
            with(headers.get(begin..end).ok_or_else(no_header)?, page)?;
            begin = end;
        }
    }
    Ok(headers.get(begin..).ok_or_else(no_header)?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{self, Read};
    use std::os::fd::{AsFd as _, OwnedFd};
    use std::thread;

    use limosa_channel::{Counters, Listener, Options, Shutdown, Tls};
    use limosa_memory::BlockOptions;
    use limosa_testkit::{Authority, scratch};

    use super::super::stream_buffer::BUFFER_LEN;
    use super::*;

    #[test]
    fn pages_that_a_block_does_not_have_are_refused_whether_they_are_looked_at_or_not() {
        let memory = BlockOptions::anonymous("ram", 4 * PAGE_LEN as u64).map().unwrap();
        let there = [PageRange::whole_block(2), PageRange::starting_at(PageNumber(2), 2)];
        let beyond = [PageRange::whole_block(2), PageRange::starting_at(PageNumber(3), 2)];
        for zeros in [Zeros::Told, Zeros::LeftOut, Zeros::Unknown] {
            let found: u64 = zeros.find(&memory, &there, ZeroMethod::best()).unwrap().map(|run| run.pages.len()).sum();
            assert_eq!(found, 4);
            assert!(zeros.find(&memory, &beyond, ZeroMethod::best()).is_err());
        }
    }

    /// An end to write to, and what the other end reads.
    type Ends = (Channel, Box<dyn Read + Send>);

    fn unix() -> Ends {
        let (near, far) = Channel::pair().unwrap();
        (near, Box::new(File::from(far)))
    }

    fn pipe() -> Ends {
        let (far, near) = io::pipe().unwrap();
        (Channel::from_fd(OwnedFd::from(near)).unwrap(), Box::new(far))
    }

    fn tcp() -> Ends {
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), &Options::default()).unwrap();
        let near = Channel::connect(listener.local_uri(), &Options::default()).unwrap();
        let far = listener.accept(None).unwrap();
        (near, Box::new(File::from(far.as_fd().try_clone_to_owned().unwrap())))
    }

    /// An encrypted channel as something to read from.
    struct Decrypted(Channel);

    impl Read for Decrypted {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.0.read(into).map_err(io::Error::other)
        }
    }

    fn tls() -> Ends {
        let folder = scratch().unwrap();
        Authority::new().unwrap().equip(folder.path()).unwrap();
        let with = |tls| Options { tls: Some(tls), ..Options::default() };
        let server = with(Tls::server(folder.path(), true).unwrap());
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), &server).unwrap();
        thread::scope(|scope| {
            let accepting = scope.spawn(|| {
                let far = listener.accept(Some(Duration::from_secs(20))).unwrap();
                far.complete_handshake().map(|()| far).unwrap()
            });
            let client = with(Tls::client(folder.path(), None).unwrap());
            let near = Channel::connect(listener.local_uri(), &client).unwrap();
            (near, Box::new(Decrypted(accepting.join().unwrap())) as _)
        })
    }

    /// A block whose pages have contents where `filled` says so.
    fn block(pages: u64, filled: impl Fn(u64) -> bool) -> MemoryBlock {
        let block = BlockOptions::anonymous("ram", pages * 4096).map().unwrap();
        for page in (0..pages).filter(|page| filled(*page)) {
            let word = (page + 1).to_le_bytes().repeat(PAGE_LEN / 8);
            block.write(page * 4096, &word).unwrap();
        }
        block
    }

    /// Sends the runs as they are, one call of the writer each; what came out, and how.
    fn sent(
        (near, mut far): Ends,
        record_write: RecordWriteMode,
        memory: &MemoryBlock,
        runs: &[Vec<PageRange>],
    ) -> (Vec<u8>, Counters) {
        let received = thread::spawn(move || {
            let mut bytes = Vec::new();
            far.read_to_end(&mut bytes).map(|_| bytes).unwrap()
        });
        let blocks = [RamBlock::new("ram", memory.len())];
        let mut writer = RecordWriter::new(&near, &blocks).unwrap().writing_by(record_write);
        for runs in runs {
            writer.send_memory(GuestPages { block: 0, memory, runs, zeros: Zeros::Told }).unwrap();
        }
        assert!(writer.take_busy() > Duration::ZERO);
        let counters = near.counters();
        // The end of what is encrypted has to be announced.
        near.shutdown(Shutdown::Write).unwrap();
        drop(near);
        (received.join().unwrap(), counters)
    }

    #[test]
    fn both_ways_write_the_same_bytes_over_every_transport() {
        let run = |start: u64, count| PageRange::starting_at(PageNumber(start), count);
        let runs = [vec![run(0, 512)], vec![run(512, 3), run(600, 1), run(700, 200)], vec![run(900, 1)], Vec::new()];
        let contents: [fn(u64) -> bool; 4] = [|_| true, |_| false, |page| page % 2 == 1, |page| page % 97 < 90];
        for filled in contents {
            let memory = block(901, filled);
            for ends in [unix, tcp, pipe, tls] {
                let (gathered, _) = sent(ends(), RecordWriteMode::Vectored, &memory, &runs);
                let (copied, _) = sent(ends(), RecordWriteMode::Buffered, &memory, &runs);
                assert!(gathered == copied && !gathered.is_empty());
                let pages: usize =
                    runs.iter().flatten().flat_map(PageRange::iter).filter(|page| filled(page.0)).count();
                assert!(gathered.len() >= pages * PAGE_LEN + 717 * 8, "{pages} pages, {} bytes", gathered.len());
            }
        }
    }

    #[test]
    fn a_batch_is_one_call_and_its_twin_one_for_each_buffer() {
        let memory = block(1024, |_| true);
        let runs = [0, 512].map(|start| vec![PageRange::starting_at(PageNumber(start), 512)]);
        for ends in [unix, tcp] {
            let (bytes, gathered) = sent(ends(), RecordWriteMode::Vectored, &memory, &runs);
            let (_, copied) = sent(ends(), RecordWriteMode::Buffered, &memory, &runs);
            assert_eq!(gathered.calls_out, 2);
            // What a batch leaves in the buffer goes out with it.
            let buffers = (bytes.len() / 2).div_ceil(BUFFER_LEN) * 2;
            assert_eq!((copied.calls_out, buffers), (buffers as u64, 258));
        }
    }
}
