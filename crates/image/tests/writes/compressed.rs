//! Compressed clusters: several in a host cluster, each of them dropped on its own, and the stock tools as the judge.

use std::sync::Arc;

use limosa_image::qcow2::{CheckOptions, CheckReport, Compression, CreateOptions, Qcow2Options, check};
use limosa_image::{Compress, Disk, GuestOffset, ImageError};
use limosa_storage::testing::SeededRandom;
use limosa_storage::{Buffer, IoVector, Storage, block_on};
use limosa_testkit::image::{TestImage, contents, memory_file, raw, raw_filled, read, read_all, write};
use limosa_testkit::{qemu_img, scratch};

const CLUSTER: u64 = 65536;

/// Contents of a cluster that become much smaller.
fn text(seed: u8, length: u64) -> Vec<u8> {
    (0..length).map(|at| seed.wrapping_add((at / 64).to_le_bytes()[0])).collect()
}

fn try_write_compressed(disk: &dyn Disk, at: u64, bytes: &[u8]) -> Result<(), ImageError> {
    let packed = disk.compressor(None)?.compress(&Buffer::from_slice(bytes).into());
    block_on(disk.write_compressed(GuestOffset(at), packed))
}

fn write_compressed(disk: &dyn Disk, at: u64, bytes: &[u8]) {
    try_write_compressed(disk, at, bytes).unwrap();
}

/// Checks a closed image, also by stock `qemu-img check`.
fn checked(file: &dyn Storage) -> CheckReport {
    let report = block_on(check(file, CheckOptions::default())).unwrap();
    assert!(report.is_clean(), "{report:?}");
    if !limosa_testkit::qemu_skipped() {
        let folder = scratch().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, contents(file)).unwrap();
        qemu_img(["check", "-f", "qcow2", path.to_str().unwrap()]).unwrap();
    }
    report
}

/// The disk as stock QEMU reads it.
fn seen(file: &dyn Storage) -> Vec<u8> {
    let folder = scratch().unwrap();
    let [image, out] = ["image", "out"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    std::fs::write(&image, contents(file)).unwrap();
    qemu_img(["convert", "-f", "qcow2", "-O", "raw", &image, &out]).unwrap();
    std::fs::read(&out).unwrap()
}

#[test]
fn clusters_share_host_clusters_and_qemu_reads_them() {
    for compression in [Compression::Zlib, Compression::Zstd] {
        for cluster in [512, 4096, CLUSTER, 2 << 20] {
            let size = 24 * cluster + 1024;
            let mut expected = text(1, size);
            let noise = SeededRandom::new(1).bytes(usize::try_from(2 * cluster).unwrap());
            expected[..noise.len()].copy_from_slice(&noise);
            let zeros = usize::try_from(5 * cluster).unwrap();
            expected[zeros..2 * zeros].fill(0);
            let options = CreateOptions::default().size(size).cluster_size(cluster).compression(compression);
            let image = TestImage::new(&options);
            let disk = image.open();
            write_compressed(&*disk, 0, &expected);
            assert!(read_all(&*disk) == expected);
            block_on(disk.close()).unwrap();
            let report = checked(&*image.file);
            let clusters = size.div_ceil(cluster);
            assert_eq!(report.compressed_clusters, clusters - 2 - 5, "{compression:?} {cluster}");
            if cluster > 512 {
                assert!(image.file.length().unwrap() < 10 * cluster, "{compression:?} {cluster}");
            }
            if !limosa_testkit::qemu_skipped() {
                assert!(seen(&*image.file) == expected, "{compression:?} {cluster}");
            }
        }
    }
}

#[test]
fn a_cluster_that_is_written_plain_or_discarded_or_compressed_again_leaves_its_neighbours() {
    for refcount_bits in [1, 2, 16, 64] {
        let size = 16 * CLUSTER;
        let image = TestImage::new(&CreateOptions::default().size(size).refcount_bits(refcount_bits));
        let mut expected = text(3, size);
        let disk = image.open();
        write_compressed(&*disk, 0, &expected);
        block_on(disk.flush()).unwrap();
        let place =
            |range: std::ops::Range<u64>| usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
        write(&*disk, CLUSTER + 700, &[9; 300]);
        expected[place(CLUSTER + 700..CLUSTER + 1000)].fill(9);
        block_on(disk.discard(GuestOffset(3 * CLUSTER), CLUSTER)).unwrap();
        expected[place(3 * CLUSTER..4 * CLUSTER)].fill(0);
        block_on(disk.write_zeroes(GuestOffset(5 * CLUSTER), CLUSTER, false)).unwrap();
        expected[place(5 * CLUSTER..6 * CLUSTER)].fill(0);
        for round in 0..4 {
            let again = text(50 + round, 3 * CLUSTER);
            write_compressed(&*disk, 7 * CLUSTER, &again);
            expected[place(7 * CLUSTER..10 * CLUSTER)].copy_from_slice(&again);
            block_on(disk.flush()).unwrap();
            assert!(read_all(&*disk) == expected, "{refcount_bits} bits, round {round}");
        }
        // The clusters that are dropped are used by what comes next, and not while a neighbour is in them.
        let plain = SeededRandom::new(4).bytes(usize::try_from(4 * CLUSTER).unwrap());
        write(&*disk, 12 * CLUSTER, &plain);
        expected[place(12 * CLUSTER..16 * CLUSTER)].copy_from_slice(&plain);
        assert!(read_all(&*disk) == expected, "{refcount_bits} bits");
        block_on(disk.close()).unwrap();
        checked(&*image.file);
        // Opened again, it is written on.
        let disk = image.open();
        write_compressed(&*disk, 2 * CLUSTER, &text(90, CLUSTER));
        expected[place(2 * CLUSTER..3 * CLUSTER)].copy_from_slice(&text(90, CLUSTER));
        assert!(read_all(&*disk) == expected, "{refcount_bits} bits, opened again");
        block_on(disk.discard(GuestOffset(0), size)).unwrap();
        block_on(disk.close()).unwrap();
        assert_eq!(checked(&*image.file).allocated_clusters, 0, "{refcount_bits} bits");
    }
}

#[test]
fn a_host_cluster_is_given_back_with_the_last_of_its_contents_and_not_before() {
    let image = TestImage::new(&CreateOptions::default().size(64 * CLUSTER));
    let disk = image.open_with(Qcow2Options::default().allocate_ahead(0));
    for number in 0..8 {
        write_compressed(&*disk, number * CLUSTER, &text(1, CLUSTER));
    }
    block_on(disk.flush()).unwrap();
    let length = image.file.length().unwrap();
    // All but one of them are dropped, again and again: the room behind it is used up first.
    for round in 0..400_u64 {
        write_compressed(&*disk, (1 + round % 7) * CLUSTER, &text(2, CLUSTER));
        block_on(disk.flush()).unwrap();
    }
    assert!(read(&*disk, 0, CLUSTER) == text(1, CLUSTER));
    block_on(disk.close()).unwrap();
    checked(&*image.file);
    // A few host clusters, and not as many as were written.
    let now = image.file.length().unwrap();
    assert!(now <= length + 4 * CLUSTER, "{length:#x} {now:#x}");
}

#[test]
fn an_image_compresses_the_whole_clusters_that_are_written_to_it() {
    for compression in [Compression::Zlib, Compression::Zstd] {
        let size = 40 * CLUSTER + 1024;
        let image = TestImage::new(&CreateOptions::default().size(size).compression(compression));
        let disk = image.open_with(Qcow2Options::default().compress(Some(Compress::default().level(Some(1)))));
        let mut expected = text(3, size);
        write(&*disk, 0, &expected);
        let noise = SeededRandom::new(1).bytes(usize::try_from(CLUSTER).unwrap());
        let mut chance = SeededRandom::new(2);
        for round in 0..200_u64 {
            let at = chance.below(size - 1);
            let length = (1 + chance.below(3 * CLUSTER)).min(size - at);
            let at = if chance.one_in(2) { at / CLUSTER * CLUSTER } else { at };
            let bytes = match chance.below(4) {
                0 => noise[..usize::try_from(length.min(CLUSTER)).unwrap()].to_vec(),
                1 => vec![0; usize::try_from(length).unwrap()],
                _ => text(round.to_le_bytes()[0], length),
            };
            let place = usize::try_from(at).unwrap();
            expected[place..place + bytes.len()].copy_from_slice(&bytes);
            write(&*disk, at, &bytes);
        }
        assert!(read_all(&*disk) == expected, "{compression:?}");
        // Each whole cluster again, in one write that begins and ends within one.
        expected = text(9, size);
        write(&*disk, 100, &expected[100..]);
        write(&*disk, 0, &expected[..100]);
        block_on(disk.close()).unwrap();
        let report = checked(&*image.file);
        assert_eq!(report.compressed_clusters, 39, "{compression:?}: neither the first nor the last one");
        assert!(read_all(&*image.open_read_only()) == expected, "{compression:?}");
        if !limosa_testkit::qemu_skipped() {
            assert!(seen(&*image.file) == expected, "{compression:?}");
        }
    }
}

#[test]
fn an_image_that_cannot_compress_stores_what_is_written_as_it_is() {
    let compress = |level| Qcow2Options::default().compress(Some(Compress::default().level(level)));
    let compressed = |options: CreateOptions, level| {
        let image = TestImage::new(&options.size(2 * CLUSTER));
        let disk = image.open_with(compress(level));
        write(&*disk, 0, &text(5, 2 * CLUSTER));
        assert!(read_all(&*disk) == text(5, 2 * CLUSTER));
        block_on(disk.close()).unwrap();
        block_on(check(&*image.file, CheckOptions::default())).unwrap().compressed_clusters
    };
    assert_eq!(compressed(CreateOptions::default().data_file(Some("data".into())), None), 0);
    // The nearest level that there is.
    assert_eq!([0, 10, 255].map(|level| compressed(CreateOptions::default(), Some(level))), [2; 3]);
}

#[test]
fn writes_that_are_not_of_whole_clusters_of_this_image_are_refused() {
    let image = TestImage::new(&CreateOptions::default().size(4 * CLUSTER + 512));
    let disk = image.open();
    let refused = |at, length: u64| {
        let error = try_write_compressed(&*disk, at, &text(1, length)).unwrap_err().to_string();
        assert!(error.contains("whole clusters of 65536 bytes"), "{error}");
    };
    refused(512, CLUSTER);
    refused(0, CLUSTER + 512);
    refused(CLUSTER, 512);
    write_compressed(&*disk, 3 * CLUSTER, &text(1, CLUSTER + 512));
    assert!(matches!(try_write_compressed(&*disk, 4 * CLUSTER, &text(1, CLUSTER)), Err(ImageError::PastEnd { .. })));
    let other = TestImage::new(&CreateOptions::default().size(CLUSTER).compression(Compression::Zstd)).open();
    let packed = other.compressor(None).unwrap().compress(&Buffer::from_slice(&text(1, CLUSTER)).into());
    let error = block_on(disk.write_compressed(GuestOffset(0), packed)).unwrap_err().to_string();
    assert!(error.contains("another image"), "{error}");
    let level = disk.compressor(Some(10)).unwrap_err().to_string();
    assert!(level.contains("takes 1 to 9"), "{level}");
    // A disk that has become longer has another end.
    let packed = disk.compressor(None).unwrap().compress(&Buffer::from_slice(&text(5, 512)).into());
    block_on(disk.grow(5 * CLUSTER)).unwrap();
    let error = block_on(disk.write_compressed(GuestOffset(4 * CLUSTER), packed)).unwrap_err().to_string();
    assert!(error.contains("whole clusters"), "{error}");
    assert!(read(&*disk, 4 * CLUSTER, 512) == text(1, CLUSTER + 512)[usize::try_from(CLUSTER).unwrap()..]);
    assert!(read(&*disk, 4 * CLUSTER + 512, CLUSTER - 512).iter().all(|byte| *byte == 0));
    block_on(disk.close()).unwrap();
    checked(&*image.file);
    let outside = TestImage::new(&CreateOptions::default().size(CLUSTER).data_file(Some("data".into())));
    assert!(outside.open().compressor(None).unwrap_err().to_string().contains("data file"));
    let error = raw(memory_file("raw")).compressor(None).unwrap_err().to_string();
    assert!(error.contains("format raw does not support compressed contents"), "{error}");
}

#[test]
fn zeros_hide_the_backing_image_in_every_version() {
    for version in [2, 3] {
        let options = CreateOptions::default().size(4 * CLUSTER).version(version);
        let image = TestImage::new(&options);
        let below: Arc<dyn Disk> = raw_filled(7, 4 * CLUSTER);
        let disk = image.open_over(Some(below), Qcow2Options::default());
        write_compressed(&*disk, 0, &[vec![0; 65536], text(1, CLUSTER)].concat());
        assert_eq!(read(&*disk, 0, CLUSTER), [0; 65536], "version {version}");
        assert!(read(&*disk, CLUSTER, CLUSTER) == text(1, CLUSTER));
        assert_eq!(read(&*disk, 2 * CLUSTER, 512), [7; 512]);
        block_on(disk.close()).unwrap();
        checked(&*image.file);
    }
}

#[test]
fn nothing_is_written_for_nothing() {
    let image = TestImage::new(&CreateOptions::default().size(4 * CLUSTER));
    let disk = image.open();
    let packed = disk.compressor(None).unwrap().compress(&IoVector::new());
    assert!(packed.is_empty());
    block_on(disk.write_compressed(GuestOffset(CLUSTER), packed)).unwrap();
    write_compressed(&*disk, 0, &vec![0; 65536 * 4]);
    block_on(disk.close()).unwrap();
    assert_eq!(checked(&*image.file).allocated_clusters, 0);
}
