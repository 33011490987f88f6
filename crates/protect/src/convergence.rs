//! A guest that writes faster than its base is sent: QEMU may stop it for longer, step by step.

/// QEMU's parameter: it stops the VM when it expects to send the rest in this time, in milliseconds.
pub(crate) const DOWNTIME_LIMIT: &str = "downtime-limit";
/// The rounds in which QEMU is expected to catch up with the guest.
const ROUNDS: u64 = 8;
/// The longest pause that the end of a base may take, in milliseconds.
pub(crate) const LONGEST: u64 = 4_000;

/// The `downtime-limit` of a base under way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BasePause {
    millis: u64,
}

impl BasePause {
    /// The limit that QEMU was found with.
    pub(crate) const fn new(millis: u64) -> Self {
        Self { millis }
    }

    /// Doubles the limit if QEMU has begun one round more than it should need. Returns the one to set, in milliseconds.
    pub(crate) fn begin_round(&mut self, round: u64) -> Option<u64> {
        if round <= ROUNDS || self.millis >= LONGEST {
            return None;
        }
        self.millis = self.millis.max(1).saturating_mul(2).min(LONGEST);
        Some(self.millis)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_doubled_after_the_usual_rounds_and_has_an_end() {
        let mut pause = BasePause::new(300);
        assert!((1..=ROUNDS).all(|round| pause.begin_round(round).is_none()));
        let later: Vec<_> = (ROUNDS + 1..ROUNDS + 7).map(|round| pause.begin_round(round)).collect();
        assert_eq!(later, [Some(600), Some(1200), Some(2400), Some(LONGEST), None, None]);
    }

    #[test]
    fn the_longer_limit_of_a_user_stays() {
        assert_eq!(BasePause::new(10_000).begin_round(20), None);
    }
}
