//! Files and memory registered with rings, as the kernel reports them (`/proc/self/fdinfo`).

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use limosa_storage::{
    Buffer, CacheMode, Create, FileOptions, FileStorage, Io, LockPolicy, Storage, StorageError, block_on,
};
use limosa_testkit::own_test_name;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use tempfile::TempDir;

/// More reads than it takes for a file to get slots.
const OFTEN: u64 = 100;
const BLOCK: usize = 4096;

/// Whether the kernel supports everything that is checked here, and shows registered files by path: Linux 6.12. Prints
/// a line if not.
fn kernel_registers() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-', '\n']).map(|number| number.parse::<u32>().unwrap_or_default());
    let is_enough = (numbers.next().unwrap(), numbers.next().unwrap()) >= (6, 12);
    if !is_enough {
        eprintln!("skipped: Linux {} is older than 6.12", release.trim());
    }
    is_enough
}

fn made(path: &Path) -> Arc<FileStorage> {
    let options = FileOptions {
        cache: CacheMode::None,
        io: Io::Uring,
        create: Create::IfMissing,
        lock: LockPolicy::Required,
        ..FileOptions::default()
    };
    FileStorage::open(path, &options).unwrap()
}

/// Writes a block and reads it again and again.
fn read_often(storage: &Arc<FileStorage>, byte: u8) {
    let check = || -> Result<(), StorageError> {
        block_on(storage.write(0, Buffer::from_slice(&[byte; BLOCK]).into()))?;
        for _ in 0..OFTEN {
            let found = Buffer::zeroed(BLOCK);
            block_on(storage.read(0, found.clone().into()))?;
            assert_eq!(found.to_vec(), [byte; BLOCK]);
        }
        Ok(())
    };
    check().unwrap();
}

/// Returns the kernel's report of this process's rings.
fn rings() -> Vec<String> {
    let is_ring = |link: &Path| fs::read_link(link).is_ok_and(|target| target.to_string_lossy().contains("[io_uring]"));
    let tell = |link: fs::DirEntry| {
        if !is_ring(&link.path()) {
            return None;
        }
        // The tables are left out while the ring is in use.
        for _ in 0..1000 {
            let answer = fs::read_to_string(Path::new("/proc/self/fdinfo").join(link.file_name())).ok()?;
            if answer.contains("UserBufs") {
                return Some(answer);
            }
            thread::sleep(Duration::from_millis(1));
        }
        None
    };
    fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(tell).collect()
}

/// Slots of all rings that hold a file beneath this path.
fn slots(path: &Path) -> usize {
    let path = path.to_string_lossy().into_owned();
    rings().iter().flat_map(|ring| ring.lines()).filter(|line| line.contains(&path)).count()
}

/// A thread that has a ring, and executes jobs.
struct Worker {
    jobs: Option<Sender<Box<dyn FnOnce() + Send>>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn new() -> Self {
        let (jobs, todo) = channel::<Box<dyn FnOnce() + Send>>();
        let thread = thread::spawn(move || todo.into_iter().for_each(|job| job()));
        Self { jobs: Some(jobs), thread: Some(thread) }
    }

    fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, outcome) = channel();
        let job = Box::new(move || done.send(job()).unwrap());
        self.jobs.as_ref().unwrap().send(job).unwrap();
        outcome.recv().unwrap()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs.take();
        _ = self.thread.take().map(JoinHandle::join);
    }
}

#[test]
fn a_file_has_a_slot_in_each_ring_that_reads_it_until_it_is_dropped_on_whatever_thread() {
    if !kernel_registers() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("disk.raw");
    let (first, second) = (Worker::new(), Worker::new());
    for round in 0..3 {
        let storage = made(&path);
        for worker in [&first, &second] {
            let storage = Arc::clone(&storage);
            worker.run(move || read_often(&storage, round));
        }
        assert_eq!(slots(&path), 2);
        // Neither of the two rings' threads.
        drop(storage);
        assert_eq!(slots(&path), 0);
        // It is not open any more, so another opener gets its lock.
        assert!(!is_open(&path));
        drop(made(&path));
    }
}

/// Whether this process has a descriptor of it.
fn is_open(path: &Path) -> bool {
    fs::read_dir("/proc/self/fd").unwrap().flatten().any(|link| fs::read_link(link.path()).is_ok_and(|it| it == path))
}

#[test]
fn a_thread_that_ends_leaves_files_to_the_others() {
    if !kernel_registers() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("disk.raw");
    let (storage, stays) = (made(&path), Worker::new());
    for round in 0..3 {
        let goes = Worker::new();
        for worker in [&goes, &stays] {
            let storage = Arc::clone(&storage);
            worker.run(move || read_often(&storage, round));
        }
        assert_eq!(slots(&path), 2);
        drop(goes);
        assert_eq!(slots(&path), 1);
    }
    drop(storage);
    assert_eq!(slots(&path), 0);
}

#[test]
fn files_that_find_no_slot_are_read_all_the_same_and_slots_are_used_again() {
    if !kernel_registers() {
        return;
    }
    const SLOTS: usize = 64;
    let folder = TempDir::new().unwrap();
    let worker = Worker::new();
    let open = |from: usize, to: usize| -> Vec<_> {
        (from..to).map(|number| made(&folder.path().join(format!("{number}.raw")))).collect()
    };
    let read = |files: &[Arc<FileStorage>]| {
        let files = files.to_vec();
        worker.run(move || files.iter().zip(1..).for_each(|(file, byte)| read_often(file, byte)));
    };
    let mut files = open(0, SLOTS + 6);
    read(&files);
    assert_eq!(slots(folder.path()), SLOTS);
    // Some of those that have one, and some that have none.
    drop(files.drain(SLOTS - 2..).collect::<Vec<_>>());
    assert_eq!(slots(folder.path()), SLOTS - 2);
    drop(files.drain(..10).collect::<Vec<_>>());
    assert_eq!(slots(folder.path()), SLOTS - 12);
    files.extend(open(100, 110));
    read(&files);
    assert_eq!(slots(folder.path()), SLOTS - 2);
    drop(files);
    assert_eq!(slots(folder.path()), 0);
}

#[test]
fn files_are_dropped_while_others_are_read_in_the_same_rings() {
    if !kernel_registers() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let kept = made(&folder.path().join("kept.raw"));
    block_on(kept.write(0, Buffer::from_slice(&[9; BLOCK]).into())).unwrap();
    let workers: Vec<_> = (0..3).map(|_| Worker::new()).collect();
    let begin = Arc::new(Barrier::new(workers.len()));
    for (number, worker) in workers.iter().enumerate() {
        let (kept, begin) = (Arc::clone(&kept), Arc::clone(&begin));
        let path = folder.path().join(format!("{number}.raw"));
        let job = move || {
            begin.wait();
            for round in 1..20 {
                let storage = made(&path);
                read_often(&storage, round);
                // Under way when the storage is dropped, by a thread that has nothing to do with the ring.
                let found: Vec<_> = (0..16).map(|_| Buffer::zeroed(BLOCK)).collect();
                let own = found.iter().map(|found| storage.read(0, found.clone().into()));
                let own: Vec<_> = own.collect();
                let others: Vec<_> = found.iter().map(|_| kept.read(0, Buffer::zeroed(BLOCK).into())).collect();
                let dropper = thread::spawn(move || drop(storage));
                let all = futures_util::future::join_all(own.into_iter().chain(others));
                block_on(all).into_iter().for_each(Result::unwrap);
                dropper.join().unwrap();
                assert!(found.iter().all(|found| found.to_vec() == [round; BLOCK]));
            }
        };
        worker.jobs.as_ref().unwrap().send(Box::new(job)).unwrap();
    }
    for worker in &workers {
        worker.run(|| ());
    }
    // The three rings know what is there yet, and nothing else.
    assert_eq!(slots(folder.path()), workers.len());
    drop(kept);
    assert_eq!(slots(folder.path()), 0);
}

/// Runs one test of this file in a child process, marked by an environment variable.
fn alone(test: &str, variable: &str, value: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(variable, value);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// The ring that knows a file: whether it knows the memory of buffers.
fn knows_buffers(path: &Path) -> bool {
    let path = path.to_string_lossy().into_owned();
    let answer: Vec<_> = rings().into_iter().filter(|ring| ring.contains(&path)).collect();
    assert_eq!(answer.len(), 1, "{answer:?}");
    let count = answer.iter().flat_map(|ring| ring.lines()).find_map(|line| line.strip_prefix("UserBufs:"));
    count.unwrap().trim() == "1"
}

/// Makes a ring execute more requests than are needed to register the memory of buffers.
fn use_buffers(storage: &Arc<FileStorage>) {
    for round in 0..50u8 {
        let writes = (0..100u64).map(|at| storage.write(at * 4096, Buffer::from_slice(&[round; BLOCK]).into()));
        let writes: Vec<_> = writes.collect();
        block_on(futures_util::future::join_all(writes)).into_iter().for_each(Result::unwrap);
        let found: Vec<_> = (0..100).map(|_| Buffer::zeroed(BLOCK)).collect();
        let reads = found.iter().zip(0u64..).map(|(found, at)| storage.read(at * 4096, found.clone().into()));
        let reads: Vec<_> = reads.collect();
        block_on(futures_util::future::join_all(reads)).into_iter().for_each(Result::unwrap);
        assert!(found.iter().all(|found| found.to_vec() == [round; BLOCK]));
    }
}

#[test]
fn rings_that_are_used_much_know_buffers_and_others_take_that_over() {
    if !kernel_registers() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let file = |name: &str| (made(&folder.path().join(name)), folder.path().join(name));
    let workers = [Worker::new(), Worker::new(), Worker::new()];
    let [(first, first_path), (second, second_path), (third, third_path)] = ["1", "2", "3"].map(file);
    workers[0].run(move || {
        use_buffers(&first);
        assert!(knows_buffers(&first_path));
    });
    // From the first, with fewer requests than it took that one.
    workers[1].run(move || {
        read_often(&second, 1);
        assert!(knows_buffers(&second_path));
    });
    // From the second, when the first is gone.
    let [first, _second, last] = workers;
    drop(first);
    last.run(move || {
        read_often(&third, 1);
        assert!(knows_buffers(&third_path));
    });
}

#[test]
fn requests_are_the_same_when_there_is_no_memory_left_that_rings_know() {
    let folder = TempDir::new().unwrap();
    let storage = made(&folder.path().join("disk.raw"));
    let worker = Worker::new();
    worker.run(move || {
        use_buffers(&storage);
        // More than there is of it, some larger than its largest piece, and slices that are no whole pieces.
        let sizes = [4096, 12288, 65536, 262_144, 1 << 20];
        let held: Vec<_> = (0..60usize).map(|number| Buffer::from_slice(&vec![1; sizes[number % 5]])).collect();
        let write = |buffer: &Buffer, at: u64| storage.write(at, buffer.slice(0..8192).into());
        let writes = held.iter().zip(0u64..).map(|(buffer, at)| write(buffer, at * 8192)).collect::<Vec<_>>();
        block_on(futures_util::future::join_all(writes)).into_iter().for_each(Result::unwrap);
        let reads = held.iter().zip(0u64..).map(|(buffer, at)| storage.read(at * 8192, buffer.slice(512..4096).into()));
        block_on(futures_util::future::join_all(reads.collect::<Vec<_>>())).into_iter().for_each(Result::unwrap);
        assert!(held.iter().all(|buffer| buffer.to_vec().iter().all(|byte| *byte == 1)));
    });
}

#[test]
fn a_process_that_may_not_pin_memory_goes_on_without() {
    if !kernel_registers() {
        return;
    }
    const FILE: &str = "LIMOSA_TEST_PINNING_FILE";
    let this = own_test_name!(a_process_that_may_not_pin_memory_goes_on_without);
    if let Ok(path) = std::env::var(FILE) {
        // What root may pin in spite of the limit.
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::IPC_LOCK);
        set_capabilities(None, sets).unwrap();
        // Enough for rings.
        let limit = Rlimit { current: Some(1 << 20), maximum: getrlimit(Resource::Memlock).maximum };
        setrlimit(Resource::Memlock, limit).unwrap();
        let storage = made(Path::new(&path));
        use_buffers(&storage);
        assert!(!knows_buffers(Path::new(&path)));
        return;
    }
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("disk.raw").to_string_lossy().into_owned();
    let outcome = alone(this, FILE, &path).output().unwrap();
    assert!(outcome.status.success(), "{}", String::from_utf8_lossy(&outcome.stdout));
}

#[test]
fn a_process_that_is_killed_leaves_no_lock() {
    if !kernel_registers() {
        return;
    }
    const FILE: &str = "LIMOSA_TEST_LOCKED_FILE";
    if let Ok(path) = std::env::var(FILE) {
        let storage = made(Path::new(&path));
        read_often(&storage, 5);
        assert_eq!(slots(Path::new(&path)), 1);
        std::io::stdout().write_all(b"\nready\n").unwrap();
        std::io::stdout().flush().unwrap();
        // Until it is killed.
        _ = std::io::stdin().read_to_end(&mut Vec::new());
        return;
    }
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("disk.raw");
    for _ in 0..5 {
        let mut child = alone(own_test_name!(a_process_that_is_killed_leaves_no_lock), FILE, &path.to_string_lossy())
            .spawn()
            .unwrap();
        let (mut answer, mut byte) = (Vec::new(), [0]);
        let stdout = child.stdout.as_mut().unwrap();
        while !answer.ends_with(b"\nready\n") {
            assert_eq!(stdout.read(&mut byte).unwrap(), 1, "{}", String::from_utf8_lossy(&answer));
            answer.push(byte[0]);
        }
        child.kill().unwrap();
        child.wait().unwrap();
        drop(made(&path));
    }
}
