//! The targets of restores from a store.

use super::rates::{Direction, SHARE, SHARE_OF_PARTS};
use super::restores::Method;
use super::{FIRST_BEAT, LATENCIES, LATENCY, Plan, WORK};
use crate::frame::{Series, part};
use crate::report::{Bound, Report, Target, figure, gib_or_mib, ratio};

/// Compares the restores from the store with a download, and with each other.
pub(super) fn compare(report: &mut Report, all: &[Series], plan: &Plan) {
    for latency in LATENCIES {
        for name in [FIRST_BEAT, WORK] {
            let case = part(&plan.restored(latency), name);
            for of in [Method::Lazy, Method::WorkingSet, Method::WarmCache] {
                report.ratios.extend(ratio(all, &case, of.name(), Method::Download.name(), "wall"));
            }
            report.ratios.extend(ratio(all, &case, Method::WorkingSet.name(), Method::Lazy.name(), "wall"));
        }
    }
}

/// Judges. `why`: why a target has no figure; `why_not_wide`: the same of one that needs the wide VM.
pub(super) fn judge(report: &mut Report, all: &[Series], plan: &Plan, why: &str, why_not_wide: &str) {
    for latency in LATENCIES {
        let case = part(&plan.restored(latency), FIRST_BEAT);
        // Six round trips, and what a restore from a file takes.
        let most = f64::from(latency) * 6.0 + 50.0;
        for method in [Method::Lazy, Method::WorkingSet] {
            let got = figure(all, &case, method.name(), "wall").map(|spread| spread.median * 1e3);
            report.targets.push(Target::new(format!("{case}: ms of {}", method.name()), Bound::AtMost(most), got, why));
        }
    }
    let case = part(&plan.flat(), FIRST_BEAT);
    let (wide, size) = (gib_or_mib(plan.wide), gib_or_mib(plan.size));
    let found = ratio(all, &case, &wide, &size, "wall");
    let got = found.as_ref().map(|ratio| ratio.median);
    report.targets.push(Target::new(format!("{case}: {wide} / {size}"), Bound::AtMost(1.2), got, why_not_wide));
    report.ratios.extend(found);
    let case = part(&plan.restored(LATENCY), WORK);
    let set = Method::WorkingSet.name();
    for (other, most) in [(Method::Lazy, 0.4), (Method::Download, 0.15)] {
        let got = ratio(all, &case, set, other.name(), "wall").map(|ratio| ratio.median);
        report.targets.push(Target::new(format!("{case}: {set} / {}", other.name()), Bound::AtMost(most), got, why));
    }
    let case = plan.rates();
    for direction in Direction::ALL {
        let got = figure(all, &case, direction.name(), SHARE).map(|spread| spread.median / 1e3);
        let name = format!("{case}: {}, of what the line carries", direction.name());
        report.targets.push(Target::new(name, Bound::AtLeast(0.8), got, why));
    }
    let up = Direction::Up.name();
    let got = figure(all, &case, up, SHARE_OF_PARTS).map(|spread| spread.median / 1e3);
    let name = format!("{case}: {up}, the same until the store has all parts");
    report.targets.push(Target::new(name, Bound::AtLeast(0.8), got, why));
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::machine::Machine;
    use crate::measure::Measured;
    use crate::options::Options;
    use crate::report::NOT_RUN;

    fn series(case: String, variant: &str, wall_ms: u64) -> Series {
        let run = Measured { wall: Duration::from_millis(wall_ms), ..Measured::default() };
        Series { case, variant: variant.into(), runs: vec![run] }
    }

    #[test]
    fn each_target_is_judged_by_its_own_figures() {
        let plan = Plan::new(&Options::default());
        let beat = |latency| part(&plan.restored(latency), FIRST_BEAT);
        let (work, flat) = (part(&plan.restored(LATENCY), WORK), part(&plan.flat(), FIRST_BEAT));
        let (lazy, set) = (Method::Lazy.name(), Method::WorkingSet.name());
        let mut upload = series(plan.rates(), Direction::Up.name(), 2000);
        upload.runs[0].counters.extend([(SHARE, 790), (SHARE_OF_PARTS, 810)]);
        let all = [
            series(beat(1), lazy, 55),
            series(beat(1), set, 57),
            series(beat(20), lazy, 169),
            series(beat(20), set, 171),
            series(flat.clone(), "1 GiB", 100),
            series(flat, "16 GiB", 121),
            series(work.clone(), set, 390),
            series(work.clone(), lazy, 1000),
            series(work, Method::Download.name(), 4000),
            upload,
        ];
        let mut report = Report::new("remote", Machine::this("/none"), 1, &all);
        compare(&mut report, &all, &plan);
        judge(&mut report, &all, &plan, NOT_RUN, NOT_RUN);
        let found: Vec<_> = report.targets.iter().map(|target| target.met).collect();
        let (met, missed) = (Some(true), Some(false));
        assert_eq!(found, [met, missed, met, missed, None, None, missed, met, met, missed, None, met]);
        let compared: Vec<_> = report.ratios.iter().map(|ratio| ratio.median).collect();
        assert_eq!(compared.len(), 2 + 3 + 1, "{compared:?}");
    }
}
