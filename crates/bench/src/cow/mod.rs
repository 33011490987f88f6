//! Copy-on-write in qcow2 images: merged, in parts (the module `split`), and by stock QEMU.
//!
//! Law: the contestants of a case put the same load on images made the same way, direct and through `io_uring`, and the
//! clock of each begins with its first request and ends with its last one; what closing the image costs is reported
//! separately as `close_ms`. Operations and bytes are those that the files were asked for. What is cloned is compared
//! apart, in the module `clones`.
//!
//! The hard disk is a stand-in that takes 8 ms for each operation: what counts there is how many there are.

mod clones;
mod convert;
mod image;
mod load;
mod split;
mod stock;

use anyhow::{Result, ensure};
use limosa_image::qcow2::Qcow2Options;

use self::image::{Base, Copies, Shape, Through, Under};
use self::load::{Cell, IOPS, Load, OPERATIONS, size_name};
use crate::frame::{Contestant, Frame, Run, Series, interleave};
use crate::machine::Machine;
use crate::measure::Measured;
use crate::options::Options;
use crate::report::{Bound, NOT_RUN, Report, Spread, Target, figure, ratio};
use crate::scratch::Scratch;

const MERGED: &str = "merged";
const SPLIT: &str = "split";
const STOCK: &str = "qemu-img";
const DEVICE: &str = "device";

const FIRST_BACKED: &str = "first writes, backed";
const FIRST: &str = "first writes";
const REWRITES: &str = "rewrites";
const CONVERT: &str = "convert";
const HARD_DISK: &str = "hard disk, random, backed";

/// The CPU time of merged to that of split that a single case may take, in the least disturbed round of each.
const CPU_OF_A_CASE: f64 = 1.25;

/// Seconds of CPU from which a case is judged by itself: what a process does beside its requests is a part of fewer.
const CPU_TO_JUDGE: f64 = 0.01;

/// Runs the bench.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let machine = Machine::this(&options.qemu);
    let size = options.size.unwrap_or(2 << 30).max(64 << 20).next_multiple_of(2 << 20);
    let stock = options.against_qemu && machine.qemu.is_some();
    let cells = cells(size, options.sequential);
    let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir);
    let folder = Scratch::new_in(&parent)?;
    options.tell("making the backing image");
    let base = Base::make(folder.path(), size)?;
    let mut contestants = Vec::new();
    let mut add = |case: &str, variant: &str, run: Run<'static>| {
        if options.wants(case, variant) {
            contestants.push(Contestant { case: case.to_owned(), variant: variant.to_owned(), run });
        }
    };
    let usual = Qcow2Options::default();
    let usual = usual
        .clone()
        .allocate_ahead(options.allocate_ahead.unwrap_or(usual.allocate_ahead))
        .reflink_mode(options.clone);
    for cell in &cells {
        for (variant, copies) in [(MERGED, Copies::Merged), (SPLIT, Copies::Split)] {
            let (base, cell) = (base.clone(), cell.clone());
            let split_matters = cell.shape.under != Under::Own;
            if variant == MERGED || split_matters {
                let how = usual.clone();
                let run = move |_: &_| load::run(&base, &cell.shape, &cell.load, copies, how.clone());
                add(&cell.case.clone(), variant, Box::new(run));
            }
        }
        if cell.stock && stock {
            let (base, cell) = (base.clone(), cell.clone());
            add(&cell.case.clone(), STOCK, Box::new(move |_| stock::bench(&base, &cell.shape, &cell.load)));
        }
        if cell.case == FIRST_BACKED {
            let (base, load) = (base.clone(), cell.load.clone());
            add(FIRST_BACKED, DEVICE, Box::new(move |_| load::device(&base, &load)));
        }
    }
    let shared = if clones::can_share(folder.path())? { clones::cells(size) } else { Vec::new() };
    for cell in &shared {
        for (variant, clone) in clones::VARIANTS {
            let (base, cell, how) = (base.clone(), cell.clone(), usual.clone().reflink_mode(clone));
            let run = move |_: &_| {
                clones::prepare(&base, cell.shape.through)?;
                load::run(&base, &cell.shape, &cell.load, Copies::Merged, how.clone())
            };
            add(&cell.case.clone(), variant, Box::new(run));
        }
    }
    if stock {
        let (ours, options) = (base.clone(), options.clone());
        add(CONVERT, "limosa", Box::new(move |_| convert::limosa(&ours, &options)));
        add(CONVERT, STOCK, Box::new(move |_| convert::stock(&base)));
    }
    let frame = Frame { touch: options.touch.unwrap_or(0) };
    let all = interleave(&mut contestants, options.rounds, &frame, &mut |line| options.tell(line))?;
    ensure!(!all.is_empty(), "{}", options.none_selected());
    let why = match (options.against_qemu, stock) {
        (false, _) => "QEMU was not asked for (--against qemu)",
        (true, false) => "no QEMU was found",
        (true, true) => NOT_RUN,
    };
    let mut report = Report::new("cow", machine, options.rounds, &all);
    judge(&mut report, &all, &cells, why);
    for cell in &shared {
        for figure in [IOPS, "cpu"] {
            report.ratios.extend(ratio(&all, &cell.case, clones::CLONED, clones::COPIED, figure));
        }
    }
    Ok(report)
}

/// The cells that are measured on a disk of `size` bytes, with this number of sequential requests.
fn cells(size: u64, sequential: Option<u64>) -> Vec<Cell> {
    let usual = Shape {
        cluster: 64 << 10,
        subclusters: false,
        under: Under::Backing,
        hard_disk: false,
        through: Through::Direct,
    };
    let bare = Shape { under: Under::Nothing, ..usual };
    // Each request in its own cluster: 16,000 on 2 GiB.
    let count = (size / 69632).min(16000);
    let first = Load { count, depth: 16, size: 4096, offset: 4096, step: Some(69632), durable: false, queues: 1 };
    let cell = |case: &str, shape, load: &Load, stock| Cell { case: case.to_owned(), shape, load: load.clone(), stock };
    let random =
        Load { count: (8192 * size) >> 31, depth: 1, size: 4096, offset: 0, step: None, durable: false, queues: 1 };
    let sequential = sequential.unwrap_or((65536 * size) >> 31);
    let sequential =
        Load { count: sequential, depth: 1, size: 4096, offset: 0, step: Some(4096), durable: false, queues: 1 };
    let few = Load { count: 150, ..random };
    let mut cells = vec![
        cell(FIRST_BACKED, usual, &first, true),
        cell(FIRST, bare, &first, true),
        cell(REWRITES, Shape { under: Under::Own, ..usual }, &first, true),
        cell("random, depth 1, backed", usual, &random, false),
        cell("random, depth 1", bare, &random, false),
        cell("sequential, depth 1, backed", usual, &sequential, true),
        cell("sequential, depth 1", bare, &sequential, true),
        cell(HARD_DISK, Shape { hard_disk: true, ..usual }, &few, false),
        cell("hard disk, random", Shape { hard_disk: true, ..bare }, &few, false),
        cell(
            "hard disk, sequential, backed",
            Shape { hard_disk: true, ..usual },
            &Load { step: Some(4096), ..few },
            false,
        ),
    ];
    for queues in [2, 4] {
        let load = Load { queues, ..first.clone() };
        for (case, under) in [(FIRST_BACKED, Under::Backing), (FIRST, Under::Nothing), (REWRITES, Under::Own)] {
            cells.push(cell(&format!("{case}, {queues} queues"), Shape { under, ..usual }, &load, false));
        }
    }
    for (cluster, subclusters) in [(32_u64 << 10, false), (64 << 10, false), (1 << 20, false), (64 << 10, true)] {
        for under in [Under::Backing, Under::Nothing] {
            for request in [4_u64 << 10, 16 << 10, 64 << 10, 512 << 10] {
                // In the middle of clusters, and over their ends where they are longer.
                let step = (cluster.max(request) + 4096).next_multiple_of(4096);
                let count = ((size / 2) / step).min(500);
                let load =
                    Load { count, depth: 4, size: request, offset: 4096, step: Some(step), durable: false, queues: 1 };
                let what = if subclusters { ", subclusters" } else { "" };
                let below = if under == Under::Backing { ", backed" } else { "" };
                let case = format!("{} in {} clusters{what}{below}", size_name(request), size_name(cluster));
                cells.push(cell(&case, Shape { cluster, subclusters, under, ..usual }, &load, true));
            }
        }
    }
    cells
}

fn judge(report: &mut Report, all: &[Series], cells: &[Cell], why: &str) {
    let median = |case: &str, of: &str, to: &str| ratio(all, case, of, to, IOPS).map(|ratio| ratio.median);
    for cell in cells {
        for (of, to) in [(MERGED, SPLIT), (MERGED, STOCK)] {
            for figure in [IOPS, "cpu", OPERATIONS] {
                report.ratios.extend(ratio(all, &cell.case, of, to, figure));
            }
        }
    }
    let backed = "IOPS of merged / the lower of 1.25 times qemu-img's and 0.85 of the device's 64 KiB";
    let got = lower_bound(all);
    report.targets.push(Target::new(format!("{FIRST_BACKED}: {backed}"), Bound::AtLeast(1.0), got, why));
    for (case, least) in [(FIRST, 1.5), (REWRITES, 1.0)] {
        let name = format!("{case}: IOPS of merged / qemu-img");
        report.targets.push(Target::new(name, Bound::AtLeast(least), median(case, MERGED, STOCK), why));
    }
    let converted = ratio(all, CONVERT, "limosa", STOCK, "wall");
    let got = converted.as_ref().map(|ratio| ratio.median);
    report.targets.push(Target::new("convert: wall of limosa / qemu-img", Bound::AtMost(1.0), got, why));
    report.ratios.extend(converted);
    let got = median(HARD_DISK, MERGED, SPLIT);
    let name = format!("{HARD_DISK}: IOPS of merged / split");
    report.targets.push(Target::new(name, Bound::AtLeast(1.6), got, NOT_RUN));
    costs_no_more(report, all, cells);
}

/// Whether merging costs more: over all cases, and in each. The time of a few hundred requests is the device's noise
/// more than anything else (one case was at 0.72, 0.88 and 0.93 of split in three runs).
fn costs_no_more(report: &mut Report, all: &[Series], cells: &[Cell]) {
    for (figure_name, what) in [(OPERATIONS, "operations"), ("cpu", "CPU")] {
        let median = |cell: &Cell, variant| Some(figure(all, &cell.case, variant, figure_name)?.median);
        let both = cells.iter().filter_map(|cell| Some((median(cell, MERGED)?, median(cell, SPLIT)?)));
        let (merged, split) = both.fold((0.0, 0.0), |(merged, split), (one, other)| (merged + one, split + other));
        let got = (split > 0.0).then(|| merged / split);
        let name = format!("all cases: {what} of merged / split");
        report.targets.push(Target::new(name, Bound::AtMost(1.0), got, NOT_RUN));
    }
    for cell in cells {
        // Others can only add to the CPU time of a round. Operations of a case depend on timing: a request that comes
        // while its cluster is being allocated waits, and writes its part by itself.
        let least = |variant| Some(figure(all, &cell.case, variant, "cpu")?.min);
        if let (Some(merged), Some(split)) = (least(MERGED), least(SPLIT))
            && split >= CPU_TO_JUDGE
        {
            let name = format!("{}: least CPU of merged / split", cell.case);
            report.targets.push(Target::new(name, Bound::AtMost(CPU_OF_A_CASE), Some(merged / split), NOT_RUN));
        }
    }
}

/// Round by round: merged against the lower of its two bounds; the median.
fn lower_bound(all: &[Series]) -> Option<f64> {
    let runs = |variant: &str| {
        let series = all.iter().find(|series| series.case == FIRST_BACKED && series.variant == variant)?;
        Some(series.runs.iter().map(iops).collect::<Vec<_>>())
    };
    let (merged, stock, device) = (runs(MERGED)?, runs(STOCK)?, runs(DEVICE)?);
    let bounds = stock.iter().zip(&device).map(|(stock, device)| (1.25 * stock).min(0.85 * device));
    Some(Spread::of(merged.iter().zip(bounds).map(|(merged, bound)| merged / bound)).median)
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn iops(run: &Measured) -> f64 {
    run.counters.get(IOPS).copied().unwrap_or_default() as f64
}
