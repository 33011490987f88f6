//! A log of epochs with any words in its sectors and lists: it is refused, and the image is as it was; or the image
//! has only what it or the log had.

#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use limosa_image::epochs::{EpochDisk, EpochError, EpochOptions, Recovered, examine, recover};
use limosa_image::raw::{Raw, RawOptions};
use limosa_image::{Disk, GuestOffset};
use limosa_storage::{Buffer, MemoryStorage, block_on};

const SIZE: usize = 64 << 10;
const LOG_MOST: u64 = 8 << 20;
const SECTOR: usize = 512;
/// The first slot, and the data behind all of them.
const SLOTS_AT: usize = 16 << 10;
const DATA_AT: usize = 1 << 20;

fn image(bytes: Vec<u8>) -> Arc<dyn Disk> {
    Raw::open(Arc::new(MemoryStorage::with_contents(bytes, SIZE as u64)), &RawOptions::default()).expect("a raw image")
}

/// The log that a killed process left.
struct Left {
    log: Vec<u8>,
    /// Where each fixed sector and each list is, and how long.
    parts: Vec<(usize, usize)>,
}

static LEFT: LazyLock<Left> = LazyLock::new(|| {
    let log = Arc::new(MemoryStorage::growing_to(LOG_MOST));
    let options = EpochOptions::default();
    let begun = EpochDisk::begin(image(vec![0; SIZE]), log.clone(), &options);
    let disk = block_on(begun).expect("an empty log");
    for epoch in 1..=4_u8 {
        let part = Buffer::from_slice(&[epoch; 700]);
        block_on(disk.write(GuestOffset(u64::from(epoch) * 512), part.into())).expect("a write");
        block_on(disk.write_zeroes(GuestOffset(u64::from(epoch) * 8192), 4096, epoch % 2 == 0)).expect("zeros");
        disk.seal(epoch.into()).expect("it is open");
        if epoch < 4 {
            block_on(disk.keep(epoch.into(), epoch == 2)).expect("it is sealed");
        }
    }
    block_on(disk.prepare(4, false)).expect("it is sealed");
    let log = log.contents();
    let fixed = [0, 4096, 8192, 12288].into_iter().chain((1..6).map(|slot| SLOTS_AT + slot * SECTOR));
    let lists = (DATA_AT..log.len()).step_by(SECTOR).filter(|at| log[*at..].starts_with(b"limosaen"));
    let parts = fixed.chain(lists).map(|at| (at, SECTOR)).collect();
    Left { log, parts }
});

fuzz_target!(|data: &[u8]| {
    let Left { log, parts } = &*LEFT;
    let mut log = log.clone();
    // A part, a word of it, and what that becomes.
    for change in data.chunks_exact(10) {
        let (at, length) = parts[usize::from(change[0]) % parts.len()];
        let word = at + usize::from(change[1]) * 8 % (length - 8);
        log[word..word + 8].copy_from_slice(&change[2..]);
        let sum = crc32c::crc32c(&log[at..at + length - 4]);
        log[at + length - 4..at + length].copy_from_slice(&sum.to_le_bytes());
    }
    let as_of = data.first().filter(|first| **first >= 128).map(|first| u64::from(*first % 8));
    let disk = image(vec![0xee; SIZE]);
    let storage = Arc::new(MemoryStorage::with_contents(log, LOG_MOST));
    let options = EpochOptions::default();
    let found = block_on(examine(storage.clone(), &options));
    let recovered = block_on(recover(&disk, storage.clone(), (&options, as_of)));
    let bytes = Buffer::zeroed(SIZE);
    block_on(disk.read(GuestOffset(0), bytes.clone().into())).expect("the image");
    let is_untouched = bytes.to_vec().iter().all(|byte| *byte == 0xee);
    match recovered {
        Ok(Recovered::Cut { epoch, .. }) => {
            let found = found.expect("it was read before").expect("it has epochs");
            assert!((found.kept..=found.last).contains(&epoch), "epoch {epoch} of {found:?}");
            assert!(as_of.is_none_or(|wanted| wanted == epoch));
            // Once more nothing is different.
            let again = block_on(recover(&disk, storage, (&options, Some(epoch))));
            assert!(matches!(again, Ok(Recovered::Cut { epoch: same, bytes: 0 }) if same == epoch), "{again:?}");
        }
        Ok(_) => assert!(is_untouched),
        Err(EpochError::Undecided { .. } | EpochError::NotThere { .. } | EpochError::Log { .. }) => {
            assert!(is_untouched);
        }
        Err(error) => panic!("{error}"),
    }
});
