//! Pages that the kernel is lent (`MSG_ZEROCOPY`), and destinations that take them slowly or not at all: what is lent
//! is back before the end of its round is told, and who wants pages back waits for what is under way and for no more.
//!
//! Freed memory is poisoned in this binary: a header or a list of the engine's own that was lent and freed shows in
//! what arrives.

mod model;

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Shutdown, ZeroCopy};
use limosa_memory::dirty::DirtyLogs;
use limosa_memory::{BlockOptions, MemoryBlock};
use limosa_migrate::live::{LiveDestinationOptions, TimeoutStrategy};
use limosa_migrate::multifd::{MultifdOptions, MultifdSourceOptions};
use limosa_migrate::stats::{LiveStats, RoundReport};
use limosa_migrate::stored::{PageError, PageSource, PrecopySource, StreamSetup};
use limosa_migrate::{
    Handle, IncomingOutcome, LiveDestination, LiveOutcome, LiveSource, MigrateError, MigrationParams,
};
use limosa_page::{PageBitmap, PageNumber, PageRange};
use limosa_stream::multifd::{Compression, INITIAL_LEN, InitialPacket, PACKET_LEN, PACKET_PAGES, Packet};
use limosa_testkit::Poisoning;
use model::live::{Destination, TestVm, random};
use model::multifd::MultifdModel;
use model::vm::Vm;
use model::{Memory, lending_pair, pair};

#[global_allocator]
static ALLOCATOR: Poisoning = Poisoning;

/// For what should take moments on any machine: a limit for the stuck, not a measure.
const SOON: Duration = Duration::from_secs(20);

/// A channel that lends, to an end that holds little: what is lent stays under way until it is read.
fn slow_pair() -> (Channel, Channel) {
    let (near, far) = lending_pair(ZeroCopy::Msg, true);
    near.set_buffers(Some(4 << 20), None).unwrap();
    far.set_buffers(None, Some(64 << 10)).unwrap();
    (near, far)
}

/// Waits for something that comes soon: whether it has.
fn comes(done: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    while !done() && begun.elapsed() < SOON {
        thread::sleep(Duration::from_millis(1));
    }
    done()
}

/// Takes packets off a channel, and passes them on.
struct Tap {
    /// A handle to the source's end.
    lender: Channel,
    from: Channel,
    to: Channel,
    /// At each SYNC packet: the calls that had lent something by then, and those of them that had come back.
    syncs: Mutex<Vec<(u64, u64)>>,
}

impl Tap {
    /// With the source's end and the destination's.
    fn new() -> (Channel, Self, Channel) {
        let ((near, from), (to, far)) = (slow_pair(), pair());
        let lender = near.try_clone().unwrap();
        (near, Self { lender, from, to, syncs: Mutex::default() }, far)
    }

    /// Passes all packets on, with a pause before each.
    fn run(&self, pause: Duration) {
        let mut first = [0; INITIAL_LEN];
        self.from.read_exact(&mut first).unwrap();
        InitialPacket::decode(&first).unwrap();
        let (mut header, mut payload) = ([0; PACKET_LEN], Vec::new());
        while self.from.read_exact(&mut header).is_ok() {
            let mut offsets = [0; PACKET_PAGES];
            let packet = Packet::decode(&header, 0, &mut offsets).unwrap().unwrap();
            if packet.sync {
                let counters = self.lender.counters();
                self.syncs.lock().unwrap().push((counters.zero_copy_calls, counters.zero_copy_completed));
            }
            thread::sleep(pause);
            payload.resize(usize::try_from(packet.payload_len).unwrap(), 0);
            self.from.read_exact(&mut payload).unwrap();
            self.to.write_all(&header).unwrap();
            self.to.write_all(&payload).unwrap();
        }
    }

    fn syncs(&self) -> usize {
        self.syncs.lock().unwrap().len()
    }
}

fn blocks(pages: u64) -> Vec<BlockOptions> {
    vec![BlockOptions::memfd("ram", pages * 4096), BlockOptions::anonymous("rom", 40 * 4096)]
}

/// How a VM is moved.
struct Move<'a> {
    params: MigrationParams,
    handle: Handle,
    taps: usize,
    /// Before each packet that is passed on.
    pause: Duration,
    /// Told of each round; the next one waits for it.
    observer: &'a (dyn Fn(&RoundReport, &[Tap]) + Sync),
    /// Called meanwhile.
    meanwhile: &'a (dyn Fn(&Handle, &[Tap]) + Sync),
}

impl Move<'_> {
    fn new(params: MigrationParams) -> Self {
        let handle = Handle::new();
        Self { params, handle, taps: 1, pause: Duration::ZERO, observer: &|_, _| {}, meanwhile: &|_, _| {} }
    }

    /// Moves the VM, and compares its memory.
    #[track_caller]
    fn run(&self, source: &TestVm, logs: DirtyLogs, pages: u64) -> LiveStats {
        let destination = Vm::of(blocks(pages));
        let (near, far) = pair();
        let (mut near_page_channels, mut taps, mut far_page_channels) = (Vec::new(), Vec::new(), Vec::new());
        for (near, tap, far) in (0..self.taps).map(|_| Tap::new()) {
            near_page_channels.push(near);
            taps.push(tap);
            far_page_channels.push(far);
        }
        let taps = &taps;
        let stats = thread::scope(|scope| {
            for tap in taps {
                scope.spawn(|| tap.run(self.pause));
            }
            scope.spawn(|| (self.meanwhile)(&self.handle, taps));
            let receiving = scope.spawn(|| {
                let options = LiveDestinationOptions::default();
                let role = LiveDestination::new(&destination, far, &Handle::new()).options(options);
                role.channels(far_page_channels, MultifdOptions { compression: Compression::None }).run()
            });
            let packets = MultifdSourceOptions { packet_pages: 32, ..MultifdSourceOptions::default() };
            let outcome = LiveSource::new(source, logs, near, &self.handle)
                .options(self.params)
                .channels(near_page_channels, packets)
                .unwrap()
                .on_round(|round| (self.observer)(round, taps))
                .run();
            source.over.store(true, Ordering::Relaxed);
            let arrival = receiving.join().unwrap();
            for tap in taps {
                tap.from.shutdown(Shutdown::Both).unwrap();
            }
            assert!(matches!(arrival, IncomingOutcome::Running(_)), "{arrival:?}");
            let LiveOutcome::Completed(stats) = outcome else { panic!("{outcome:?}") };
            stats
        });
        for block in 0..2 {
            let here = source.contents(block);
            let mut there = vec![0; here.len()];
            destination.memory.block(block).unwrap().read(0, &mut there).unwrap();
            let differs = here.chunks(4096).zip(there.chunks(4096)).position(|(here, there)| here != there);
            assert_eq!(differs, None, "page of block {block}: {stats:#?}");
        }
        stats
    }
}

#[test]
fn what_a_round_lends_is_back_before_its_end_is_reported() {
    let pages = 1600;
    let vm = TestVm::of(blocks(pages));
    vm.fill(0, |page| page % 3 != 1);
    vm.fill(1, |_| true);
    let (logs, marker) = vm.restless_logs(300);
    let params = MigrationParams::default()
        .downtime_limit(Duration::ZERO)
        .stalled_rounds(Some(2))
        .timeout_strategy(TimeoutStrategy::Pause)
        .answer_timeout(SOON);
    let seen = Mutex::new(Vec::new());
    // The next round lends nothing before the SYNC of this one was seen. One more came before the first round.
    let observer = |round: &RoundReport, taps: &[Tap]| {
        let syncs = usize::try_from(round.number).unwrap() + 2;
        let came = comes(|| taps.iter().all(|tap| tap.syncs() >= syncs));
        let at_sync = taps.iter().map(|tap| *tap.syncs.lock().unwrap().last().unwrap());
        let now = taps.iter().map(|tap| tap.lender.counters().zero_copy_calls);
        seen.lock().unwrap().push((came, at_sync.collect::<Vec<_>>(), now.collect::<Vec<_>>()));
    };
    let stats = thread::scope(|scope| {
        scope.spawn(|| {
            let mut seed = 7;
            while !vm.over.load(Ordering::Relaxed) {
                seed = random(seed);
                vm.write(&marker, 0, (seed >> 20) % pages, u8::try_from(seed >> 8 & 0xff).unwrap());
                thread::sleep(Duration::from_micros(100));
            }
        });
        let pause = Duration::from_millis(1);
        Move { taps: 2, pause, observer: &observer, ..Move::new(params) }.run(&vm, logs, pages)
    });
    for (round, (came, at_sync, now)) in seen.into_inner().unwrap().into_iter().enumerate() {
        assert!(came, "no SYNC in round {round}");
        for ((lent, back), now) in at_sync.into_iter().zip(now) {
            assert_eq!((back, now), (lent, lent), "back at the SYNC of round {round}, and lent behind it");
        }
    }
    assert!(stats.rounds.len() > 2 && stats.channels.iter().all(|counters| counters.zero_copy_calls > 0), "{stats:#?}");
}

#[test]
fn a_destination_that_reads_no_more_is_waited_for_as_long_as_the_patience_says_and_so_is_a_discard() {
    let answer_timeout = Duration::from_millis(1500);
    let fails = |half_closed: bool| {
        // Less than the source's buffer holds: it is the wait for the loans that fails, and no put.
        let vm = TestVm::new(&[160]);
        vm.fill(0, |_| true);
        let (logs, _) = vm.logs();
        let params = MigrationParams::default().answer_timeout(answer_timeout);
        let ((near, far), (page_channel, deaf)) = (pair(), slow_pair());
        let (lender, ended, gone) = (page_channel.try_clone().unwrap(), AtomicBool::new(false), AtomicBool::new(false));
        if half_closed {
            deaf.shutdown(Shutdown::Write).unwrap();
        }
        let handle = Handle::new();
        let begun = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| Destination::new(far, None).run());
            scope.spawn(|| {
                assert!(comes(|| lender.counters().bytes_out > 160 * 4096));
                vm.memory.block(0).unwrap().discard(PageRange::starting_at(PageNumber(3), 1)).unwrap();
                gone.store(true, Ordering::SeqCst);
            });
            scope.spawn(|| {
                thread::sleep(answer_timeout / 2);
                assert!(!gone.load(Ordering::SeqCst), "a page was discarded while it was lent");
            });
            let outcome = LiveSource::new(&vm, logs, near, &handle)
                .options(params)
                .channels(vec![page_channel], MultifdSourceOptions::default())
                .unwrap()
                .on_round(|_| ended.store(true, Ordering::SeqCst))
                .run();
            let LiveOutcome::Resumed { error: MigrateError::Multifd { id: 0, source }, .. } = outcome else {
                panic!("{outcome:?}")
            };
            assert!(matches!(&*source, MigrateError::Channel(error) if error.is_timeout()), "{source}");
        });
        let took = begun.elapsed();
        assert!(took >= answer_timeout && took < 2 * answer_timeout, "{took:?}");
        assert!(gone.load(Ordering::SeqCst));
        // What was not taken ends no round, and the VM was not stopped for it.
        let counters = lender.counters();
        assert!(counters.zero_copy_calls > counters.zero_copy_completed, "{counters:?}");
        assert!(!ended.load(Ordering::SeqCst) && vm.pauses.load(Ordering::SeqCst) == 0 && vm.runs());
    };
    thread::scope(|scope| {
        scope.spawn(|| fails(false));
        scope.spawn(|| fails(true));
    });
}

#[test]
fn a_discard_in_the_middle_of_a_round_that_is_held_back_does_not_wait_for_its_end() {
    // Three windows of 1 MiB: one at once, and the next one after 8 seconds.
    let pages = 3 * 256;
    let vm = TestVm::of(blocks(pages));
    vm.fill(0, |_| true);
    let (logs, _marker) = vm.logs();
    let params = MigrationParams::default()
        .max_bandwidth(NonZeroU64::new(128 << 10))
        .downtime_limit(Duration::from_secs(60))
        .answer_timeout(SOON);
    let waited = Mutex::new(None);
    let meanwhile = |handle: &Handle, taps: &[Tap]| {
        assert!(comes(|| taps[0].lender.counters().bytes_out > 256 * 4096));
        thread::sleep(Duration::from_millis(100));
        let begun = Instant::now();
        assert!(vm.discard(0, 3));
        *waited.lock().unwrap() = Some(begun.elapsed());
        // The rest as fast as it goes.
        handle.control.set_max_bandwidth(None);
    };
    let stats = Move { meanwhile: &meanwhile, ..Move::new(params) }.run(&vm, logs, pages);
    let waited = waited.into_inner().unwrap().unwrap();
    assert!(waited < Duration::from_secs(2), "{waited:?}");
    assert!(stats.channels[0].zero_copy_calls > 0, "{stats:#?}");
}

/// A VM with one block of guest memory and another that is read from somewhere, and a thread that gives a page of the
/// first one back when the second is read for the first time.
struct HalfStored<'a> {
    memory: &'a Memory,
    ram: Arc<MemoryBlock>,
    reads: AtomicU32,
    gone: Arc<AtomicBool>,
    /// Whether the page was gone in the first read, and in the second.
    seen: Mutex<Vec<bool>>,
}

impl HalfStored<'_> {
    fn note(&self, gone: bool) {
        self.seen.lock().unwrap().push(gone);
    }
}

impl PageSource for HalfStored<'_> {
    fn setup(&self) -> &StreamSetup {
        self.memory.setup()
    }
    fn stored_bitmap(&self, block: usize) -> &PageBitmap {
        self.memory.stored_bitmap(block)
    }
    fn read(&self, block: usize, pages: PageRange, into: &mut [u8]) -> Result<(), PageError> {
        match self.reads.fetch_add(1, Ordering::SeqCst) {
            0 => {
                let (ram, gone) = (Arc::clone(&self.ram), Arc::clone(&self.gone));
                thread::spawn(move || {
                    ram.discard(PageRange::starting_at(PageNumber(3), 1)).unwrap();
                    gone.store(true, Ordering::SeqCst);
                });
                thread::sleep(Duration::from_millis(100));
                self.note(self.gone.load(Ordering::SeqCst));
            }
            1 => {
                let begun = Instant::now();
                while !self.gone.load(Ordering::SeqCst) && begun.elapsed() < Duration::from_secs(2) {
                    thread::sleep(Duration::from_millis(1));
                }
                self.note(self.gone.load(Ordering::SeqCst));
            }
            _ => {}
        }
        self.memory.read(block, pages, into)
    }
    fn memory(&self, block: usize) -> Option<&MemoryBlock> {
        (block == 0).then_some(&self.ram)
    }
    fn device_sections(&self) -> &[u8] {
        self.memory.device_sections()
    }
    fn description(&self) -> &[u8] {
        self.memory.description()
    }
}

#[test]
fn a_discard_does_not_wait_for_windows_that_nothing_is_lent_of() {
    let memory = Memory::new(&[256, 3 * 256], |_, _| true);
    let ram = BlockOptions::memfd("block0", 256 * 4096).map().unwrap();
    (0..256).for_each(|page| ram.write(page * 4096, &memory.page(0, page)).unwrap());
    let (ram, reads, gone, seen) = (Arc::new(ram), AtomicU32::new(0), Arc::default(), Mutex::default());
    let source = HalfStored { memory: &memory, ram, reads, gone, seen };
    let model = MultifdModel::new(&memory, (&[], &[]), Compression::None, None);
    let ((near, far), (page_channel, far_page_channel)) = (pair(), lending_pair(ZeroCopy::Msg, true));
    let handle = Handle::new();
    thread::scope(|scope| {
        let arrived = scope.spawn(|| model.run(far, vec![far_page_channel]));
        let role = PrecopySource::new(&source, near, &handle);
        role.channels(vec![page_channel], MultifdSourceOptions::default()).unwrap().run().unwrap();
        assert_eq!(arrived.join().unwrap().wrong, Vec::<String>::new());
    });
    model.assert_memory();
    assert_eq!(*source.seen.lock().unwrap(), [false, true]);
}
