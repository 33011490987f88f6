//! Page records of one channel: headers gathered with the pages they announce, in one vectored call.
//!
//! A channel has a *current block*; a record that stays in it carries no name. Each channel has its own, so each sending
//! thread has its own [`RecordWriter`].

use std::io::IoSlice;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, ChannelError};
use limosa_memory::MemoryBlock;
use limosa_page::scan::{PageKind, Run, ScanRanges};
use limosa_page::zero::Method;
use limosa_page::{PAGE_LEN, PageBitmap, PageNumber, PageRange};
use limosa_stream::ram::{RamBlock, RecordEncoder, RecordKind};

use super::gather::Gather;
use crate::error::MigrateError;

/// Zero records that go out in one call at most: 9 bytes each, so a few tens of KiB.
const ZEROS_A_CALL: usize = 4096;

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
    gather: Gather<'static>,
    /// How guest memory is looked at.
    method: Method,
    busy: Duration,
}

/// What becomes of zero pages of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zeros {
    /// They are looked for, and told.
    Told,
    /// They are looked for, and left out: the destination's memory is fresh, and nothing was sent for them yet.
    LeftOut,
    /// They are not looked for, and sent as they are.
    Unknown,
}

impl Zeros {
    /// Runs of pages of guest memory, cut into runs of one kind each by looking at them; what is not looked at passes for
    /// pages with contents.
    ///
    /// # Errors
    /// The block has no such pages.
    pub(crate) fn find<'r>(
        self,
        memory: &'r MemoryBlock,
        runs: &'r [PageRange],
        method: Method,
    ) -> Result<impl Iterator<Item = Run> + 'r, MigrateError> {
        if let Some(run) = runs.iter().find(|run| run.end > memory.pages().end) {
            return Err(no_such_pages(memory, *run));
        }
        let (looked_at, unseen) = if self == Self::Unknown { (&[][..], runs) } else { (runs, &[][..]) };
        let unseen = unseen.iter().map(|pages| Run { pages: *pages, kind: PageKind::Data });
        Ok(ScanRanges::new(memory.look(), looked_at, method).chain(unseen))
    }
}

/// What a source fails with that is asked for pages which its block does not have.
pub(crate) fn no_such_pages(memory: &MemoryBlock, run: PageRange) -> MigrateError {
    MigrateError::Source(format!("RAM block {} has no {run}", memory.name()).into())
}

/// What was sent of some pages.
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
            gather: Gather::default(),
            method: Method::best(),
            busy: Duration::ZERO,
        })
    }

    /// Looks at guest memory by this method.
    pub(crate) fn looking_by(self, method: Method) -> Self {
        Self { method, ..self }
    }

    /// Sends a run of pages of one block, `contents` being theirs; those that are not `stored`, which are not looked at, or
    /// turn out to be zero go as ZERO records.
    ///
    /// Returns how many went with contents and how many as zero.
    pub(crate) fn send(
        &mut self,
        block: usize,
        pages: PageRange,
        stored: &PageBitmap,
        contents: &[u8],
    ) -> Result<(u64, u64), MigrateError> {
        self.headers.clear();
        self.records.clear();
        let mut zeros = 0;
        for (page, bytes) in pages.iter().zip(contents.chunks_exact(PAGE_LEN)) {
            let zero = !stored.get(page) || limosa_page::zero::is_zero(bytes);
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
                slices.push(IoSlice::new(self.headers.get(begin..end).unwrap_or_default()));
                slices.push(IoSlice::new(bytes));
                begin = end;
            }
        }
        if let Some(last @ [_, ..]) = self.headers.get(begin..) {
            slices.push(IoSlice::new(last));
        }
        self.channel.put_vector(&slices)?;
        Ok((pages.len() - zeros, zeros))
    }

    /// Sends runs of pages out of guest memory, from where they live. Pages may be written meanwhile: whoever lets that
    /// happen sends them again. `left_out` is called for each run of pages that is left out.
    pub(crate) fn send_memory(
        &mut self,
        block: usize,
        memory: &MemoryBlock,
        runs: &[PageRange],
        zeros: Zeros,
        mut left_out: impl FnMut(PageRange),
    ) -> Result<Sent, MigrateError> {
        self.headers.clear();
        self.placed.clear();
        let mut sent = Sent::default();
        for Run { pages, kind } in zeros.find(memory, runs, self.method)? {
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
        let mut gather = std::mem::take(&mut self.gather).emptied();
        let mut begin = 0;
        for &(end, kind, page) in &self.placed {
            if kind == RecordKind::Page {
                gather.bytes(self.headers.get(begin..end).unwrap_or_default());
                let page = PageRange::starting_at(page, 1);
                if !gather.pages(memory, page) {
                    return Err(no_such_pages(memory, page));
                }
                begin = end;
            }
        }
        gather.bytes(self.headers.get(begin..).unwrap_or_default());
        let began = Instant::now();
        let put = gather.put(self.channel);
        self.busy += began.elapsed();
        self.gather = gather.emptied();
        put?;
        Ok(sent)
    }

    /// Time in calls of the channel since it was asked for last.
    pub(crate) fn take_busy(&mut self) -> Duration {
        std::mem::take(&mut self.busy)
    }

    fn put_headers(&mut self) -> Result<(), ChannelError> {
        let began = Instant::now();
        let put = self.channel.put(&self.headers);
        self.busy += began.elapsed();
        put
    }

    /// Says of a run of pages of one block that they are zero.
    pub(crate) fn send_zero(&mut self, block: usize, pages: PageRange) -> Result<(), MigrateError> {
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
        Ok(self.put_headers()?)
    }
}
