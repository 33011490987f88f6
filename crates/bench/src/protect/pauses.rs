//! Pauses of a VM, as QEMU's events say.

use std::time::{Duration, Instant};

use anyhow::Result;
use limosa_page::{to_micros, to_u64};

use crate::vm::Vm;

/// Pauses, the shortest first.
pub(super) struct Pauses(Vec<Duration>);

/// Collects the pauses of a VM that are over within this time.
pub(super) fn watch(vm: &Vm, time: Duration) -> Result<Pauses> {
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
    Ok(Pauses(pauses))
}

impl Pauses {
    pub(super) fn count(&self) -> u64 {
        to_u64(self.0.len())
    }

    /// The pause that this part of all does not exceed, in microseconds; 0 of no pauses.
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank")]
    pub(super) fn quantile_us(&self, quantile: f64) -> u64 {
        let rank = (quantile * self.0.len() as f64).ceil() as usize;
        let pause = self.0.get(rank.saturating_sub(1).min(self.0.len().saturating_sub(1)));
        pause.copied().map_or(0, to_micros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_a_pause_that_was_seen() {
        let pauses = Pauses((1..=100).map(Duration::from_micros).collect());
        let found = [0.0, 0.5, 0.95, 0.99, 1.0].map(|quantile| pauses.quantile_us(quantile));
        assert_eq!(found, [1, 50, 95, 99, 100]);
        assert_eq!(Pauses(Vec::new()).quantile_us(0.5), 0);
    }
}
