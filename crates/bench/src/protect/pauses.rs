//! Pauses of a VM, as QEMU's events say.

use std::time::{Duration, Instant};

use anyhow::Result;
use limosa_page::to_micros;

use crate::vm::Vm;

/// Collects the pauses of a VM that are over within this time; the shortest first.
pub(super) fn watch(vm: &Vm, time: Duration) -> Result<Vec<Duration>> {
    let end = Instant::now() + time;
    let (mut stopped, mut pauses) = (None, Vec::new());
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        let Some(event) = vm.monitor.qmp().wait_event(&["STOP", "RESUME"], left)? else { break };
        match (event.name.as_str(), stopped) {
            ("STOP", _) => stopped = event.at,
            (_, Some(since)) => {
                pauses.extend(event.at.and_then(|at| at.checked_sub(since)));
                stopped = None;
            }
            (_, None) => {}
        }
    }
    pauses.sort_unstable();
    Ok(pauses)
}

/// The time that this part of all does not exceed, in microseconds; 0 of no times. They are sorted.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank")]
pub(super) fn quantile_us(times: &[Duration], part: f64) -> u64 {
    let rank = (part * times.len() as f64).ceil() as usize;
    times.get(rank.saturating_sub(1).min(times.len().saturating_sub(1))).copied().map_or(0, to_micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_a_time_that_was_seen() {
        let times: Vec<_> = (1..=100).map(Duration::from_micros).collect();
        let found = [0.0, 0.5, 0.95, 0.99, 1.0].map(|part| quantile_us(&times, part));
        assert_eq!(found, [1, 50, 95, 99, 100]);
        assert_eq!(quantile_us(&[], 0.5), 0);
    }
}
