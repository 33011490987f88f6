//! limosa's balloon under a live migration: the device over its rings, driven as Linux drives it, while programs take
//! from it what it has told. Nothing that they write is lost, moved or not.
//!
//! Cases follow from their seeds. `LIMOSA_CHAOS_TRIALS=N` moves N times, `LIMOSA_CHAOS_SEED=S` begins with another
//! seed.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use crate::model::ballooned::{Ballooned, RAM, Slow};
use crate::model::live::random;
use crate::model::pair;
use crate::model::vm::Vm;
use limosa_memory::BlockOptions;
use limosa_migrate::control::Stop;
use limosa_migrate::live::{PostcopyMode, TimeoutStrategy, ZeroCheck};
use limosa_migrate::multifd::{MultifdOptions, MultifdSourceOptions};
use limosa_migrate::{Handle, IncomingOutcome, LiveDestination, LiveOutcome, LiveSource, MigrationParams};
use limosa_stream::multifd::{INITIAL_LEN, InitialPacket};

/// Migrations of one guest.
const OF_ONE: u64 = 25;

/// A number that is said by the environment.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// One migration.
#[derive(Debug)]
struct Case {
    seed: u64,
    log: u64,
    channels: usize,
    fresh: bool,
    zero_check: ZeroCheck,
    hint_wait: Duration,
    hint_pages: u64,
    /// How long the device takes for each range.
    slow: Duration,
    max_bandwidth: Option<NonZeroU64>,
    /// The round behind which it continues in postcopy.
    postcopy: Option<u32>,
    /// When it is called off.
    stop: Option<Duration>,
}

#[derive(Debug, Default)]
struct Sums {
    moved: u64,
    stopped: u64,
    postcopy: u64,
    compared: u64,
    hinted: u64,
    lists: u64,
    late: u64,
}

impl Case {
    fn new(seed: u64) -> Self {
        let mut number = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = |below: u64| {
            number = random(number);
            number.rotate_left(20) % below
        };
        let postcopy = (next(5) == 0).then(|| u32::try_from(next(3)).unwrap());
        Self {
            seed,
            log: next(3),
            channels: if postcopy.is_some() { 0 } else { usize::try_from(next(4)).unwrap() },
            fresh: next(2) == 0,
            zero_check: [ZeroCheck::Always, ZeroCheck::Bulk, ZeroCheck::Off][usize::try_from(next(3)).unwrap()],
            hint_wait: Duration::from_millis([0, 0, 1, 20][usize::try_from(next(4)).unwrap()]),
            hint_pages: [0, 0, u64::MAX][usize::try_from(next(3)).unwrap()],
            slow: Duration::from_micros([0, 500, 4000, 20_000][usize::try_from(next(4)).unwrap()]),
            max_bandwidth: NonZeroU64::new([0, 0, 400 << 20][usize::try_from(next(3)).unwrap()]),
            postcopy,
            stop: (next(6) == 0 && postcopy.is_none()).then(|| Duration::from_micros(next(40_000))),
        }
    }

    fn run(&self, guest: &Ballooned, sums: &mut Sums) {
        let destination = Vm::of(vec![BlockOptions::memfd("pc.ram", RAM)]);
        if !self.fresh {
            destination.memory.block(0).unwrap().write(0, &vec![0xdd; usize::try_from(RAM).unwrap()]).unwrap();
        }
        let (near, far) = pair();
        let (near_page_channels, far_page_channels): (Vec<_>, Vec<_>) = (0..self.channels).map(|_| pair()).unzip();
        let handle = Handle::new();
        let params = MigrationParams::default()
            .zero_check(self.zero_check)
            .downtime_limit(if self.postcopy.is_some() { Duration::ZERO } else { Duration::from_millis(1) })
            .stalled_rounds(Some(5))
            .timeout_strategy(TimeoutStrategy::Pause)
            .hint_wait(self.hint_wait)
            .hint_pages(self.hint_pages)
            .answer_timeout(Duration::from_secs(20))
            .max_bandwidth(self.max_bandwidth);
        let (outcome, arrived) = thread::scope(|scope| {
            let receiving = scope.spawn(|| {
                for channel in &far_page_channels {
                    let mut first = [0; INITIAL_LEN];
                    if channel.read_exact(&mut first).is_err() {
                        return false;
                    }
                    InitialPacket::decode(&first).unwrap();
                }
                let handle = Handle::new();
                let outcome = LiveDestination::new(&destination, far, &handle)
                    .channels(far_page_channels, MultifdOptions::default())
                    .run();
                matches!(outcome, IncomingOutcome::Running(_))
            });
            if let Some(after) = self.stop {
                let handle = &handle;
                scope.spawn(move || {
                    thread::sleep(after);
                    handle.control.stop(Stop::Cancel);
                });
            }
            let outcome = LiveSource::new(&guest.vm, guest.logs(self.log), near, &handle)
                .options(params)
                .destination_zeroed(self.fresh)
                .postcopy(if self.postcopy.is_some() { PostcopyMode::Allowed } else { PostcopyMode::Off })
                .channels(near_page_channels, MultifdSourceOptions::default())
                .unwrap()
                .hint_free_pages(Arc::new(Slow { balloon: Arc::clone(&guest.balloon), most: self.slow }))
                .on_round(|round| {
                    if self.postcopy == Some(round.number) {
                        handle.control.start_postcopy();
                    }
                })
                .run();
            (outcome, receiving.join().unwrap())
        });
        let stats = match outcome {
            LiveOutcome::Completed(stats) => {
                assert!(arrived, "seed {}: {self:?}", self.seed);
                let there = destination.memory.block(0).unwrap();
                let (wrong, pages) = guest.compare(|offset, bytes| there.read(offset, bytes).unwrap());
                assert!(wrong.is_empty(), "{self:?}: {} of {pages} pages, {:?}\n{stats:#?}", wrong.len(), wrong[0]);
                sums.moved += 1;
                sums.postcopy += u64::from(stats.postcopy.is_some());
                sums.compared += pages;
                // The guest continues here: the next one moves it again.
                *guest.vm.stopped.write().unwrap() = false;
                stats
            }
            LiveOutcome::Resumed { error, stats, .. } => {
                assert!(self.stop.is_some(), "{self:?}: {error}");
                sums.stopped += 1;
                stats
            }
            other => panic!("{self:?}: {other:?}"),
        };
        guest.wait_given_back();
        sums.hinted += stats.sum(|round| round.hinted);
        let hints = stats.hints.unwrap();
        assert_eq!(hints.refused, None, "{self:?}");
        sums.lists += u64::from(hints.lists);
        sums.late += hints.late;
    }
}

/// Ends a guest's life.
struct EndOnDrop<'a>(&'a Ballooned);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.vm.over.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_guest_with_limosas_balloon_is_moved_over_and_over_and_loses_nothing() {
    let (first, count) = (number("LIMOSA_CHAOS_SEED").unwrap_or(1), number("LIMOSA_CHAOS_TRIALS").unwrap_or(200));
    let (mut sums, mut taken_back, mut discarded) = (Sums::default(), 0, 0);
    let seeds: Vec<u64> = (first..first + count).collect();
    for seeds in seeds.chunks(usize::try_from(OF_ONE).unwrap()) {
        let ram = match (seeds[0] / OF_ONE).is_multiple_of(2) {
            true => BlockOptions::memfd("pc.ram", RAM),
            false => BlockOptions::anonymous("pc.ram", RAM),
        };
        let guest = Ballooned::new(ram);
        thread::scope(|scope| {
            // Also if something is wrong.
            let _over = EndOnDrop(&guest);
            guest.live(scope, seeds[0]);
            for seed in seeds {
                // Up to a fifth of the memory goes into the balloon, or comes out of it, meanwhile.
                guest.balloon.set_target(RAM - random(*seed | 1) % (RAM / 5)).unwrap();
                Case::new(*seed).run(&guest, &mut sums);
            }
        });
        taken_back += guest.taken_back.load(Ordering::Relaxed);
        discarded += guest.balloon.counters().discarded_bytes;
    }
    println!("{sums:?}, {taken_back} blocks taken back without a word, {} MiB given back", discarded >> 20);
    assert!(sums.moved > count / 2 && sums.hinted > 0 && sums.lists > sums.moved, "{sums:?}");
    assert!(count < 100 || taken_back > 0 && discarded > 0 && sums.late > 0 && sums.postcopy > 0, "{sums:?}");
}
