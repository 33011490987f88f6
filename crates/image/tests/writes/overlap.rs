//! Images whose tables are said to be something else, too: nothing is written over them, and the image is marked as
//! corrupt.

use std::sync::Arc;

use limosa_image::qcow2::{CreateOptions, Header, Qcow2, Qcow2Options, create};
use limosa_image::{Disk, GuestOffset, HostOffset, ImageError};
use limosa_storage::testing::{Failing, Fault};
use limosa_storage::{MemoryStorage, Operation, Storage, block_on};
use limosa_testkit::image::{self, TestImage, filled, number, put};

const CLUSTER: u64 = 64 << 10;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// The cluster of the disk whose entry is forged; those up to 4 are there, behind it is nothing.
const FORGED: u64 = 3;

/// An image with some contents and a snapshot, whose tables a test breaks.
struct Victim {
    storage: MemoryStorage,
    header: Header,
}

impl Victim {
    fn new(extended_l2: bool) -> Self {
        let storage = MemoryStorage::growing_to(16 << 20);
        let options = CreateOptions::default().size(1 << 30).extended_l2(extended_l2);
        let header = block_on(create(&storage, None, &options)).unwrap();
        let mut victim = Self { storage, header };
        let disk = victim.open();
        block_on(disk.write(GuestOffset(0), filled(1, 5 * CLUSTER).into())).unwrap();
        block_on(disk.close()).unwrap();
        // A snapshot without contents: its table, and an L1 table of zeros.
        let end = victim.storage.length().unwrap().next_multiple_of(CLUSTER);
        let table = [&(end + CLUSTER).to_be_bytes()[..], &1_u32.to_be_bytes(), &[0, 1, 0, 1], &[0; 16], &[0; 4]];
        put(&victim.storage, end, &[&table.concat()[..], &24_u32.to_be_bytes()[..], &[0; 24], b"1s"].concat());
        put(&victim.storage, end + CLUSTER, &vec![0; 64 << 10]);
        victim.header.snapshots = (HostOffset(end), 1);
        block_on(victim.header.write_fields(&victim.storage)).unwrap();
        // An encryption header, as if its contents were encrypted: the first extension, and the last.
        let extension = [0x0537_be77_u32.to_be_bytes(), 16_u32.to_be_bytes()].concat();
        let place = [(end + 2 * CLUSTER).to_be_bytes(), CLUSTER.to_be_bytes()].concat();
        put(&victim.storage, 112, &[&extension[..], &place, &[0; 8]].concat());
        put(&victim.storage, end + 2 * CLUSTER, &vec![0xee; 64 << 10]);
        victim.header = block_on(Header::read(&victim.storage)).unwrap();
        for at in [end, end + CLUSTER, end + 2 * CLUSTER] {
            victim.set_refcount(at, 1);
        }
        victim
    }

    fn open(&self) -> Arc<Qcow2> {
        self.open_with(Qcow2Options::default())
    }

    fn open_with(&self, options: Qcow2Options) -> Arc<Qcow2> {
        TestImage::existing(Arc::new(self.storage.clone())).open_with(options)
    }

    fn block(&self) -> u64 {
        number(&self.storage, self.header.refcount_table.0.0)
    }

    fn l2(&self) -> u64 {
        number(&self.storage, self.header.l1.0.0) & OFFSET
    }

    fn set_refcount(&self, at: u64, count: u16) {
        put(&self.storage, self.block() + at / CLUSTER * 2, &count.to_be_bytes());
    }

    fn set_entry(&self, entry: u64, bitmap: u64) {
        if self.header.features.extended_l2() {
            put(&self.storage, self.l2() + FORGED * 16, &[entry.to_be_bytes(), bitmap.to_be_bytes()].concat());
        } else {
            put(&self.storage, self.l2() + FORGED * 8, &entry.to_be_bytes());
        }
    }

    /// The tables that contents can be said to lie on, each with the name that it has in errors.
    fn tables(&self) -> [(&'static str, u64); 7] {
        let snapshots = self.header.snapshots.0.0;
        [
            ("L1 table", self.header.l1.0.0),
            ("refcount table", self.header.refcount_table.0.0),
            ("refcount block", self.block()),
            ("L2 table", self.l2()),
            ("snapshot table", snapshots),
            ("snapshot table", snapshots + CLUSTER),
            ("encryption header", snapshots + 2 * CLUSTER),
        ]
    }

    /// Every request to the image fails because of this table; the image is marked as corrupt, and has not changed
    /// otherwise.
    fn refuses(&self, name: &str, at: u64, what: impl FnOnce(&Qcow2) -> Result<(), ImageError>) {
        let before = self.storage.contents();
        let disk = self.open();
        let error = what(&disk).expect_err(name);
        let ImageError::Corrupt { table, .. } = &error else { panic!("{name}: {error}") };
        assert!(table.starts_with(name) && table.ends_with(&format!(" at {at:#x}")), "{name} at {at:#x}: {error}");
        assert!(block_on(Header::read(&self.storage)).unwrap().features.corrupt(), "{error}");
        let after = self.storage.contents();
        // The feature bits are bytes 72 to 79.
        let untouched = |range: std::ops::Range<usize>| before[range.clone()] == after[range];
        assert!(untouched(0..72) && untouched(80..before.len()), "{error}");

        // Every other request is refused, too, and closing changes nothing of the tables that no request has written.
        for number in [0, FORGED, 100] {
            block_on(disk.write(GuestOffset(number * CLUSTER), filled(9, 512).into())).unwrap_err();
            block_on(disk.discard(GuestOffset(number * CLUSTER), CLUSTER)).unwrap_err();
            block_on(disk.write_zeroes(GuestOffset(number * CLUSTER), 512, true)).unwrap_err();
        }
        block_on(disk.close()).unwrap();
        let after = self.storage.contents();
        for (other, at) in
            self.tables().into_iter().filter(|(other, _)| !matches!(*other, "L2 table" | "refcount block"))
        {
            let cluster = usize::try_from(at).unwrap()..usize::try_from(at + CLUSTER).unwrap();
            assert!(before[cluster.clone()] == after[cluster], "{other}");
        }
    }
}

const HERE: GuestOffset = GuestOffset(FORGED * CLUSTER);

type Request = fn(&Qcow2) -> Result<(), ImageError>;

const WRITE_PART: Request = |disk| block_on(disk.write(HERE, filled(7, 512).into()));
const WRITE_ALL: Request = |disk| block_on(disk.write(HERE, filled(7, CLUSTER).into()));
const WRITE_ACROSS: Request = |disk| block_on(disk.write(GuestOffset(HERE.0 - 512), filled(7, CLUSTER).into()));
const ZERO_PART: Request = |disk| block_on(disk.write_zeroes(HERE, 512, false));
const ZERO_ALL: Request = |disk| block_on(disk.write_zeroes(HERE, CLUSTER, true));
const DISCARD: Request = |disk| block_on(disk.discard(HERE, CLUSTER));

#[test]
fn contents_that_are_said_to_lie_on_a_table_are_not_written() {
    for number in 0..6 {
        for request in [WRITE_PART, WRITE_ALL, WRITE_ACROSS, ZERO_PART] {
            let victim = Victim::new(false);
            let (name, at) = victim.tables()[number];
            victim.set_entry(COPIED | at, 0);
            let before = victim.storage.contents();
            if request as usize == WRITE_ACROSS as usize {
                // What lies before it is written.
                let error = request(&victim.open()).unwrap_err();
                assert!(error.to_string().contains(name), "{error}");
                let at = usize::try_from(at).unwrap();
                assert!(before[at..at + (64 << 10)] == victim.storage.contents()[at..at + (64 << 10)], "{name}");
            } else {
                victim.refuses(name, at, request);
            }
        }
    }
}

#[test]
fn room_that_is_said_to_lie_on_a_table_is_not_filled() {
    for number in 0..6 {
        for (extended, bitmap) in [(false, 0), (true, 0), (true, 1 << 32)] {
            let victim = Victim::new(extended);
            let (name, at) = victim.tables()[number];
            // A cluster that reads as zeros and has its room; subclusters that are there in part, or not at all.
            victim.set_entry(COPIED | at | u64::from(!extended), bitmap);
            victim.refuses(name, at, WRITE_PART);
        }
    }
}

#[test]
fn tables_are_not_given_back_as_contents() {
    for number in 0..6 {
        for request in [ZERO_ALL, DISCARD, WRITE_ALL] {
            let victim = Victim::new(false);
            let (name, at) = victim.tables()[number];
            // What others have, too, is left where it is.
            let flags = if request as usize == WRITE_ALL as usize { 0 } else { COPIED };
            victim.set_entry(flags | at, 0);
            if flags == 0 {
                let error = request(&victim.open()).unwrap_err();
                assert!(error.to_string().contains(name), "{error}");
                assert!(block_on(Header::read(&victim.storage)).unwrap().features.corrupt());
            } else {
                victim.refuses(name, at, request);
            }
        }
    }
}

#[test]
fn compressed_contents_in_the_header_are_not_given_back() {
    let victim = Victim::new(false);
    victim.set_entry(COMPRESSED | 512, 0);
    victim.refuses("header", 0, DISCARD);
}

#[test]
fn tables_that_are_counted_as_free_are_not_handed_out() {
    let tables = Victim::new(false).tables();
    for (name, at) in [("header", 0)].into_iter().chain(tables) {
        let victim = Victim::new(false);
        victim.set_refcount(at, 0);
        victim.refuses(name, at, |disk| block_on(disk.write(GuestOffset(32 << 20), filled(7, CLUSTER).into())));
    }
}

#[test]
fn a_new_table_is_not_given_back_with_contents_that_were_said_to_lie_there_before() {
    // Contents that are not counted: their cluster is free for a new L2 table.
    let victim = Victim::new(false);
    let end = victim.storage.length().unwrap().next_multiple_of(CLUSTER);
    victim.set_entry(end, 0);
    let disk = victim.open_with(Qcow2Options::default().allocate_ahead(0));
    block_on(disk.discard(HERE, CLUSTER)).unwrap();
    let far = GuestOffset(600 << 20);
    block_on(disk.write(far, filled(7, CLUSTER).into())).unwrap();
    let error = block_on(disk.flush()).unwrap_err();
    assert!(error.to_string().contains(&format!("L2 table at {end:#x}")), "{error}");
    assert!(block_on(Header::read(&victim.storage)).unwrap().features.corrupt());
    block_on(disk.close()).unwrap();
    let disk = victim.open_with(Qcow2Options::default().read_only(true));
    assert_eq!(image::read(&*disk, far.0, 512), [7; 512]);
}

#[test]
fn tables_that_lie_on_each_other_are_not_written() {
    let write: Request = |disk| block_on(disk.write(GuestOffset(0), filled(7, 512).into()));
    // An entry of the L1 table that leads to another table.
    for (name, at) in Victim::new(false).tables().into_iter().filter(|(name, _)| *name != "L2 table") {
        let victim = Victim::new(false);
        put(&victim.storage, victim.header.l1.0.0, &(COPIED | at).to_be_bytes());
        let named = if name == "refcount block" { name } else { "L2 table" };
        victim.refuses(named, at, write);
    }
    // One of the refcount table.
    for (name, at) in Victim::new(false).tables() {
        let victim = Victim::new(false);
        let second = victim.header.refcount_table.0.0 + 8;
        put(&victim.storage, second, &at.to_be_bytes());
        assert!(!name.is_empty());
        victim.refuses("refcount block", at, write);
    }
    // Fields of the header.
    let victim = Victim::new(false);
    let mut header = victim.header.clone();
    header.snapshots.0 = header.l1.0;
    put(&victim.storage, header.l1.0.0, &vec![0; 64 << 10]);
    put(&victim.storage, header.l1.0.0 + 36, &24_u32.to_be_bytes());
    block_on(header.write_fields(&victim.storage)).unwrap();
    let error = write(&victim.open()).unwrap_err();
    assert!(error.to_string().contains("lies there, too"), "{error}");
}

#[test]
fn a_refcount_block_is_not_made_where_a_table_lies() {
    // The refcounts of a block are about 64 clusters of 512 bytes; all are counted, and the L1 table lies behind them.
    let storage = MemoryStorage::growing_to(16 << 20);
    let options = CreateOptions::default().size(64 << 10).cluster_size(512).refcount_bits(64);
    let mut header = block_on(create(&storage, None, &options)).unwrap();
    let victim = Victim { storage, header: header.clone() };
    let ones: Vec<u8> = (0..64).flat_map(|_| 1_u64.to_be_bytes()).collect();
    put(&victim.storage, victim.block(), &ones);
    let table = header.refcount_table.0.0;
    for behind in [64, 64 * 64] {
        // At first the second block is missing; then the whole table is full, and a longer one is needed.
        for entry in 1..behind / 64 {
            let block = (1 << 20) + entry * 512;
            put(&victim.storage, block, &ones);
            put(&victim.storage, table + entry * 8, &block.to_be_bytes());
        }
        let at = behind * 512;
        put(&victim.storage, at, &vec![0; 4096]);
        header.l1.0 = HostOffset(at);
        block_on(header.write_fields(&victim.storage)).unwrap();
        let disk = victim.open();
        let error = block_on(disk.write(GuestOffset(0), filled(7, 512).into())).unwrap_err();
        assert!(error.to_string().contains(&format!("L1 table at {at:#x}")), "{error}");
        assert!(block_on(Header::read(&victim.storage)).unwrap().features.corrupt());
        assert_eq!(victim.storage.contents()[usize::try_from(at).unwrap()..][..512], [0; 512]);
    }
}

#[test]
fn what_was_acknowledged_is_flushed_although_the_mark_of_corruption_cannot_be_written() {
    let corrupt = |victim: &Victim| block_on(Header::read(&victim.storage)).unwrap().features.corrupt();
    let there = GuestOffset(100 * CLUSTER);
    // The mark cannot be written by the request, or by the flush after it either.
    for failures in 1..=2 {
        let victim = Victim::new(false);
        victim.set_entry(COPIED | victim.header.l1.0.0, 0);
        let failing = Failing::only(&[Operation::Write]);
        let image = TestImage::existing(Arc::new(victim.storage.clone())).over(|storage| failing.wrap(storage));
        let disk = image.open();
        block_on(disk.write(there, filled(7, CLUSTER).into())).unwrap();
        failing.fail(0, failures, Fault::Broken);
        let error = WRITE_PART(&disk).unwrap_err();
        assert!(matches!(error, ImageError::Corrupt { .. }), "{error}");
        assert!(!corrupt(&victim));
        for flush in 1..=failures {
            block_on(disk.flush()).unwrap();
            assert_eq!(corrupt(&victim), flush == failures, "flush {flush} of {failures}");
        }
        let opened = victim.open_with(Qcow2Options::default().read_only(true));
        assert!(image::read(&*opened, there.0, 512) == [7; 512], "what was acknowledged is lost");
        WRITE_PART(&disk).unwrap_err();
        block_on(disk.close()).unwrap();
    }
}

#[test]
fn an_image_of_version_2_is_refused_although_it_cannot_be_marked() {
    let storage = MemoryStorage::growing_to(16 << 20);
    let options = CreateOptions::default().size(64 << 20).version(2);
    let header = block_on(create(&storage, None, &options)).unwrap();
    let victim = Victim { storage, header };
    victim.set_refcount(victim.header.l1.0.0, 0);
    let before = victim.storage.contents();
    let disk = victim.open();
    for _ in 0..2 {
        block_on(disk.write(GuestOffset(0), filled(7, 512).into())).unwrap_err();
    }
    block_on(disk.close()).unwrap();
    assert!(victim.storage.contents() == before);
}
