//! A VM out of a file: limosa's mapped and lazy restore, compared with stock QEMU's own load of the same file and its
//! postcopy of the same VM; and its eager restore on one or several channels, compared with a QEMU that sends that VM.
//!
//! Every run takes a fresh destination. The clock begins right before limosa's exec, or before the first command to
//! QEMU, and three times are taken: when the guest runs (QEMU's own time of its `RESUME` event), when its first beat
//! has come over the serial port, and when all memory is there (its `MIGRATION` event; mapped memory is there when the
//! guest runs). The file is in the page cache. A postcopy from QEMU to QEMU needs no file at all: it is the fastest
//! that this QEMU can receive.

mod eager;
pub(crate) mod runs;

use anyhow::{Result, ensure};

use self::eager::Eager;
use self::runs::{RATE, RestoreMethod, Stage, TO_BEAT, TO_GUEST};
use crate::frame::{self, Contestant, Frame, Series, interleave, part};
use crate::machine::Machine;
use crate::options::Options;
use crate::report::{Bound, NOT_RUN, Report, Target, figure, gib_or_mib, ratio};
use crate::stored::Stored;

const MAPPED: &str = "limosa mapped";
const LAZY: &str = "limosa lazy";
const LAZY_ONE_CHANNEL: &str = "limosa lazy, --preempt off";
const EAGER: &str = "QEMU mapped-ram, multifd";
const POSTCOPY: &str = "QEMU postcopy, preempt";
const POSTCOPY_ONE_CHANNEL: &str = "QEMU postcopy";

/// The three times of a restore; the last is the wall time of the run itself.
const GUEST_RUNS: &str = "guest runs";
const FIRST_BEAT: &str = "first beat";
const ALL_MEMORY: &str = "all memory there";

const METHODS: &[(&str, RestoreMethod)] = &[
    (MAPPED, RestoreMethod::Mapped),
    (LAZY, RestoreMethod::Lazy { preempt: true }),
    (POSTCOPY, RestoreMethod::Postcopy { preempt: true }),
    (LAZY_ONE_CHANNEL, RestoreMethod::Lazy { preempt: false }),
    (POSTCOPY_ONE_CHANNEL, RestoreMethod::Postcopy { preempt: false }),
    (EAGER, RestoreMethod::Eager),
];

/// The VMs: sizes, and what they are called.
struct Plan {
    full: u64,
    full_case: String,
    wide: u64,
    content: u64,
    wide_case: String,
    eager: u64,
    eager_case: String,
}

impl Plan {
    fn new(options: &Options) -> Self {
        // 4 GiB, because that is what the bound on the time to the guest is for.
        let full = options.size.unwrap_or(4 << 30).next_multiple_of(2 << 20);
        let (wide, content) = (full.saturating_mul(4), full / 64);
        let wide_case = format!("{} with {} in it", gib_or_mib(wide), gib_or_mib(content));
        // Eight contestants: a quarter of the memory is enough for their ratios.
        let eager = (full / 4).next_multiple_of(2 << 20);
        let eager_case = format!("{} eagerly", gib_or_mib(eager));
        Self { full, full_case: gib_or_mib(full), wide, content, wide_case, eager, eager_case }
    }
}

/// Runs the bench.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let machine = Machine::this(&options.qemu);
    let plan = Plan::new(options);
    let lacking = machine.lacks_mapped_ram();
    let room = plan.wide >> 30 < machine.memory_gib;
    let all = if lacking.is_none() { rounds(options, &plan, room)? } else { Vec::new() };
    let (eager, lazy): (Vec<_>, Vec<_>) = all.into_iter().partition(|series| series.case == plan.eager_case);
    let mut all = in_parts(&lazy);
    all.extend(eager);
    let mut report = Report::new("restore", machine, options.rounds, &all);
    let no_room = (!room).then(|| format!("a VM of {} does not fit into this machine", gib_or_mib(plan.wide)));
    compare(&mut report, &all, &[&plan.full_case, &plan.wide_case]);
    judge(&mut report, &all, &plan, lacking.as_deref(), no_room.as_deref());
    eager::judge(&mut report, &all, &plan.eager_case, lacking.as_deref().unwrap_or(NOT_RUN));
    Ok(report)
}

/// Saves the VMs and lets every contestant restore them.
fn rounds(options: &Options, plan: &Plan, room: bool) -> Result<Vec<Series>> {
    let entries = |case: &str, postcopy: bool| -> Vec<(&'static str, RestoreMethod)> {
        let methods =
            METHODS.iter().filter(|(_, method)| postcopy || !matches!(method, RestoreMethod::Postcopy { .. }));
        methods.filter(|(name, _)| options.wants(case, name)).copied().collect()
    };
    let full_ways = entries(&plan.full_case, true);
    // To send the wide VM by postcopy would take as much memory once more, and shows nothing that the other does not.
    let wide_ways = if room { entries(&plan.wide_case, false) } else { Vec::new() };
    let full = if full_ways.is_empty() {
        None
    } else {
        options.tell("saving the VM that is full");
        Some(Stored::full(options, plan.full)?)
    };
    let wide = if wide_ways.is_empty() {
        None
    } else {
        options.tell("saving the VM that is almost empty");
        Some(Stored::sparse(options, plan.wide, plan.content)?)
    };
    let eager_methods: Vec<_> = Eager::all().filter(|method| options.wants(&plan.eager_case, &method.name())).collect();
    let eager = if eager_methods.is_empty() {
        None
    } else {
        options.tell("saving the VM that is restored eagerly");
        Some(Stored::full(options, plan.eager)?)
    };
    let stages = [
        (&plan.full_case, full_ways, full.as_ref().map(|(stored, source)| (stored, Some(source))), plan.full),
        (&plan.wide_case, wide_ways, wide.as_ref().map(|stored| (stored, None)), plan.content),
    ];
    let mut contestants = Vec::new();
    for (case, methods, stage, touch) in stages {
        let Some((stored, source)) = stage else { continue };
        let frame = Frame { touch: options.touch.unwrap_or(touch) };
        for (name, method) in methods {
            let stage = Stage { options, stored, source };
            contestants.push(Contestant {
                case: case.clone(),
                variant: name.to_owned(),
                run: Box::new(move |_| stage.run(method, &frame)),
            });
        }
    }
    if let Some((stored, source)) = &eager {
        let frame = Frame { touch: options.touch.unwrap_or(plan.eager) };
        contestants.extend(eager_methods.into_iter().map(|method| Contestant {
            case: plan.eager_case.clone(),
            variant: method.name(),
            run: Box::new(move |_| method.run(options, stored, source, &frame)),
        }));
    }
    ensure!(!contestants.is_empty(), "{}", options.none_selected());
    interleave(&mut contestants, options.rounds, &Frame { touch: 0 }, &mut |line| options.tell(line))
}

/// Makes of every series one for each of the three times.
fn in_parts(all: &[Series]) -> Vec<Series> {
    frame::in_parts(all, &[(GUEST_RUNS, Some(TO_GUEST)), (FIRST_BEAT, Some(TO_BEAT)), (ALL_MEMORY, None)])
}

/// limosa compared with QEMU's load in all times, and with the postcopy of the same kind where all memory is concerned.
fn compare(report: &mut Report, all: &[Series], cases: &[&str]) {
    for case in cases {
        for limosa in [MAPPED, LAZY, LAZY_ONE_CHANNEL] {
            for name in [GUEST_RUNS, FIRST_BEAT, ALL_MEMORY] {
                report.ratios.extend(ratio(all, &part(case, name), limosa, EAGER, "wall"));
            }
        }
        for (limosa, qemu) in [(LAZY, POSTCOPY), (LAZY_ONE_CHANNEL, POSTCOPY_ONE_CHANNEL)] {
            for figure in [RATE, "cpu"] {
                report.ratios.extend(ratio(all, &part(case, ALL_MEMORY), limosa, qemu, figure));
            }
        }
    }
}

fn judge(report: &mut Report, all: &[Series], plan: &Plan, lacking: Option<&str>, no_room: Option<&str>) {
    let why = lacking.unwrap_or(NOT_RUN);
    let to_guest = |case: &str, limosa: &str| Some(figure(all, &part(case, GUEST_RUNS), limosa, "wall")?.median * 1e3);
    for (limosa, most, most_more) in [(MAPPED, 5.0, 2.0), (LAZY, 50.0, 10.0)] {
        let (full, wide) = (to_guest(&plan.full_case, limosa), to_guest(&plan.wide_case, limosa));
        let name = format!("{}: ms from exec of {limosa} to the guest", plan.full_case);
        report.targets.push(Target::new(name, Bound::AtMost(most), full, why));
        let name = format!("{}: ms more of {limosa} than at {}", plan.wide_case, plan.full_case);
        let more = full.zip(wide).map(|(full, wide)| wide - full);
        report.targets.push(Target::new(name, Bound::AtMost(most_more), more, lacking.or(no_room).unwrap_or(why)));
    }
    for (limosa, qemu) in [(LAZY, POSTCOPY), (LAZY_ONE_CHANNEL, POSTCOPY_ONE_CHANNEL)] {
        let rate = ratio(all, &part(&plan.full_case, ALL_MEMORY), limosa, qemu, RATE).map(|ratio| ratio.median);
        let name = format!("{}: rate of {limosa} / {qemu}", plan.full_case);
        report.targets.push(Target::new(name, Bound::AtLeast(0.95), rate, why));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::measure::Measured;

    fn series(case: &str, variant: &str, guest_ms: u64, rate: u64) -> Series {
        let run = Measured { wall: Duration::from_secs(2), ..Measured::default() };
        let run = run.with(TO_GUEST, guest_ms * 1000).with(TO_BEAT, guest_ms * 1000 + 500).with(RATE, rate);
        Series { case: case.into(), variant: variant.into(), runs: vec![run] }
    }

    fn plan() -> Plan {
        Plan::new(&Options::default())
    }

    #[test]
    fn the_cases_are_named_by_their_sizes() {
        assert_eq!((plan().full_case.as_str(), plan().wide_case.as_str()), ("4 GiB", "16 GiB with 64 MiB in it"));
    }

    #[test]
    fn a_run_is_reported_in_its_three_times() {
        let parts = in_parts(&[series("4 GiB", LAZY, 30, 900)]);
        let walls: Vec<_> = parts.iter().map(|part| (part.case.as_str(), part.runs[0].wall.as_micros())).collect();
        let expected =
            [("4 GiB: guest runs", 30_000), ("4 GiB: first beat", 30_500), ("4 GiB: all memory there", 2_000_000)];
        assert_eq!(walls, expected);
    }

    #[test]
    fn each_target_is_judged_by_its_own_figures() {
        let all = in_parts(&[
            series("4 GiB", MAPPED, 6, 0),
            series("4 GiB", LAZY, 30, 900),
            series("4 GiB", POSTCOPY, 40, 1000),
            series("16 GiB with 64 MiB in it", MAPPED, 7, 0),
            series("16 GiB with 64 MiB in it", LAZY, 45, 10),
        ]);
        let mut report = Report::new("restore", Machine::this("/none"), 1, &all);
        judge(&mut report, &all, &plan(), None, None);
        let found: Vec<_> = report.targets.iter().map(|target| (target.got, target.met)).collect();
        let shown = [(6.0, false), (1.0, true), (30.0, true), (15.0, false), (0.9, false)];
        let expected = shown.map(|(got, met)| (Some(got), Some(met)));
        assert_eq!((&found[..5], found[5]), (&expected[..], (None, None)));
    }
}
