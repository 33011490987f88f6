//! Opens a temporary file, writes, reads and flushes it, and shows where it has data:
//!
//!     cargo run -p limosa-storage --example open_read_write

use std::error::Error;

use limosa_storage::{Buffer, CacheMode, Create, FileOptions, FileStorage, LockPolicy, Storage, block_on};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("disk.raw");
    let options = FileOptions {
        cache: CacheMode::Writeback,
        create: Create::New,
        lock: LockPolicy::Auto,
        ..FileOptions::default()
    };
    let storage = FileStorage::open(&path, &options)?;
    println!("opened {}, I/O by {:?}", storage.name(), storage.io());

    // Requests are futures: several may be in flight. Each begins with its first poll.
    block_on(async {
        storage.set_len(16 << 20).await?;
        storage.write(1 << 20, Buffer::from_slice(&[7; 65536]).into()).await?;
        storage.flush().await
    })?;

    let found = Buffer::zeroed(65536);
    block_on(storage.read(1 << 20, found.clone().into()))?;
    println!("read {} bytes, the first is {}", found.len(), found.to_vec()[0]);
    for extent in storage.extents(0..storage.length()?)? {
        println!("{:#9x}..{:#9x} {:?}", extent.range.start, extent.range.end, extent.kind);
    }

    // QEMU's image locks: while this process may write the file, it is not opened a second time.
    let reason = FileStorage::open(&path, &FileOptions::read_only_default()).map(drop);
    println!("opened a second time: {}", reason.err().map_or("yes".into(), |error| error.to_string()));
    println!("{:?}", storage.counters());
    Ok(())
}
