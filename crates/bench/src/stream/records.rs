//! Page records on the main channel: copied through a buffer of 16 KiB, or gathered, hundreds of pages a call. What
//! vectors save, and where.
//!
//! Law: both write the same bytes, out of the same memory, and look at the same pages for zeros. What differs is how a
//! record gets from where it lives into the kernel.

use std::num::NonZeroU64;

use super::send_options::SendOptions;
use super::stage::{Link, Stage};
use crate::caches::Caches;
use crate::frame::{Contestant, Frame, Series};
use crate::options::Options;
use crate::report::{Bound, NOT_RUN, Report, Target, figure, gib_or_mib, ratio};

/// The throughput of a line of 1 Gbit/s in bytes a second: limosa's own limit stands for the line.
pub(super) const GIGABIT: Option<NonZeroU64> = NonZeroU64::new(125_000_000);

/// The plain way.
pub(super) const COPIED: &str = "copied";
/// The fast one.
pub(super) const GATHERED: &str = "gathered";

/// Calls of the fast way for one of the plain one.
const CALLS: f64 = 1.0 / 64.0;
/// Wall time of the fast way for that of the plain one, on the fastest transport.
const FASTEST: f64 = 0.83;
/// The same in any cell: no more.
const ANY: f64 = 1.0;

/// The part of a memory that has contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Contents {
    Full,
    /// Every second page is zero, but there.
    Half,
}

/// One cell: two contestants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cell {
    memory: u64,
    contents: Contents,
    caches: Caches,
    link: Link,
    limited: bool,
}

impl Cell {
    fn case(&self) -> String {
        let Self { memory, contents, caches, link, limited } = *self;
        let half = if contents == Contents::Half { ", half zero" } else { "" };
        let limit = if limited { " at 1 GbE" } else { "" };
        format!("records, {}{half}, {}, over {}{limit}", gib_or_mib(memory), caches.name(), link.name())
    }

    /// The cells of such memory. What is larger than all caches cannot be hot, and shows nothing new at 1 Gbit/s or
    /// where it is half zero.
    pub(super) fn of(memory: u64, contents: Contents, large: bool) -> Vec<Self> {
        let cell = |link, caches, limited| Self { memory, contents, caches, link, limited };
        let over_all = |caches, limited| Link::ALL.map(|link| cell(link, caches, limited));
        match (contents, large) {
            (Contents::Full, true) => over_all(Caches::Cold, false).to_vec(),
            (Contents::Full, false) => {
                [over_all(Caches::Cold, false), over_all(Caches::Hot, false), over_all(Caches::Cold, true)].concat()
            }
            (Contents::Half, _) => over_all(Caches::Cold, false).to_vec(),
        }
    }

    /// The ways of it that are wanted.
    pub(super) fn wanted(self, options: &Options) -> impl Iterator<Item = (Self, &'static str)> {
        let both = [(self, COPIED), (self, GATHERED)];
        both.into_iter().filter(|(cell, variant)| options.wants(&cell.case(), variant))
    }
}

/// Those of the cells that are wanted and that the stage has a link for.
pub(super) fn contestants<'s>(options: &'s Options, stage: &'s Stage<'_>, cells: &[Cell]) -> Vec<Contestant<'s>> {
    let wanted = cells.iter().filter(|cell| stage.has(cell.link)).flat_map(|cell| cell.wanted(options));
    wanted
        .map(|(cell, variant)| {
            let max_bandwidth = GIGABIT.filter(|_| cell.limited);
            let way = SendOptions { copied: variant == COPIED, max_bandwidth, ..SendOptions::default() };
            Contestant {
                case: cell.case(),
                variant: variant.into(),
                run: Box::new(move |_: &Frame| stage.send(cell.link, way, cell.caches, || Ok(()))),
            }
        })
        .collect()
}

/// `no_cable`: why nothing was sent over veth.
pub(super) fn judge(report: &mut Report, all: &[Series], cells: &[Cell], no_cable: Option<&str>) {
    let why = |cell: &Cell| no_cable.filter(|_| cell.link == Link::Veth).unwrap_or(NOT_RUN);
    for cell in cells {
        let case = cell.case();
        for (figure, name, most) in [("wall", "time", ANY), ("writes", "calls", CALLS)] {
            let found = ratio(all, &case, GATHERED, COPIED, figure);
            let got = found.as_ref().map(|ratio| ratio.median);
            let name = format!("{case}: {name}, {GATHERED} / {COPIED}");
            report.targets.push(Target::new(name, Bound::AtMost(most), got, why(cell)));
            report.ratios.extend(found);
        }
        report.ratios.extend(ratio(all, &case, GATHERED, COPIED, "cpu"));
    }
}

/// The target of the fastest transport alone: of the first cells, which differ in the transport only.
pub(super) fn judge_fastest(report: &mut Report, all: &[Series], cells: &[Cell]) {
    let wall = |cell: &&Cell| figure(all, &cell.case(), GATHERED, "wall").map_or(f64::INFINITY, |wall| wall.median);
    if let Some(cell) = cells.iter().take(Link::ALL.len()).min_by(|one, other| wall(one).total_cmp(&wall(other))) {
        let case = cell.case();
        let got = ratio(all, &case, GATHERED, COPIED, "wall").map(|ratio| ratio.median);
        let name = format!("{case}, the fastest: time, {GATHERED} / {COPIED}");
        report.targets.push(Target::new(name, Bound::AtMost(FASTEST), got, NOT_RUN));
    }
}
