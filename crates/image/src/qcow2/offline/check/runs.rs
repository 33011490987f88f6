//! The parts of a file that several tables cover together.
//!
//! Law: a part that is in more than one of them is examined once. Snapshots may all name one L1 table of 32 MiB, or
//! tables that overlap in ever other ways: the work is bounded by the file all the same.

use std::collections::BTreeSet;

/// A run of a file that the same tables cover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) at: u64,
    pub(super) bytes: u64,
    /// How many tables cover it.
    pub(super) times: u64,
    /// The number of the first of them.
    pub(super) owner: usize,
}

/// The runs that tables cover, in order; tables are numbered as they come, and given by offset and length.
pub(super) fn runs(tables: impl Iterator<Item = (u64, u64)>) -> Vec<Run> {
    let mut ends = Vec::new();
    for (number, (at, bytes)) in tables.enumerate() {
        let end = at.saturating_add(bytes);
        if at < end {
            ends.extend([(at, true, number), (end, false, number)]);
        }
    }
    ends.sort_unstable();
    let (mut found, mut open, mut from) = (Vec::new(), BTreeSet::new(), 0);
    for (at, begins, number) in ends {
        if let Some(owner) = open.first().filter(|_| at > from) {
            found.push(Run { at: from, bytes: at - from, times: open.len() as u64, owner: *owner });
        }
        from = at;
        if begins {
            open.insert(number);
        } else {
            open.remove(&number);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn tables_over_each_other_are_gone_through_once() {
        let run = |at, bytes, times, owner| Run { at, bytes, times, owner };
        assert_eq!(runs([(8, 8), (8, 8), (8, 8)].into_iter()), [run(8, 8, 3, 0)]);
        assert_eq!(
            runs([(16, 8), (0, 32), (64, 0), (64, 8)].into_iter()),
            [run(0, 16, 1, 1), run(16, 8, 2, 0), run(24, 8, 1, 1), run(64, 8, 1, 3),]
        );
    }

    proptest! {
        #[test]
        fn each_byte_is_covered_as_often_as_tables_cover_it(tables in prop::collection::vec((0_u64..40, 0_u64..20), 0..8)) {
            let found = runs(tables.iter().copied());
            prop_assert!(found.is_sorted_by_key(|run| run.at));
            for byte in 0..64 {
                let covers = |at: u64, bytes: u64| (at..at + bytes).contains(&byte);
                let over: Vec<_> = (0..tables.len()).filter(|number| covers(tables[*number].0, tables[*number].1)).collect();
                let run: Vec<_> = found.iter().filter(|run| covers(run.at, run.bytes)).collect();
                prop_assert_eq!(run.first().map(|run| (run.times, run.owner)), over.first().map(|first| (over.len() as u64, *first)));
                prop_assert!(run.len() < 2);
            }
        }
    }
}
