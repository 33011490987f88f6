//! Images that are not what they say, files that go away under them, and storages that fail: errors that say what and where, and
//! nothing else.

mod cut_off;
mod cycles;
mod failing;
#[path = "../fields/mod.rs"]
mod fields;
mod lies;

use std::sync::Arc;

use limosa_image::qcow2::{CreateOptions, Header, Parts, Qcow2, Qcow2Options, create};
use limosa_image::{Disk, GuestOffset, ImageError};
use limosa_storage::testing::SparseMemory;
use limosa_storage::{Buffer, Storage, block_on};

use fields::{number, put};

/// An image in memory, with contents of its own in its first clusters, closed.
fn made(options: &CreateOptions, contents: &[u8]) -> Arc<dyn Storage> {
    let file: Arc<dyn Storage> = Arc::new(SparseMemory::file("image", 1 << 30));
    block_on(create(&*file, None, options)).unwrap();
    let disk = opened(&file, Qcow2Options::default()).unwrap();
    block_on(disk.write(GuestOffset(0), Buffer::copied(contents).into())).unwrap();
    block_on(disk.close()).unwrap();
    file
}

fn opened(file: &Arc<dyn Storage>, options: Qcow2Options) -> Result<Arc<Qcow2>, ImageError> {
    block_on(async {
        let header = Header::read(&**file).await?;
        let parts = Parts { file: Arc::clone(file), data_file: None, backing: None, header };
        Qcow2::open(parts, options).await
    })
}

/// What is read, or what is said in its place.
fn read(disk: &dyn Disk, at: u64, length: usize) -> Result<Vec<u8>, String> {
    let found = Buffer::copied(&vec![0xee; length]);
    block_on(disk.read(GuestOffset(at), found.clone().into())).map_err(|error| error.to_string())?;
    Ok(found.to_vec())
}
