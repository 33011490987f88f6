//! The same memory through `vm-memory` and through blocks: contents, dirty marks, and who keeps it mapped.
#![cfg(feature = "vm-memory")]

use std::fs::File;
use std::sync::Arc;

use limosa_memory::dirty::{DirtyLog, DirtyPages, SoftwareDirtyLog, Writers};
use limosa_memory::rust_vmm::{DirtyMarks, attach_dirty_bitmap, export, import};
use limosa_memory::{BlockOptions, GuestMemory, GuestRegion, MemoryError};
use limosa_page::{PAGE_SIZE, PageNumber, PageRange, error_with_causes};
use limosa_testkit::HugePages;
use proptest::prelude::*;
use vm_memory::bitmap::Bitmap as _;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Bytes as _, FileOffset, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
    GuestRegionMmap,
};

const HIGH: u64 = 4 << 30;

fn range(start: u64, pages: u64) -> PageRange {
    PageRange::starting_at(PageNumber(start), pages)
}

/// One block that the guest sees below and above 4 GiB.
fn split_memory() -> Arc<GuestMemory> {
    let block = BlockOptions::memfd("pc.ram", 64 * PAGE_SIZE).map().unwrap();
    let regions = vec![
        GuestRegion { guest_address: 0, block: 0, pages: range(0, 16) },
        GuestRegion { guest_address: HIGH, block: 0, pages: range(16, 48) },
    ];
    Arc::new(GuestMemory::with_regions(vec![block], regions).unwrap())
}

#[test]
fn what_devices_write_is_in_the_blocks_and_stays_mapped_with_either() {
    let memory = split_memory();
    let devices = export(&memory).unwrap();
    devices.write_slice(b"contents", GuestAddress(HIGH + 5 * PAGE_SIZE)).unwrap();
    let mut bytes = [0; 8];
    memory.block(0).unwrap().read(21 * PAGE_SIZE, &mut bytes).unwrap();
    assert_eq!(&bytes, b"contents");
    drop(memory);
    let mut again = [0; 8];
    devices.read_slice(&mut again, GuestAddress(HIGH + 5 * PAGE_SIZE)).unwrap();
    assert_eq!(&again, b"contents");
    assert!(
        devices.write_slice(b"contents", GuestAddress(16 * PAGE_SIZE - 4)).is_err(),
        "no memory behind the first region"
    );
    // Another process could map what the device models have.
    let region = devices.find_region(GuestAddress(HIGH)).unwrap();
    assert_eq!(region.file_offset().unwrap().start(), 16 * PAGE_SIZE);
}

#[test]
fn mappings_of_a_vmm_become_blocks_of_their_kind() {
    let file = |bytes: u64| {
        let memfd = BlockOptions::memfd("x", bytes).map().unwrap();
        File::from(memfd.file().unwrap().0.try_clone_to_owned().unwrap())
    };
    let ranges = vec![
        (GuestAddress(0), 16 * 4096, None),
        (GuestAddress(HIGH), 8 * 4096, Some(FileOffset::new(file(32 * PAGE_SIZE), 4 * PAGE_SIZE))),
    ];
    let devices = GuestMemoryMmap::<()>::from_ranges_with_files(ranges).unwrap();
    let memory = import(&devices, |at| format!("ram@{:#x}", at.0)).unwrap();
    let (low, high) = (memory.block(0).unwrap(), memory.block(1).unwrap());
    assert_eq!((low.name(), low.len(), low.is_shared()), ("ram@0x0", 16 * PAGE_SIZE, false));
    assert_eq!((high.name(), high.len(), high.is_shared()), ("ram@0x100000000", 8 * PAGE_SIZE, true));
    assert_eq!(high.file().map(|(_, offset)| offset), Some(4 * PAGE_SIZE));
    assert_eq!(memory.page_at(HIGH + 4096), Some((1, PageNumber(1))));

    devices.write_slice(b"contents", GuestAddress(HIGH + 3 * PAGE_SIZE)).unwrap();
    devices.write_slice(b"contents", GuestAddress(3 * PAGE_SIZE)).unwrap();
    drop(devices);
    for block in memory.blocks() {
        let mut bytes = [0; 8];
        block.read(3 * PAGE_SIZE, &mut bytes).unwrap();
        assert_eq!(&bytes, b"contents");
        assert_eq!(block.populated(block.pages()).unwrap().runs().collect::<Vec<_>>(), [range(3, 1)]);
        assert_eq!(block.discard(range(3, 1)).unwrap().given_back, 1);
        block.read(3 * PAGE_SIZE, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 8]);
    }
}

fn region(flags: i32, length: usize) -> GuestMemoryMmap {
    let builder = MmapRegionBuilder::<()>::new(length).with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
    let region = builder.with_mmap_flags(flags | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE).build().unwrap();
    GuestMemoryMmap::from_regions(vec![GuestRegionMmap::new(region, GuestAddress(0)).unwrap()]).unwrap()
}

#[test]
fn shared_memory_without_a_descriptor_is_given_back_through_its_mapping() {
    let memory = import(&region(libc::MAP_SHARED, 16 * 4096), |_| "ram".into()).unwrap();
    let block = memory.block(0).unwrap();
    block.write(5 * PAGE_SIZE, b"contents").unwrap();
    assert_eq!(block.populated(block.pages()).unwrap().count(), 16, "there is no file that could be asked");
    assert_eq!(block.discard(range(4, 4)).unwrap().given_back, 4);
    let mut bytes = [0; 8];
    block.read(5 * PAGE_SIZE, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 8]);
}

#[test]
fn huge_pages_are_known_as_such() {
    let _pages = HugePages::reserve(4 << 20).unwrap();
    let size = |flags| import(&region(flags, 4 << 20), |_| "ram".into()).unwrap().block(0).unwrap().page_size();
    assert_eq!(size(libc::MAP_PRIVATE), PAGE_SIZE);
    assert_eq!(size(libc::MAP_PRIVATE | libc::MAP_HUGETLB | 21 << 26), 2 << 20);
    assert_eq!(size(libc::MAP_PRIVATE | libc::MAP_HUGETLB), 2 << 20, "the usual size of this machine");
}

#[test]
fn memory_that_is_not_whole_pages_or_not_the_same_is_refused() {
    let odd = GuestMemoryMmap::<DirtyMarks>::from_ranges(&[(GuestAddress(0), 4096 + 512)]).unwrap();
    assert!(matches!(import(&odd, |_| "ram".into()), Err(MemoryError::Layout { .. })));
    let twice = [(GuestAddress(0), 4096), (GuestAddress(HIGH), 4096)];
    let devices = GuestMemoryMmap::<DirtyMarks>::from_ranges(&twice).unwrap();
    let error = error_with_causes(&import(&devices, |_| "ram".into()).unwrap_err());
    assert!(error.contains("two blocks with this name"), "{error}");
    let other = split_memory();
    let marker = SoftwareDirtyLog::new(&other, Writers::DEVICES).bitmap();
    assert!(attach_dirty_bitmap(&devices, &other, &marker).unwrap_err().to_string().contains("guest address 0x0"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_page_that_a_device_writes_is_marked_and_no_other(
        writes in prop::collection::vec((prop::bool::ANY, 0u64..48 * PAGE_SIZE, 1usize..20_000), 0..12),
    ) {
        let memory = split_memory();
        let devices = export(&memory).unwrap();
        let mut log = SoftwareDirtyLog::new(&memory, Writers::DEVICES);
        attach_dirty_bitmap(&devices, &memory, &log.bitmap()).unwrap();
        devices.write_slice(&[1], GuestAddress(0)).unwrap();
        log.start().unwrap();
        let mut expected = DirtyPages::new(&memory);
        for (high, at, length) in writes {
            let (address, first, pages) = if high { (HIGH, 16, 48) } else { (0, 0, 16) };
            let at = at % (pages * PAGE_SIZE);
            let length = length.min(usize::try_from(pages * PAGE_SIZE - at).unwrap());
            devices.write_slice(&vec![7; length], GuestAddress(address + at)).unwrap();
            let bytes = first * PAGE_SIZE + at..first * PAGE_SIZE + at + length as u64;
            expected.add(0, PageRange::covering(&bytes));
        }
        for region in devices.iter() {
            for page in 0..region.len() / PAGE_SIZE {
                let known = memory.page_at(region.start_addr().0 + page * PAGE_SIZE).unwrap().1;
                let marked = region.bitmap().dirty_at(usize::try_from(page * PAGE_SIZE).unwrap());
                prop_assert_eq!(marked, expected.block(0).unwrap().get(known));
            }
        }
        let mut found = DirtyPages::new(&memory);
        log.fetch(&mut found).unwrap();
        prop_assert_eq!(found, expected);
    }
}
