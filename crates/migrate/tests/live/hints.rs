//! Free pages that the guest reports while it is moved: they are not sent, and nothing that it writes is lost, in
//! whichever way it does with what it has called free.
//!
//! Cases follow from their seeds. `LIMOSA_CHAOS_TRIALS=N` runs N of each kind, `LIMOSA_CHAOS_SEED=S` begins with
//! another seed.

use crate::model;
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::model::InOneLine;
use crate::model::heap::Heap;
use crate::model::live::{At, Destination, Does, TestVm, random};
use crate::model::pair;
use crate::model::vm::Vm;
use limosa_channel::Channel;
use limosa_memory::dirty::{DirtyLogs, Writers};
use limosa_memory::{BlockOptions, FreePageHinting, FreePageSink, FreePagesError, GuestMemory, GuestRegion};
use limosa_migrate::control::Stop;
use limosa_migrate::live::{PostcopyMode, RecordWriteMode, TimeoutStrategy, ZeroCheck};
use limosa_migrate::multifd::{MultifdOptions, MultifdSourceOptions};
use limosa_migrate::stats::LiveStats;
use limosa_migrate::{Handle, IncomingOutcome, LiveDestination, LiveOutcome, LiveSource, MigrationParams};
use limosa_page::{PAGE_SIZE, PageRange};
use limosa_stream::multifd::{INITIAL_LEN, InitialPacket};

/// Where the guest sees its second block.
const ABOVE: u64 = 4 << 30;

fn blocks(pages: [u64; 2]) -> Vec<BlockOptions> {
    [("low", pages[0]), ("high", pages[1])].map(|(name, pages)| BlockOptions::memfd(name, pages * PAGE_SIZE)).into()
}

/// A VM whose guest sees both blocks; all have contents.
fn vm(pages: [u64; 2]) -> TestVm {
    let mapped = blocks(pages).into_iter().map(|options| options.map().unwrap()).collect();
    let region =
        |block: usize, guest_address| GuestRegion { guest_address, block, pages: PageRange::whole_block(pages[block]) };
    let memory = GuestMemory::with_regions(mapped, vec![region(0, 0), region(1, ABOVE)]).unwrap();
    let vm = TestVm { memory: Arc::new(memory), ..TestVm::new(&[1]) };
    (0..2).for_each(|block| vm.fill(block, |_| true));
    vm
}

/// Receives a VM on a main channel and on multifd channels, to the end.
fn receive(vm: &Vm, main: Channel, page_channels: Vec<Channel>) -> IncomingOutcome<'_, Vm> {
    for channel in &page_channels {
        let mut first = [0; INITIAL_LEN];
        channel.read_exact(&mut first).unwrap();
        InitialPacket::decode(&first).unwrap();
    }
    let handle = Handle::new();
    LiveDestination::new(vm, main, &handle).channels(page_channels, MultifdOptions::default()).run()
}

/// How many cases, and from which seed on.
fn seeds(usual: u64) -> Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let first = number("LIMOSA_CHAOS_SEED").unwrap_or(1);
    first..first + number("LIMOSA_CHAOS_TRIALS").unwrap_or(usual)
}

/// One migration of a guest with a heap. Everything follows from a seed.
#[derive(Debug)]
struct Case {
    seed: u64,
    channels: usize,
    fresh: bool,
    zero_check: ZeroCheck,
    record_write: RecordWriteMode,
    pages: [u64; 2],
    /// Pages of a piece of the heap.
    each: u64,
    hint_wait: Duration,
    hint_pages: u64,
    max_bandwidth: Option<NonZeroU64>,
    postcopy: Option<u32>,
    /// Whether it begins with postcopy.
    at_once: bool,
    auto_converge: bool,
}

impl Case {
    fn new(seed: u64) -> Self {
        let mut number = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = |below: u64| {
            number = random(number);
            number.rotate_left(20) % below
        };
        Self {
            seed,
            channels: usize::try_from(next(4)).unwrap(),
            fresh: next(2) == 0,
            zero_check: [ZeroCheck::Always, ZeroCheck::Bulk, ZeroCheck::Off][usize::try_from(next(3)).unwrap()],
            record_write: [RecordWriteMode::Vectored, RecordWriteMode::Buffered][usize::try_from(next(2)).unwrap()],
            pages: [1 + next(300), 200 + next(1200)],
            each: [1, 3, 16][usize::try_from(next(3)).unwrap()],
            hint_wait: Duration::from_millis([0, 0, 1, 5][usize::try_from(next(4)).unwrap()]),
            hint_pages: [0, 0, 100][usize::try_from(next(3)).unwrap()],
            // Some are slow enough for many lists to come while they last.
            max_bandwidth: NonZeroU64::new([0, 50 << 20, 200 << 20][usize::try_from(next(3)).unwrap()]),
            postcopy: None,
            at_once: false,
            auto_converge: next(3) == 0,
        }
    }

    /// The outcome, and how often the guest was asked.
    fn run(&self) -> (LiveStats, u64) {
        let source = Arc::new(vm(self.pages));
        let (logs, marker) = source.restless_logs(self.postcopy.is_some().into());
        let heap = Heap::new(&source, marker, 1, self.each);
        let destination = Vm::of(blocks(self.pages));
        if !self.fresh {
            for block in destination.memory.blocks() {
                block.write(0, &vec![0xdd; usize::try_from(block.len()).unwrap()]).unwrap();
            }
        }
        let (near, far) = pair();
        let (near_page_channels, far_page_channels): (Vec<_>, Vec<_>) = (0..self.channels).map(|_| pair()).unzip();
        let handle = Handle::new();
        let params = MigrationParams::default()
            .zero_check(self.zero_check)
            .record_write(self.record_write)
            .downtime_limit(if self.postcopy.is_some() { Duration::ZERO } else { Duration::from_micros(300) })
            .stalled_rounds(Some(6))
            .timeout_strategy(TimeoutStrategy::Pause)
            .hint_wait(self.hint_wait)
            .hint_pages(self.hint_pages)
            .auto_converge(self.auto_converge)
            .answer_timeout(Duration::from_secs(20))
            .max_bandwidth(self.max_bandwidth);
        let (outcome, arrival) = thread::scope(|scope| {
            let receiving = scope.spawn(|| receive(&destination, far, far_page_channels));
            heap.live(scope, self.seed, Duration::from_micros(random(self.seed | 1) % 30));
            let outcome = LiveSource::new(&*source, logs, near, &handle)
                .options(params)
                .destination_zeroed(self.fresh)
                .postcopy(match self.postcopy {
                    _ if self.at_once => PostcopyMode::AtOnce,
                    Some(_) => PostcopyMode::Allowed,
                    None => PostcopyMode::Off,
                })
                .channels(near_page_channels, MultifdSourceOptions::default())
                .unwrap()
                .hint_free_pages(Arc::clone(&heap) as Arc<dyn FreePageHinting>)
                .on_round(|round| {
                    if self.postcopy == Some(round.number) {
                        handle.control.start_postcopy();
                    }
                })
                .run();
            source.over.store(true, Ordering::Relaxed);
            (outcome, receiving.join().unwrap())
        });
        let LiveOutcome::Completed(stats) = outcome else { panic!("{self:?}: {outcome:?}") };
        let IncomingOutcome::Running(_) = arrival else { panic!("{self:?}: {arrival:?}") };
        assert_eq!(heap.held_when_resumed(), 0, "{self:?}: the guest has not got its pages back");
        let all = PageRange::whole_block(self.pages[0]);
        let mut wrong = Vec::new();
        for (block, pages) in std::iter::once((0, all)).chain(heap.owned().into_iter().map(|pages| (1, pages))) {
            for page in pages.iter() {
                let (mut here, mut there) = ([0; 4096], [0; 4096]);
                source.memory.block(block).unwrap().read(page.offset(), &mut here).unwrap();
                destination.memory.block(block).unwrap().read(page.offset(), &mut there).unwrap();
                wrong.extend((here != there).then_some((block, page)));
            }
        }
        assert!(wrong.is_empty(), "{self:?}: {} pages, {:?}\n{stats:#?}", wrong.len(), wrong.first());
        (stats, heap.requests.load(Ordering::Relaxed))
    }
}

fn many(cases: impl Iterator<Item = Case>) {
    let sums = cases.map(|case| case.run()).fold((0, 0, 0), |(cases, left_out, asked), (stats, requests)| {
        (cases + 1, left_out + stats.sum(|round| round.hinted), asked + requests)
    });
    println!("{} migrations: {} pages left out, the guest asked {} times", sums.0, sums.1, sums.2);
    assert!(sums.1 > 0 && sums.2 >= sums.0, "{sums:?}");
}

#[test]
fn a_guest_that_takes_back_what_it_has_called_free_loses_nothing() {
    many(seeds(120).map(Case::new));
}

#[test]
fn a_guest_that_runs_before_its_memory_has_come_has_all_that_it_did_not_call_free() {
    let rounds = [0, 1, 3];
    many(seeds(100).map(|seed| {
        let postcopy = Some(rounds[usize::try_from(seed % 3).unwrap()]);
        Case { postcopy, channels: 0, ..Case::new(seed) }
    }));
}

#[test]
fn a_guest_that_is_slowed_down_is_asked_in_every_round_and_loses_nothing() {
    let mut slowed = 0;
    for seed in seeds(20) {
        let max_bandwidth = NonZeroU64::new(60 << 20);
        let case = Case { auto_converge: true, hint_pages: 0, max_bandwidth, ..Case::new(seed) };
        let (stats, _) = case.run();
        slowed += stats.rounds.iter().filter(|round| round.throttle > 0 && round.hinted > 0).count();
    }
    assert!(slowed > 0, "none was slowed down");
}

#[test]
fn a_guest_that_is_stopped_at_once_has_named_its_free_pages_before() {
    many(seeds(60).map(|seed| {
        let hint_wait = Duration::from_millis([1, 5, 100][usize::try_from(seed % 3).unwrap()]);
        Case { at_once: true, channels: 0, hint_wait, max_bandwidth: None, ..Case::new(seed) }
    }));
}

/// A guest that answers as a test says, at once, on the thread that asks.
#[derive(Default)]
struct Answers {
    /// Told to every list, by its number.
    lists: Vec<Vec<Range<u64>>>,
    /// Whether the lists end.
    complete: bool,
    asked: AtomicUsize,
    /// Whether the VM stood still when it got its pages back, each time that it did.
    done: Mutex<Vec<bool>>,
    vm: Option<Arc<TestVm>>,
    sinks: Mutex<Vec<Arc<dyn FreePageSink>>>,
}

impl FreePageHinting for Answers {
    fn request_list(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError> {
        let number = self.asked.fetch_add(1, Ordering::SeqCst);
        self.lists.get(number).into_iter().flatten().for_each(|range| to.add_range(range.clone()));
        if self.complete {
            to.complete();
        }
        self.sinks.lock().unwrap().push(to);
        Ok(())
    }

    fn stop_list(&self) {}

    fn return_pages(&self) {
        let stands = self.vm.as_ref().is_some_and(|vm| !vm.runs());
        self.done.lock().unwrap().push(stands);
    }
}

fn params() -> MigrationParams {
    MigrationParams::default().answer_timeout(Duration::from_secs(20))
}

/// How an attempt is made.
struct Setup {
    params: MigrationParams,
    /// The destination's mistake, and its place.
    trouble: Option<(At, Does)>,
    handle: Handle,
}

impl From<MigrationParams> for Setup {
    fn from(params: MigrationParams) -> Self {
        Self { params, trouble: None, handle: Handle::new() }
    }
}

/// Moves a VM to a destination that behaves, or does not.
fn attempt<'v>(
    vm: &'v TestVm,
    logs: DirtyLogs,
    from: &Arc<impl FreePageHinting + 'static>,
    setup: impl Into<Setup>,
) -> (LiveOutcome<'v, TestVm>, model::live::Arrived) {
    let Setup { params, trouble, handle } = setup.into();
    let (near, far) = pair();
    thread::scope(|scope| {
        let destination = scope.spawn(move || Destination::new(far, trouble).run());
        let outcome = LiveSource::new(vm, logs, near, &handle)
            .options(params)
            .destination_zeroed(true)
            .hint_free_pages(Arc::clone(from) as Arc<dyn FreePageHinting>)
            .run();
        (outcome, destination.join().unwrap())
    })
}

fn completed(outcome: LiveOutcome<'_, TestVm>) -> LiveStats {
    let LiveOutcome::Completed(stats) = outcome else { panic!("{outcome:?}") };
    stats
}

#[test]
fn what_is_free_is_not_sent_and_the_guest_has_its_pages_back_before_its_devices_tell_their_state() {
    let vm = Arc::new(vm([64, 128]));
    // Pages 8 to 16 below, and 32 to 96 above: with half a page and with what is no memory, in two pieces that overlap.
    let list = vec![8 * PAGE_SIZE..16 * PAGE_SIZE + 77, ABOVE + 32 * PAGE_SIZE..ABOVE + 80 * PAGE_SIZE];
    let more = vec![ABOVE + 64 * PAGE_SIZE..ABOVE + 96 * PAGE_SIZE, 1 << 40..2 << 40];
    let answers = Arc::new(Answers {
        lists: vec![[list, more].concat()],
        complete: true,
        vm: Some(Arc::clone(&vm)),
        ..Answers::default()
    });
    let (outcome, arrived) = attempt(&vm, vm.logs().0, &answers, params());
    let stats = completed(outcome);
    assert_eq!((stats.rounds[0].hinted, stats.sum(|round| round.normal)), (8 + 64, 64 + 128 - 72));
    assert_eq!(arrived.normal, 64 + 128 - 72);
    for (block, free) in [(0, 8..16), (1, 32..96)] {
        let here = vm.contents(block);
        for (page, (here, there)) in here.chunks(4096).zip(arrived.memory[block].chunks(4096)).enumerate() {
            assert!(if free.contains(&page) { there == [0; 4096] } else { here == there }, "page {page} of {block}");
        }
    }
    assert_eq!(*answers.done.lock().unwrap(), [true]);
    let hints = stats.hints.unwrap();
    assert_eq!((hints.lists, hints.complete, hints.ranges, hints.outside, hints.late), (1, 1, 3, 1, 0));
    assert!(hints.list_took.is_some() && hints.refused.is_none());
    // What comes later is of no use.
    answers.sinks.lock().unwrap().iter().for_each(|sink| sink.add_range(0..u64::MAX));
}

/// Holes are looked for among what is left: each page is one or the other, and a destination that has something there
/// is told of the holes.
#[test]
fn a_hole_that_was_called_free_counts_as_free_and_every_page_counts_once() {
    for (fresh, channels) in [(true, 0), (false, 0), (true, 2), (false, 2)] {
        let source = TestVm { memory: vm([64, 128]).memory, ..TestVm::new(&[1]) };
        // Of every eight pages four have contents, others were never populated.
        (0..2).for_each(|block| {
            let ram = source.memory.block(block).unwrap();
            ram.discard(ram.pages()).unwrap();
            source.fill(block, |page| page % 8 < 4);
        });
        let lists = vec![vec![8 * PAGE_SIZE..16 * PAGE_SIZE, ABOVE..ABOVE + 30 * PAGE_SIZE]];
        let answers = Arc::new(Answers { lists, complete: true, ..Answers::default() });
        let destination = Vm::of(blocks([64, 128]));
        let (near, far) = pair();
        let (near_page_channels, far_page_channels): (Vec<_>, Vec<_>) = (0..channels).map(|_| pair()).unzip();
        let handle = Handle::new();
        let (outcome, arrival) = thread::scope(|scope| {
            let receiving = scope.spawn(|| receive(&destination, far, far_page_channels));
            let outcome = LiveSource::new(&source, source.logs().0, near, &handle)
                .options(params())
                .destination_zeroed(fresh)
                .channels(near_page_channels, MultifdSourceOptions::default())
                .unwrap()
                .hint_free_pages(Arc::clone(&answers) as Arc<dyn FreePageHinting>)
                .run();
            (outcome, receiving.join().unwrap())
        });
        let stats = completed(outcome);
        assert!(matches!(arrival, IncomingOutcome::Running(_)), "{arrival:?}");
        let first = &stats.rounds[0];
        // Behind 24 pages of the second block come four that have contents, and two that have none.
        let contents = 4 + 12 + 4;
        assert_eq!((first.pages, first.hinted), (192, 8 + 30));
        assert_eq!((first.normal, first.holes), (96 - contents, 96 - (38 - contents)));
        assert_eq!((first.zero, first.left_out), if fresh { (0, first.holes) } else { (first.holes, 0) });
        for block in 0..2 {
            let there = destination.memory.block(block).unwrap();
            for (page, here) in source.contents(block).chunks(4096).enumerate() {
                let free = if block == 0 { (8..16).contains(&page) } else { page < 30 };
                let mut found = [0; 4096];
                there.read(page as u64 * PAGE_SIZE, &mut found).unwrap();
                assert!(free || here == found, "page {page} of block {block}");
            }
        }
    }
}

#[test]
fn a_page_that_was_free_is_zero_at_once_for_a_guest_that_runs_before_its_memory_has_come() {
    for postcopy in [PostcopyMode::Allowed, PostcopyMode::AtOnce] {
        zero_at_once(postcopy);
    }
}

fn zero_at_once(postcopy: PostcopyMode) {
    let source = vm([64, 16]);
    let (logs, _marker) = source.restless_logs(1);
    let lists = vec![vec![8 * PAGE_SIZE..16 * PAGE_SIZE, 20 * PAGE_SIZE..21 * PAGE_SIZE]];
    let answers = Arc::new(Answers { lists, complete: true, ..Answers::default() });
    // It has something there, which is not needed; its devices look at one of the free pages before the guest runs.
    let destination = Vm { looks_at: vec![9], ..Vm::of(blocks([64, 16])) };
    let ram = destination.memory.block(0).unwrap();
    ram.write(0, &vec![0xdd; usize::try_from(ram.len()).unwrap()]).unwrap();
    let (near, far) = pair();
    let handle = Handle::new();
    let params = params().downtime_limit(Duration::ZERO).hint_wait(Duration::from_secs(60));
    let (outcome, arrival) = thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&destination, far, Vec::new()));
        let outcome = LiveSource::new(&source, logs, near, &handle)
            .options(params)
            .postcopy(postcopy)
            .hint_free_pages(Arc::clone(&answers) as Arc<dyn FreePageHinting>)
            .on_round(|_| handle.control.start_postcopy())
            .run();
        (outcome, receiving.join().unwrap())
    });
    let stats = completed(outcome);
    let IncomingOutcome::Running(arrived) = arrival else { panic!("{arrival:?}") };
    assert_eq!(stats.rounds[0].hinted, 9);
    // Once for each device.
    assert_eq!(*destination.seen.lock().unwrap(), [0, 0]);
    // Asked for, and answered without its contents; of the others nothing was said, and they are zero all the same.
    assert_eq!(stats.postcopy.unwrap().zero_pages, 1);
    assert!(arrived.postcopy.unwrap().requests > 0);
    let here = source.contents(0);
    let mut there = vec![0; here.len()];
    ram.read(0, &mut there).unwrap();
    for (page, (here, there)) in here.chunks(4096).zip(there.chunks(4096)).enumerate() {
        let free = (8..16).contains(&page) || page == 20;
        assert!(if free { there == [0; 4096] } else { here == there }, "page {page}");
    }
}

#[test]
fn a_list_may_be_waited_for_but_not_longer_than_was_said() {
    for complete in [true, false] {
        let vm = vm([16, 16]);
        let answers = Arc::new(Answers { complete, ..Answers::default() });
        let hint_wait = if complete { Duration::from_secs(3600) } else { Duration::from_millis(30) };
        let begun = Instant::now();
        let params = params().hint_wait(hint_wait);
        completed(attempt(&vm, vm.logs().0, &answers, params).0);
        assert!(complete || begun.elapsed() >= hint_wait);
    }
    // Who waits can be stopped, however long he would.
    for hint_wait in [Duration::from_secs(3600), Duration::MAX] {
        let vm = vm([16, 16]);
        let (answers, handle) = (Arc::new(Answers::default()), Handle::new());
        thread::scope(|scope| {
            scope.spawn(|| {
                while answers.asked.load(Ordering::SeqCst) == 0 {
                    thread::yield_now();
                }
                thread::sleep(Duration::from_millis(50));
                handle.control.stop(Stop::Cancel);
            });
            let params = params().hint_wait(hint_wait);
            let (outcome, _) = attempt(&vm, vm.logs().0, &answers, Setup { handle: handle.clone(), ..params.into() });
            assert!(matches!(outcome, LiveOutcome::Resumed { .. }), "{outcome:?}");
        });
        assert_eq!((answers.done.lock().unwrap().len(), vm.runs()), (1, true));
    }
}

#[test]
fn the_guest_gets_its_pages_back_whatever_becomes_of_the_migration() {
    let troubles = [At::Layout, At::Pages(20), At::End, At::Devices, At::Gone, At::Go].map(|at| (at, Does::Close));
    for trouble in troubles.into_iter().chain([(At::Devices, Does::Shut(1)), (At::Pages(7), Does::Garbage)]) {
        let vm = Arc::new(vm([64, 64]));
        let list = vec![0..PAGE_SIZE * 2, PAGE_SIZE * 2..PAGE_SIZE * 4];
        let answers = Arc::new(Answers { lists: vec![list], vm: Some(Arc::clone(&vm)), ..Answers::default() });
        let (outcome, _) = attempt(&vm, vm.logs().0, &answers, Setup { trouble: Some(trouble), ..params().into() });
        let asked = answers.asked.load(Ordering::SeqCst);
        assert_eq!(answers.done.lock().unwrap().len(), asked.min(1), "{trouble:?}: {outcome:?}");
        assert!(!matches!(outcome, LiveOutcome::Completed(_)), "{trouble:?}");
    }
    for fail in ["pause", "devices", "resume"] {
        let vm = TestVm { fail: Some(fail), ..vm([64, 64]) };
        let answers = Arc::new(Answers::default());
        let (outcome, _) = attempt(&vm, vm.logs().0, &answers, params());
        assert_eq!(answers.done.lock().unwrap().len(), 1, "{fail}: {outcome:?}");
    }
}

#[test]
fn later_rounds_ask_again_if_they_are_long_enough() {
    // Every round has a hundred pages to send; each of its lists names ten of them, and the first one none.
    for (hint_pages, asks) in [(100, true), (101, false)] {
        let vm = vm([200, 8]);
        let list = || vec![0..4 * PAGE_SIZE, 4 * PAGE_SIZE..10 * PAGE_SIZE];
        let answers = Arc::new(Answers { lists: vec![vec![], list(), list(), list()], ..Answers::default() });
        let params = params()
            .hint_pages(hint_pages)
            .downtime_limit(Duration::ZERO)
            .stalled_rounds(Some(3))
            .timeout_strategy(TimeoutStrategy::Pause);
        let (outcome, _) = attempt(&vm, vm.restless_logs(100).0, &answers, params);
        let stats = completed(outcome);
        let hinted: Vec<_> = stats.rounds.iter().map(|round| (round.pages, round.hinted)).collect();
        let later = (100, if asks { 10 } else { 0 });
        assert_eq!(hinted[..4], [(208, 0), later, later, later], "{hinted:?}");
        assert_eq!(answers.asked.load(Ordering::SeqCst), if asks { hinted.len() - 1 } else { 1 });
        assert_eq!(hinted.last(), Some(&(100, 0)), "a guest that is stopped is not asked");
    }
}

#[test]
fn hints_are_refused_where_no_log_sees_what_the_guest_writes() {
    let answers = Arc::new(Answers::default());
    let refusal = |vm: &TestVm, logs, postcopy| {
        let (near, far) = pair();
        let handle = Handle::new();
        thread::scope(|scope| {
            scope.spawn(move || Destination::new(far, None).run());
            let source = LiveSource::new(vm, logs, near, &handle).options(params()).postcopy(postcopy);
            let LiveOutcome::Resumed { error, .. } = source.hint_free_pages(Arc::clone(&answers) as _).run() else {
                panic!("it is not refused")
            };
            error.in_one_line()
        })
    };
    let vm = vm([16, 16]);
    let at_once = refusal(&vm, vm.logs().0, PostcopyMode::AtOnce);
    let expected = "free-page hints cannot be used: hint_wait is zero, and postcopy at once stops the guest before it can \
                    report its free pages";
    assert_eq!(at_once, expected);
    let unseen = refusal(&vm, DirtyLogs::new(Writers::NONE, Vec::new()).unwrap(), PostcopyMode::Off);
    assert!(unseen.contains("guest memory is written by vCPUs without a dirty log"), "{unseen}");
    // A VM that reports no writers is moved without a log; but a guest that tells its free pages is one that runs.
    let vm = TestVm { writers: Writers::NONE, ..vm };
    let silent = refusal(&vm, DirtyLogs::new(Writers::NONE, Vec::new()).unwrap(), PostcopyMode::Off);
    assert_eq!(silent, "free-page hints cannot be used: no dirty log sees what the guest's vCPUs write");
    assert!(vm.runs() && answers.asked.load(Ordering::SeqCst) == 0);
}

/// A guest whose driver goes amid its list.
struct Vanishing;

impl FreePageHinting for Vanishing {
    fn request_list(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError> {
        thread::spawn(move || {
            to.add_range(8 * PAGE_SIZE..16 * PAGE_SIZE);
            thread::sleep(Duration::from_millis(30));
        });
        Ok(())
    }
    fn stop_list(&self) {}
    fn return_pages(&self) {}
}

#[test]
fn a_list_that_can_come_no_more_is_not_waited_for() {
    let vm = vm([64, 16]);
    let params = params().hint_wait(Duration::MAX);
    let (outcome, _) = attempt(&vm, vm.logs().0, &Arc::new(Vanishing), params);
    let stats = completed(outcome);
    let hints = stats.hints.clone().unwrap();
    assert_eq!((stats.rounds[0].hinted, hints.lists, hints.complete), (8, 1, 0));
    assert_eq!(hints.list_took, None);
}

/// A guest whose driver is not there.
struct Deaf(AtomicU64);

impl FreePageHinting for Deaf {
    fn request_list(&self, _to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Err(FreePagesError::NotOffered { why: "the balloon has no driver".into() })
    }
    fn stop_list(&self) {}
    fn return_pages(&self) {}
}

#[test]
fn a_guest_that_cannot_be_asked_is_moved_without() {
    let vm = vm([64, 64]);
    let deaf = Arc::new(Deaf(AtomicU64::new(0)));
    let params = params().hint_wait(Duration::from_secs(3600));
    let stats = completed(attempt(&vm, vm.logs().0, &deaf, params).0);
    assert_eq!((stats.sum(|round| round.hinted), deaf.0.load(Ordering::SeqCst)), (0, 1));
    let refused = stats.hints.unwrap().refused.unwrap();
    assert_eq!(refused, "the guest does not report its free pages: the balloon has no driver");
}
