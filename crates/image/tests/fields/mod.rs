//! Fields of an image, looked at and overwritten where they lie.

use limosa_storage::{Buffer, Storage, block_on};

pub(crate) fn put(file: &dyn Storage, at: u64, bytes: &[u8]) {
    block_on(file.write(at, Buffer::copied(bytes).into())).unwrap();
}

pub(crate) fn number(file: &dyn Storage, at: u64) -> u64 {
    let field = Buffer::zeroed(8);
    block_on(file.read(at, field.clone().into())).unwrap();
    u64::from_be_bytes(field.to_vec().try_into().unwrap())
}
