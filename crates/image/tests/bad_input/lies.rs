//! Images whose fields, tables and contents are not what they say.

use std::io::Write;
use std::sync::Arc;

use limosa_image::Disk;
use limosa_image::GuestOffset;
use limosa_image::qcow2::{Compression, CreateOptions, Header, Qcow2Options, create, read_snapshots};
use limosa_storage::testing::{RequestRecorder, SparseMemory};
use limosa_storage::{Buffer, Storage, block_on};
use limosa_testkit::image::{number, put};

use crate::{made, opened, read};

const CLUSTER: u64 = 64 << 10;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Behind the end of every file here.
const FAR: u64 = 1 << 40;

const READ_ONLY: fn() -> Qcow2Options = || Qcow2Options::default().read_only(true);

/// An image with five clusters of contents, and where its first L2 table lies.
fn victim(compression: Compression) -> (Arc<dyn Storage>, u64) {
    let options = CreateOptions::default().size(64 << 20).compression(compression);
    let file = made(&options, &vec![7; 5 << 16]);
    let l2 = number(&*file, number(&*file, 40)) & OFFSET;
    (file, l2)
}

#[test]
fn what_is_said_to_lie_behind_the_end_of_the_file_is_named_with_its_place() {
    // An L2 table.
    let (file, _) = victim(Compression::Zlib);
    let length = file.length().unwrap();
    put(&*file, number(&*file, 40), &(COPIED | FAR).to_be_bytes());
    let said = read(&*opened(&file, READ_ONLY()).unwrap(), 0, 512).unwrap_err();
    let there = format!("image: L2 table at {FAR:#x}: the file of {length:#x} bytes ends before {:#x}", FAR + 4096);
    assert!(said.starts_with(&there), "{said}");
    let disk = opened(&file, Qcow2Options::default()).unwrap();
    block_on(disk.write(GuestOffset(0), Buffer::from_slice(&[1; 512]).into())).unwrap_err();

    // Contents.
    let (file, l2) = victim(Compression::Zlib);
    put(&*file, l2, &(COPIED | FAR).to_be_bytes());
    let disk = opened(&file, READ_ONLY()).unwrap();
    let said = read(&*disk, 512, 512).unwrap_err();
    let there = format!("image: contents at {:#x} of guest offset 0x200: the file ends at {length:#x}", FAR + 512);
    assert!(said.starts_with(&there), "{said}");
    // The rest of the disk is as it was.
    assert_eq!(read(&*disk, CLUSTER, 512).unwrap(), [7; 512]);

    // Contents that are kept in part.
    put(&*file, l2, &FAR.to_be_bytes());
    let disk = opened(&file, Qcow2Options::default()).unwrap();
    let said = block_on(disk.write(GuestOffset(512), Buffer::from_slice(&[1; 512]).into())).unwrap_err().to_string();
    assert!(said.starts_with(&format!("image: contents at {FAR:#x} of guest offset 0x0: ")), "{said}");

    // Compressed contents.
    put(&*file, l2, &(COMPRESSED | FAR).to_be_bytes());
    let said = read(&*opened(&file, READ_ONLY()).unwrap(), 512, 512).unwrap_err();
    assert!(said.starts_with(&format!("image: compressed contents at {FAR:#x} of guest offset 0x200: ")), "{said}");

    // A refcount block.
    let (file, _) = victim(Compression::Zlib);
    put(&*file, number(&*file, 48), &FAR.to_be_bytes());
    let disk = opened(&file, Qcow2Options::default()).unwrap();
    let said =
        block_on(disk.write(GuestOffset(32 << 20), Buffer::from_slice(&[1; 512]).into())).unwrap_err().to_string();
    assert!(said.starts_with(&format!("image: refcount block at {FAR:#x}: ")), "{said}");
}

#[test]
fn a_cluster_that_is_in_use_and_counted_as_free_has_the_image_marked_when_it_is_given_up() {
    let (file, l2) = victim(Compression::Zlib);
    let cluster = number(&*file, l2 + 8) & OFFSET;
    let block = number(&*file, number(&*file, 48));
    put(&*file, block + cluster / CLUSTER * 2, &[0, 0]);
    let disk = opened(&file, Qcow2Options::default().allocate_ahead(0)).unwrap();
    block_on(disk.discard(GuestOffset(CLUSTER), CLUSTER)).unwrap();
    let said = block_on(disk.flush()).unwrap_err().to_string();
    assert!(said.starts_with(&format!("image: refcount of the cluster at {cluster:#x}: it is 0")), "{said}");
    assert!(block_on(Header::read(&*file)).unwrap().features.corrupt());
    let said = opened(&file, Qcow2Options::default()).unwrap_err().to_string();
    assert!(said.contains("marked as corrupt: it has to be repaired before it is written"), "{said}");
    assert_eq!(read(&*opened(&file, READ_ONLY()).unwrap(), 0, 512).unwrap(), [7; 512]);
}

/// Compressed bytes as the first cluster of the disk.
fn compressed(compression: Compression, packed: &[u8]) -> Arc<dyn Storage> {
    let (file, l2) = victim(compression);
    let at = file.length().unwrap().next_multiple_of(CLUSTER);
    let sectors = (packed.len() as u64).div_ceil(512);
    put(&*file, at, packed);
    block_on(file.set_len(at + sectors * 512)).unwrap();
    // In clusters of 64 KiB the number of further sectors starts at bit 54.
    put(&*file, l2, &(COMPRESSED | (sectors - 1) << 54 | at).to_be_bytes());
    file
}

#[test]
fn what_expands_without_end_is_one_cluster_of_the_disk() {
    let bomb = vec![0x5a; 64 << 20];
    let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(&bomb).unwrap();
    let deflated = encoder.finish().unwrap();
    for (compression, packed) in
        [(Compression::Zlib, deflated), (Compression::Zstd, zstd::encode_all(&bomb[..], 3).unwrap())]
    {
        let disk = opened(&compressed(compression, &packed), READ_ONLY()).unwrap();
        assert_eq!(read(&*disk, 0, 1 << 16).unwrap(), vec![0x5a; 1 << 16], "{compression:?}");
        assert_eq!(read(&*disk, CLUSTER, 512).unwrap(), [7; 512]);
    }
}

#[test]
fn what_takes_memory_or_never_begins_is_an_error_with_its_place() {
    // A window of 128 MiB.
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 3).unwrap();
    encoder.window_log(27).unwrap();
    encoder.write_all(&vec![0x5a; 1 << 20]).unwrap();
    let window = encoder.finish().unwrap();
    // Stored blocks of nothing, up to the end of a sector, and frames of nothing.
    let nothing = [0, 0, 0, 0xff, 0xff].repeat(20 * 512);
    let frames = zstd::encode_all(&[][..], 3).unwrap().repeat(1024);
    for (compression, packed, why) in [
        (Compression::Zstd, window, "cannot be unpacked"),
        (Compression::Zlib, nothing, "end after 0 of 65536 bytes"),
        (Compression::Zstd, frames, "end after 0 of 65536 bytes"),
    ] {
        let file = compressed(compression, &packed);
        let said = read(&*opened(&file, READ_ONLY()).unwrap(), 0, 512).unwrap_err();
        assert!(
            said.starts_with("image: compressed cluster at 0x") && said.contains(" of guest offset 0x0: "),
            "{said}"
        );
        assert!(said.contains(why), "{said}");
        // Nor is it taken for something when a part of it is written over.
        let disk = opened(&file, Qcow2Options::default()).unwrap();
        block_on(disk.write(GuestOffset(0), Buffer::from_slice(&[1; 512]).into())).unwrap_err();
    }
}

/// An image whose header has this number of snapshots, in a table of zeros at 1 MiB.
fn with_snapshots(count: u32, version: u32) -> (Arc<dyn Storage>, Header) {
    let file: Arc<dyn Storage> = Arc::new(SparseMemory::file("image", 1 << 40));
    let options = CreateOptions::default().size(1 << 20).version(version);
    let mut header = block_on(create(&*file, None, &options)).unwrap();
    block_on(file.set_len(4 << 20)).unwrap();
    header.snapshots = (limosa_image::HostOffset(1 << 20), count);
    block_on(header.write_fields(&*file)).unwrap();
    (file, header)
}

/// The result of reading the snapshots, and the bytes read.
fn snapshots(file: &Arc<dyn Storage>, header: &Header) -> (Result<usize, String>, u64) {
    let counting = RequestRecorder::new();
    let over = counting.wrap(Arc::clone(file));
    let found = block_on(read_snapshots(&*over, header));
    let bytes = counting.take().iter().map(|seen| seen.range.end - seen.range.start).sum();
    (found.map(|found| found.len()).map_err(|error| error.to_string()), bytes)
}

#[test]
fn snapshot_tables_with_absurd_counts_and_lengths_are_refused_after_little() {
    // More than there may be: nothing but the header is looked at.
    let (file, _) = with_snapshots(u32::MAX, 3);
    let said = opened(&file, Qcow2Options::default()).unwrap_err().to_string();
    assert_eq!(said, "image: header, byte 60: 4294967295 snapshots; 65536 is the most");

    // As many as there may be, in a hole.
    let (file, header) = with_snapshots(65536, 3);
    let (found, bytes) = snapshots(&file, &header);
    assert_eq!(bytes, 40);
    let entry = "image: snapshot table at 0x100000, entry";
    assert_eq!(found.unwrap_err(), format!("{entry} 0: 0 bytes of extra data; version 3 has 16: repair the image"));
    // Writing goes nowhere, either.
    opened(&file, Qcow2Options::default()).unwrap_err();
    // In version 2 these are snapshots, without anything.
    let (file, header) = with_snapshots(65536, 2);
    assert_eq!(snapshots(&file, &header), (Ok(65536), 65536 * 40));

    // Names of 64 KiB each: no more than the longest table is read.
    let (file, header) = with_snapshots(65536, 3);
    let each = 40 + 16 + 2 * 65535_u64;
    for number in 0..600_u64 {
        let at = (1 << 20) + number * each.next_multiple_of(8);
        put(&*file, at + 12, &[0xff; 4]);
        put(&*file, at + 36, &16_u32.to_be_bytes());
    }
    let (found, bytes) = snapshots(&file, &header);
    assert!(bytes <= 64 << 20, "{bytes}");
    let said = found.unwrap_err();
    assert!(said.starts_with(&format!("{entry} {}: its {each} bytes at 0x", (64 << 20) / each)), "{said}");

    // An L1 table that is longer than any, or begins in the middle of a cluster.
    for (at, entries) in [(0_u64, u32::MAX), (512, 1)] {
        let (file, header) = with_snapshots(1, 3);
        let entry = [&at.to_be_bytes()[..], &entries.to_be_bytes()].concat();
        put(&*file, 1 << 20, &entry);
        put(&*file, (1 << 20) + 36, &16_u32.to_be_bytes());
        let said = snapshots(&file, &header).0.unwrap_err();
        assert!(said.contains(&format!("entry 0: an L1 table of {entries} entries at {at:#x}")), "{said}");
    }
}
