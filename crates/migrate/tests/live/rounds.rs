//! Both ends of a live migration: small VMs that write all the time, moved over and over, and compared byte for byte.

use std::num::NonZeroU64;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use crate::model::live::{TestVm, random};
use crate::model::vm::Vm;
use crate::model::{lending_pair, pair};
use limosa_channel::ZeroCopy;
use limosa_memory::{BlockOptions, BlockRole};
use limosa_migrate::live::{PostcopyMode, RecordWriteMode, TimeoutStrategy, ZeroCheck};
use limosa_migrate::multifd::{MultifdOptions, MultifdSourceOptions};
use limosa_migrate::stats::RoundKind;
use limosa_migrate::{Handle, IncomingOutcome, LiveDestination, LiveOutcome, LiveSource, MigrationParams};
use limosa_stream::multifd::{Compression, INITIAL_LEN, InitialPacket};

/// One migration. Everything follows from a seed.
#[derive(Debug)]
struct Case {
    seed: u64,
    channels: usize,
    fresh: bool,
    zero_check: ZeroCheck,
    /// How pages leave on the multifd channels, and whether that is over TCP.
    zero_copy: (ZeroCopy, bool),
    compression: Compression,
    private: bool,
    machine: &'static str,
    pages: [u64; 2],
    /// It continues in postcopy after this number of rounds, or at once.
    postcopy: Option<Option<u32>>,
    record_write: RecordWriteMode,
    packet_pages: usize,
    /// It gets this rate and time, and then stops with the rest, or continues in postcopy.
    hurried: Option<(NonZeroU64, Duration)>,
    /// Hardly anything of its memory was ever touched.
    sparse: bool,
}

impl Case {
    fn new(seed: u64) -> Self {
        let mut number = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = |below: u64| {
            number = random(number);
            number.rotate_left(20) % below
        };
        let machines = ["pc-q35-10.0", "pc-q35-8.2", "pc-q35-8.0", "demo"];
        let compressions =
            [Compression::None, Compression::None, Compression::None, Compression::Zstd, Compression::Zlib];
        let compression = compressions[usize::try_from(next(5)).unwrap()];
        let ways = [
            (ZeroCopy::Off, false),
            (ZeroCopy::Auto, next(2) == 0),
            (ZeroCopy::Msg, true),
            (ZeroCopy::Splice, next(2) == 0),
        ];
        // What is compressed cannot be sent as it is, and a demand for it is refused.
        let most = if compression == Compression::None { 4 } else { 2 };
        Self {
            seed,
            channels: usize::try_from(next(5)).unwrap(),
            fresh: next(2) == 0,
            zero_check: [ZeroCheck::Always, ZeroCheck::Bulk, ZeroCheck::Off][usize::try_from(next(3)).unwrap()],
            zero_copy: ways[usize::try_from(next(most)).unwrap()],
            compression,
            private: next(2) == 0,
            machine: machines[usize::try_from(next(4)).unwrap()],
            pages: [1 + next(1200), 1 + next(300)],
            record_write: [RecordWriteMode::Vectored, RecordWriteMode::Buffered][usize::try_from(next(2)).unwrap()],
            packet_pages: [1, 3, 64, 128][usize::try_from(next(4)).unwrap()],
            postcopy: None,
            hurried: None,
            sparse: false,
        }
    }

    fn blocks(&self) -> Vec<BlockOptions> {
        let of = |name: &str, pages: u64, role| match self.private {
            true => BlockOptions::anonymous(name, pages * 4096).role(role),
            false => BlockOptions::memfd(name, pages * 4096).role(role),
        };
        vec![of("ram", self.pages[0], BlockRole::Ram), of("vga", self.pages[1], BlockRole::Video)]
    }

    fn run(&self) {
        let source = TestVm { machine: self.machine, ..TestVm::of(self.blocks()) };
        source.fill(0, |page| random(page ^ self.seed).is_multiple_of(if self.sparse { 3000 } else { 3 }));
        let destination = Vm::of(self.blocks());
        // Firmware has filled it before a page comes; what is not fresh has more in it.
        let video = destination.memory.block(1).unwrap();
        video.write(0, &vec![0xcc; usize::try_from(video.len()).unwrap()]).unwrap();
        if !self.fresh {
            let ram = destination.memory.block(0).unwrap();
            ram.write(0, &vec![0xdd; usize::try_from(ram.len()).unwrap()]).unwrap();
        }
        let (logs, marker) = source.restless_logs(self.postcopy.is_some().into());
        let (near, far) = pair();
        let (near_page_channels, far_page_channels): (Vec<_>, Vec<_>) =
            (0..self.channels).map(|_| lending_pair(self.zero_copy.0, self.zero_copy.1)).unzip();
        let handle = Handle::new();
        let params = MigrationParams::default()
            .zero_check(self.zero_check)
            .record_write(self.record_write)
            .downtime_limit(if self.postcopy.is_some() { Duration::ZERO } else { Duration::from_micros(200) })
            .stalled_rounds(Some(6))
            .timeout_strategy(if self.postcopy.is_some() { TimeoutStrategy::Postcopy } else { TimeoutStrategy::Pause })
            .answer_timeout(Duration::from_secs(20))
            .max_bandwidth(self.hurried.map(|(bandwidth, _)| bandwidth))
            .timeout(self.hurried.map(|(_, time)| time));
        let (compression, packet_pages) = (self.compression, self.packet_pages);
        let options = MultifdSourceOptions { compression, packet_pages, ..MultifdSourceOptions::default() };
        let (outcome, arrival) = thread::scope(|scope| {
            let receiving = scope.spawn(|| {
                for channel in &far_page_channels {
                    let mut first = [0; INITIAL_LEN];
                    channel.read_exact(&mut first).unwrap();
                    InitialPacket::decode(&first).unwrap();
                }
                let expected = MultifdOptions { compression: self.compression };
                let handle = Handle::new();
                LiveDestination::new(&destination, far, &handle).channels(far_page_channels, expected).run()
            });
            source.write_on(scope, marker, self.seed | 1, Duration::from_micros(random(self.seed | 1) % 40));
            let postcopy = match self.postcopy {
                None => PostcopyMode::Off,
                Some(None) => PostcopyMode::AtOnce,
                Some(Some(_)) => PostcopyMode::Allowed,
            };
            let outcome = LiveSource::new(&source, logs, near, &handle)
                .options(params)
                .destination_zeroed(self.fresh)
                .postcopy(postcopy)
                .channels(near_page_channels, options)
                .unwrap()
                .on_round(|round| {
                    if self.postcopy == Some(Some(round.number)) {
                        handle.control.start_postcopy();
                    }
                })
                .run();
            source.over.store(true, Ordering::Relaxed);
            (outcome, receiving.join().unwrap())
        });
        let LiveOutcome::Completed(stats) = outcome else { panic!("{self:?}: {outcome:?}") };
        if self.sparse {
            let untouched = self.pages.iter().sum::<u64>() / 2;
            assert!(stats.rounds[0].holes < untouched, "it was not looked at the time: {self:?}\n{stats:#?}");
        }
        if self.hurried.is_some() && self.postcopy.is_none() {
            // The first round was broken off, and the last one sent what it did not get to.
            let kinds: Vec<_> = stats.rounds.iter().map(|round| round.kind).collect();
            assert_eq!(kinds, [RoundKind::Bulk, RoundKind::Last], "{self:?}");
            assert!(stats.rounds[1].pages >= stats.rounds[0].rest, "{self:?}");
        }
        let IncomingOutcome::Running(arrived) = arrival else { panic!("{self:?}: {arrival:?}") };
        assert_eq!(destination.started(), 1);
        assert!(!source.runs());
        for block in 0..2 {
            let mut there = vec![0; usize::try_from(self.pages[block] * 4096).unwrap()];
            destination.memory.block(block).unwrap().read(0, &mut there).unwrap();
            let here = source.contents(block);
            let differs = here.chunks(4096).zip(there.chunks(4096)).position(|(here, there)| here != there);
            assert_eq!(differs, None, "page of block {block}, {self:?}\n{stats:#?}");
        }
        let lent = stats.channels.iter().map(|counters| counters.zero_copy_calls).sum::<u64>() != 0;
        let spliced = stats.channels.iter().map(|counters| counters.spliced).sum::<u64>() != 0;
        let as_they_are = self.channels != 0 && self.compression == Compression::None;
        let [by_message, by_splice] = match self.zero_copy.0 {
            ZeroCopy::Off => [false, false],
            ZeroCopy::Msg => [as_they_are, false],
            ZeroCopy::Auto | ZeroCopy::Splice => [false, as_they_are],
        };
        let any = stats.sum(|round| round.normal) != 0;
        assert_eq!((lent, spliced), (by_message && any, by_splice && any), "{self:?}");
        assert_eq!(stats.postcopy.is_some(), self.postcopy.is_some(), "{self:?}");
        if self.postcopy.is_none() {
            assert_eq!(arrived.received.normal_pages, stats.sum(|round| round.normal), "{self:?}");
            assert_eq!(arrived.received.zero_pages, stats.sum(|round| round.zero), "{self:?}");
        }
        let loaded = destination.loaded.lock().unwrap();
        assert_eq!(loaded[0].2, source.writes.load(Ordering::SeqCst).to_le_bytes(), "{self:?}");
    }
}

fn many(seeds: std::ops::Range<u64>) {
    seeds.for_each(|seed| Case::new(seed).run());
}

#[test]
fn a_thousand_small_vms_arrive_as_they_were() {
    many(0..1000);
}

#[test]
fn small_vms_that_run_before_their_memory_has_come_get_all_of_it() {
    for seed in 0..200 {
        let postcopy = [None, Some(0), Some(1), Some(3)][usize::try_from(seed % 4).unwrap()];
        Case { postcopy: Some(postcopy), channels: 0, ..Case::new(seed) }.run();
    }
}

#[test]
fn a_vm_whose_time_is_up_in_the_middle_of_a_round_takes_the_rest_with_it() {
    for seed in 0..20 {
        // A megabyte at once, and the next one after a second: which is not waited for.
        let hurried = NonZeroU64::new(1 << 20).map(|bandwidth| (bandwidth, Duration::from_millis(5)));
        let channels = usize::try_from(seed % 3).unwrap();
        Case { hurried, channels, pages: [3000 + seed, 300], ..Case::new(seed) }.run();
    }
}

#[test]
fn a_vm_whose_time_is_up_while_holes_are_announced_goes_on_as_was_said_with_the_others_zero() {
    for seed in 0..4 {
        let hurried = NonZeroU64::new(1 << 16).map(|bandwidth| (bandwidth, Duration::from_millis(5)));
        let (channels, postcopy) =
            [(0, None), (1, None), (2, None), (0, Some(Some(99)))][usize::try_from(seed % 4).unwrap()];
        let (fresh, pages) = (false, [40_000, 30]);
        Case { hurried, channels, postcopy, fresh, pages, sparse: true, ..Case::new(seed) }.run();
    }
}

#[test]
fn channels_that_are_to_send_pages_as_they_are_are_refused_where_pages_are_compressed() {
    for zero_copy in ZeroCopy::ALL {
        let source = TestVm::of(vec![BlockOptions::memfd("ram", 1 << 20)]);
        let (logs, _marker) = source.logs();
        let handle = Handle::new();
        let role = LiveSource::new(&source, logs, pair().0, &handle);
        let options = MultifdSourceOptions { compression: Compression::Zstd, ..MultifdSourceOptions::default() };
        let taken = role.channels(vec![lending_pair(zero_copy, true).0], options);
        assert_eq!(taken.is_err(), matches!(zero_copy, ZeroCopy::Msg | ZeroCopy::Splice), "{zero_copy}");
    }
}
