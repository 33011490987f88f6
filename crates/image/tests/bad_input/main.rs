//! Images that are not what they say, files that go away under them, and storages that fail: errors that say what and
//! where, and nothing else.

mod cut_off;
mod cycles;
mod failing;
mod lies;

use std::sync::Arc;

use limosa_image::qcow2::{CreateOptions, Qcow2, Qcow2Options};
use limosa_image::{Disk, ImageError};
use limosa_storage::{Storage, block_on};
use limosa_testkit::image::{TestImage, try_read, write};

/// An image in memory, with contents of its own in its first clusters, closed.
fn made(options: &CreateOptions, contents: &[u8]) -> Arc<dyn Storage> {
    let image = TestImage::new(options);
    let disk = image.open();
    write(&*disk, 0, contents);
    block_on(disk.close()).unwrap();
    image.file
}

fn opened(file: &Arc<dyn Storage>, options: Qcow2Options) -> Result<Arc<Qcow2>, ImageError> {
    TestImage::existing(Arc::clone(file)).try_open(None, options)
}

/// The bytes read, or the error.
fn read(disk: &dyn Disk, at: u64, length: usize) -> Result<Vec<u8>, String> {
    try_read(disk, at, length as u64).map_err(|error| error.to_string())
}
