//! Any messages of a front end, and any memory of its guest, as a disk's device gets them: over a real qcow2 image,
//! which stays sound.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use limosa_export::Export;
use limosa_export::vhost_user_blk::{VhostUserBlk, VhostUserBlkOptions};
use limosa_fuzz::image::{empty, open};
use limosa_image::Disk;
use limosa_image::qcow2::{CheckOptions, check};
use limosa_storage::block_on;

fuzz_target!(|data: &[u8]| {
    let storage = empty();
    let disk: Arc<dyn Disk> = open(&storage, false).expect("a sound image opens");
    let export = Arc::new(Export::new("", Arc::clone(&disk)).expect("a name"));
    let device = VhostUserBlk::new(export, &VhostUserBlkOptions::default().queues(3).threads(1));
    limosa_vhost::fuzzing::play_to(Arc::new(device), data);
    block_on(disk.close()).expect("memory does not fail");
    let report = block_on(check(&storage, CheckOptions::default())).expect("memory does not fail");
    assert!(report.is_clean(), "{report:?}");
});
