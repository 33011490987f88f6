//! The plan of a prune: a pure function of the snapshots of a directory.
//!
//! Law: a snapshot that stays is restorable afterwards without those that go. One that cannot be judged stays, with all
//! that it stands on; if what it stands on is not known, everything stays.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsString;
use std::num::NonZeroUsize;

use uuid::Uuid;

use crate::entry::{SnapshotEntry, SnapshotFile};

/// Seconds of a day.
const DAY: u64 = 86_400;
/// 2010-01-01: no snapshot is older, so a host's clock was wrong.
const EARLIEST: u64 = 1_262_304_000;

/// Rules for the snapshots of each VM that stay: those that any rule keeps. Without a rule all stay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Retention {
    /// The newest ones.
    pub last: Option<NonZeroUsize>,
    /// The newest one of each day (UTC), of that many days with snapshots, the newest ones.
    pub daily: Option<NonZeroUsize>,
    /// Whether one that stays keeps all that it stands on: nothing is packed again.
    pub with_bases: bool,
}

impl Retention {
    /// No rule.
    #[must_use]
    pub const fn new() -> Self {
        Self { last: None, daily: None, with_bases: false }
    }
}

/// A step of pruning. Each leaves every snapshot that stays restorable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PruneStep {
    /// Have one that stays stand on another that stays, or on none.
    Rebase {
        /// The one that stays.
        snapshot: SnapshotFile,
        /// Its new base.
        base: Option<SnapshotFile>,
    },
    /// Remove one that goes.
    Remove {
        /// The one that goes.
        snapshot: SnapshotFile,
    },
}

/// A snapshot that stays although no rule keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StayingSnapshot {
    /// Its name.
    pub name: OsString,
    /// The reason.
    pub why: String,
}

/// A plan of what goes, and of what is done before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrunePlan {
    /// The steps, in their order.
    pub steps: Vec<PruneStep>,
    /// Packed snapshots that were not judged.
    pub staying: Vec<StayingSnapshot>,
}

/// Plans what to do so that of the packed snapshots only those are left that the rules keep; plain ones stay. `now` is
/// the time in seconds since 1970.
///
/// What needs no packing is removed first, and each snapshot as soon as nothing stands on it: a full disk gets emptier.
#[must_use]
pub fn plan_prune(entries: &[SnapshotEntry], retention: &Retention, now: u64) -> PrunePlan {
    let staying: Vec<_> = entries.iter().filter_map(|entry| staying(entry, now)).collect();
    let has_rule = retention.last.is_some() || retention.daily.is_some();
    if !has_rule || entries.iter().any(|entry| !entry.is_base_known) {
        return PrunePlan { steps: Vec::new(), staying };
    }
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
    let unjudged: HashSet<_> = staying.iter().map(|staying| &staying.name).collect();
    let mut kept = kept(entries.iter().filter(|entry| entry.is_packed && !unjudged.contains(&entry.name)), retention);
    for entry in entries.iter().filter(|entry| !entry.is_packed || unjudged.contains(&entry.name)) {
        kept.insert(&entry.name);
        kept.extend(bases(entry).into_iter().map(|base| &base.name));
    }
    if retention.with_bases {
        let bases = entries.iter().filter(|entry| kept.contains(&entry.name)).flat_map(bases).map(|base| &base.name);
        kept = kept.iter().copied().chain(bases).collect();
    }
    let mut present: Vec<_> = entries.iter().map(|entry| (entry, base(entry).map(|base| &base.name))).collect();
    // The lowest ones are packed first, so that none is packed twice.
    present.sort_by_key(|(entry, _)| (bases(entry).len(), &entry.name));
    let mut steps = Vec::new();
    loop {
        let needed: HashSet<_> = present.iter().filter_map(|(_, base)| *base).collect();
        let goes = |entry: &SnapshotEntry| !kept.contains(&entry.name) && !needed.contains(&entry.name);
        let (gone, left): (Vec<_>, Vec<_>) = present.into_iter().partition(|(entry, _)| goes(entry));
        steps.extend(gone.iter().map(|(entry, _)| PruneStep::Remove { snapshot: entry.planned() }));
        present = left;
        if !gone.is_empty() {
            continue;
        }
        let next = present
            .iter_mut()
            .find(|(entry, base)| kept.contains(&entry.name) && base.is_some_and(|base| !kept.contains(base)));
        let Some((entry, its_base)) = next else { return PrunePlan { steps, staying } };
        let nearest = bases(entry).into_iter().find(|base| kept.contains(&base.name));
        *its_base = nearest.map(|base| &base.name);
        let base = nearest.map(SnapshotEntry::planned);
        steps.push(PruneStep::Rebase { snapshot: entry.planned(), base });
    }
}

/// Returns why a packed snapshot cannot be judged by the rules.
fn staying(entry: &SnapshotEntry, now: u64) -> Option<StayingSnapshot> {
    let why = match &entry.fault {
        Some(fault) if !entry.is_base_known => format!("may stand on any other one: {fault}"),
        _ if !entry.is_packed => return None,
        Some(fault) => format!("cannot be restored: {fault}"),
        None if entry.name.as_encoded_bytes().starts_with(b".") => "its name is hidden".to_owned(),
        None if entry.vm.is_empty() => "its VM has neither a uuid nor a name".to_owned(),
        None if entry.saved > now.saturating_add(DAY) => "it is from the future: a clock is wrong".to_owned(),
        None if entry.saved < EARLIEST => "it is too old to be true: a clock was wrong".to_owned(),
        None => return None,
    };
    Some(StayingSnapshot { name: entry.name.clone(), why })
}

/// The names that a rule keeps. Copies of one snapshot count once, and stay or go together.
fn kept<'a>(entries: impl Iterator<Item = &'a SnapshotEntry>, retention: &Retention) -> HashSet<&'a OsString> {
    let mut vms: HashMap<(&str, Option<&String>), Vec<&SnapshotEntry>> = HashMap::new();
    for entry in entries {
        vms.entry((&entry.vm, entry.vm_name.as_ref())).or_default().push(entry);
    }
    let mut kept = HashSet::new();
    for mut entries in vms.into_values() {
        entries.sort_by(|a, b| (b.saved, b.written, &b.name).cmp(&(a.saved, a.written, &a.name)));
        let mut copies: Vec<(Option<Uuid>, Vec<&SnapshotEntry>)> = Vec::new();
        for entry in &entries {
            match copies.iter_mut().find(|(id, _)| id.is_some() && *id == entry.id) {
                Some((_, copies)) => copies.push(entry),
                None => copies.push((entry.id, vec![entry])),
            }
        }
        let last = retention.last.map_or(0, NonZeroUsize::get);
        let daily = retention.daily.map_or(0, NonZeroUsize::get);
        let mut days = BTreeSet::new();
        for (index, (_, copies)) in copies.iter().enumerate() {
            let day = copies.first().map(|entry| entry.saved / DAY);
            let is_of_day = days.len() < daily && days.insert(day);
            if index < last || is_of_day {
                kept.extend(copies.iter().map(|entry| &entry.name));
            }
        }
        // If the times that were recorded are wrong, that of the file is not. A store has it in whole seconds.
        kept.extend(entries.iter().max_by_key(|entry| (entry.written, entry.saved)).map(|entry| &entry.name));
    }
    kept
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use proptest::prelude::*;

    use super::*;

    const START: u64 = 20_000 * DAY;

    /// An entry of that many seconds after the start.
    fn entry(name: &str, saved: u64, base: Option<&str>) -> SnapshotEntry {
        SnapshotEntry {
            vm: "vm".to_owned(),
            saved: START + saved,
            written: SystemTime::UNIX_EPOCH + Duration::from_secs(START + saved),
            is_packed: true,
            base: base.map(Into::into),
            is_base_known: true,
            ..SnapshotEntry::new(name.into())
        }
    }

    fn rules(last: usize, daily: usize) -> Retention {
        Retention { last: NonZeroUsize::new(last), daily: NonZeroUsize::new(daily), with_bases: false }
    }

    fn plan(entries: &[SnapshotEntry], retention: &Retention) -> Vec<String> {
        let name = |file: &SnapshotFile| file.name.display().to_string();
        let text = |step: &PruneStep| match step {
            PruneStep::Rebase { snapshot, base: None } => format!("{} on nothing", name(snapshot)),
            PruneStep::Rebase { snapshot, base: Some(base) } => format!("{} on {}", name(snapshot), name(base)),
            PruneStep::Remove { snapshot } => format!("remove {}", name(snapshot)),
        };
        plan_prune(entries, retention, START + 100 * DAY).steps.iter().map(text).collect()
    }

    #[test]
    fn what_stays_stands_on_what_stays_and_what_nothing_stands_on_goes_at_once() {
        let chain = [entry("a", 1, None), entry("b", 2, Some("a")), entry("c", 3, Some("b")), entry("d", 4, Some("c"))];
        assert_eq!(plan(&chain, &rules(2, 0)), ["c on nothing", "remove b", "remove a"]);
        assert!(plan(&chain, &rules(4, 0)).is_empty());
        assert!(plan(&chain, &Retention::new()).is_empty(), "no rule");
        let days = [
            entry("a", 0, None),
            entry("b", 5, Some("a")),
            entry("c", DAY, Some("b")),
            entry("d", DAY + 1, Some("c")),
            entry("e", 1, Some("d")),
        ];
        let steps = ["remove e", "b on nothing", "remove a", "d on b", "remove c"];
        assert_eq!(plan(&days, &rules(0, 2)), steps);
    }

    #[test]
    fn where_nothing_is_packed_again_what_stays_keeps_what_it_stands_on() {
        let entries = [
            entry("a", 1, None),
            entry("b", 2, Some("a")),
            entry("c", 3, Some("a")),
            entry("d", 4, Some("c")),
            entry("e", 5, None),
            entry("f", 6, Some("e")),
        ];
        let rules = |last| Retention { with_bases: true, ..rules(last, 0) };
        assert_eq!(plan(&entries, &rules(1)), ["remove b", "remove d", "remove c", "remove a"]);
        assert_eq!(plan(&entries, &rules(3)), ["remove b"]);
    }

    #[test]
    fn each_vm_has_its_own_and_a_broken_one_keeps_its_bases() {
        let mut entries = vec![entry("a", 1, None), entry("b", 2, Some("a")), entry("c", 3, None), entry("d", 4, None)];
        entries[2].vm = "other".to_owned();
        assert_eq!(plan(&entries, &rules(1, 0)), ["remove b", "remove a"]);
        entries[3].vm_name = Some("a clone with the same uuid".to_owned());
        assert_eq!(plan(&entries, &rules(1, 0)), ["b on nothing", "remove a"]);
        entries[1].fault = Some("damaged".to_owned());
        assert!(plan(&entries, &rules(1, 0)).is_empty());
        entries[1].is_base_known = false;
        entries.push(entry("0", 0, None));
        assert!(plan(&entries, &rules(1, 0)).is_empty(), "what it stands on is not known");
    }

    #[test]
    fn what_cannot_be_judged_stays() {
        let mut entries: Vec<_> = ["a", "b", "c", "d", "e", ".f"].map(|name| entry(name, 5, None)).to_vec();
        entries[0].vm.clear();
        entries[1].saved = START + 200 * DAY;
        entries[2].saved = 1;
        entries[3].is_packed = false;
        assert!(plan(&entries, &rules(1, 0)).is_empty());
        let staying = plan_prune(&entries, &rules(1, 0), START + 100 * DAY).staying;
        let names: Vec<_> = staying.iter().map(|staying| staying.name.to_str().unwrap()).collect();
        assert_eq!(names, ["a", "b", "c", ".f"], "the plain one is not spoken of");
    }

    #[test]
    fn the_file_that_was_written_last_stays_and_copies_count_once() {
        let mut entries = [entry("a", 9, None), entry("b", 8, None), entry("c", 7, None), entry("d", 6, None)];
        entries[2].written += Duration::from_secs(60);
        assert_eq!(plan(&entries, &rules(1, 0)), ["remove b", "remove d"]);
        for copy in &mut entries[..2] {
            copy.id = Some(Uuid::from_u128(1));
        }
        assert_eq!(plan(&entries, &rules(2, 0)), ["remove d"]);
    }

    #[test]
    fn a_loop_ends() {
        let entries = [entry("a", 1, Some("b")), entry("b", 2, Some("a")), entry("c", 3, None)];
        assert!(plan(&entries, &rules(1, 0)).is_empty());
    }

    proptest! {
        #[test]
        fn at_every_step_what_is_there_stands_on_what_is_there(
            times in prop::collection::vec(0..10 * DAY, 1..20),
            bases in prop::collection::vec(prop::option::of(0_usize..20), 20),
            (last, daily) in (0_usize..5, 0_usize..5).prop_filter("a rule", |rules| *rules != (0, 0)),
        ) {
            let name = |index: usize| format!("{index:02}");
            let entries: Vec<_> = times.iter().enumerate().map(|(index, time)| {
                let base = bases[index].filter(|base| *base < index).map(name);
                entry(&name(index), *time, base.as_deref())
            }).collect();
            let mut there: HashMap<OsString, Option<OsString>> =
                entries.iter().map(|entry| (entry.name.clone(), entry.base.clone())).collect();
            for step in plan_prune(&entries, &rules(last, daily), START + 100 * DAY).steps {
                match step {
                    PruneStep::Rebase { snapshot, base } => {
                        prop_assert!(there.contains_key(&snapshot.name));
                        there.insert(snapshot.name, base.map(|base| base.name));
                    }
                    PruneStep::Remove { snapshot } => prop_assert!(there.remove(&snapshot.name).is_some()),
                }
                prop_assert!(there.values().flatten().all(|base| there.contains_key(base)));
            }
            prop_assert!(there.len() >= last.min(entries.len()));
            prop_assert_eq!(there.len(), kept(entries.iter(), &rules(last, daily)).len());
        }
    }
}
