//! Commands of keepers: in order, out of order, and of two at a time.

use std::sync::Arc;
use std::task::{Context, Waker};

use limosa_image::epochs::{EpochDisk, EpochError, EpochOptions, Recovered, recover};
use limosa_image::{BlockStatus, Disk, GuestOffset, ImageError};
use limosa_storage::testing::{Failing, Fault, RequestHolder};
use limosa_storage::{Buffer, MemoryStorage, Operation, Storage, block_on};

use crate::bed::{Format, SECTOR, SIZE, sector, versions, write};

struct Bed {
    file: Arc<MemoryStorage>,
    log: Arc<MemoryStorage>,
    disk: Arc<EpochDisk>,
}

fn options() -> EpochOptions {
    EpochOptions::default().boot([1, 1])
}

fn begin(format: Format) -> Bed {
    let file = Arc::new(MemoryStorage::with_contents(format.empty(), 4 << 20));
    let log = Arc::new(MemoryStorage::growing_to(64 << 20));
    let disk = block_on(EpochDisk::begin(format.open(file.clone()), log.clone(), &options())).unwrap();
    Bed { file, log, disk }
}

/// Returns the state that the next server finds.
fn killed(format: Format, bed: &Bed) -> (Recovered, Vec<u64>) {
    let file: Arc<dyn Storage> = Arc::new(MemoryStorage::with_contents(bed.file.contents(), 4 << 20));
    let log = Arc::new(MemoryStorage::with_contents(bed.log.contents(), 64 << 20));
    let image = format.open(file);
    let recovered = block_on(recover(&image, log, (&options(), None))).unwrap();
    (recovered, versions(&*image))
}

#[test]
fn an_epoch_is_the_images_when_it_is_kept_and_not_before() {
    for format in [Format::Raw, Format::Qcow2] {
        let bed = begin(format);
        write(&bed.disk, 0, 10).unwrap();
        bed.disk.seal(1).unwrap();
        write(&bed.disk, 0, 20).unwrap();
        write(&bed.disk, 1, 21).unwrap();
        assert_eq!(versions(&*bed.disk)[..2], [20, 21], "reads see their own writes");
        let (recovered, found) = killed(format, &bed);
        assert!(matches!(recovered, Recovered::Cut { epoch: 0, .. }));
        assert_eq!(found[..2], [0, 0]);
        block_on(bed.disk.keep(1, false)).unwrap();
        let (recovered, found) = killed(format, &bed);
        assert!(matches!(recovered, Recovered::Cut { epoch: 1, bytes: 512, .. }));
        assert_eq!(found[..2], [10, 0]);
        block_on(bed.disk.merge()).unwrap();
        assert_eq!((bed.disk.status().merged, bed.disk.status().extents), (1, 2));
        assert_eq!(versions(&*bed.disk)[..2], [20, 21]);
        assert_eq!(versions(&**bed.disk.image())[..2], [10, 0]);
        block_on(bed.disk.end()).unwrap();
        assert_eq!(versions(&**bed.disk.image())[..2], [20, 21]);
        assert!(matches!(killed(format, &bed).0, Recovered::Whole));
        assert!(matches!(write(&bed.disk, 0, 30), Err(ImageError::Unsupported { .. })));
    }
}

#[test]
fn a_flush_in_an_epoch_does_not_wait_for_the_storage() {
    for format in [Format::Raw, Format::Qcow2] {
        let holder = RequestHolder::only(&[Operation::Flush]);
        holder.release_all();
        let file = holder.wrap(Arc::new(MemoryStorage::with_contents(format.empty(), 4 << 20)));
        let log = holder.wrap(Arc::new(MemoryStorage::growing_to(64 << 20)));
        let disk = block_on(EpochDisk::begin(format.open(file), log, &options())).unwrap();
        holder.hold_again();
        let mut context = Context::from_waker(Waker::noop());
        for epoch in 1..4 {
            write(&disk, epoch, epoch).unwrap();
            assert!(disk.flush().as_mut().poll(&mut context).is_ready(), "{format:?}");
            disk.seal(epoch).unwrap();
            block_on(disk.keep(epoch, false)).unwrap();
        }
        assert!(holder.waiting().is_empty(), "{:?}", holder.waiting());
        // What has to survive a power cut does wait.
        disk.seal(4).unwrap();
        let mut kept = Box::pin(disk.keep(4, true));
        assert!(kept.as_mut().poll(&mut context).is_pending());
        assert!(!holder.waiting().is_empty());
        holder.release_all();
        block_on(kept).unwrap();
    }
}

#[test]
fn commands_out_of_order_change_nothing() {
    let bed = begin(Format::Raw);
    let Bed { disk, .. } = &bed;
    for epoch in [0, 2, u64::MAX] {
        assert!(matches!(disk.seal(epoch), Err(EpochError::NotOpen { open: 1, .. })));
    }
    for epoch in [1, 2, u64::MAX] {
        assert!(matches!(block_on(disk.keep(epoch, true)), Err(EpochError::NotSealed { kept: 0, open: 1, .. })));
        assert!(matches!(block_on(disk.drop_after(epoch)), Err(EpochError::NotSealed { .. })));
    }
    disk.seal(1).unwrap();
    assert!(matches!(disk.seal(1), Err(EpochError::NotOpen { open: 2, .. })), "by a second keeper");
    block_on(disk.keep(1, false)).unwrap();
    block_on(disk.keep(1, true)).unwrap();
    let why = block_on(disk.drop_after(0)).unwrap_err().to_string();
    assert!(why.contains("epoch 0 is not sealed: epoch 1 is kept, and epoch 2 is open"), "{why}");
    write(disk, 3, 7).unwrap();
    block_on(disk.drop_after(1)).unwrap();
    block_on(disk.drop_after(1)).unwrap();
    for refused in [disk.seal(2), block_on(disk.keep(1, true)), block_on(disk.end())] {
        assert!(matches!(refused, Err(EpochError::Over { .. })));
    }
    assert_eq!(versions(&**disk.image())[3], 0);
    assert!(write(disk, 3, 8).is_err() && block_on(disk.flush()).is_err());
    assert!(matches!(killed(Format::Raw, &bed).0, Recovered::Cut { epoch: 1, .. }));
}

/// Returns the state of an image that is brought to an epoch after a kill.
fn killed_as_of(bed: &Bed, epoch: Option<u64>) -> Result<(Recovered, u64), EpochError> {
    let file: Arc<dyn Storage> = Arc::new(MemoryStorage::with_contents(bed.file.contents(), 4 << 20));
    let log = Arc::new(MemoryStorage::with_contents(bed.log.contents(), 64 << 20));
    let image = Format::Raw.open(file);
    let recovered = block_on(recover(&image, log.clone(), (&options(), epoch)))?;
    // Once more, and without a wish: it stays so.
    assert!(block_on(recover(&image, log, (&options(), None))).is_ok());
    Ok((recovered, versions(&*image)[0]))
}

#[test]
fn a_prepared_epoch_counts_or_not_as_its_checkpoint_says() {
    let bed = begin(Format::Raw);
    for epoch in 1..=3 {
        write(&bed.disk, 0, epoch).unwrap();
        bed.disk.seal(epoch).unwrap();
    }
    block_on(bed.disk.keep(1, false)).unwrap();
    block_on(bed.disk.prepare(2, true)).unwrap();
    assert_eq!((bed.disk.status().kept, bed.disk.status().prepared, bed.disk.status().sealed), (1, 2, 1));
    block_on(bed.disk.merge()).unwrap();
    assert_eq!(bed.disk.status().merged, 1, "what is not kept is not the image's");
    let undecided = killed_as_of(&bed, None).unwrap_err();
    assert!(matches!(undecided, EpochError::Undecided { kept: 1, prepared: 2, .. }), "{undecided}");
    for epoch in [1, 2] {
        let (recovered, version) = killed_as_of(&bed, Some(epoch)).unwrap();
        assert!(matches!(recovered, Recovered::Cut { epoch: found, .. } if found == epoch));
        assert_eq!(version, epoch);
    }
    for epoch in [0, 3, u64::MAX] {
        let missing = killed_as_of(&bed, Some(epoch)).unwrap_err();
        assert!(matches!(missing, EpochError::NotThere { kept: 1, last: 2, .. }), "{missing}");
    }
    block_on(bed.disk.keep(2, false)).unwrap();
    assert_eq!(killed_as_of(&bed, None).unwrap().1, 2);
    block_on(bed.disk.prepare(3, false)).unwrap();
    block_on(bed.disk.drop_after(2)).unwrap();
    assert_eq!(versions(&**bed.disk.image())[0], 2);
    assert_eq!(killed_as_of(&bed, Some(2)).unwrap().1, 2);
    assert!(matches!(killed_as_of(&bed, Some(3)), Err(EpochError::NotThere { .. })), "it was dropped");
}

#[test]
fn dropping_keeps_a_sealed_epoch_that_it_is_to_be_as_of() {
    let bed = begin(Format::Qcow2);
    for (epoch, version) in [(1, 11), (2, 12), (3, 13)] {
        write(&bed.disk, 0, version).unwrap();
        bed.disk.seal(epoch).unwrap();
    }
    block_on(bed.disk.drop_after(2)).unwrap();
    assert_eq!(versions(&**bed.disk.image())[0], 12);
}

#[test]
fn zeros_and_discards_belong_to_an_epoch_too() {
    let bed = begin(Format::Qcow2);
    (0..16).for_each(|at| write(&bed.disk, at, 9).unwrap());
    bed.disk.seal(1).unwrap();
    block_on(bed.disk.keep(1, true)).unwrap();
    block_on(bed.disk.merge()).unwrap();
    block_on(bed.disk.write_zeroes(GuestOffset(SECTOR), SECTOR, false)).unwrap();
    // Of the two clusters the second one is whole.
    block_on(bed.disk.discard(GuestOffset(2 * SECTOR), 14 * SECTOR)).unwrap();
    let map = |at: u64| block_on(bed.disk.map(GuestOffset(at * SECTOR), SIZE)).unwrap();
    assert_eq!((map(1).kind, map(1).length), (BlockStatus::Zero, SECTOR));
    assert_eq!((map(2).kind, map(2).length), (BlockStatus::Data, 6 * SECTOR));
    assert_eq!((map(8).kind, map(8).length), (BlockStatus::Zero, 8 * SECTOR));
    let wanted: Vec<u64> = (0..16).map(|at| if at == 1 || at >= 8 { 0 } else { 9 }).collect();
    assert_eq!(versions(&*bed.disk)[..16], wanted);
    assert_eq!(versions(&**bed.disk.image())[..16], [9; 16]);
    bed.disk.seal(2).unwrap();
    block_on(bed.disk.keep(2, true)).unwrap();
    block_on(bed.disk.merge()).unwrap();
    assert_eq!(versions(&**bed.disk.image())[..16], wanted);
}

#[test]
fn a_log_without_room_fails_writes_and_is_used_again_when_the_image_has_them() {
    let file = Arc::new(MemoryStorage::with_contents(Format::Raw.empty(), 4 << 20));
    let log = Arc::new(MemoryStorage::growing_to(64 << 20));
    let limited = options().limit(2 << 20);
    let disk = block_on(EpochDisk::begin(Format::Raw.open(file), log.clone(), &limited)).unwrap();
    for epoch in 1..=10 {
        let written = (0..600).take_while(|number| write(&disk, number % 128, 1 + number).is_ok()).count();
        // Pages of 4 KiB: the open epoch replaces what it wrote before, which frees whole segments.
        assert!(written >= 128, "epoch {epoch}: {written}");
        disk.seal(epoch).unwrap();
        block_on(disk.keep(epoch, false)).unwrap();
        block_on(disk.merge()).unwrap();
    }
    assert!(log.contents().len() <= 3 << 20);
}

#[test]
fn a_write_that_was_given_up_never_lands_in_what_is_written_later() {
    let holder = RequestHolder::only(&[Operation::Write]);
    holder.release_all();
    let file = Arc::new(MemoryStorage::with_contents(Format::Raw.empty(), 4 << 20));
    let log = holder.wrap(Arc::new(MemoryStorage::growing_to(64 << 20)));
    let limited = options().limit(3 << 20);
    let disk = block_on(EpochDisk::begin(Format::Raw.open(file), log, &limited)).unwrap();
    holder.hold_again();
    let mut context = Context::from_waker(Waker::noop());
    let mut write = |version: u64, at: u64, is_given_up: bool| {
        let bytes = Buffer::from_slice(&sector(version));
        let mut write = disk.write(GuestOffset(at * SECTOR), bytes.into());
        assert!(write.as_mut().poll(&mut context).is_pending());
        let number = holder.waiting().last().unwrap().number;
        if !is_given_up {
            holder.release(number);
            assert!(write.as_mut().poll(&mut context).is_ready());
        }
        number
    };
    let late = write(1_000_000, 0, true);
    // A segment has 256 pages. The first page of every other one would have a sector that is the latest of its place.
    let mut wanted = vec![0; 128];
    for version in 1..3 * 512 + 50 {
        let at = version % 128;
        write(version, at, false);
        wanted[usize::try_from(at).unwrap()] = version;
    }
    assert!(holder.release(late));
    assert_eq!(versions(&*disk), wanted);
}

#[test]
fn a_failing_image_leaves_epochs_in_the_log_and_a_failing_log_fails_the_command() {
    let file = Arc::new(MemoryStorage::with_contents(Format::Raw.empty(), 4 << 20));
    let log = Arc::new(MemoryStorage::growing_to(64 << 20));
    let (image_fails, log_fails) = (Failing::only(&[Operation::Write]), Failing::only(&[Operation::Write]));
    let disk =
        block_on(EpochDisk::begin(Format::Raw.open(image_fails.wrap(file)), log_fails.wrap(log), &options())).unwrap();
    write(&disk, 0, 10).unwrap();
    disk.seal(1).unwrap();
    log_fails.fail(0, u64::MAX, Fault::HalfWay);
    assert!(write(&disk, 0, 11).is_err());
    assert!(block_on(disk.keep(1, false)).is_err());
    log_fails.mend();
    block_on(disk.keep(1, false)).unwrap();
    image_fails.fail(0, u64::MAX, Fault::HalfWay);
    assert!(block_on(disk.merge()).is_err());
    assert_eq!(versions(&*disk)[0], 10);
    image_fails.mend();
    block_on(disk.merge()).unwrap();
    assert_eq!(disk.status().merged, 1);
}

#[test]
fn a_log_of_another_file_or_a_damaged_one_is_refused() {
    let bed = begin(Format::Raw);
    write(&bed.disk, 0, 10).unwrap();
    bed.disk.seal(1).unwrap();
    block_on(bed.disk.keep(1, true)).unwrap();
    let image = || Format::Raw.open(Arc::new(MemoryStorage::with_contents(Format::Raw.empty(), 4 << 20)));
    let refused = |bytes: Vec<u8>, options| {
        let image = image();
        let error =
            block_on(recover(&image, Arc::new(MemoryStorage::with_contents(bytes, 64 << 20)), (&options, None)));
        assert_eq!(versions(&*image)[0], 0);
        error.unwrap_err().to_string()
    };
    let log = bed.log.contents();
    assert!(refused(log.clone(), options().file([5, 5])).contains("another file"));
    // A byte in each of header, marks, slot and list.
    let list = log.windows(8).position(|word| word == b"limosaen").unwrap();
    for at in [100, list + 60] {
        let mut bytes = log.clone();
        bytes[at] ^= 1;
        assert!(refused(bytes, options()).contains("damaged"), "{at}");
    }
    let mut bytes = log;
    bytes[4096..12288].fill(0);
    assert!(refused(bytes, options()).contains("no mark"));
}
