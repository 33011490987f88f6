//! Pages in memory and in cache, looked at in every way there is.
//!
//! Law: the scans of one case look at the same pages, equally often, and each counts the zero pages, which is checked.
//! *Cold* is memory of more than four times the last-level cache, gone through once from front to back, so that of what
//! is read nothing is left from the time before. *Hot* is half of a core's second-level cache, over and over.
//!
//! A scan is one thread that never waits, so what it takes is its CPU time: on a machine that others use, its wall time
//! is partly theirs. All figures are of CPU time.

use std::hint::black_box;

use anyhow::{Context, Result, ensure};
use limosa_page::{GuestPages, PAGE_LEN, PAGE_SIZE, PageKind, Scan, ZeroMethod, is_zero};

use super::contents::Contents;
use super::loops;
use crate::caches;
use crate::frame::{Contestant, Frame, Series, interleave};
use crate::measure::{Measured, Stopwatch, nanoseconds};
use crate::options::Options;
use crate::raw::Mapping;
use crate::report::{Bound, NOT_RUN, Report, Target, figure, ratio};

/// Nanoseconds for a page, rounded up to whole ones.
const PER_PAGE: &str = "ns_per_page";
/// Picoseconds: of a page in cache a nanosecond says too little.
const PER_PAGE_PS: &str = "ps_per_page";
const SPEED: &str = "mib_per_s";

/// How often the hot pages are gone through where most of each is read, and where a page is done with at its beginning.
const OFTEN: u64 = 2000;
const VERY_OFTEN: u64 = 20_000;

/// Nanoseconds that a hot page with contents may take.
const EARLY_LIMIT: f64 = 10.0;
/// Of the speed at which memory is read, what zero pages that are cold have to be looked at with.
const OF_BANDWIDTH: f64 = 0.9;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CacheState {
    Cold,
    Hot,
}

impl CacheState {
    fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Hot => "hot",
        }
    }

    /// How often its pages are gone through.
    fn times(self, contents: Contents) -> u64 {
        match (self, contents) {
            (Self::Cold, _) => 1,
            (Self::Hot, Contents::Random | Contents::Early) => VERY_OFTEN,
            (Self::Hot, _) => OFTEN,
        }
    }
}

/// How pages are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageScan {
    /// All of the memory is read and nothing is said of it.
    Read(ZeroMethod),
    /// The loop that the compiler makes of an iterator over bytes.
    Iterator,
    /// [`is_zero`], as a user of the crate calls it: the method is chosen for each page.
    IsZero,
    /// One page after the other.
    Pages(ZeroMethod),
    /// Many pages in one call.
    Runs(ZeroMethod),
}

impl PageScan {
    /// Those of a case, the plain ones first.
    fn all(contents: Contents) -> impl Iterator<Item = Self> {
        let reads = ZeroMethod::ALL.into_iter().filter(|method| loops::read(*method, &[])).map(Self::Read);
        let methods = || ZeroMethod::available().filter(|method| *method != ZeroMethod::Plain);
        reads
            // What is read does not change how fast it is read.
            .filter(move |_| contents == Contents::Zero)
            .chain([Self::Iterator, Self::Pages(ZeroMethod::Plain), Self::IsZero])
            .chain(methods().map(Self::Pages))
            .chain(methods().map(Self::Runs))
    }

    fn name(self) -> String {
        match self {
            Self::Read(method) => format!("read, {method}"),
            Self::Iterator => "the compiler's loop".into(),
            Self::IsZero => "is_zero".into(),
            Self::Pages(ZeroMethod::Plain) => "16 bytes at a time".into(),
            Self::Pages(method) => format!("{method}, page by page"),
            Self::Runs(method) => format!("{method}, in runs"),
        }
    }

    /// Looks at all pages once; how many are zero, which a read does not know.
    fn look(self, memory: &[u8]) -> Option<u64> {
        let pages = GuestPages::from(memory);
        let slices = memory.as_chunks::<PAGE_LEN>().0;
        Some(match self {
            Self::Read(method) => {
                loops::read(method, memory);
                return None;
            }
            Self::Iterator => count(slices.iter().map(|page| loops::by_iterator(page))),
            Self::IsZero => count(slices.iter().map(|page| is_zero(page))),
            Self::Pages(method) => {
                count(pages.pages().iter().map(|page| pages.page_is_zero(method, page) == Some(true)))
            }
            Self::Runs(method) => {
                let zeros = Scan::new(pages, pages.pages(), method).filter(|run| run.kind == PageKind::Zero);
                zeros.map(|run| run.pages.len()).sum()
            }
        })
    }
}

fn count(zero: impl Iterator<Item = bool>) -> u64 {
    zero.map(u64::from).sum()
}

fn case(cache: CacheState, contents: Contents) -> String {
    format!("{}, {}", cache.name(), contents.name())
}

/// The runs, and the bytes of each.
pub(super) struct Measurements {
    pub(super) all: Vec<Series>,
    cold: u64,
    hot: u64,
}

/// Runs the cases, contents by contents: the memory is filled once for each.
pub(super) fn rounds(options: &Options) -> Result<Measurements> {
    let more_than_four_times = (4 * caches::last_level() + 1).next_multiple_of(256 << 20);
    let cold = options.size.unwrap_or(more_than_four_times).next_multiple_of(2 << 20);
    let hot = (caches::second_level() / 2).next_multiple_of(PAGE_SIZE).min(cold);
    let mut measurements = Measurements { all: Vec::new(), cold, hot };
    let mut memory: Option<Mapping> = None;
    for contents in Contents::ALL {
        let wanted: Vec<(CacheState, PageScan)> = [CacheState::Cold, CacheState::Hot]
            .into_iter()
            .flat_map(|cache| PageScan::all(contents).map(move |scan| (cache, scan)))
            .filter(|(cache, scan)| options.wants(&case(*cache, contents), &scan.name()))
            .collect();
        if wanted.is_empty() {
            continue;
        }
        options.tell(&format!("filling memory: {}", contents.name()));
        let memory = match &mut memory {
            Some(memory) => memory,
            none => {
                let len = usize::try_from(cold).context("--size")?;
                none.insert(Mapping::anonymous(len).with_context(|| format!("mapping {cold} bytes"))?)
            }
        };
        memory.populate().with_context(|| format!("not enough memory for {cold} bytes"))?;
        contents.fill(memory.bytes_mut());
        let memory: &[u8] = memory.bytes();
        let mut contestants = Vec::new();
        for (cache, scan) in wanted {
            let len = usize::try_from(if cache == CacheState::Cold { cold } else { hot })?;
            let memory = memory.get(..len).context("hot memory beyond the cold")?;
            let zeros = PageScan::Pages(ZeroMethod::Portable).look(memory).unwrap_or(0);
            contestants.push(Contestant {
                case: case(cache, contents),
                variant: scan.name(),
                run: Box::new(move |_: &Frame| run(scan, memory, cache.times(contents), zeros)),
            });
        }
        let done = interleave(&mut contestants, options.rounds, &Frame { touch: 0 }, &mut |line| options.tell(line))?;
        measurements.all.extend(done);
    }
    Ok(measurements)
}

fn run(scan: PageScan, memory: &[u8], times: u64, zeros: u64) -> Result<Measured> {
    // Once beforehand, so that what is hot is hot.
    if times > 1 {
        scan.look(memory);
    }
    let mut found = None;
    let watch = Stopwatch::start(&[])?;
    for _ in 0..times {
        found = scan.look(black_box(memory));
    }
    let measured = watch.stop()?;
    if let Some(found) = found {
        ensure!(found == zeros, "{found} pages are zero, expected {zeros}");
    }
    let pages = times * (memory.len() as u64 / PAGE_SIZE);
    let nanos = nanoseconds(measured.cpu).max(1);
    let mib_by_billion = u128::from((pages * PAGE_SIZE) >> 20) * 1_000_000_000;
    let speed = u64::try_from(mib_by_billion / u128::from(nanos)).unwrap_or(u64::MAX);
    let ps = nanos.saturating_mul(1000) / pages.max(1);
    Ok(measured.with("pages", pages).with(PER_PAGE, ps.div_ceil(1000)).with(PER_PAGE_PS, ps).with(SPEED, speed))
}

/// Ratios and targets.
pub(super) fn judge(report: &mut Report, measured: &Measurements) {
    let Measurements { all, cold, hot } = measured;
    let best = ZeroMethod::best();
    let zero = case(CacheState::Cold, Contents::Zero);
    let cache = caches::known_last_level();
    let why = match cache {
        None => "the size of the last-level cache is not known".to_owned(),
        Some(cache) if *cold <= 4 * cache => {
            format!("{} MiB are not more than four times the last-level cache of {} MiB", cold >> 20, cache >> 20)
        }
        Some(_) => NOT_RUN.to_owned(),
    };
    let is_cold = cache.is_some_and(|cache| *cold > 4 * cache);
    for method in ZeroMethod::available().filter(|method| loops::read(*method, &[])) {
        let (read, runs) = (PageScan::Read(method).name(), PageScan::Runs(method).name());
        let found = ratio(all, &zero, &read, &runs, "cpu");
        if method == best {
            let got = found.as_ref().map(|ratio| ratio.median).filter(|_| is_cold);
            let name = format!("{zero}: speed of {runs} / {read}");
            report.targets.push(Target::new(name, Bound::AtLeast(OF_BANDWIDTH), got, &why));
        }
        report.ratios.extend(found);
    }
    let early = case(CacheState::Hot, Contents::Early);
    let pages = hot / PAGE_SIZE * CacheState::Hot.times(Contents::Early);
    for scan in [PageScan::IsZero, PageScan::Runs(best)] {
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let got = figure(all, &early, &scan.name(), "cpu").map(|cpu| cpu.median * 1e9 / pages as f64);
        let name = format!("{early}: nanoseconds for a page, {}", scan.name());
        report.targets.push(Target::new(name, Bound::AtMost(EARLY_LIMIT), got, NOT_RUN));
    }
    for contents in Contents::ALL {
        for cache in [CacheState::Cold, CacheState::Hot] {
            let case = case(cache, contents);
            let runs = PageScan::Runs(best).name();
            for other in [
                PageScan::Iterator,
                PageScan::Pages(ZeroMethod::Plain),
                PageScan::Pages(best),
                PageScan::Runs(ZeroMethod::Avx512),
            ] {
                report.ratios.extend(ratio(all, &case, &runs, &other.name(), "cpu").filter(|_| runs != other.name()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_finds_the_same_pages_zero() {
        for contents in Contents::ALL {
            let mut memory = vec![0xff; 100 * PAGE_LEN];
            let zeros = contents.fill(&mut memory);
            for scan in PageScan::all(contents) {
                match scan {
                    PageScan::Read(_) => assert_eq!(scan.look(&memory), None),
                    _ => assert_eq!(scan.look(&memory), Some(zeros), "{contents:?}: {}", scan.name()),
                }
            }
        }
    }

    #[test]
    fn no_two_ways_have_the_same_name() {
        let names: std::collections::BTreeSet<_> = PageScan::all(Contents::Zero).map(PageScan::name).collect();
        assert_eq!(names.len(), PageScan::all(Contents::Zero).count());
    }
}
