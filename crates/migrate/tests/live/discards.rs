//! Memory that is given back while its VM is moved: its contents are others then, in every dirty log and of every kind
//! of memory, and what is written to it next is not lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use crate::model::live::{Restless, TestVm, random};
use crate::model::pair;
use crate::model::vm::Vm;
use kvm_ioctls::Kvm;
use limosa_memory::dirty::{
    DirtyLog, DirtyLogs, SoftwareDirtyBitmap, SoftwareDirtyLog, UffdWpAsyncLog, UffdWpSyncLog, VhostLog, Writers,
};
use limosa_memory::dirty::{KvmLog, KvmRingLog, KvmRings, KvmSlots};
use limosa_memory::{BlockOptions, ReleaseMethod};
use limosa_migrate::live::TimeoutStrategy;
use limosa_migrate::{Handle, IncomingOutcome, LiveDestination, LiveOutcome, LiveSource, MigrationParams};
use limosa_page::{PAGE_LEN, PAGE_SIZE, PageNumber, PageRange};
use limosa_testkit::HugePages;

const LENGTH: u64 = 4 << 20;
const HUGE: u64 = 2 << 20;
const METHODS: [ReleaseMethod; 4] =
    [ReleaseMethod::PunchHole, ReleaseMethod::DontNeed, ReleaseMethod::Remove, ReleaseMethod::Free];
/// Rounds that the guest is moved in, before it is stopped.
const ROUNDS: u32 = 200;

/// A log, and whose writes it is tried with in addition to the discards.
enum Sees {
    /// All of this process's.
    All,
    /// Those that are marked.
    Marked(SoftwareDirtyBitmap),
    /// Of those that write here, none: what is named is what was discarded.
    NoWriter,
}

fn logs(vm: &TestVm, kind: &str) -> (Box<dyn DirtyLog>, Sees) {
    let memory = || Arc::clone(&vm.memory);
    let kvm = || Arc::new(Kvm::new().expect("without /dev/kvm, set LIMOSA_SKIP_KVM=1").create_vm().unwrap());
    match kind {
        "write fault" => (Box::new(UffdWpSyncLog::new(memory()).unwrap()), Sees::All),
        "write protect" => (Box::new(UffdWpAsyncLog::new(memory()).unwrap()), Sees::All),
        "explicit" => {
            let log = SoftwareDirtyLog::new(&vm.memory, Writers::VCPUS);
            let marker = log.bitmap();
            (Box::new(log), Sees::Marked(marker))
        }
        "vhost" => (Box::new(VhostLog::new(memory(), |_| Ok(())).unwrap()), Sees::NoWriter),
        "kvm" => (Box::new(KvmLog::new(KvmSlots::register_memory(kvm(), memory()).unwrap())), Sees::NoWriter),
        _ => {
            let vm = kvm();
            let slots = KvmSlots::register_memory(Arc::clone(&vm), memory()).unwrap();
            (Box::new(KvmRingLog::new(KvmRings::enable(&vm, slots, 64 << 10).unwrap())), Sees::NoWriter)
        }
    }
}

/// Gives pages back in every way that the memory takes, and writes some, if the log sees that, until the VM is over.
fn live(vm: &TestVm, sees: &Sees, mut seed: u64) {
    let block = vm.memory.block(0).unwrap();
    let host = block.page_size() / PAGE_SIZE;
    let methods: Vec<_> = METHODS.into_iter().filter(|method| block.supports_release(*method)).collect();
    while !vm.over.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_micros(20));
        seed = random(seed);
        let stopped = vm.stopped.read().unwrap();
        if *stopped {
            continue;
        }
        let fill = u8::try_from(seed >> 40 & 0xff).unwrap();
        let first = (seed >> 20) % (LENGTH / PAGE_SIZE);
        let page = PageRange::starting_at(PageNumber(first), 1);
        let whole = PageRange::starting_at(PageNumber(first / host * host), host);
        match (seed >> 8) % 5 {
            0 => assert!(block.discard(page).is_ok()),
            1 => assert!(block.discard(whole).is_ok()),
            // A private copy of a file takes none of them.
            2 if !methods.is_empty() => {
                let method = methods[usize::try_from(seed >> 50).unwrap() % methods.len()];
                assert!(block.release(whole, method).is_ok());
            }
            _ => match sees {
                Sees::NoWriter => {}
                Sees::All => block.write(page.start.offset(), &[fill; PAGE_LEN]).unwrap(),
                Sees::Marked(marker) => {
                    block.write(page.start.offset(), &[fill; PAGE_LEN]).unwrap();
                    marker.mark(0, page);
                }
            },
        }
    }
}

fn no_discard_is_lost(kind: &str, memory: &str, block: impl Fn() -> BlockOptions) {
    let vm = TestVm::of(vec![block()]);
    let ram = vm.memory.block(0).unwrap();
    ram.write(0, &vec![0xee; usize::try_from(LENGTH).unwrap()]).unwrap();
    let (log, sees) = logs(&vm, kind);
    let logs = DirtyLogs::new(Writers::VCPUS, vec![log, Box::new(Restless(8))]).unwrap();
    let destination = Vm::of(vec![BlockOptions::memfd("ram", LENGTH)]);
    let (near, far) = pair();
    let handle = Handle::new();
    let params = MigrationParams::default()
        .downtime_limit(Duration::ZERO)
        .stalled_rounds(Some(ROUNDS))
        .timeout_strategy(TimeoutStrategy::Pause)
        .answer_timeout(Duration::from_secs(20));
    let (outcome, arrival) = thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let handle = Handle::new();
            matches!(LiveDestination::new(&destination, far, &handle).run(), IncomingOutcome::Running(_))
        });
        for seed in 1..3 {
            let (vm, sees) = (&vm, &sees);
            scope.spawn(move || live(vm, sees, seed));
        }
        let outcome = LiveSource::new(&vm, logs, near, &handle).options(params).destination_zeroed(true).run();
        vm.over.store(true, Ordering::Relaxed);
        (outcome, receiving.join().unwrap())
    });
    let LiveOutcome::Completed(stats) = outcome else { panic!("{kind}, {memory}: {outcome:?}") };
    assert!(arrival, "{kind}, {memory}: it has not arrived");
    assert!(stats.rounds.len() > usize::try_from(ROUNDS / 2).unwrap(), "{kind}, {memory}: {stats:#?}");
    let (here, mut there) = (vm.contents(0), vec![0; usize::try_from(LENGTH).unwrap()]);
    destination.memory.block(0).unwrap().read(0, &mut there).unwrap();
    let wrong = here.chunks(PAGE_LEN).zip(there.chunks(PAGE_LEN)).filter(|(here, there)| here != there).count();
    assert_eq!(wrong, 0, "pages that are not as they were: {kind}, {memory}");
}

fn in_all_memory(kind: &str) {
    let name = "ram";
    no_discard_is_lost(kind, "private", || BlockOptions::anonymous(name, LENGTH));
    no_discard_is_lost(kind, "shared", || BlockOptions::memfd(name, LENGTH));
    no_discard_is_lost(kind, "a private copy", || BlockOptions::memfd(name, LENGTH).private());
    let _reserved = HugePages::reserve(2 * LENGTH).unwrap();
    no_discard_is_lost(kind, "private huge pages", || BlockOptions::anonymous(name, LENGTH).huge_pages(HUGE));
    no_discard_is_lost(kind, "shared huge pages", || BlockOptions::memfd(name, LENGTH).huge_pages(HUGE));
}

#[test]
fn a_log_with_a_fault_handler_loses_neither_a_discard_nor_what_is_written_behind_it() {
    in_all_memory("write fault");
}

#[test]
fn asynchronous_write_protection_loses_neither_a_discard_nor_what_is_written_behind_it() {
    in_all_memory("write protect");
}

#[test]
fn a_log_that_writers_keep_reports_discards_that_no_writer_marks() {
    in_all_memory("explicit");
}

#[test]
fn the_log_of_back_ends_reports_discards() {
    in_all_memory("vhost");
}

#[test]
fn the_logs_of_kvm_hear_of_discards() {
    if !limosa_testkit::skipped("LIMOSA_SKIP_KVM") {
        in_all_memory("kvm");
        in_all_memory("kvm ring");
    }
}
