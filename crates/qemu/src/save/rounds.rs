//! Rounds over the dirty log: whether what remains of the memory gets less.
//!
//! QEMU counts its rounds and reports how much of the memory is dirty at the beginning of each. A save converges as
//! long as every few rounds begin with less than all before them. One that does not converge continues for ever, unless
//! the VM becomes calmer or is stopped: a person has to know.

use crate::monitor::RamProgress;

/// Rounds in a row that begin with no less than one before them, until the save counts as not converging.
const PATIENCE: u32 = 3;

/// The rounds of one save.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    counted: u64,
    /// Bytes that the round with the least of them began with.
    least: Option<u64>,
    /// Rounds in a row that began with no less.
    idle: u32,
}

impl Rounds {
    /// Takes QEMU's numbers of this moment. Returns true once: when the save turns out not to converge.
    pub(super) fn note(&mut self, ram: &RamProgress) -> bool {
        if ram.dirty_sync_count <= self.counted {
            return false;
        }
        self.counted = ram.dirty_sync_count;
        // Rounds of a VM that does not change differ by some pages.
        let shrinks = self.least.is_none_or(|least| ram.remaining < least - least / 10);
        if shrinks {
            (self.least, self.idle) = (Some(ram.remaining), 0);
            return false;
        }
        self.idle = self.idle.saturating_add(1);
        if self.idle == PATIENCE {
            // Never again: a line each few rounds would say nothing new.
            self.counted = u64::MAX;
            return true;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the save is said not to converge after each of these rounds, given by what they begin with.
    fn said(remaining: &[u64]) -> Vec<bool> {
        let mut rounds = Rounds::default();
        let ram = |dirty_sync_count, remaining| RamProgress { dirty_sync_count, remaining, ..RamProgress::default() };
        let counted = (1..).zip(remaining);
        counted
            .map(|(count, &remaining)| {
                let said = rounds.note(&ram(count, remaining));
                assert!(!rounds.note(&ram(count, remaining / 2)), "the same round");
                said
            })
            .collect()
    }

    #[test]
    fn the_third_round_in_a_row_that_did_not_shrink_is_reported_once() {
        assert_eq!(
            said(&[1000, 80, 81, 79, 80, 80, 80, 80, 80]),
            [[false; 4].as_slice(), &[true], &[false; 4]].concat()
        );
    }

    #[test]
    fn a_save_whose_rounds_shrink_now_and_then_is_not_reported() {
        assert_eq!(said(&[1000, 850, 950, 920, 700, 720, 710, 500, 90, 95, 99, 40, 0]), [false; 13]);
    }
}
