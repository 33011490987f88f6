//! Guests that report their free memory, moved over and over, and hit on the way: what programs have is whole
//! wherever the guest runs, and its balloon's driver holds nothing back.
//!
//! Trials follow from their seeds, which are printed. `LIMOSA_CHAOS_TRIALS=N` runs N of each kind,
//! `LIMOSA_CHAOS_SEED=S` begins with another seed.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use crate::chaos::dice::Dice;
use crate::chaos::proxied_migration::ProxiedMigration;
use crate::chaos::*;
use limosa_channel::Uri;
use limosa_demo::Settings;
use limosa_demo::guest::GuestKind;
use limosa_demo::guest::LogKind;
use limosa_demo::report::SourceReport;
use limosa_demo::settings::Postcopy;
use limosa_demo::state::{Role, State};
use limosa_testkit::Direction;

/// A guest whose memory is half a heap, asked in every round, slow enough for lists to come on the way.
fn hinted(seed: u64) -> Settings {
    let mut dice = Dice::new(seed ^ 0x41e4);
    Settings {
        hints: true,
        hint_wait_ms: dice.pick(&[0, 0, 2, 20]),
        hint_pages: 0,
        max_bandwidth: NonZeroU64::new(dice.pick(&[0, 100 << 20, 400 << 20])),
        downtime_limit_ms: dice.pick(&[5, 30]),
        timeout_ms: Some(1500),
        give_up: limosa_migrate::live::TimeoutStrategy::Pause,
        channels: dice.pick(&[0, 0, 2]),
        ..small()
    }
}

/// Checks that programs' memory is whole, and that the driver gives back what it held as soon as it runs.
fn assert_whole(end: &EndProcess) {
    let until = Instant::now() + SOON;
    loop {
        let found = end.memory();
        if found.held_pages == 0 {
            return;
        }
        assert!(Instant::now() < until, "{found:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

struct Sums {
    moved: u64,
    pages: u64,
    lists: u64,
    late: u64,
}

/// One migration, cut or an end killed where the seed says, if it says so. Where it ended up is in the sums.
fn trial(settings: &Settings, seed: u64, sums: &mut Sums) {
    println!("seed {seed}");
    let mut dice = Dice::new(seed ^ 0xb411);
    let mut migration = ProxiedMigration::new(settings);
    let strikes = dice.below(3) == 0;
    let mut killed = None;
    if strikes {
        migration.migrate_up_to(Direction::Forward, 4096 + dice.below(settings.memory / 2));
        if dice.coin() {
            migration.destination.kill();
            killed = Some(Role::Destination);
        } else {
            migration.proxy.cut();
        }
        migration.proxy.go_on(Direction::Forward);
    } else {
        migration.migrate();
    }
    let ProxiedMigration { scene, source, destination, .. } = &mut migration;
    wait_stable(source, destination);
    while can_recover(source, destination) {
        let at = destination.monitor.listen("migrate-recover", &Uri::Unix(scene.path("recovery"))).unwrap();
        let resume = serde_json::json!({ "uri": at.to_string(), "resume": true });
        source.monitor.execute("migrate", resume).unwrap();
        wait_stable(source, destination);
    }
    let stuck = |source: &mut EndProcess| {
        source.status().is_some_and(|status| matches!(status.state, State::Undecided | State::PostcopyPaused))
    };
    let by_hand = stuck(source);
    match operate(source, destination, killed, dice.coin()) {
        Whereabouts::Destination => {
            assert_whole(destination);
            let report: SourceReport = source.monitor.typed("query-report").unwrap_or_default();
            sums.moved += 1;
            sums.pages += report.rounds.iter().map(|round| round.hinted).sum::<u64>();
            sums.lists += report.hints.as_ref().map_or(0, |hints| hints.lists.into());
            sums.late += report.hints.as_ref().map_or(0, |hints| hints.late);
        }
        Whereabouts::Source => {
            assert_whole(source);
            let (scene, again) = migration.retry(settings, false);
            assert_whole(&again);
            return assert_lawful(&scene, by_hand);
        }
        Whereabouts::Lost => assert!(killed.is_some(), "lost, although no end was killed"),
    }
    assert_lawful(scene, by_hand);
}

fn many(count: u64, settings: impl Fn(u64) -> Settings) {
    let mut sums = Sums { moved: 0, pages: 0, lists: 0, late: 0 };
    trials(count).for_each(|seed| trial(&settings(seed), seed, &mut sums));
    let Sums { moved, pages, lists, late } = sums;
    println!("{moved} moved at once: {pages} pages left out, {lists} lists, {late} ranges too late");
    assert!(moved == 0 || (pages > 0 && lists >= moved), "{moved} moved, {pages} pages, {lists} lists");
}

#[test]
fn a_guest_that_takes_back_what_its_balloon_holds_arrives_whole() {
    many(24, hinted);
}

#[test]
fn a_guest_that_runs_ahead_of_its_pages_arrives_whole_without_its_free_ones() {
    many(10, |seed| Settings {
        postcopy: Postcopy::AfterRounds(1 + u32::try_from(seed % 2).unwrap()),
        channels: 0,
        ..hinted(seed)
    });
}

#[test]
fn a_guest_under_kvm_with_a_heap_arrives_whole() {
    if limosa_testkit::skipped("LIMOSA_SKIP_KVM") {
        return;
    }
    many(8, |seed| Settings {
        guest: GuestKind::Kvm,
        log: if seed.is_multiple_of(2) { LogKind::KvmLog } else { LogKind::KvmRing },
        dirty_rate: 20 << 20,
        ..hinted(seed)
    });
}
