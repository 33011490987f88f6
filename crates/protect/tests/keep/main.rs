//! A keeper whose primary is a VMM that links limosa: it has the VM as it was at the newest checkpoint that counts.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Listener, Options};
use limosa_memory::dirty::{DirtyLogs, SoftwareDirtyBitmap, SoftwareDirtyLog, Writers};
use limosa_memory::{BlockOptions, GuestMemory};
use limosa_migrate::checkpoints::CheckpointSourceOptions;
use limosa_migrate::control::Stop;
use limosa_migrate::{Handle, LiveSource, LiveVm, VmError};
use limosa_page::{PageNumber, PageRange};
use limosa_protect::{KeepEvent, KeepOptions, KeepRequest, keep};
use limosa_qemu::JobContext;
use limosa_snapshot::{CHECKPOINT_NAME, Snapshot};
use limosa_stream::{Configuration, DeviceSections};

const PAGES: u64 = 50;
const SOON: Duration = Duration::from_secs(30);

/// A VM that counts: each number is written to a page, in turn.
struct CountingVm {
    memory: GuestMemory,
    stopped: RwLock<bool>,
    count: AtomicU64,
    over: AtomicBool,
}

impl CountingVm {
    fn new() -> Self {
        let memory = GuestMemory::new(vec![BlockOptions::memfd("ram", PAGES * 4096).map().unwrap()]).unwrap();
        Self { memory, stopped: RwLock::new(false), count: AtomicU64::new(0), over: AtomicBool::new(false) }
    }

    fn work(&self, marker: &SoftwareDirtyBitmap) {
        while !self.over.load(Ordering::Relaxed) {
            let stopped = self.stopped.read().unwrap();
            if !*stopped {
                let number = self.count.load(Ordering::SeqCst) + 1;
                let page = number % PAGES;
                self.memory.block(0).unwrap().write(page * 4096, &number.to_le_bytes()).unwrap();
                marker.mark(0, PageRange::starting_at(PageNumber(page), 1));
                self.count.store(number, Ordering::SeqCst);
            }
            drop(stopped);
            thread::sleep(Duration::from_micros(100));
        }
    }
}

impl LiveVm for CountingVm {
    fn configuration(&self) -> Configuration {
        Configuration::new("counting")
    }

    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    fn writers(&self) -> Writers {
        Writers::VCPUS
    }

    fn pause(&self) -> Result<(), VmError> {
        *self.stopped.write().unwrap() = true;
        Ok(())
    }

    fn resume(&self) -> Result<(), VmError> {
        *self.stopped.write().unwrap() = false;
        Ok(())
    }

    fn device_sections(&self) -> Result<DeviceSections, VmError> {
        let mut sections = DeviceSections::new();
        sections.push("counter", 0, 1, &self.count.load(Ordering::SeqCst).to_be_bytes())?;
        Ok(sections)
    }
}

/// The number of a page, 0 if it was never written.
fn number_of(snapshot: &Snapshot, page: u64) -> u64 {
    let mut bytes = vec![0; 4096];
    snapshot.read_pages(0, PageRange::starting_at(PageNumber(page), 1), &mut bytes).unwrap();
    u64::from_le_bytes(*bytes.first_chunk().unwrap())
}

#[test]
fn a_vmm_that_links_limosa_is_kept_as_qemu_is() {
    let folder = tempfile::tempdir().unwrap();
    let uri = format!("unix:{}", folder.path().join("keeper").display()).parse().unwrap();
    let (listener, kept) = (Listener::bind(&uri, &Options::default()).unwrap(), folder.path().join("kept"));
    let keeper = Handle::new();
    let (checkpoints, ended) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let vm = CountingVm::new();
    let log = SoftwareDirtyLog::new(&vm.memory, Writers::VCPUS);
    let marker = log.bitmap();
    let logs = DirtyLogs::new(Writers::VCPUS, vec![Box::new(log)]).unwrap();
    let event = |event: &KeepEvent<'_>| match event {
        KeepEvent::Kept(_) => drop(checkpoints.fetch_add(1, Ordering::SeqCst)),
        KeepEvent::Ended { newest, farewell, .. } => ended.lock().unwrap().push((*newest, *farewell)),
        _ => {}
    };
    let (options, notice) = (KeepOptions::default(), |line: &str| println!("{line}"));
    let (listener, directory, watch) = (&listener, kept.as_path(), JobContext::new(&keeper, &notice));
    let request = KeepRequest { listener, directory, options: &options, standby: None, watch, event: &event };
    let (report, made) = thread::scope(|scope| {
        let keeping = scope.spawn(move || keep(request));
        scope.spawn(|| vm.work(&marker));
        let line = UnixStream::connect(folder.path().join("keeper")).unwrap();
        let cut = line.try_clone().unwrap();
        let channel = Channel::from_fd(line.into()).unwrap();
        let source = scope.spawn(|| {
            let mut options = CheckpointSourceOptions::default();
            options.every = Duration::from_millis(5);
            LiveSource::new(&vm, logs, channel, &Handle::new()).make_checkpoints(&options)
        });
        let begun = Instant::now();
        while checkpoints.load(Ordering::SeqCst) < 20 {
            assert!(begun.elapsed() < SOON && !source.is_finished(), "{:?}", source.join());
            thread::sleep(Duration::from_millis(1));
        }
        // Its host fails.
        cut.shutdown(Shutdown::Both).unwrap();
        let made = source.join().unwrap();
        vm.over.store(true, Ordering::Relaxed);
        while ended.lock().unwrap().is_empty() {
            assert!(begun.elapsed() < SOON);
            thread::sleep(Duration::from_millis(1));
        }
        keeper.control.stop(Stop::Cancel);
        (keeping.join().unwrap().unwrap(), made)
    });
    let newest = checkpoints.load(Ordering::SeqCst);
    assert_eq!(*ended.lock().unwrap(), [(Some(newest), None)]);
    assert_eq!((report.series, report.checkpoints), (1, newest));
    // It may have stored one whose word was lost.
    assert!(made.acknowledged.is_some_and(|last| last == newest || last + 1 == newest), "{made:?}, {newest}");
    let snapshot = Snapshot::open(&kept.join(CHECKPOINT_NAME)).unwrap();
    assert_eq!(snapshot.manifest().unwrap().checkpoint, Some(newest));
    snapshot.check_restorable().unwrap();
    snapshot.verify_all().unwrap();
    let numbers: Vec<_> = (0..PAGES).map(|page| number_of(&snapshot, page)).collect();
    let count = *numbers.iter().max().unwrap();
    let expected = (0..PAGES).map(|page| count - (count + PAGES - page) % PAGES);
    assert!(count > PAGES, "{count}: each page was written");
    assert_eq!(numbers, expected.collect::<Vec<_>>(), "all of one instant");
    let state = count.to_be_bytes();
    assert!(snapshot.device_tail().windows(8).any(|bytes| bytes == state), "the device is of the same instant");
}
