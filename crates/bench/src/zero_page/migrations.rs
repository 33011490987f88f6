//! Whole migrations of guests with zero pages, from one process to another: looked at in every round, in the first one,
//! never, and in every round with the plain loop.

use anyhow::Result;

use super::guest::Guest;
use crate::frame::{Contestant, Frame, Series, interleave};
use crate::options::Options;
use crate::report::{Bound, NOT_RUN, Report, Target, ratio};
use crate::stream::{SendOptions, Source, Transport, ZeroPages};

/// Multifd channels.
const CHANNELS: [u8; 2] = [0, 2];

/// The share of the time with the plain loop that a zero-heavy guest may take.
const OF_PLAIN: f64 = 0.78;

fn case(guest: Guest, channels: u8) -> String {
    if channels == 0 {
        format!("{}, main channel", guest.name())
    } else {
        format!("{}, {channels} channels", guest.name())
    }
}

fn variant(zeros: ZeroPages) -> &'static str {
    match zeros {
        ZeroPages::Always => "always",
        ZeroPages::Plainly => "always, 16 bytes at a time",
        ZeroPages::Bulk => "bulk",
        ZeroPages::Off => "off",
    }
}

pub(super) fn rounds(options: &Options) -> Result<Vec<Series>> {
    let mut contestants = Vec::new();
    for guest in Guest::ALL {
        for channels in CHANNELS {
            for zeros in ZeroPages::ALL {
                if options.wants(&case(guest, channels), variant(zeros)) {
                    let way = SendOptions::multifd(channels).with_zeros(zeros);
                    contestants.push(Contestant {
                        case: case(guest, channels),
                        variant: variant(zeros).into(),
                        run: Box::new(move |_: &Frame| {
                            // One that has been migrated is not what it was.
                            let memory = guest.memory(options.size);
                            let mut source = Source::start_guest(guest, memory)?;
                            let frame = Frame { touch: options.touch.unwrap_or(guest.takes(memory, zeros)) };
                            source.send(Transport::Tcp, way, || frame.touch())
                        }),
                    });
                }
            }
        }
    }
    if contestants.is_empty() {
        return Ok(Vec::new());
    }
    interleave(&mut contestants, options.rounds, &Frame { touch: 0 }, &mut |line| options.tell(line))
}

pub(super) fn judge(report: &mut Report, all: &[Series]) {
    for guest in Guest::ALL {
        for channels in CHANNELS {
            let case = case(guest, channels);
            for other in [ZeroPages::Plainly, ZeroPages::Bulk, ZeroPages::Off] {
                for figure in ["wall", "cpu"] {
                    let found = ratio(all, &case, variant(ZeroPages::Always), variant(other), figure);
                    if guest == Guest::ZeroHeavy && other == ZeroPages::Plainly && figure == "wall" {
                        let got = found.as_ref().map(|ratio| ratio.median);
                        let name = format!("{case}: wall of {} / {}", variant(ZeroPages::Always), variant(other));
                        report.targets.push(Target::new(name, Bound::AtMost(OF_PLAIN), got, NOT_RUN));
                    }
                    report.ratios.extend(found);
                }
            }
        }
    }
}
