//! Checkpoints of a running VM: `limosa protect`, compared with a keeper that throws all of it away; what they cost its
//! network; and how soon the VM runs elsewhere.
//!
//! Every run has a fresh VM of the newest QEMU (TCG). Pauses are those of QEMU's own events `STOP` and `RESUME`, for
//! all contestants alike.

mod bare;
mod door;
mod failover;
mod load;
mod network;
mod pauses;
mod watched;

use anyhow::{Context as _, Result, ensure};
use limosa_testkit::Series as QemuSeries;

use self::load::Load;
use self::watched::Way;
use crate::frame::{Contestant, Frame, Run, Series, interleave};
use crate::machine::Machine;
use crate::options::Options;
use crate::report::{Bound, NOT_RUN, Report, Target, figure, gib_or_mib, ratio};

/// The periods, in milliseconds.
const PERIODS: [u64; 4] = [10, 20, 100, 1000];

/// The guest's loads, their names, and their periods.
const LOADS: [(&str, Load, &[u64]); 4] = [
    ("idle", Load::None, &PERIODS),
    ("moderate", Load::Moderate, &PERIODS),
    ("heavy", Load::Heavy, &PERIODS),
    ("same data", Load::Same, &[100]),
];

/// The cases of watched series: a name, the load and the period.
fn cases() -> impl Iterator<Item = (String, (Load, u64))> {
    LOADS.iter().flat_map(|&(name, load, periods)| {
        periods.iter().map(move |&period| (format!("{name}, {period} ms"), (load, period)))
    })
}

/// The case of a failover.
fn failover_case(size: u64) -> String {
    format!("failover, {}", gib_or_mib(size))
}

/// Runs the bench.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let qemu = QemuSeries::Newest.program()?;
    let qemu = qemu.to_str().context("a path that is not UTF-8")?;
    let size = options.size.unwrap_or(256 << 20);
    let mut contestants = Vec::new();
    for (case, watched) in cases() {
        for way in Way::ALL {
            let run: Run<'_> = Box::new(move |_| watched::run(options, qemu, size, watched, way));
            contestants.push(Contestant { case: case.clone(), variant: way.name().to_owned(), run });
        }
    }
    for (variant, every) in network::WAYS {
        let run: Run<'_> = Box::new(move |_| network::run(options, every));
        contestants.push(Contestant { case: network::CASE.to_owned(), variant: variant.to_owned(), run });
    }
    for size in failover::SIZES {
        for way in failover::Way::ALL {
            let run: Run<'_> = Box::new(move |_| failover::run(options, qemu, size, way));
            contestants.push(Contestant { case: failover_case(size), variant: way.name().to_owned(), run });
        }
    }
    contestants.retain(|one| options.wants(&one.case, &one.variant));
    ensure!(!contestants.is_empty(), options.none_selected());
    let all = interleave(&mut contestants, options.rounds, &Frame { touch: 0 }, &mut |line| options.tell(line))?;
    let mut report = Report::new("protect", Machine::this(qemu), options.rounds, &all);
    for (case, _) in cases() {
        for way in [Way::Here, Way::Elsewhere] {
            for name in ["pause_median_us", "pause_p99_us"] {
                report.ratios.extend(ratio(&all, &case, way.name(), Way::Bare.name(), name));
            }
        }
    }
    report.targets = targets(&all);
    Ok(report)
}

fn targets(all: &[Series]) -> Vec<Target> {
    let median = |case: &str, variant: &str, name: &str| figure(all, case, variant, name).map(|spread| spread.median);
    let of = |case: &str, name: &str| median(case, Way::Here.name(), name);
    let heavy = ratio(all, "heavy, 100 ms", Way::Here.name(), Way::Bare.name(), "pause_median_us");
    let answer = |variant: &str| median(network::CASE, variant, "answer_median_us");
    let added = answer(network::BY_EVENT).zip(answer(network::UNPROTECTED)).map(|(held, free)| held - free);
    let mut wanted = vec![
        ("idle, 20 ms: median pause, us".to_owned(), Bound::AtMost(2000.0), of("idle, 20 ms", "pause_median_us")),
        ("idle, 20 ms: 99% of pauses, us".into(), Bound::AtMost(5000.0), of("idle, 20 ms", "pause_p99_us")),
        (
            "heavy, 100 ms: median pause of limosa protect / bare keeper".into(),
            Bound::AtMost(1.2),
            heavy.map(|ratio| ratio.median),
        ),
        (
            "same data, 100 ms: pages kept of 1000 sent".into(),
            Bound::AtMost(500.0),
            of("same data, 100 ms", "kept_permille"),
        ),
        (
            "moderate, 100 ms: beats of 1000 unprotected".into(),
            Bound::AtLeast(900.0),
            of("moderate, 100 ms", "beats_permille"),
        ),
        ("network: added to an answer by --every event, us".into(), Bound::AtMost(5000.0), added),
    ];
    for size in failover::SIZES {
        let case = failover_case(size);
        for (way, most) in [(failover::Way::Warm, 20_000.0), (failover::Way::Cold, 50_000.0)] {
            let got = median(&case, way.name(), "first_beat_us");
            wanted.push((format!("{case}: first beat by {}, us", way.name()), Bound::AtMost(most), got));
        }
    }
    wanted.into_iter().map(|(name, bound, got)| Target::new(name, bound, got, NOT_RUN)).collect()
}
