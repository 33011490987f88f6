//! Many VMs of one snapshot: limosa's clones, which map it, compared with the same VMs restored one by one, lazily by
//! limosa and eagerly by QEMU itself, and with QEMUs that boot without a snapshot.
//!
//! The clock begins right before the first exec. Each guest beats on its serial port; when all do, all read the same
//! part of their contents at the same time, and send its sum, which is checked. Then each writes some pages of its own.
//! At most as many VMs as there are cores are being started at a time, which is what `limosa clone` does by itself. A
//! run is warm, with the snapshot in the page cache, or cold, with all of it on disk alone.

mod guests;
mod launch;
mod run;
mod targets;

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use limosa_memory::MemcgHeadroom;

use self::launch::CloneMethod;
use self::run::{PAGED_IN, PSS_READ, PSS_WRITTEN, Stage, WORK, WORK_CPU};
use crate::frame::{Contestant, Frame, Series, interleave};
use crate::guest::WRITTEN_PAGES;
use crate::machine::Machine;
use crate::measure::Measured;
use crate::options::Options;
use crate::report::{NOT_RUN, Report, gib_or_mib, ratio};
use crate::stored::Stored;

const BARE: &str = "QEMU without a snapshot";
const EAGER: &str = "QEMU mapped-ram, multifd";
const LAZY: &str = "limosa lazy";
const MAPPED: &str = "limosa mapped";
const READ_AHEAD: &str = "limosa mapped, working set";
const POOL: &str = "limosa mapped, from a pool";

const METHODS: &[(&str, CloneMethod)] = &[
    (BARE, CloneMethod::Bare),
    (EAGER, CloneMethod::Eager),
    (LAZY, CloneMethod::Lazy),
    (MAPPED, CloneMethod::Mapped),
    (READ_AHEAD, CloneMethod::ReadAhead),
    (POOL, CloneMethod::Pool),
];

/// The two parts of a run; the second is the wall time of that part alone.
const FIRST_BEATS: &str = "first beats";
const READING: &str = "reading";

/// Number of VMs in each cell, if none is named.
const COUNTS: &[u32] = &[1, 4, 16, 32];

/// Bytes that each guest writes.
const WRITTEN: u64 = WRITTEN_PAGES as u64 * 4096;
/// Bytes that a QEMU needs at most besides its guest's memory.
const OWN: u64 = 64 << 20;

/// VMs that are started together.
struct Cell {
    case: String,
    vms: u32,
    cold: bool,
}

/// The VMs of all cells.
struct Plan {
    memory: u64,
    contents: u64,
    cells: Vec<Cell>,
}

impl Plan {
    fn new(options: &Options) -> Result<Self> {
        let memory = options.size.unwrap_or(512 << 20).next_multiple_of(2 << 20);
        let contents = memory / 2;
        ensure!(contents >= WRITTEN, "--size must be at least {} for this bench", gib_or_mib(2 * WRITTEN));
        let cell = |&vms: &u32, cold: bool| {
            let case = format!("{vms} x {} {}", gib_or_mib(memory), if cold { "cold" } else { "warm" });
            Cell { case, vms, cold }
        };
        let counts = if options.counts.is_empty() { COUNTS } else { &options.counts };
        let cells = counts.iter().flat_map(|vms| [cell(vms, false), cell(vms, true)]).collect();
        Ok(Self { memory, contents, cells })
    }

    /// Memory that the VMs of a cell take at the end of a run, at most.
    fn needs(&self, cell: &Cell, method: CloneMethod) -> u64 {
        let each = match method {
            CloneMethod::Bare => 0,
            CloneMethod::Eager | CloneMethod::Lazy => self.contents,
            CloneMethod::Mapped | CloneMethod::ReadAhead | CloneMethod::Pool => WRITTEN,
        };
        u64::from(cell.vms).saturating_mul(each + OWN).saturating_add(self.contents)
    }
}

impl Cell {
    fn part(&self, part: &str) -> String {
        format!("{}: {part}", self.case)
    }

    /// Whether this contestant takes part. Without a snapshot nothing can be cold.
    fn has(&self, method: CloneMethod) -> bool {
        method != CloneMethod::Bare || !self.cold
    }
}

/// Runs the bench.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let machine = Machine::this(&options.qemu);
    let plan = Plan::new(options)?;
    let available = MemcgHeadroom::of_this_process().left().context("/proc/meminfo: no memory available")?;
    let lacking = machine.lacks_mapped_ram();
    let all = if lacking.is_none() { in_parts(&rounds(options, &plan, available)?) } else { Vec::new() };
    let mut report = Report::new("clone", machine, options.rounds, &all);
    for cell in &plan.cells {
        compare(&mut report, &all, cell);
        let fits = METHODS.iter().all(|(_, method)| plan.needs(cell, *method) < available);
        let no_room = (!fits).then(|| format!("not all contestants fit into the {} available", gib_or_mib(available)));
        targets::judge(&mut report, &all, &plan, cell, lacking.as_deref().or(no_room.as_deref()).unwrap_or(NOT_RUN));
    }
    Ok(report)
}

/// Saves the VM and lets every contestant start it, as often as each cell says.
fn rounds(options: &Options, plan: &Plan, available: u64) -> Result<Vec<Series>> {
    let mut taking_part = Vec::new();
    for cell in &plan.cells {
        for (name, method) in METHODS.iter().filter(|(_, method)| cell.has(*method)) {
            if !options.wants(&cell.case, name) {
                continue;
            }
            if plan.needs(cell, *method) < available {
                taking_part.push((cell, *name, *method));
            } else {
                options.tell(&format!("left out: {}, {name} does not fit into memory", cell.case));
            }
        }
    }
    ensure!(!taking_part.is_empty(), "{}", options.none_selected());
    options.tell("saving the VM");
    let stored = &Stored::sparse(options, plan.memory, plan.contents)?;
    if taking_part.iter().any(|(_, _, method)| *method == CloneMethod::ReadAhead) {
        options.tell("recording the working set");
        launch::record(options, stored)?;
    }
    let contestant = |(cell, name, method): (&Cell, &str, CloneMethod)| -> Result<Contestant<'_>> {
        let stage = Stage { options, stored, vms: usize::try_from(cell.vms)?, cold: cell.cold };
        let frame = Frame { touch: options.touch.unwrap_or(plan.needs(cell, method)) };
        let run = Box::new(move |_: &Frame| stage.run(method, &frame));
        Ok(Contestant { case: cell.case.clone(), variant: name.to_owned(), run })
    };
    let mut contestants = taking_part.into_iter().map(contestant).collect::<Result<Vec<_>>>()?;
    interleave(&mut contestants, options.rounds, &Frame { touch: 0 }, &mut |line| options.tell(line))
}

/// Makes two series of each, one for each part of a run.
fn in_parts(all: &[Series]) -> Vec<Series> {
    let part = |series: &Series, part: &str, of: &dyn Fn(&Measured) -> Option<Measured>| {
        let runs: Vec<Measured> = series.runs.iter().filter_map(of).collect();
        let case = format!("{}: {part}", series.case);
        (!runs.is_empty()).then(|| Series { case, variant: series.variant.clone(), runs })
    };
    let first = all.iter().filter_map(|series| part(series, FIRST_BEATS, &|run| Some(until_beats(run))));
    first.chain(all.iter().filter_map(|series| part(series, READING, &reading))).collect()
}

/// Figures of a run that belong to its second part.
const OF_READING: &[&str] = &[WORK, WORK_CPU, PSS_READ, PSS_WRITTEN, PAGED_IN];

fn until_beats(run: &Measured) -> Measured {
    let mut part = run.clone();
    part.counters.retain(|name, _| !OF_READING.contains(name));
    part
}

/// None for guests that have nothing to read.
fn reading(run: &Measured) -> Option<Measured> {
    let micros = |name: &str| run.counters.get(name).copied().map(Duration::from_micros);
    let mut part = Measured { wall: micros(WORK)?, cpu: micros(WORK_CPU)?, counters: run.counters.clone() };
    part.counters.retain(|name, _| [PSS_READ, PSS_WRITTEN, PAGED_IN].contains(name));
    Some(part)
}

/// limosa compared with QEMU, and its own methods with each other.
fn compare(report: &mut Report, all: &[Series], cell: &Cell) {
    for (of, to) in [(LAZY, EAGER), (MAPPED, EAGER), (MAPPED, LAZY)] {
        for part in [FIRST_BEATS, READING] {
            report.ratios.extend(ratio(all, &cell.part(part), of, to, "wall"));
        }
        report.ratios.extend(ratio(all, &cell.part(READING), of, to, PSS_READ));
    }
    for part in [FIRST_BEATS, READING] {
        report.ratios.extend(ratio(all, &cell.part(part), READ_AHEAD, MAPPED, "wall"));
    }
    report.ratios.extend(ratio(all, &cell.part(FIRST_BEATS), POOL, MAPPED, "wall"));
    report.ratios.extend(ratio(all, &cell.part(FIRST_BEATS), MAPPED, BARE, "wall"));
}

#[cfg(test)]
mod tests {
    use super::run::PSS_IDLE;
    use super::*;

    #[test]
    fn every_number_of_vms_is_started_warm_and_cold() {
        let plan = Plan::new(&Options { counts: vec![1, 8], ..Options::default() }).expect("a plan");
        let cases: Vec<_> = plan.cells.iter().map(|cell| cell.case.as_str()).collect();
        assert_eq!(cases, ["1 x 512 MiB warm", "1 x 512 MiB cold", "8 x 512 MiB warm", "8 x 512 MiB cold"]);
        assert!(plan.cells[0].has(CloneMethod::Bare) && !plan.cells[1].has(CloneMethod::Bare));
        let needs = |method| plan.needs(&plan.cells[2], method) >> 20;
        assert_eq!([CloneMethod::Bare, CloneMethod::Lazy, CloneMethod::Mapped].map(needs), [768, 2816, 1024]);
    }

    #[test]
    fn a_guest_too_small_for_its_work_is_refused() {
        assert!(Plan::new(&Options { size: Some(32 << 20), ..Options::default() }).is_err());
    }

    #[test]
    fn a_run_is_reported_in_two_parts_and_a_guest_without_contents_in_one() {
        let run = Measured { wall: Duration::from_millis(90), ..Measured::default() }.with(PSS_IDLE, 7);
        let work = run.clone().with(WORK, 250_000).with(WORK_CPU, 200_000).with(PSS_READ, 9);
        let series = |variant: &str, run| Series { case: "1 x".into(), variant: variant.into(), runs: vec![run] };
        let parts = in_parts(&[series(BARE, run), series(MAPPED, work)]);
        let found: Vec<_> = parts
            .iter()
            .map(|part| (part.case.as_str(), part.variant.as_str(), part.runs[0].wall.as_millis()))
            .collect();
        let expected =
            [("1 x: first beats", BARE, 90), ("1 x: first beats", MAPPED, 90), ("1 x: reading", MAPPED, 250)];
        assert_eq!(found, expected);
        assert_eq!(parts[1].runs[0].counters.keys().copied().collect::<Vec<_>>(), [PSS_IDLE]);
        assert_eq!(parts[2].runs[0].counters.keys().copied().collect::<Vec<_>>(), [PSS_READ]);
    }
}
