//! Page records of one channel: headers gathered with the pages they announce, in one vectored call.
//!
//! A channel has a *current block*; a record that stays in it carries no name. Each channel has its own, so each sending
//! thread has its own [`RecordWriter`].

use std::io::IoSlice;

use limosa_channel::Channel;
use limosa_page::{PAGE_LEN, PageBitmap, PageRange};
use limosa_stream::ram::{RamBlock, RecordEncoder, RecordKind};

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
}

impl<'a> RecordWriter<'a> {
    /// A writer whose first record will carry its block's name.
    pub(crate) fn new(channel: &'a Channel, blocks: &[RamBlock]) -> Result<Self, MigrateError> {
        Ok(Self { channel, encoder: RecordEncoder::new(blocks)?, headers: Vec::new(), records: Vec::new() })
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

    /// Says of a run of pages of one block that they are zero.
    pub(crate) fn send_zero(&mut self, block: usize, pages: PageRange) -> Result<(), MigrateError> {
        let mut waiting = 0;
        self.headers.clear();
        for page in pages.iter() {
            self.encoder.append(RecordKind::Zero, block, page.offset(), &mut self.headers)?;
            waiting += 1;
            if waiting == ZEROS_A_CALL {
                self.channel.put(&self.headers)?;
                self.headers.clear();
                waiting = 0;
            }
        }
        Ok(self.channel.put(&self.headers)?)
    }
}
