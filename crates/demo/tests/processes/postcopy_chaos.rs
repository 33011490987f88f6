//! A postcopy is hit at any point, and its recoveries as well: the laws are those of `precopy_chaos`, and nothing is
//! lost when the network is: the guest waits, and continues over another connection.

use std::collections::BTreeMap;
use std::process::Command;

use crate::chaos::dice::Dice;
use crate::chaos::proxied_migration::wait_for_byte;
use crate::chaos::*;
use limosa_channel::Uri;
use limosa_demo::Settings;
use limosa_demo::settings::Postcopy;
use limosa_demo::state::{Role, State};
use limosa_testkit::{Direction, Proxy};
use serde_json::json;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Blow {
    KillSource,
    KillDestination,
    Cut,
}

struct Trial {
    scene: Scene,
    source: EndProcess,
    destination: EndProcess,
    recoveries: u32,
}

impl Trial {
    fn new(settings: &Settings) -> Self {
        let mut scene = Scene::new();
        let source = scene.start(Role::Source, settings, None);
        let destination = scene.start(Role::Destination, settings, None);
        let (source, destination) = (scene.meet(source), scene.meet(destination));
        Self { scene, source, destination, recoveries: 0 }
    }

    /// Has the destination listen behind its own proxy.
    fn listen(&self, command: &str) -> Proxy {
        let name = |end: &str| self.scene.path(&format!("{end}{}", self.recoveries));
        let proxy = Proxy::start(&name("proxy"), &name("real")).unwrap();
        self.destination.monitor.listen(command, &Uri::Unix(name("real"))).unwrap();
        proxy
    }

    fn strike(&mut self, blow: Blow) -> Option<Role> {
        match blow {
            Blow::KillSource => self.source.kill(),
            Blow::KillDestination => self.destination.kill(),
            Blow::Cut => return None,
        }
        Some(if blow == Blow::KillSource { Role::Source } else { Role::Destination })
    }

    /// Continues by the command that is printed for that.
    fn recover_by_hand(&self) {
        let (source, destination) = (self.source.control.display(), self.destination.control.display());
        let printed = format!("limosa-demo recover --control {source}");
        assert!(words(&self.source.control).contains(&printed), "{printed}");
        let arguments = format!("recover --control {source} --destination {destination}");
        let output = Command::new(PROGRAM).args(arguments.split(' ')).output().unwrap();
        assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Continues as often as it is broken off, struck again on the way at first.
    fn recover(&mut self, dice: &mut Dice, pages: u64) {
        while can_recover(&mut self.source, &mut self.destination) {
            self.recoveries += 1;
            assert!(self.recoveries < 20, "{}\n{}", words(&self.source.control), words(&self.destination.control));
            if self.recoveries == 1 {
                let nowhere = Uri::Unix(self.scene.path("no directory/socket"));
                let refused = self.destination.monitor.listen("migrate-recover", &nowhere).unwrap_err().to_string();
                assert!(refused.contains("No such file"), "{refused}");
            }
            let struck = self.recoveries < 4 && dice.coin();
            if !struck {
                self.recover_by_hand();
                continue;
            }
            let proxy = self.listen("migrate-recover");
            let direction = if dice.coin() { Direction::Forward } else { Direction::Backward };
            // The negotiation is short, and what follows is not.
            let within = dice.pick(&[200, 4000, pages * 4096]);
            proxy.stall_at(direction, dice.below(within));
            let there = Uri::Unix(proxy.path().to_owned()).to_string();
            self.source.monitor.execute("migrate", json!({ "uri": there, "resume": true })).unwrap();
            wait_for_byte(&proxy, direction, &mut self.source);
            proxy.cut();
            proxy.go_on(direction);
            wait_stable(&mut self.source, &mut self.destination);
        }
    }
}

/// Runs trials of one kind of postcopy.
fn postcopies(settings: &Settings, count: u64, salt: u64) {
    let mut seen = BTreeMap::new();
    let pages = settings.memory / 4096;
    for seed in trials(count) {
        let mut dice = Dice::new(seed ^ salt);
        let blow = dice.pick(&[Blow::KillSource, Blow::KillDestination, Blow::Cut, Blow::Cut, Blow::Cut, Blow::Cut]);
        let (direction, byte) = match dice.below(4) {
            0 => (Direction::Backward, dice.below(600)),
            1 => (Direction::Forward, dice.below(6000)),
            2 => (Direction::Forward, pages * 4096 * 15 / 16 + dice.below(pages * 256)),
            _ => (Direction::Forward, dice.below(pages * 4096)),
        };
        println!("seed {seed}: {blow:?} behind byte {byte} {direction:?}");
        let mut trial = Trial::new(settings);
        let proxy = trial.listen("migrate-incoming");
        proxy.stall_at(direction, byte);
        migrate(&trial.source, &Uri::Unix(proxy.path().to_owned()), true);
        wait_for_byte(&proxy, direction, &mut trial.source);
        let killed = trial.strike(blow);
        proxy.cut();
        proxy.go_on(direction);
        trial.recover(&mut dice, pages);
        let by_hand = trial
            .source
            .status()
            .is_some_and(|status| matches!(status.state, State::Undecided | State::PostcopyPaused));
        let Trial { mut scene, mut source, mut destination, recoveries } = trial;
        let outcome = operate(&mut source, &mut destination, killed, dice.coin());
        match outcome {
            Whereabouts::Lost => assert!(killed.is_some(), "lost, although no end was killed"),
            Whereabouts::Destination => drop(destination.memory()),
            Whereabouts::Source => {
                source.memory();
                let started = scene.start(Role::Destination, settings, None);
                let mut again = scene.meet(started);
                let at = again.monitor.listen("migrate-incoming", &Uri::Unix(scene.path("again"))).unwrap();
                migrate(&source, &at, true);
                let moved = operate(&mut source, &mut again, None, true);
                assert_eq!(moved, Whereabouts::Destination, "another attempt: {}", words(&source.control));
                again.memory();
            }
        }
        assert_lawful(&scene, by_hand);
        let recovered = if recoveries > 0 { " recovered" } else { "" };
        *seen.entry(format!("{blow:?} {outcome:?}{recovered}")).or_insert(0) += 1;
    }
    println!("{seen:?}");
}

#[test]
fn a_postcopy_from_the_start_is_hit_anywhere() {
    postcopies(&Settings { postcopy: Postcopy::AtOnce, ..small() }, 60, 0xa7);
}

#[test]
fn a_precopy_that_goes_on_in_postcopy_is_hit_anywhere() {
    postcopies(&Settings { postcopy: Postcopy::AfterRounds(1), ..small() }, 60, 0xaf7e2);
}

#[test]
fn a_postcopy_with_a_channel_for_requested_pages_is_hit_anywhere() {
    postcopies(&Settings { postcopy: Postcopy::AtOnce, preempt: true, ..small() }, 60, 0x2c);
}
