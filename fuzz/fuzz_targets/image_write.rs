//! Any bytes as an image that is written to: it refuses, or does it. What says where everything lies is not written
//! over, nor are its snapshots; and an image that was in order stays so.

#![no_main]

use std::ops::Range;

use libfuzzer_sys::fuzz_target;
use limosa_fuzz::image::{Input, open};
use limosa_image::Disk;
use limosa_image::qcow2::{CheckOptions, Header, check, read_snapshots};
use limosa_storage::{Buffer, MemoryStorage, block_on};

/// The header up to the place of the L1 table: no request changes it.
const FIXED: usize = 36;
/// Where the name of the backing file lies, and its length. A length without a name is not kept.
const NAME: Range<usize> = 8..16;
const NAME_LENGTH: Range<usize> = 16..20;

fuzz_target!(|data: &[u8]| {
    let Some(input) = Input::of(data) else { return };
    let before = input.storage.contents();
    let order = in_order(&input.storage);
    let snapshots = snapshots(&input.storage);
    let Some(disk) = open(&input.storage, false) else { return };
    for request in &input.requests {
        let (at, length) = request.place(disk.len());
        let _ = match request.kind % 6 {
            0..=2 => block_on(disk.write(at, Buffer::from_slice(&vec![request.kind; length as usize]).into())),
            3 => block_on(disk.write_zeroes(at, length, request.kind & 8 != 0)),
            4 => block_on(disk.discard(at, length)),
            _ => block_on(disk.flush()),
        };
    }
    let _ = block_on(disk.close());
    let after = input.storage.contents();
    assert_eq!(fixed(&after), fixed(&before), "the header was written over");
    for range in snapshots {
        assert_eq!(after.get(range.clone()), before.get(range), "a snapshot's table was written over");
    }
    assert!(
        order != Some(true) || in_order(&input.storage) != Some(false),
        "an image that was in order is not any more"
    );
});

/// The bytes that no request changes.
fn fixed(image: &[u8]) -> Vec<u8> {
    let mut bytes = image.get(..FIXED).unwrap_or_default().to_vec();
    if bytes.get(NAME).is_some_and(|at| at.iter().all(|byte| *byte == 0))
        && let Some(length) = bytes.get_mut(NAME_LENGTH)
    {
        length.fill(0);
    }
    bytes
}

/// Whether nothing is wrong except lost space; `None` if that is unknown: it was not closed, or cannot be checked.
fn in_order(storage: &MemoryStorage) -> Option<bool> {
    block_on(Header::read(storage)).ok().filter(|header| !header.features.dirty())?;
    let options = CheckOptions::default().memory(1 << 20).max_findings(0);
    let report = block_on(check(storage, options)).ok()?;
    Some(report.corruptions == 0 && report.check_errors == 0)
}

/// Where the snapshots' L1 tables lie, outside of the header's cluster. A repair at the beginning may change them.
fn snapshots(storage: &MemoryStorage) -> Vec<Range<usize>> {
    let Some(header) = block_on(Header::read(storage)).ok().filter(|header| !header.features.dirty()) else {
        return Vec::new();
    };
    let place = |at: u64, bytes: u64| {
        let start = usize::try_from(at).ok().filter(|_| at >= 1 << header.cluster_bits)?;
        let end = start.checked_add(usize::try_from(bytes).ok()?)?;
        Some(start..end)
    };
    let found = block_on(read_snapshots(storage, &header)).unwrap_or_default();
    found.iter().filter_map(|snapshot| place(snapshot.l1.0.0, u64::from(snapshot.l1.1) * 8)).collect()
}
