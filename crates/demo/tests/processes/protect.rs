//! A guest that prints is killed, and continues in another process.

use std::process::Command;
use std::time::Duration;

use limosa_demo::DemoError;
use limosa_demo::guest::LogKind;
use limosa_demo::protect::{ProtectReport, ProtectSettings, demonstrate};

const SETTINGS: ProtectSettings = ProtectSettings {
    memory: 16 << 20,
    dirty_rate: 20 << 20,
    every: Duration::from_millis(20),
    by_output: false,
    held: true,
    line_every: Duration::from_millis(2),
    log: LogKind::Best,
};

fn killed(settings: &ProtectSettings, after: u64) -> Result<ProtectReport, DemoError> {
    let program = || Command::new(env!("CARGO_BIN_EXE_limosa-demo"));
    demonstrate(program, settings, Duration::from_millis(after))
}

#[test]
fn no_line_is_seen_that_the_survivor_does_not_know() {
    for settings in [SETTINGS, ProtectSettings { by_output: true, every: Duration::from_secs(3600), ..SETTINGS }] {
        for after in [0, 41, 133, 290] {
            let report = killed(&settings, after).unwrap();
            assert!(report.seen <= report.known && report.known < report.last, "{report:?}");
        }
    }
}

#[test]
fn without_the_gate_a_line_is_seen_that_the_survivor_does_not_know() {
    let free = ProtectSettings { held: false, every: Duration::from_secs(1), ..SETTINGS };
    // Long before its next checkpoint, unless the machine stands still for that long.
    let broken = (0..20).any(|number| matches!(killed(&free, 100 + 30 * number), Err(DemoError::Differs(_))));
    assert!(broken, "the test would not notice output that is not held");
}
