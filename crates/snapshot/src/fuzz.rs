//! A whole reading of arbitrary bytes as a snapshot file, for fuzzers and property tests.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use limosa_page::{PAGE_LEN, PAGE_SIZE, PageRange, to_usize};
use rustix::fs::MemfdFlags;

use crate::error::SnapshotError;
use crate::reader::Snapshot;

/// Pages that are read at once.
const STRIDE: u64 = 300;

/// Opens the bytes as a snapshot from a file in memory, looks at everything in it and reads every stored page.
///
/// Returns the snapshot if all of that went well.
///
/// # Errors
/// Returns the error of the first of these steps that fails. Bytes must never make it panic, or take memory without a
/// bound.
pub fn fuzz_open(bytes: &[u8]) -> Result<Snapshot, SnapshotError> {
    let path = Path::new("bytes");
    let made = rustix::fs::memfd_create("limosa-fuzz", MemfdFlags::CLOEXEC);
    let file = File::from(made.map_err(|e| SnapshotError::io("make a file in memory", path, None, e))?);
    fill(&file, bytes).map_err(|e| SnapshotError::io("fill a file in memory", path, None, e))?;
    let snapshot = Snapshot::from_file(file, path)?;
    let _ = snapshot.summary();
    let _ = snapshot.check_restorable();
    let mut buffer = Vec::new();
    for (block, stored) in snapshot.memory().stored.iter().enumerate() {
        for run in stored.runs() {
            for pages in run.chunks(STRIDE) {
                buffer.resize(to_usize(pages.len() * PAGE_SIZE), 0);
                snapshot.read_pages(block, pages, &mut buffer)?;
            }
        }
        snapshot.verify(block, PageRange::whole_block(stored.len()))?;
    }
    Ok(snapshot)
}

/// Writes the bytes, leaving out pages of zeros: most of a snapshot is holes, and a fuzzer has many of them.
fn fill(file: &File, bytes: &[u8]) -> io::Result<()> {
    file.set_len(bytes.len() as u64)?;
    for (page, at) in bytes.chunks(PAGE_LEN).zip((0_u64..).step_by(PAGE_LEN)) {
        if !limosa_page::is_zero(page) {
            file.write_all_at(page, at)?;
        }
    }
    Ok(())
}
