//! A user-mode Linux with limosa's balloon.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use limosa_balloon::{Balloon, Options, Strategy, VhostUserBalloon};
use limosa_memory::{FreePageHinting as _, FreePageSink};
use limosa_testkit::{Uml, UmlGuest, pattern};
use limosa_vhost::{FaultKind, Ram, Server, ServerError, Stopper};
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate};

pub(crate) const MIB: u64 = 1 << 20;

/// MiB of a guest that reports free pages and needs much memory at any time. Linux takes up to 32 blocks of 4 MiB off
/// its free lists and waits until the device has given them back; a guest that has little more than that kills a
/// process if the host is slow.
pub(crate) const REPORTING_MEMORY: u64 = 512;

/// The size of the driver's blocks: the largest ones of Linux's allocator on x86-64 until 6.3.
pub(crate) const BLOCK: u64 = 4 * MIB;

/// Waits until the condition is true.
pub(crate) fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !so() {
        assert!(Instant::now() < end, "still not: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The guest, its balloon and the server between them.
pub(crate) struct Guest {
    pub(crate) balloon: Arc<Balloon>,
    pub(crate) uml: Uml,
    device: Arc<VhostUserBalloon>,
    server: Arc<Server>,
    stopper: Stopper,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
    _folder: tempfile::TempDir,
}

impl Guest {
    /// Boots a guest with this many MiB, and its driver.
    pub(crate) fn start(memory: u64, options: Options) -> Self {
        Self::booted(memory, options, "init_on_alloc=0")
    }

    /// The same, with these words on the kernel's command line.
    pub(crate) fn booted(memory: u64, options: Options, kernel_words: &str) -> Self {
        let folder = limosa_testkit::scratch().unwrap();
        let path = folder.path().join("balloon.sock");
        let balloon = Arc::new(Balloon::new(options));
        let device = Arc::new(VhostUserBalloon::new(balloon.clone(), Strategy::Auto));
        let server = Arc::new(Server::bind(&path, device.clone()).unwrap());
        let (stopper, serving) = (server.stopper(), server.clone());
        let thread = Some(std::thread::spawn(move || serving.serve()));
        let uml = UmlGuest {
            memory,
            devices: vec![(path, 5)],
            modules: vec!["virtio_balloon".into()],
            kernel_words: kernel_words.into(),
            programs: vec![std::env::current_exe().unwrap()],
        };
        let guest = Self { balloon, uml: uml.start().unwrap(), device, server, stopper, thread, _folder: folder };
        until("the driver is there", || guest.balloon.has_driver());
        guest
    }

    /// Starts a program that holds this many MiB of known pages.
    pub(crate) fn hold(&self, mib: u64) {
        let program = std::env::current_exe().unwrap();
        let name = program.file_name().unwrap().to_string_lossy().into_owned();
        self.uml.shell(&pattern::hold_line(&name, "holds_a_pattern_when_asked", mib)).unwrap();
    }

    /// The program's check of its pages.
    pub(crate) fn verify(&self) -> String {
        // The kernel may have printed lines in between.
        let said = self.uml.shell(&pattern::verify_line()).unwrap();
        said.iter().rfind(|line| line.ends_with("pages lost")).expect("a verdict").clone()
    }

    /// Touches this many MiB of the guest's memory, and frees them.
    pub(crate) fn touch(&self, mib: u64) {
        self.uml.shell(&format!("dd if=/dev/urandom of=/tmp/touched bs=1M count={mib} && rm /tmp/touched")).unwrap();
    }

    /// Sets the balloon so that the guest keeps this many bytes, and waits for it.
    pub(crate) fn resize(&self, bytes: u64) {
        self.balloon.set_target(bytes).unwrap();
        until("the balloon has its size", || self.balloon.size().actual == bytes);
    }

    pub(crate) fn ram(&self) -> Arc<Ram> {
        self.device.ram().expect("the guest has shared its memory")
    }

    /// Bytes of the guest's memory that are resident in the host.
    pub(crate) fn resident(&self) -> u64 {
        self.file().metadata().unwrap().blocks() * 512
    }

    /// Bytes that the guest's allocator has in its largest blocks.
    pub(crate) fn in_largest_blocks(&self) -> u64 {
        let zones = self.uml.shell("cat /proc/buddyinfo").unwrap();
        let blocks = zones.iter().filter(|line| line.starts_with("Node")).map(|line| {
            let largest = line.split_whitespace().next_back().expect("a number of blocks");
            largest.parse::<u64>().unwrap()
        });
        blocks.sum::<u64>() * BLOCK
    }

    /// Waits until the guest has reported its largest free blocks, and the host has them back. What is free in smaller
    /// pieces stays.
    pub(crate) fn wait_until_free_blocks_are_given_back(&self) {
        let ram = self.balloon.size().ram;
        until("the largest blocks are given back", || self.resident() + self.in_largest_blocks() <= ram + 2 * BLOCK);
    }

    fn file(&self) -> File {
        self.ram().regions()[0].file().try_clone().unwrap()
    }

    /// Requests a list of free pages and waits for its end.
    pub(crate) fn free_pages(&self) -> Vec<Range<u64>> {
        let list = Arc::new(List::default());
        self.balloon.request_list(list.clone()).unwrap();
        until("the list is complete", || list.is_complete());
        list.ranges()
    }

    /// Bytes that no program and no cache of the guest has.
    pub(crate) fn free_memory(&self) -> u64 {
        self.uml.meminfo("MemFree").unwrap() * 1024
    }

    /// Ends a list, and waits until the guest has as many free bytes as before. It needs them for what comes next.
    pub(crate) fn done(&self, free: u64) {
        self.balloon.return_pages();
        until("the guest has its pages back", || self.free_memory() > free.saturating_sub(32 * MIB));
    }

    /// Numbers of known pages in the guest's memory, each page with its guest address. The guest is stopped.
    pub(crate) fn known_pages(&self) -> Vec<(u64, u64)> {
        let ram = self.ram();
        let mut found = Vec::new();
        let mut bytes = vec![0; 1 << 20];
        for region in ram.regions() {
            let mut at = 0;
            while at < region.length {
                let length = (region.length - at).min(bytes.len() as u64);
                let piece = &mut bytes[..usize::try_from(length).unwrap()];
                region.file().read_exact_at(piece, region.file_offset + at).unwrap();
                for (place, page) in (0..).zip(piece.chunks_exact(4096)) {
                    if let Some(number) = pattern::number_of(page) {
                        found.push((number, region.guest_address + at + place * 4096));
                    }
                }
                at += length;
            }
        }
        found
    }

    /// Discards the pages, as a host does that trusts hints.
    pub(crate) fn discard(&self, ranges: &[Range<u64>]) {
        let ram = self.ram();
        for range in ranges {
            let region = ram
                .regions()
                .iter()
                .find(|region| (region.guest_address..region.guest_address + region.length).contains(&range.start))
                .expect("hints are inside of memory");
            let offset = region.file_offset + (range.start - region.guest_address);
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(region.file(), flags, offset, range.end - range.start).unwrap();
        }
    }

    /// Ends the server at once.
    pub(crate) fn end_server(&mut self) {
        self.stopper.stop();
        self.thread.take().unwrap().join().unwrap().unwrap();
    }

    /// No fault was counted.
    pub(crate) fn no_faults(&self) {
        for fault in [FaultKind::Message, FaultKind::Unknown, FaultKind::Refused, FaultKind::Ring, FaultKind::Device] {
            assert_eq!(self.server.fault_count(fault), 0, "{fault:?}");
        }
        let counters = self.balloon.counters();
        assert_eq!((counters.pages_outside, counters.blocks_outside, counters.failed_discards), (0, 0, 0));
        self.uml.check_alive().unwrap();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stopper.stop();
    }
}

/// A list of free pages.
#[derive(Default)]
pub(crate) struct List {
    got: Mutex<(Vec<Range<u64>>, bool)>,
}

impl List {
    pub(crate) fn is_complete(&self) -> bool {
        self.got.lock().1
    }

    pub(crate) fn ranges(&self) -> Vec<Range<u64>> {
        self.got.lock().0.clone()
    }
}

impl FreePageSink for List {
    fn add_range(&self, range: Range<u64>) {
        self.got.lock().0.push(range);
    }

    fn complete(&self) {
        self.got.lock().1 = true;
    }
}

/// Bytes in ranges that do not overlap.
pub(crate) fn bytes(ranges: &[Range<u64>]) -> u64 {
    let mut sorted = ranges.to_vec();
    sorted.sort_unstable_by_key(|range| range.start);
    assert!(sorted.windows(2).all(|pair| pair[0].end <= pair[1].start), "no page is free twice");
    sorted.iter().map(|range| range.end - range.start).sum()
}
