//! The plan of a prune: a pure function of the snapshots of a directory.
//!
//! Law: a snapshot that stays is restorable afterwards without those that go, and one that cannot be read keeps all
//! that it may stand on.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsString;
use std::num::NonZeroUsize;

use crate::directory::SnapshotEntry;

/// Seconds of a day.
const DAY: u64 = 86_400;

/// Rules for the snapshots of each VM that stay: those that any rule keeps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Retention {
    /// The newest ones.
    pub last: Option<NonZeroUsize>,
    /// The newest one of each day (UTC), of that many days with snapshots, the newest ones.
    pub daily: Option<NonZeroUsize>,
}

impl Retention {
    /// Keeps nothing, until a rule is set.
    #[must_use]
    pub const fn new() -> Self {
        Self { last: None, daily: None }
    }
}

/// A step of pruning. Each leaves every snapshot that stays restorable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PruneStep {
    /// Have one that stays stand on another that stays, or on none.
    Rebase {
        /// The one that stays.
        name: OsString,
        /// Its new base.
        base: Option<OsString>,
    },
    /// Remove one that goes.
    Remove {
        /// The one that goes.
        name: OsString,
    },
}

/// Plans what to do so that only what the rules keep is left.
#[must_use]
pub fn plan_prune(entries: &[SnapshotEntry], retention: &Retention) -> Vec<PruneStep> {
    let by_name: HashMap<_, _> = entries.iter().map(|entry| (&entry.name, entry)).collect();
    let base = |entry: &SnapshotEntry| entry.base.as_ref().and_then(|base| by_name.get(base).copied());
    // The bases of one, from the next one down. A file is in a chain once.
    let bases = |entry: &SnapshotEntry| {
        let mut seen = HashSet::new();
        let mut chain = Vec::new();
        let mut next = base(entry);
        while let Some(found) = next.filter(|found| seen.insert(&found.name)) {
            chain.push(found);
            next = base(found);
        }
        chain
    };
    let mut kept: HashSet<&OsString> = kept(entries, retention);
    for broken in entries.iter().filter(|entry| entry.fault.is_some()) {
        kept.insert(&broken.name);
        kept.extend(bases(broken).into_iter().map(|base| &base.name));
    }
    // Without its key nobody knows what it stands on.
    let is_secret = |entry: &SnapshotEntry| entry.is_encrypted && entry.fault.is_some();
    if entries.iter().any(is_secret) {
        return Vec::new();
    }
    let depth = |entry: &SnapshotEntry| bases(entry).len();
    let mut staying: Vec<_> = entries.iter().filter(|entry| kept.contains(&entry.name)).collect();
    staying.sort_by_key(|entry| depth(entry));
    let mut steps = Vec::new();
    for entry in staying {
        if base(entry).is_some_and(|base| !kept.contains(&base.name)) {
            let nearest = bases(entry).into_iter().find(|base| kept.contains(&base.name));
            let base = nearest.map(|base| base.name.clone());
            steps.push(PruneStep::Rebase { name: entry.name.clone(), base });
        }
    }
    let mut going: Vec<_> = entries.iter().filter(|entry| !kept.contains(&entry.name)).collect();
    // What stands on another goes first.
    going.sort_by_key(|entry| std::cmp::Reverse(depth(entry)));
    steps.extend(going.into_iter().map(|entry| PruneStep::Remove { name: entry.name.clone() }));
    steps
}

/// The names that a rule keeps.
fn kept<'a>(entries: &'a [SnapshotEntry], retention: &Retention) -> HashSet<&'a OsString> {
    let mut vms: HashMap<&str, Vec<&SnapshotEntry>> = HashMap::new();
    for entry in entries.iter().filter(|entry| entry.fault.is_none()) {
        vms.entry(&entry.vm).or_default().push(entry);
    }
    let mut kept = HashSet::new();
    for mut entries in vms.into_values() {
        entries.sort_by(|a, b| (b.saved, &b.name).cmp(&(a.saved, &a.name)));
        let last = retention.last.map_or(0, NonZeroUsize::get);
        kept.extend(entries.iter().take(last).map(|entry| &entry.name));
        let mut days = BTreeSet::new();
        for entry in entries {
            if days.len() < retention.daily.map_or(0, NonZeroUsize::get) && days.insert(entry.saved / DAY) {
                kept.insert(&entry.name);
            }
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(name: &str, saved: u64, base: Option<&str>) -> SnapshotEntry {
        SnapshotEntry {
            name: name.into(),
            id: None,
            vm: "vm".to_owned(),
            saved,
            allocated: 0,
            page_bytes: 0,
            is_packed: true,
            is_encrypted: false,
            base: base.map(Into::into),
            fault: None,
        }
    }

    fn rules(last: usize, daily: usize) -> Retention {
        Retention { last: NonZeroUsize::new(last), daily: NonZeroUsize::new(daily) }
    }

    fn rebase(name: &str, base: Option<&str>) -> PruneStep {
        PruneStep::Rebase { name: name.into(), base: base.map(Into::into) }
    }

    fn remove(name: &str) -> PruneStep {
        PruneStep::Remove { name: name.into() }
    }

    #[test]
    fn what_stays_stands_on_what_stays_and_the_top_of_what_goes_goes_first() {
        let chain = [entry("a", 1, None), entry("b", 2, Some("a")), entry("c", 3, Some("b")), entry("d", 4, Some("c"))];
        assert_eq!(plan_prune(&chain, &rules(2, 0)), [rebase("c", None), remove("b"), remove("a")]);
        assert_eq!(plan_prune(&chain, &rules(4, 0)), []);
        let days = [
            entry("a", DAY, None),
            entry("b", DAY + 5, Some("a")),
            entry("c", 2 * DAY, Some("b")),
            entry("d", 2 * DAY + 1, Some("c")),
        ];
        let plan = plan_prune(&days, &rules(0, 2));
        assert_eq!(plan, [rebase("b", None), rebase("d", Some("b")), remove("c"), remove("a")]);
    }

    #[test]
    fn each_vm_has_its_own_and_a_broken_one_keeps_its_bases() {
        let mut entries = vec![entry("a", 1, None), entry("b", 2, Some("a")), entry("c", 3, None), entry("d", 4, None)];
        entries[2].vm = "other".to_owned();
        assert_eq!(plan_prune(&entries, &rules(1, 0)), [remove("b"), remove("a")]);
        entries[1].fault = Some("damaged".to_owned());
        assert_eq!(plan_prune(&entries, &rules(1, 0)), []);
        entries[1].is_encrypted = true;
        entries.push(entry("0", 0, None));
        assert_eq!(plan_prune(&entries, &rules(1, 0)), [], "what it stands on is not known");
    }

    #[test]
    fn a_loop_ends() {
        let entries = [entry("a", 1, Some("b")), entry("b", 2, Some("a")), entry("c", 3, None)];
        assert_eq!(plan_prune(&entries, &rules(1, 0)).len(), 2);
    }

    proptest! {
        #[test]
        fn at_every_step_what_is_there_stands_on_what_is_there(
            times in prop::collection::vec(0..10 * DAY, 1..20),
            bases in prop::collection::vec(prop::option::of(0_usize..20), 20),
            last in 0_usize..5,
            daily in 0_usize..5,
        ) {
            let name = |index: usize| format!("{index:02}");
            let entries: Vec<_> = times.iter().enumerate().map(|(index, time)| {
                let base = bases[index].filter(|base| *base < index).map(name);
                entry(&name(index), *time, base.as_deref())
            }).collect();
            let mut there: HashMap<OsString, Option<OsString>> =
                entries.iter().map(|entry| (entry.name.clone(), entry.base.clone())).collect();
            for step in plan_prune(&entries, &rules(last, daily)) {
                match step {
                    PruneStep::Rebase { name, base } => {
                        prop_assert!(there.contains_key(&name));
                        there.insert(name, base);
                    }
                    PruneStep::Remove { name } => prop_assert!(there.remove(&name).is_some()),
                }
                prop_assert!(there.values().flatten().all(|base| there.contains_key(base)));
            }
            prop_assert!(there.len() >= last.min(entries.len()));
            prop_assert_eq!(there.len(), kept(&entries, &rules(last, daily)).len());
        }
    }
}
