//! Migrations over a network in memory that is cut at a byte: cuts, delays and the guest's writes follow from a seed.
//!
//! A failure prints its seed. `LIMOSA_CHAOS_SEED=S LIMOSA_CHAOS_TRIALS=1` repeats it.

use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use crate::ends::{Endings, Ends, Pair, Vms, after, assert_same, blocks};
use crate::model::live::{TestVm, random};
use crate::model::network::{CutAt, Network, SaySeed, Way, seeds};
use crate::model::vm::Vm;
use limosa_memory::BlockOptions;
use limosa_memory::dirty::SoftwareDirtyBitmap;
use limosa_migrate::live::{LiveDestinationOptions, PostcopyMode, TimeoutStrategy};
use limosa_migrate::{Handle, LiveDestination, LiveSource, MigrationParams};
use limosa_testkit::HugePages;

/// A guest that writes its memory whenever the network makes a step.
struct Guest {
    vm: Arc<TestVm>,
    marker: SoftwareDirtyBitmap,
    seed: Mutex<u64>,
}

impl Guest {
    /// Writes a page, a fifth of them with zeros, or gives one back.
    fn step(&self) {
        let mut seed = self.seed.lock().unwrap();
        *seed = random(*seed);
        let block = usize::try_from(*seed >> 60).unwrap() % self.vm.memory.blocks().len();
        let page = (*seed >> 20) % self.vm.memory.block(block).unwrap().pages().len();
        let fill = if seed.is_multiple_of(5) { 0 } else { u8::try_from(*seed >> 8 & 0xff).unwrap() };
        match seed.is_multiple_of(7) {
            true => self.vm.discard(block, page),
            false => self.vm.write(&self.marker, block, page, fill),
        };
    }
}

struct Case {
    seed: u64,
    drawn: u64,
    /// After this number of rounds, or at once.
    postcopy: Option<Option<u32>>,
    /// The memory of both ends.
    blocks: fn() -> Vec<BlockOptions>,
    /// Bytes to the destination before which a cut is made.
    reach: u64,
    /// The course of every attempt.
    trace: Vec<String>,
    endings: Endings,
}

impl Case {
    fn new(seed: u64, postcopy: Option<Option<u32>>) -> Self {
        Self {
            seed,
            drawn: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            postcopy,
            blocks,
            reach: 2 << 20,
            trace: Vec::new(),
            endings: Endings::default(),
        }
    }

    fn next(&mut self, below: u64) -> u64 {
        self.drawn = random(self.drawn);
        self.drawn.rotate_left(20) % below
    }

    /// Moves a VM until an attempt succeeds.
    fn run(&mut self) {
        let _say = SaySeed(self.seed);
        let vm = Arc::new(TestVm::of((self.blocks)()));
        let seed = self.drawn;
        vm.fill(0, |page| !random(page ^ seed).is_multiple_of(4));
        vm.fill(1, |_| true);
        let (logs, marker) = vm.restless_logs(1);
        let guest = Arc::new(Guest { vm: Arc::clone(&vm), marker, seed: Mutex::new(seed) });
        let fresh: [OnceLock<Vm>; 16] = Default::default();
        let (mut ends, mut attempts) = (Ends::Whole(logs), 0);
        let arrived = loop {
            let vms = Vms { source: &vm, fresh: &fresh[attempts] };
            attempts += 1;
            // The last attempts are not disturbed.
            let cut = match self.next(8) {
                _ if attempts > 5 => None,
                0 => Some(CutAt { way: Way::ToSource, offset: self.next(80) }),
                _ => Some(CutAt { way: Way::ToDestination, offset: self.next(self.reach) }),
            };
            match self.attempt(vms, ends, cut, &guest) {
                Ok(vm) => break vm,
                Err(next) => ends = next,
            }
        };
        assert_same(&vm, arrived, self.seed);
        self.endings.completed += 1;
    }

    fn attempt<'v>(
        &mut self,
        vms: Vms<'v>,
        ends: Ends<'v>,
        cut: Option<CutAt>,
        guest: &Arc<Guest>,
    ) -> Result<&'v Vm, Ends<'v>> {
        let source = vms.source;
        let coin = self.next(2) == 0;
        let (writes, postcopy) = (Arc::clone(guest), self.postcopy);
        let (near, far, network) = Network::new(self.next(u64::MAX), cut, move |_| writes.step());
        let (whole, broken, vm) = match ends {
            Ends::Whole(logs) => (Some(logs), None, vms.fresh.get_or_init(|| Vm::of((self.blocks)()))),
            Ends::Broken(recoverable, paused, vm) => (None, Some((recoverable, paused)), vm),
        };
        let (recoverable, paused) = broken.unzip();
        let rounds = Mutex::new(Vec::new());
        let (outcome, arrival) = thread::scope(|scope| {
            let receiving = scope.spawn(|| match paused {
                Some(paused) => paused.recover(far, None, &Handle::new()),
                None => {
                    let options = LiveDestinationOptions {
                        answer_timeout: Some(Duration::from_secs(10)),
                        ..LiveDestinationOptions::default()
                    };
                    LiveDestination::new(vm, far, &Handle::new()).options(options).run()
                }
            });
            let handle = Handle::new();
            let outcome = match (whole, recoverable) {
                (Some(logs), _) => {
                    let params = MigrationParams::default()
                        .downtime_limit(Duration::ZERO)
                        .stalled_rounds(Some(5))
                        .timeout_strategy(TimeoutStrategy::Pause)
                        .answer_timeout(Duration::from_secs(10));
                    LiveSource::new(source, logs, near, &handle)
                        .options(params)
                        .destination_zeroed(true)
                        .postcopy(match postcopy {
                            None => PostcopyMode::Off,
                            Some(None) => PostcopyMode::AtOnce,
                            Some(Some(_)) => PostcopyMode::Allowed,
                        })
                        .on_round(|round| {
                            rounds.lock().unwrap().push((round.normal, round.zero, round.left_out));
                            if postcopy == Some(Some(round.number)) {
                                handle.control.start_postcopy();
                            }
                        })
                        .run()
                }
                (None, Some(recoverable)) => recoverable.recover(near, None, &handle),
                (None, None) => unreachable!("one or the other"),
            };
            network.cut();
            (outcome, receiving.join().unwrap())
        });
        let kinds = [format!("{outcome:?}"), format!("{arrival:?}")];
        let kinds = kinds.map(|kind| kind.split(|c: char| !c.is_alphanumeric()).next().unwrap().to_owned());
        self.trace.push(format!("{cut:?} {kinds:?} {:?}", rounds.into_inner().unwrap()));
        after(source, vm, Pair { outcome, arrival }, coin, &mut self.endings)
    }
}

#[test]
fn a_precopy_that_is_cut_at_any_byte_leaves_the_vm_on_one_side_and_whole() {
    let mut retried = 0;
    let seeds = seeds(1, 100);
    for seed in seeds.clone() {
        let mut case = Case::new(seed, None);
        case.run();
        retried += case.endings.retried;
    }
    assert!(retried > 20 || seeds.count() < 50, "{retried} attempts were repeated");
}

#[test]
fn a_postcopy_that_is_cut_at_any_byte_leaves_the_vm_on_one_side_and_whole() {
    let mut recovered = 0;
    let seeds = seeds(1001, 100);
    for seed in seeds.clone() {
        let rounds = u32::try_from(seed % 4).ok().filter(|rounds| *rounds < 2);
        let mut case = Case::new(seed, Some(rounds));
        case.run();
        recovered += case.endings.recovered;
    }
    assert!(recovered > 10 || seeds.count() < 50, "{recovered} postcopies were recovered");
}

/// Bytes of a huge page.
const HUGE: u64 = 2 << 20;

fn huge_blocks() -> Vec<BlockOptions> {
    vec![BlockOptions::memfd("huge", 2 * HUGE).huge_pages(HUGE), BlockOptions::anonymous("small", 16 * 4096)]
}

#[test]
fn a_postcopy_from_huge_pages_into_huge_pages_that_is_cut_at_any_byte_leaves_the_vm_on_one_side_and_whole() {
    // The source's, and one destination for each attempt.
    let _pages = HugePages::reserve((1 + 16) * 2 * HUGE).unwrap();
    let mut recovered = 0;
    let seeds = seeds(3001, 40);
    for seed in seeds.clone() {
        let rounds = u32::try_from(seed % 4).ok().filter(|rounds| *rounds < 2);
        let mut case = Case { blocks: huge_blocks, reach: 6 << 20, ..Case::new(seed, Some(rounds)) };
        case.run();
        recovered += case.endings.recovered;
    }
    assert!(recovered > 4 || seeds.count() < 20, "{recovered} postcopies were recovered");
}

#[test]
fn the_course_of_a_cut_precopy_follows_from_its_seed() {
    for seed in seeds(2001, 30) {
        let course = || {
            let mut case = Case::new(seed, None);
            case.run();
            case.trace
        };
        assert_eq!(course(), course(), "seed {seed}");
    }
}
