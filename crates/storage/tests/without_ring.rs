//! A thread that gets no ring. Alone in its process, whose descriptors it uses up.

use std::fs::File;
use std::sync::Arc;

use limosa_storage::{Buffer, CacheMode, Create, FileOptions, FileStorage, Io, Storage, block_on};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tempfile::TempDir;

#[test]
fn the_pool_carries_out_what_a_thread_without_a_ring_asks_for() {
    let folder = TempDir::new().unwrap();
    let options = FileOptions { cache: CacheMode::None, io: Io::Uring, create: Create::New, ..FileOptions::default() };
    let storage = FileStorage::open(folder.path().join("disk.raw"), &options).unwrap();
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), maximum: before.maximum }).unwrap();
    let mut used = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        used.push(file);
    }
    let ours = Arc::clone(&storage);
    let outcome = std::thread::spawn(move || {
        let found = Buffer::zeroed(4096);
        block_on(async {
            ours.write(4096, Buffer::from_slice(&[6; 4096]).into()).await?;
            ours.flush().await?;
            ours.read(4096, found.clone().into()).await?;
            ours.write(1, Buffer::from_slice(b"part").into()).await
        })
        .map(|()| found.to_vec())
    });
    assert_eq!(outcome.join().unwrap().unwrap(), [6; 4096]);
    // With descriptors again, another thread has its ring.
    drop(used);
    let found = Buffer::zeroed(4);
    block_on(storage.read(1, found.clone().into())).unwrap();
    assert_eq!(found.to_vec(), b"part");
}
