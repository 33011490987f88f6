//! Stores a VM of two pages, one of them zero, and reads it again: `cargo run -p limosa-snapshot --example write_read`

use std::error::Error;
use std::io::IoSlice;

use limosa_migrate::stored::{PageSink, PageSource, StreamSetup};
use limosa_page::{PageNumber, PageRange};
use limosa_snapshot::{Manifest, Snapshot, SnapshotWriter, UnnamedFile, WriteOptions};
use limosa_stream::{Configuration, RamBlock};

const PAGE: usize = 4096;

/// The part of a stream behind the RAM: one device of 8 bytes, the end, and the JSON that describes the device.
fn device_tail() -> Result<Vec<u8>, Box<dyn Error + Send + Sync>> {
    let json = br#"{"devices":[{"name":"timer","instance_id":0,"fields":[{"name":"t","type":"b","size":8}]}]}"#;
    let mut tail = b"\x04\0\0\0\x03\x05timer\0\0\0\0\0\0\0\x01".to_vec();
    tail.extend_from_slice(b"12345678\x7e\0\0\0\x03\0\x06");
    tail.extend_from_slice(&u32::try_from(json.len())?.to_be_bytes());
    tail.extend_from_slice(json);
    Ok(tail)
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let directory = tempfile::tempdir()?;
    let target = directory.path().join("vm.snapshot");
    let start = StreamSetup {
        configuration: Configuration::new("pc-q35-10.0"),
        section_id: 2,
        blocks: vec![RamBlock::new("pc.ram", 2 * PAGE as u64)],
    };

    let mut writer = SnapshotWriter::new(UnnamedFile::create(&target, false)?, WriteOptions::default())?;
    writer.begin(&start)?;
    writer.put_zero(0, PageRange::whole_block(1))?;
    writer.put_pages(0, PageNumber(1), &[IoSlice::new(&[0x5a; PAGE])])?;
    let published = writer.finish(&device_tail()?, Manifest::new())?;
    println!("stored as {}, {} of {} pages are zero", published.manifest.id, 1, 2);

    let snapshot = Snapshot::open(&target)?;
    let mut page = [0; PAGE];
    snapshot.read(0, PageRange::starting_at(PageNumber(1), 1), &mut page)?;
    assert_eq!(page, [0x5a; PAGE]);
    println!("read again: {} bytes of RAM, {} pages stored", snapshot.ram_bytes(), snapshot.stored_pages());
    Ok(())
}
