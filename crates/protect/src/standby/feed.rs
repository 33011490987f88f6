//! The stream of a standby, from the files of checkpoints.

use std::io::IoSlice;

use limosa_channel::Channel;
use limosa_migrate::MigrateError;
use limosa_migrate::stored::StreamSetup;
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageBitmap, error_with_causes, is_zero, to_usize};
use limosa_snapshot::CheckpointPair;
use limosa_stream::{RecordEncoder, RecordKind, ram, section};

use crate::error::ProtectError;

/// Pages that are read and written at once.
const STRIDE: u64 = 256;

/// A stream that has begun.
#[derive(Debug)]
pub(super) struct Feed {
    section_id: u32,
    blocks: usize,
    records: RecordEncoder,
    contents: Vec<u8>,
}

impl Feed {
    /// Writes everything before the pages.
    pub(super) fn begin(channel: &Channel, setup: &StreamSetup) -> Result<Self, ProtectError> {
        let mut bytes = Vec::new();
        setup.configuration.encode(&mut bytes).map_err(MigrateError::from)?;
        ram::encode_ram_start(setup.section_id, &setup.blocks, &mut bytes).map_err(MigrateError::from)?;
        write(channel, &[IoSlice::new(&bytes)])?;
        Ok(Self {
            section_id: setup.section_id,
            blocks: setup.blocks.len(),
            records: RecordEncoder::new(&setup.blocks).map_err(MigrateError::from)?,
            contents: vec![0; to_usize(STRIDE * PAGE_SIZE)],
        })
    }

    /// Writes all pages.
    pub(super) fn all(
        &mut self,
        channel: &Channel,
        pair: &CheckpointPair,
        working: &dyn Fn() -> Result<(), ProtectError>,
    ) -> Result<(), ProtectError> {
        let needed: Vec<_> = (0..self.blocks).filter_map(|block| pair.needed_pages(block)).collect();
        self.part(channel, pair, &needed.iter().collect::<Vec<_>>(), working)
    }

    /// Writes the pages that the newest checkpoint has changed.
    pub(super) fn changes(
        &mut self,
        channel: &Channel,
        pair: &CheckpointPair,
        working: &dyn Fn() -> Result<(), ProtectError>,
    ) -> Result<(), ProtectError> {
        let changed: Vec<_> = (0..self.blocks).filter_map(|block| pair.changed_pages(block)).collect();
        self.part(channel, pair, &changed, working)
    }

    /// Writes the end of the stream.
    pub(super) fn end(&mut self, channel: &Channel, tail: &[u8]) -> Result<(), ProtectError> {
        let mut bytes = Vec::with_capacity(tail.len() + 64);
        section::encode_end(self.section_id, &mut bytes);
        ram::encode_eos(self.section_id, &mut bytes);
        bytes.extend_from_slice(tail);
        write(channel, &[IoSlice::new(&bytes)])
    }

    /// Writes a PART section with pages, one bitmap a block.
    fn part(
        &mut self,
        channel: &Channel,
        pair: &CheckpointPair,
        pages: &[&PageBitmap],
        working: &dyn Fn() -> Result<(), ProtectError>,
    ) -> Result<(), ProtectError> {
        let mut head = Vec::new();
        section::encode_part(self.section_id, &mut head);
        write(channel, &[IoSlice::new(&head)])?;
        for (block, pages) in pages.iter().enumerate() {
            for run in pages.runs().flat_map(|run| run.chunks(STRIDE)) {
                working()?;
                let (contents, _) = self.contents.split_at_mut(to_usize(run.len() * PAGE_SIZE));
                pair.read(block, run, contents)?;
                let mut records = Vec::new();
                let mut kinds = Vec::new();
                for (page, bytes) in run.iter().zip(contents.chunks_exact(PAGE_LEN)) {
                    let kind = if is_zero(bytes) { RecordKind::Zero } else { RecordKind::Page };
                    let begin = records.len();
                    self.records.append(kind, block, page.offset(), &mut records).map_err(MigrateError::from)?;
                    kinds.push((begin..records.len(), kind, bytes));
                }
                let slices = kinds.iter().flat_map(|(record, kind, bytes)| {
                    let record = records.get(record.clone()).unwrap_or_default();
                    let page = if *kind == RecordKind::Page { *bytes } else { &[] };
                    [IoSlice::new(record), IoSlice::new(page)]
                });
                write(channel, &slices.collect::<Vec<_>>())?;
            }
        }
        head.clear();
        ram::encode_eos(self.section_id, &mut head);
        write(channel, &[IoSlice::new(&head)])
    }
}

/// Writes to the standby, whose failure is not that of anybody else.
fn write(channel: &Channel, slices: &[IoSlice<'_>]) -> Result<(), ProtectError> {
    let failed = |error| ProtectError::Standby { reason: error_with_causes(&error) };
    channel.write_all_vectored(slices).map_err(failed)
}
