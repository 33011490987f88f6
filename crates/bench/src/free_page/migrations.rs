//! Whole migrations of a guest that is idle: as it has started, and when seven eighths of its memory were used once and
//! given back to its kernel. With the list of its free pages and without; looked at for zero pages in both.
//!
//! The guest is asked while it runs, and the list is waited for, which is a part of the time. Nothing shows what
//! user-mode Linux writes meanwhile, so what arrives is measured and not run.

use std::cell::RefCell;

use anyhow::{Context as _, Result};
use limosa_balloon::Features;

use super::discards::taken;
use super::uml;
use crate::frame::{Contestant, Frame, Series, interleave};
use crate::measure::{Measured, millis};
use crate::options::Options;
use crate::report::{Bound, NOT_RUN, Report, Target, ratio};
use crate::stream::{SendOptions, Source, Transport};

/// Multifd channels.
const CHANNELS: u8 = 2;

const WITH: &str = "with hints";
const WITHOUT: &str = "without hints";

/// Least factor by which a migration takes longer without hints.
const FASTER: f64 = 15.0;

/// The guest's activity before the migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Past {
    Nothing,
    Touched,
}

impl Past {
    const ALL: [Self; 2] = [Self::Nothing, Self::Touched];

    fn case(self) -> &'static str {
        match self {
            Self::Nothing => "migration, as it has started",
            Self::Touched => "migration, 7/8 touched and freed",
        }
    }

    fn start(self, program: &std::path::Path, memory: u64) -> Result<uml::Guest> {
        let mut guest = uml::Guest::start(program, memory, Features::ALL.without(Features::REPORTING))?;
        if self == Self::Touched {
            guest.touch_with("urandom", taken(memory))?;
        }
        Ok(guest)
    }
}

/// The series: none if there is no such guest here.
pub(super) fn rounds(options: &Options, memory: u64) -> Result<Vec<Series>> {
    let Ok(program) = uml::program() else { return Ok(Vec::new()) };
    let mut all = Vec::new();
    // One after the other: each guest has memory of its own.
    for past in Past::ALL {
        let guest = RefCell::new(None);
        let (guest, program) = (&guest, &program);
        let contestant = |variant: &str, hints: bool| Contestant {
            case: past.case().into(),
            variant: variant.into(),
            run: Box::new(move |_: &Frame| {
                let mut guest = guest.borrow_mut();
                let guest = match guest.take() {
                    Some(there) => guest.insert(there),
                    None => guest.insert(past.start(program, memory)?),
                };
                migrate(options, guest, hints)
            }),
        };
        let mut contestants = vec![contestant(WITH, true), contestant(WITHOUT, false)];
        contestants.retain(|one| options.wants(&one.case, &one.variant));
        if !contestants.is_empty() {
            let frame = Frame { touch: 0 };
            all.extend(interleave(&mut contestants, options.rounds, &frame, &mut |line| options.tell(line))?);
        }
    }
    Ok(all)
}

fn migrate(options: &Options, guest: &mut uml::Guest, hints: bool) -> Result<Measured> {
    use std::os::unix::fs::MetadataExt as _;
    let (file, place) = guest.file()?;
    let about = file.metadata().context("the guest's memory")?;
    let resident = about.blocks() * 512;
    let mut source = Source::start(&file, about.len(), None)?;
    let frame = Frame { touch: options.touch.unwrap_or(if hints { 0 } else { resident }) };
    let asked = if hints { Some(guest.ask()?) } else { None };
    let (list, took) = asked.unwrap_or_default();
    let free = list.iter().map(|range| place(range.start)..place(range.end)).collect();
    let sent = source.send_but(Transport::Tcp, SendOptions::multifd(CHANNELS), free, || frame.touch());
    if hints {
        guest.done()?;
    }
    let sent = sent?;
    let wall = sent.wall + took;
    Ok(Measured { wall, ..sent }.with("list_ms", millis(took)).with("resident_mib", resident >> 20))
}

pub(super) fn judge(report: &mut Report, all: &[Series], why: Option<&str>) {
    for past in Past::ALL {
        for figure in ["wall", "cpu"] {
            let found = ratio(all, past.case(), WITHOUT, WITH, figure);
            if past == Past::Touched && figure == "wall" {
                let name = format!("{}: wall of {WITHOUT} / {WITH}", past.case());
                let got = found.as_ref().map(|ratio| ratio.median);
                report.targets.push(Target::new(name, Bound::AtLeast(FASTER), got, why.unwrap_or(NOT_RUN)));
            }
            report.ratios.extend(found);
        }
    }
}
