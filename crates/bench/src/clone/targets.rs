//! The targets of clones.

use super::run::{PSS_IDLE, PSS_WRITTEN};
use super::{BARE, Cell, EAGER, FIRST_BEATS, LAZY, MAPPED, POOL, Plan, READ_AHEAD, READING, WRITTEN};
use crate::frame::Series;
use crate::report::{Bound, Report, Target, figure, ratio};

/// Judges a cell. What a cold one takes is the disk's, so that only the working set is judged there.
pub(super) fn judge(report: &mut Report, all: &[Series], plan: &Plan, cell: &Cell, why: &str) {
    if cell.cold {
        let reads = cell.part(READING);
        let got = ratio(all, &reads, READ_AHEAD, MAPPED, "wall").map(|ratio| ratio.median);
        let name = format!("{reads}: wall of {READ_AHEAD} / {MAPPED}");
        report.targets.push(Target::new(name, Bound::AtMost(0.6), got, why));
        return;
    }
    let found = if cell.vms == 1 { alone(all, cell) } else { together(all, cell) };
    let targets = found.into_iter().chain(memory(all, plan, cell));
    report.targets.extend(targets.map(|(name, bound, got)| Target::new(name, bound, got, why)));
}

type Found = (String, Bound, Option<f64>);

/// One VM: how soon its guest runs, and how fast.
fn alone(all: &[Series], cell: &Cell) -> Vec<Found> {
    let (beats, reads) = (cell.part(FIRST_BEATS), cell.part(READING));
    let ms = |variant: &str| Some(figure(all, &beats, variant, "wall")?.median * 1e3);
    let more = ms(MAPPED).zip(ms(BARE)).map(|(mapped, bare)| mapped - bare);
    let mut found = vec![
        (format!("{beats}: ms of {MAPPED} more than of {BARE}"), Bound::AtMost(25.0), more),
        (format!("{beats}: ms of {POOL}"), Bound::AtMost(10.0), ms(POOL)),
    ];
    for (other, most) in [(EAGER, 1.1), (LAZY, 0.333)] {
        let got = ratio(all, &reads, MAPPED, other, "wall").map(|ratio| ratio.median);
        found.push((format!("{reads}: wall of {MAPPED} / {other}"), Bound::AtMost(most), got));
    }
    found
}

/// Many VMs: as many a second as QEMU can start at all, and far more of QEMUs that wait.
fn together(all: &[Series], cell: &Cell) -> Vec<Found> {
    let beats = cell.part(FIRST_BEATS);
    let got = ratio(all, &beats, MAPPED, BARE, "wall").map(|ratio| ratio.median);
    let each = figure(all, &beats, POOL, "wall").map(|wall| wall.median * 1e3 / f64::from(cell.vms));
    vec![
        (format!("{beats}: wall of {MAPPED} / {BARE}"), Bound::AtMost(1.1), got),
        (format!("{beats}: ms a VM of {POOL}"), Bound::AtMost(4.0), each),
    ]
}

/// Memory of all VMs, compared with what every contestant needs: QEMU itself, the contents once, and what each guest
/// wrote.
fn memory(all: &[Series], plan: &Plan, cell: &Cell) -> Vec<Found> {
    let kib = |part: &str, variant: &str, name: &str| Some(figure(all, &cell.part(part), variant, name)?.median);
    let contents = f64::from(u32::try_from(plan.contents >> 10).unwrap_or(u32::MAX));
    let written = f64::from(cell.vms) * f64::from(u32::try_from(WRITTEN >> 10).unwrap_or(u32::MAX));
    let bare = kib(FIRST_BEATS, BARE, PSS_IDLE);
    let quotient = |found: Option<f64>, more: f64| Some(found? / (bare? + contents + more));
    let (idle, wrote) = (kib(FIRST_BEATS, MAPPED, PSS_IDLE), kib(READING, MAPPED, PSS_WRITTEN));
    vec![
        (cell.part(&format!("{PSS_IDLE} of {MAPPED} / {BARE} and contents")), Bound::AtMost(1.05), quotient(idle, 0.0)),
        (
            cell.part(&format!("{PSS_WRITTEN} of {MAPPED} / {BARE}, contents and what was written")),
            Bound::AtMost(1.1),
            quotient(wrote, written),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::machine::Machine;
    use crate::measure::Measured;
    use crate::options::Options;

    fn series(case: &str, variant: &str, ms: u64, name: &'static str, kib: u64) -> Series {
        let run = Measured { wall: Duration::from_millis(ms), ..Measured::default() }.with(name, kib);
        Series { case: case.into(), variant: variant.into(), runs: vec![run] }
    }

    fn judged(count: u32, all: &[Series]) -> Vec<(Option<f64>, Option<bool>)> {
        let plan = Plan::new(&Options { counts: vec![count], ..Options::default() }).expect("a plan");
        let mut report = Report::new("clone", Machine::this("/none"), 1, all);
        plan.cells.iter().for_each(|cell| judge(&mut report, all, &plan, cell, "it was not run"));
        report.targets.iter().map(|target| (target.got, target.met)).collect()
    }

    #[test]
    fn one_vm_is_judged_by_its_times_and_its_memory() {
        let (beats, reads) = ("1 x 512 MiB warm: first beats", "1 x 512 MiB warm: reading");
        let own = 40 << 10;
        let all = [
            series(beats, BARE, 50, PSS_IDLE, own),
            series(beats, MAPPED, 80, PSS_IDLE, own + (256 << 10)),
            series(beats, POOL, 9, PSS_IDLE, own),
            series(reads, EAGER, 200, PSS_WRITTEN, 0),
            series(reads, MAPPED, 100, PSS_WRITTEN, own + (288 << 10)),
        ];
        let expected = [(30.0, false), (9.0, true), (0.5, true)].map(|(got, met)| (Some(got), Some(met)));
        let found = judged(1, &all);
        assert_eq!(found[..3], expected);
        assert_eq!(found[3], (None, None));
        assert_eq!(found[4..6], [(Some(1.0), Some(true)); 2]);
    }

    #[test]
    fn a_cold_guest_with_a_working_set_is_judged_by_one_without() {
        let reads = "1 x 512 MiB cold: reading";
        let all = [series(reads, MAPPED, 1000, PSS_WRITTEN, 0), series(reads, READ_AHEAD, 500, PSS_WRITTEN, 0)];
        assert_eq!(judged(1, &all).last(), Some(&(Some(0.5), Some(true))));
    }

    #[test]
    fn many_vms_are_judged_by_bare_starts() {
        let beats = "100 x 512 MiB warm: first beats";
        let all = [
            series(beats, BARE, 3000, PSS_IDLE, 4000 << 10),
            series(beats, MAPPED, 3600, PSS_IDLE, 6000 << 10),
            series(beats, POOL, 350, PSS_IDLE, 6000 << 10),
        ];
        let found = judged(100, &all);
        assert_eq!(found[..2], [(Some(1.2), Some(false)), (Some(3.5), Some(true))]);
        assert_eq!(found[2].1, Some(false));
    }
}
