//! Any bytes as an image: what opens is read everywhere and mapped, or says what is wrong.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_fuzz::image::{Input, open};
use limosa_image::{Disk, GuestOffset};
use limosa_storage::{Buffer, block_on};

fuzz_target!(|data: &[u8]| {
    let Some(input) = Input::of(data) else { return };
    let Some(disk) = open(&input.storage, true) else { return };
    for request in &input.requests {
        let (at, length) = request.place(disk.len());
        let found = Buffer::zeroed(length as usize);
        let _ = block_on(disk.read(at, found.into()));
        if let Ok(mapped) = block_on(disk.map(at, length.max(1))) {
            assert!((1..=length.max(1)).contains(&mapped.length), "{mapped:?} of {length}");
        }
    }
    let behind = Buffer::zeroed(512);
    assert!(block_on(disk.read(GuestOffset(disk.len()), behind.into())).is_err());
});
