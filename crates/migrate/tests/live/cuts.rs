//! Both ends of a live migration, and a network between them that is cut at random: at most one of them ever runs the
//! VM, a look at both tells what to do, and wherever the VM runs in the end it has its memory.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use crate::ends::{Endings, Ends, Pair, Vms, after, assert_same, blocks};
use crate::model::here;
use crate::model::live::{TestVm, random};
use crate::model::relay::Relay;
use crate::model::vm::Vm;
use limosa_channel::ZeroCopy;
use limosa_migrate::live::{LiveDestinationOptions, OpenPreempt, PostcopyMode};
use limosa_migrate::multifd::{MultifdOptions, MultifdSourceOptions};
use limosa_migrate::{Handle, LiveDestination, LiveSource, MigrationParams};
use limosa_stream::multifd::INITIAL_LEN;

struct Case {
    number: u64,
    preempt: bool,
    /// After this number of rounds, or at once.
    postcopy: Option<Option<u32>>,
    /// Pages go on two multifd channels, in this way.
    page_channels: Option<ZeroCopy>,
}

impl Case {
    fn next(&mut self, below: u64) -> u64 {
        self.number = random(self.number);
        self.number.rotate_left(20) % below
    }

    fn run(&mut self, endings: &mut Endings) {
        let source = &TestVm::of(blocks());
        let vms: [OnceLock<Vm>; 16] = Default::default();
        let seed = self.number;
        source.fill(0, |page| !random(page ^ seed).is_multiple_of(4));
        source.fill(1, |_| true);
        let (logs, marker) = source.restless_logs(1);
        thread::scope(|scope| {
            source.write_on(scope, marker, seed | 1, Duration::from_micros(30));
            let mut ends = Ends::Whole(logs);
            let mut attempts = 0;
            let arrived = loop {
                let vms = Vms { source, fresh: &vms[attempts] };
                attempts += 1;
                // The last attempts are not disturbed.
                let limit = if attempts > 5 { u64::MAX } else { self.next(2 << 20) };
                match self.attempt(vms, ends, limit, endings) {
                    Ok(vm) => break vm,
                    Err(next) => ends = next,
                }
            };
            source.over.store(true, Ordering::Relaxed);
            assert_same(source, arrived, seed);
            endings.completed += 1;
        });
    }

    /// One connection: the VM that runs at the destination with all of its memory, or where both ends stand.
    fn attempt<'v>(
        &mut self,
        vms: Vms<'v>,
        ends: Ends<'v>,
        limit: u64,
        endings: &mut Endings,
    ) -> Result<&'v Vm, Ends<'v>> {
        let source = vms.source;
        let coin = self.next(2) == 0;
        let (near, far, relay) = Relay::new();
        let (near_preempt, far_preempt, relay_preempt) = Relay::new();
        // One of them is cut; the main one carries little else than pages.
        let (limit, limits) = match (self.page_channels, limit) {
            (None, _) | (_, u64::MAX) => (limit, [u64::MAX; 2]),
            _ => match self.next(4) {
                0 => (self.next(3000), [u64::MAX; 2]),
                1 => (u64::MAX, [limit, u64::MAX]),
                _ => (u64::MAX, [u64::MAX, limit / 2]),
            },
        };
        let (mut page_channels, mut far_page_channels, mut relays) = (Vec::new(), Vec::new(), Vec::new());
        for (near, far, relay) in self.page_channels.into_iter().flat_map(|way| [way; 2]).map(Relay::lending) {
            page_channels.push(near);
            far_page_channels.push(far);
            relays.push(relay);
        }
        let (preempt, postcopy) = (self.preempt, self.postcopy);
        let open_near = preempt.then(|| Box::new(move || Ok(near_preempt)) as OpenPreempt<'static>);
        let open_far = preempt.then(|| here(far_preempt));
        let (outcome, arrival, vm) = thread::scope(|scope| {
            let (relay, relay_preempt) = (&relay, &relay_preempt);
            scope.spawn(move || {
                relay.run(limit);
                relay_preempt.cut();
            });
            scope.spawn(move || {
                relay_preempt.run(limit / 2);
                if preempt && limit != u64::MAX {
                    relay.cut();
                }
            });
            for (relay, limit) in relays.iter().zip(limits) {
                scope.spawn(move || relay.run(limit));
            }
            let (whole, broken, vm) = match ends {
                Ends::Whole(logs) => (Some(logs), None, vms.fresh.get_or_init(|| Vm::of(blocks()))),
                Ends::Broken(recoverable, paused, vm) => (None, Some((recoverable, paused)), vm),
            };
            let (recoverable, paused) = broken.unzip();
            let receiving = scope.spawn(move || {
                let handle = Handle::new();
                let options = LiveDestinationOptions {
                    answer_timeout: Some(Duration::from_secs(10)),
                    ..LiveDestinationOptions::default()
                };
                let arrival = match (paused, open_far) {
                    (Some(paused), open) => paused.recover(far, open, &handle),
                    (None, Some(open)) => LiveDestination::new(vm, far, &handle).options(options).preempt(open).run(),
                    (None, None) => {
                        for channel in &far_page_channels {
                            // Who is cut before it has said who it is has no more to say.
                            let _ = channel.read_exact(&mut [0; INITIAL_LEN]);
                        }
                        LiveDestination::new(vm, far, &handle)
                            .options(options)
                            .channels(far_page_channels, MultifdOptions::default())
                            .run()
                    }
                };
                // A destination that is done for closes what it has.
                relay_preempt.cut();
                arrival
            });
            let handle = Handle::new();
            let outcome = match (whole, recoverable) {
                (Some(logs), _) => {
                    let params = MigrationParams::default()
                        .downtime_limit(Duration::ZERO)
                        .stalled_rounds(Some(5))
                        .timeout_strategy(limosa_migrate::live::TimeoutStrategy::Pause)
                        .answer_timeout(Duration::from_secs(10));
                    let role = LiveSource::new(source, logs, near, &handle)
                        .options(params)
                        .destination_zeroed(true)
                        .channels(page_channels, MultifdSourceOptions::default())
                        .unwrap()
                        .postcopy(match postcopy {
                            None => PostcopyMode::Off,
                            Some(None) => PostcopyMode::AtOnce,
                            Some(Some(_)) => PostcopyMode::Allowed,
                        })
                        .on_round(|round| {
                            if postcopy == Some(Some(round.number)) {
                                handle.control.start_postcopy();
                            }
                        });
                    match open_near.filter(|_| postcopy.is_some()) {
                        Some(open) => role.preempt(open).run(),
                        None => role.run(),
                    }
                }
                (None, Some(recoverable)) => recoverable.recover(near, open_near, &handle),
                (None, None) => unreachable!("one or the other"),
            };
            relay.cut();
            relays.iter().for_each(Relay::cut);
            (outcome, receiving.join().unwrap(), vm)
        });
        after(vms.source, vm, Pair { outcome, arrival }, coin, endings)
    }
}

fn many(seeds: std::ops::Range<u64>, preempt: bool, postcopy: impl Fn(u64) -> Option<Option<u32>>) -> Endings {
    let mut endings = Endings::default();
    for seed in seeds {
        Case { number: number(seed), preempt, postcopy: postcopy(seed), page_channels: None }.run(&mut endings);
    }
    endings
}

fn number(seed: u64) -> u64 {
    seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

#[test]
fn a_precopy_that_is_cut_anywhere_leaves_the_vm_on_one_side_and_whole() {
    let endings = many(0..60, false, |_| None);
    assert!(endings.completed == 60 && endings.retried > 20, "{endings:?}");
}

#[test]
fn a_precopy_whose_channels_lend_or_splice_pages_and_are_cut_anywhere_leaves_the_vm_on_one_side_and_whole() {
    for (way, seeds) in [(ZeroCopy::Msg, 3000..3040), (ZeroCopy::Splice, 4000..4040)] {
        let mut endings = Endings::default();
        for seed in seeds {
            Case { number: number(seed), preempt: false, postcopy: None, page_channels: Some(way) }.run(&mut endings);
        }
        assert!(endings.completed == 40 && endings.retried > 20, "{way}: {endings:?}");
    }
}

#[test]
fn a_postcopy_that_is_cut_anywhere_leaves_the_vm_on_one_side_and_whole() {
    let rounds = |seed: u64| Some(u32::try_from(seed % 4).ok().filter(|rounds| *rounds < 2));
    let endings = many(1000..1060, false, rounds);
    assert!(endings.completed == 60 && endings.retried > 10 && endings.recovered > 10, "{endings:?}");
}

#[test]
fn a_postcopy_over_two_channels_that_are_cut_anywhere_leaves_the_vm_on_one_side_and_whole() {
    let rounds = |seed: u64| Some(u32::try_from(seed % 4).ok().filter(|rounds| *rounds < 2));
    let endings = many(2000..2060, true, rounds);
    assert!(endings.completed == 60 && endings.retried > 10 && endings.recovered > 10, "{endings:?}");
}
