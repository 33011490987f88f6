//! Any bytes as an image: its header and the lists in it are read or refused, and a header that was read is written
//! back as it was.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_fuzz::image::MOST;
use limosa_image::probe;
use limosa_image::qcow2::{Header, read_bitmaps, read_snapshots};
use limosa_storage::{Buffer, MemoryStorage, Storage, block_on};

fuzz_target!(|data: &[u8]| {
    let storage = MemoryStorage::with_contents(data.to_vec(), MOST.max(data.len() as u64));
    block_on(async {
        let _ = probe(&storage).await;
        let usable = Header::read(&storage).await;
        let Ok(mut header) = Header::read_to_examine(&storage).await else {
            assert!(usable.is_err(), "what is usable can be looked at");
            return;
        };
        let _ = read_snapshots(&storage, &header).await;
        let _ = read_bitmaps(&storage, &header).await;
        if usable.is_ok() {
            let before = header.clone();
            header.prepare_autoclear(&storage, false).await.expect("memory has room");
            let now = Header::read(&storage).await.expect("a header that is usable stays so");
            assert_eq!(now, header);
            assert_eq!(header.features.incompatible, before.features.incompatible);
        }
        if let Ok(bytes) = header.encode(storage.name()) {
            storage.write(0, Buffer::from_slice(&bytes).into()).await.expect("memory has room");
            assert_eq!(Header::read_to_examine(&storage).await.expect("it was written"), header);
        }
    });
});
