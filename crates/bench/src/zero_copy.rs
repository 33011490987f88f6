//! Guest memory that leaves on multifd channels: copied, lent to the kernel, and spliced.
//!
//! Law: all three send the same packets of the same memory, from one process to another on this machine; what differs
//! is who copies the pages, and how often. A copy is made by the sender's call. `MSG_ZEROCOPY` lends them, and the
//! kernel copies them itself where the receiver is on the same machine: over loopback and veth it can be no faster
//! here, and what it saves on a network card shows only there. Splice leaves the receiver's copy as the only one.
//!
//! Stressed, every core has another process that does nothing but run.

use std::cell::RefCell;

use anyhow::Result;
use limosa_channel::ZeroCopy;

use crate::caches::Caches;
use crate::content::random_memory;
use crate::frame::{Contestant, Frame, Series, interleave};
use crate::machine::Machine;
use crate::namespaces::Cable;
use crate::options::Options;
use crate::report::{Bound, NOT_RUN, Report, Target, figure, gib_or_mib, ratio};
use crate::stream::{Link, SENDER_PER_GIB, SendOptions, Stage, Stress};

/// Multifd channels.
const CHANNELS: [u8; 4] = [1, 2, 4, 8];

/// CPU of the sender, spliced for copied, over loopback.
const SPLICED: f64 = 0.6;
/// Wall time under stress of the best way for that of copying.
const STRESSED: f64 = 0.87;

/// The ways of sending, the plain one first.
const METHODS: [ZeroCopy; 3] = [ZeroCopy::Off, ZeroCopy::Msg, ZeroCopy::Splice];

/// A case in which two ways and numbers of channels are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell {
    memory: u64,
    link: Link,
    stressed: bool,
}

impl Cell {
    fn case(&self) -> String {
        let stressed = if self.stressed { ", every core busy" } else { "" };
        format!("{} over {}{stressed}", gib_or_mib(self.memory), self.link.name())
    }

    fn methods(&self) -> impl Iterator<Item = ZeroCopy> {
        // A unix socket has no MSG_ZEROCOPY.
        let unix = self.link == Link::Unix;
        METHODS.into_iter().filter(move |method| !(unix && *method == ZeroCopy::Msg))
    }
}

fn variant(method: ZeroCopy, channels: u8) -> String {
    let method = if method == ZeroCopy::Off { "copy" } else { method.into() };
    if channels == 1 { format!("{method}, 1 channel") } else { format!("{method}, {channels} channels") }
}

/// Runs the bench.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let machine = Machine::this(&options.qemu);
    let memory = options.size.unwrap_or(1 << 30).next_multiple_of(2 << 20);
    let cable = Cable::lay().map_err(|error| format!("no network namespaces: {error:#}"));
    let cells: Vec<Cell> =
        [false, true].into_iter().flat_map(|stressed| Link::ALL.map(|link| Cell { memory, link, stressed })).collect();
    options.tell(&format!("filling {}", gib_or_mib(memory)));
    let content = random_memory(memory)?;
    let stage = Stage::new(options, &content, memory, cable.as_ref().ok())?;
    let stress = RefCell::new(Stress::start()?);
    let mut contestants = Vec::new();
    for cell in cells.iter().filter(|cell| stage.has(cell.link)) {
        for channels in CHANNELS {
            for method in cell.methods().filter(|method| options.wants(&cell.case(), &variant(*method, channels))) {
                contestants.push(contestant(&stage, &stress, *cell, method, channels));
            }
        }
    }
    anyhow::ensure!(!contestants.is_empty(), "{}", options.none_selected());
    let all = interleave(&mut contestants, options.rounds, &Frame { touch: 0 }, &mut |line| options.tell(line))?;
    drop(contestants);
    let mut report = Report::new("zero-copy", machine, options.rounds, &all);
    compare(&mut report, &all, &cells);
    judge(&mut report, &all, memory);
    Ok(report)
}

fn contestant<'s>(
    stage: &'s Stage<'_>,
    stress: &'s RefCell<Stress>,
    cell: Cell,
    method: ZeroCopy,
    channels: u8,
) -> Contestant<'s> {
    let way = SendOptions::multifd(channels).leaving(method);
    let run = move |_: &Frame| {
        let begin = || if cell.stressed { stress.borrow_mut().begin() } else { Ok(()) };
        let measured = stage.send(cell.link, way, Caches::Cold, begin);
        if cell.stressed {
            stress.borrow_mut().end()?;
        }
        measured
    };
    Contestant { case: cell.case(), variant: variant(method, channels), run: Box::new(run) }
}

/// Both ways that save a copy, compared with the copy.
fn compare(report: &mut Report, all: &[Series], cells: &[Cell]) {
    for cell in cells {
        for channels in CHANNELS {
            let copied = variant(ZeroCopy::Off, channels);
            for method in cell.methods().skip(1) {
                for figure in ["wall", "cpu", SENDER_PER_GIB] {
                    let (case, method) = (cell.case(), variant(method, channels));
                    report.ratios.extend(ratio(all, &case, &method, &copied, figure));
                }
            }
        }
    }
}

fn judge(report: &mut Report, all: &[Series], memory: u64) {
    let loopback = Cell { memory, link: Link::Tcp, stressed: false };
    let stressed = Cell { stressed: true, ..loopback };
    let against_copy = |cell: &Cell, method, channels, figure| {
        let (method, copied) = (variant(method, channels), variant(ZeroCopy::Off, channels));
        ratio(all, &cell.case(), &method, &copied, figure).map(|ratio| ratio.median)
    };
    for channels in CHANNELS {
        let name = format!("{}: sender's CPU, splice / {}", loopback.case(), variant(ZeroCopy::Off, channels));
        let got = against_copy(&loopback, ZeroCopy::Splice, channels, SENDER_PER_GIB);
        report.targets.push(Target::new(name, Bound::AtMost(SPLICED), got, NOT_RUN));
    }
    for channels in CHANNELS {
        let walls = METHODS.map(|method| against_copy(&stressed, method, channels, "wall"));
        let best = walls.into_iter().skip(1).flatten().min_by(f64::total_cmp);
        let copied = variant(ZeroCopy::Off, channels);
        let name = format!("{}: time, the better of msg and splice / {copied}", stressed.case());
        report.targets.push(Target::new(name, Bound::AtMost(STRESSED), best, NOT_RUN));
    }
    // Of the calls that lent pages, those whose pages the kernel did not copy.
    let count = |name| figure(all, &loopback.case(), &variant(ZeroCopy::Msg, 2), name).map(|figure| figure.median);
    let kept = match (count("lent_completed"), count("lent_copied")) {
        (Some(lent), Some(copied)) if lent > 0.0 => Some(1.0 - copied / lent).filter(|kept| *kept > 0.0),
        // It ran, and nothing was lent.
        (lent, _) => lent.map(|_| 0.0),
    };
    let why = match count("lent_completed") {
        None => NOT_RUN,
        Some(_) => {
            "the receiver is on this machine, where the kernel copies what MSG_ZEROCOPY lends before it hands it over"
        }
    };
    report.targets.push(Target::new("msg: share of the sends without a copy", Bound::AtLeast(1.0), kept, why));
}
