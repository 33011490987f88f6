//! A checkpoint that was copied while the VM stood still.

use limosa_memory::GuestMemory;
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageBitmap, PageRange, is_zero, to_usize};
use limosa_stream::{RamBlock, RecordEncoder, RecordKind};

use crate::error::MigrateError;

/// Pages that are copied at once.
const STRIDE: u64 = 64;

/// Appends the records of all pages in the bitmaps, one a RAM block, with the contents that they have now.
pub(super) fn copy(
    memory: &GuestMemory,
    blocks: &[RamBlock],
    pages: &[PageBitmap],
    out: &mut Vec<u8>,
) -> Result<(), MigrateError> {
    let mut encoder = RecordEncoder::new(blocks)?;
    let mut contents = vec![0; to_usize(STRIDE * PAGE_SIZE)];
    for (index, dirty) in pages.iter().enumerate() {
        let outside = |error: limosa_memory::MemoryError| MigrateError::Source(error.into());
        let block = memory.block(index).map_err(outside)?;
        for run in dirty.runs().flat_map(|run| run.chunks(STRIDE)) {
            let run: PageRange = run;
            let (contents, _) = contents.split_at_mut(to_usize(run.len() * PAGE_SIZE));
            block.read(run.bytes().start, contents).map_err(outside)?;
            for (page, bytes) in run.iter().zip(contents.chunks_exact(PAGE_LEN)) {
                if is_zero(bytes) {
                    encoder.append(RecordKind::Zero, index, page.offset(), out)?;
                } else {
                    encoder.append(RecordKind::Page, index, page.offset(), out)?;
                    out.extend_from_slice(bytes);
                }
            }
        }
    }
    Ok(())
}
