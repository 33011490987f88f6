//! A live migration is hit at hundreds of points: its source is killed, its destination is killed, its network is cut,
//! stalled or slowed down. In every case the guest never runs twice, it is never lost while its own process lives,
//! what is undecided can be decided by the command that is printed, its memory is right wherever it runs, and another
//! attempt succeeds.
//!
//! Trials follow from their seeds, which are printed. `LIMOSA_CHAOS_TRIALS=N` runs N of each kind,
//! `LIMOSA_CHAOS_SEED=S` begins with another seed.

use std::time::Duration;

use crate::chaos::dice::Dice;
use crate::chaos::proxied_migration::ProxiedMigration;
use crate::chaos::*;
use limosa_demo::Settings;
use limosa_demo::guest::GuestKind;
use limosa_demo::guest::LogKind;
use limosa_demo::state::{Role, State};
use limosa_testkit::Direction;

/// A failure during a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blow {
    KillSource,
    KillDestination,
    /// The connection is closed, both ways.
    Cut,
    /// Nothing more arrives in this direction, and neither end gets an error; both have to find out.
    Silence,
    /// Nothing comes through for this number of milliseconds.
    Delay(u64),
}

/// A blow and the byte behind which it falls.
#[derive(Debug, Clone, Copy)]
struct Strike {
    blow: Blow,
    direction: Direction,
    byte: u64,
}

/// Bytes of an undisturbed migration, both ways.
fn undisturbed(settings: &Settings) -> (u64, u64) {
    let mut migration = ProxiedMigration::new(settings);
    migration.migrate();
    assert_eq!(operate(&mut migration.source, &mut migration.destination, None, true), Whereabouts::Destination);
    migration.destination.memory();
    assert_lawful(&migration.scene, false);
    (migration.proxy.passed(Direction::Forward), migration.proxy.passed(Direction::Backward))
}

/// One migration, struck once. Where the guest was in the end.
fn trial(settings: &Settings, strike: Strike, seed: u64) -> Whereabouts {
    println!("seed {seed}: {strike:?}");
    let mut dice = Dice::new(seed ^ 0xface);
    let mut migration = ProxiedMigration::new(settings);
    migration.migrate_up_to(strike.direction, strike.byte);
    let ProxiedMigration { scene, source, destination, proxy } = &mut migration;
    let killed = match strike.blow {
        Blow::KillSource => {
            source.kill();
            Some(Role::Source)
        }
        Blow::KillDestination => {
            destination.kill();
            Some(Role::Destination)
        }
        Blow::Cut => {
            proxy.cut();
            None
        }
        Blow::Silence => None,
        Blow::Delay(millis) => {
            std::thread::sleep(Duration::from_millis(millis));
            None
        }
    };
    if strike.blow != Blow::Silence {
        proxy.go_on(strike.direction);
    }
    let by_hand = |source: &mut EndProcess| source.status().is_some_and(|status| status.state == State::Undecided);
    wait_stable(source, destination);
    let resumed_by_hand = by_hand(source);
    let outcome = operate(source, destination, killed, dice.coin());
    match outcome {
        Whereabouts::Lost => {}
        Whereabouts::Destination => drop(destination.memory()),
        Whereabouts::Source => {
            source.memory();
            let (scene, destination) = migration.retry(settings, dice.coin());
            destination.memory();
            assert_lawful(&scene, resumed_by_hand);
            return outcome;
        }
    }
    assert_lawful(scene, resumed_by_hand);
    outcome
}

/// A guest whose migration is the same bytes each time, so that a byte is a moment.
fn idle() -> Settings {
    Settings { dirty_rate: 0, ..small() }
}

/// Hits a migration of a guest that writes.
fn hit_anywhere(settings: &Settings, count: u64) {
    let (forward, _) = undisturbed(settings);
    let mut seen = std::collections::BTreeMap::new();
    for seed in trials(count) {
        let mut dice = Dice::new(seed);
        let blow = dice.pick(&[Blow::KillSource, Blow::KillDestination, Blow::Cut, Blow::Cut, Blow::Delay(20)]);
        // The later, the more happens; a little behind the end too.
        let late = forward - dice.below(forward / 8) + dice.below(1 << 20);
        let byte = if dice.coin() { 4096 + dice.below(forward) } else { late };
        let outcome = trial(settings, Strike { blow, direction: Direction::Forward, byte }, seed);
        *seen.entry(format!("{blow:?} {outcome:?}")).or_insert(0) += 1;
    }
    println!("{seen:?}");
}

#[test]
fn a_precopy_is_hit_anywhere_while_its_guest_writes() {
    hit_anywhere(&small(), 100);
}

#[test]
fn a_precopy_on_several_channels_is_hit_anywhere() {
    hit_anywhere(&Settings { channels: 2, ..small() }, 60);
}

#[test]
fn a_guest_under_kvm_is_hit_anywhere() {
    if limosa_testkit::skipped("LIMOSA_SKIP_KVM") {
        return;
    }
    let kvm = Settings { guest: GuestKind::Kvm, log: LogKind::KvmLog, ..small() };
    hit_anywhere(&Settings { dirty_rate: 20 << 20, ..kvm }, 25);
}

#[test]
fn a_switchover_is_hit_behind_every_few_bytes() {
    let settings = idle();
    let (forward, _) = undisturbed(&settings);
    let mut seen = std::collections::BTreeMap::new();
    // The end of memory, the device sections, the question, the go, the end and the description.
    const TAIL: u64 = 1200;
    for seed in trials(150) {
        let mut dice = Dice::new(seed ^ 0x7a11);
        let blow = dice.pick(&[Blow::KillSource, Blow::KillDestination, Blow::Cut, Blow::Cut]);
        let byte = forward + 2 - dice.below(TAIL);
        let outcome = trial(&settings, Strike { blow, direction: Direction::Forward, byte }, seed);
        *seen.entry(format!("{blow:?} {outcome:?}")).or_insert(0) += 1;
    }
    println!("{seen:?}");
}

#[test]
fn answers_are_cut_off_behind_every_byte() {
    let settings = idle();
    let (_, backward) = undisturbed(&settings);
    for byte in 0..=backward {
        for blow in [Blow::Cut, Blow::KillDestination] {
            trial(&settings, Strike { blow, direction: Direction::Backward, byte }, byte);
        }
    }
}

#[test]
fn a_network_that_falls_silent_is_found_out() {
    let settings = Settings { answer_timeout_ms: 700, ..idle() };
    let (forward, backward) = undisturbed(&settings);
    for seed in trials(8) {
        let mut dice = Dice::new(seed ^ 0x51e7);
        let (direction, byte) = match dice.below(3) {
            0 => (Direction::Forward, dice.below(forward)),
            1 => (Direction::Forward, forward - dice.below(1200)),
            _ => (Direction::Backward, dice.below(backward)),
        };
        trial(&settings, Strike { blow: Blow::Silence, direction, byte }, seed);
    }
}
