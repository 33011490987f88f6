//! `limosa img` beside stock `qemu-img`: the same command lines on the same images, in turns, round by round.
//!
//! Law: every run begins with images that are the same, with what others wrote on disk, and with no output there.
//! Sources are in the page cache, where direct cases do not look. The clock ends with the program: neither makes a new
//! image durable unless its cache mode says so.

mod cases;
mod images;
mod program;
mod random;

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};

use self::cases::{Case, Goal};
use self::images::Images;
use self::program::{LIMOSA, PEAK, Program, STOCK};
use self::random::{CIPHER, Cell, Disk, IOPS, PLAIN};
use crate::frame::{Contestant, Frame, Run, Series, interleave};
use crate::machine::Machine;
use crate::measure::Measured;
use crate::options::Options;
use crate::page_cache;
use crate::report::{Bound, NOT_RUN, Report, Spread, Target, figure, ratio};
use crate::scratch::Scratch;
use crate::serve::servers::QEMU;

/// Bytes of the image that a command wrote: its length, and what it takes on disk.
const LENGTH: &str = "result_kib";
const ALLOCATED: &str = "result_allocated_kib";

/// Stock's time divided by limosa's must be at least this, as of the worst case of the bench `cow`.
const EVEN: f64 = 0.95;
const COMPRESSION: f64 = 1.3;
const MEMORY_KIB: f64 = 256.0 * 1024.0;

/// Runs the bench.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let machine = Machine::this(STOCK);
    let has_stock = machine.qemu.is_some();
    let size = options.size.unwrap_or(1 << 30).max(4 << 20).next_multiple_of(4 << 20);
    let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir);
    let folder = Scratch::new_in(&parent)?;
    let limosa = Program::Limosa(options.limosa()?);
    let maker = if has_stock { Program::Stock } else { limosa.clone() };
    let images = Rc::new(Images::new(folder.path(), size, maker, limosa));
    let mut contestants = Vec::new();
    let mut add = |case: &str, variant: &str, run: Run<'static>| {
        if options.wants(case, variant) {
            contestants.push(Contestant { case: case.to_owned(), variant: variant.to_owned(), run });
        }
    };
    let (cases, cells) = (cases::all(), random::cells());
    for case in cases.iter().copied() {
        for program in Program::all(options, has_stock)? {
            let images = Rc::clone(&images);
            add(case.name, program.name(), Box::new(move |_| measure(&images, &program, &case)));
        }
    }
    for cell in &cells {
        for variant in cell.variants(has_stock) {
            let (images, cell, options) = (Rc::clone(&images), cell.clone(), options.clone());
            add(&cell.name.clone(), variant, Box::new(move |_| cell.run(&images, variant, &options, size)));
        }
    }
    let frame = Frame { touch: options.touch.unwrap_or(0) };
    let all = interleave(&mut contestants, options.rounds, &frame, &mut |line| options.tell(line))?;
    ensure!(!all.is_empty(), "{}", options.none_selected());
    let mut report = Report::new("img", machine, options.rounds, &all);
    let why = if has_stock { NOT_RUN } else { "no qemu-img was found" };
    judge(&mut report, &all, &cases, why);
    judge_random(&mut report, &all, &cells, why);
    let peaks = all.iter().filter(|series| series.variant == LIMOSA);
    let peaks = peaks.filter_map(|series| Some((figure(&all, &series.case, LIMOSA, PEAK)?.max, &series.case)));
    let worst = peaks.max_by(|one, other| one.0.total_cmp(&other.0));
    let which = worst.map_or_else(|| "any case".to_owned(), |(_, case)| format!("the worst case, {case}"));
    let name = format!("{which}: {PEAK} of {LIMOSA}");
    report.targets.push(Target::new(name, Bound::AtMost(MEMORY_KIB), worst.map(|(got, _)| got), NOT_RUN));
    Ok(report)
}

/// Runs one program on one case.
fn measure(images: &Images, program: &Program, case: &Case) -> Result<Measured> {
    let work = (case.prepare)(images)?;
    let folder = File::open(images.folder()).context("the folder of the images")?;
    rustix::fs::syncfs(&folder).context("syncfs")?;
    for source in work.sources.iter().filter(|source| source.exists()) {
        page_cache::warm(source)?;
    }
    let mut measured = program.measure(&work.words, images.folder(), case.one_core)?;
    if let Some(result) = work.result {
        let about = fs::metadata(&result).with_context(|| result.display().to_string())?;
        measured = measured.with(LENGTH, about.len() >> 10).with(ALLOCATED, about.blocks() >> 1);
        fs::remove_file(&result)?;
    }
    Ok(measured)
}

/// The targets of the commands.
fn judge(report: &mut Report, all: &[Series], cases: &[Case], why: &str) {
    let many = std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1);
    for case in cases {
        for figure in ["wall", "cpu"] {
            report.ratios.extend(ratio(all, case.name, STOCK, LIMOSA, figure));
        }
        let times = ratio(all, case.name, STOCK, LIMOSA, "wall").map(|ratio| ratio.median);
        let name = format!("{}: wall of {STOCK} / {LIMOSA}", case.name);
        let least = if case.goal == Goal::Compression && many { COMPRESSION } else { EVEN };
        report.targets.push(Target::new(name, Bound::AtLeast(least), times, why));
        if case.goal == Goal::Compression {
            // Not the length: stock's file ends with space that it has allocated ahead.
            let sizes = ratio(all, case.name, LIMOSA, STOCK, ALLOCATED);
            let name = format!("{}: {ALLOCATED} of {LIMOSA} / {STOCK}", case.name);
            let got = sizes.as_ref().map(|ratio| ratio.median);
            report.targets.push(Target::new(name, Bound::AtMost(1.02), got, why));
            report.ratios.extend(sizes);
        }
    }
    for method in ["zlib", "zstd"] {
        for program in [STOCK, LIMOSA] {
            let one = figure(all, &format!("compress {method} on one core"), program, "wall");
            let all = figure(all, &format!("compress {method}"), program, "wall");
            if let Some((one, all)) = one.zip(all) {
                report.ratios.push(crate::report::Ratio {
                    case: format!("compress {method}, {program}"),
                    of: "on one core".into(),
                    to: "on all".into(),
                    figure: "wall, of medians".into(),
                    median: one.median / all.median.max(1e-9),
                });
            }
        }
    }
}

/// The targets of random requests.
fn judge_random(report: &mut Report, all: &[Series], cells: &[Cell], why: &str) {
    for cell in cells {
        for figure in [IOPS, "cpu"] {
            for other in [QEMU, PLAIN, CIPHER] {
                report.ratios.extend(ratio(all, &cell.name, LIMOSA, other, figure));
            }
        }
        let (bound, got) = if cell.disk == Disk::Luks && !cell.write {
            let bound = format!("the lowest of 1.2 times {QEMU}'s, 0.9 of the cipher's and 0.9 of not decrypted ones");
            (bound, lowest_bound(all, &cell.name))
        } else {
            (QEMU.to_owned(), ratio(all, &cell.name, LIMOSA, QEMU, IOPS).map(|ratio| ratio.median))
        };
        let least = if cell.disk == Disk::Luks && !cell.write { 1.0 } else { EVEN };
        let name = format!("{}: {IOPS} of {LIMOSA} / {bound}", cell.name);
        report.targets.push(Target::new(name, Bound::AtLeast(least), got, why));
    }
}

/// Round by round: limosa against the lowest of its bounds; the median.
fn lowest_bound(all: &[Series], case: &str) -> Option<f64> {
    let quotients = |other: &str| {
        let series = |variant: &str| all.iter().find(|series| series.case == case && series.variant == variant);
        let (limosa, other) = (series(LIMOSA)?, series(other)?);
        Some(limosa.runs.iter().zip(&other.runs).map(|(limosa, other)| iops(limosa) / iops(other)).collect::<Vec<_>>())
    };
    let (stock, cipher, plain) = (quotients(QEMU)?, quotients(CIPHER)?, quotients(PLAIN)?);
    let best = stock.iter().zip(&cipher).zip(&plain);
    let best = best.map(|((stock, cipher), plain)| (stock / 1.2).max(cipher / 0.9).max(plain / 0.9));
    Some(Spread::of(best).median)
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn iops(run: &Measured) -> f64 {
    run.counters.get(IOPS).copied().unwrap_or_default() as f64
}
