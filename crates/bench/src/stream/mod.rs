//! A VM's memory from one process to another: limosa to limosa, compared with stock QEMU to stock QEMU.
//!
//! Law: both do the same. The source's memory is the very same file in memory, full of random bytes and mapped by both;
//! the destination's is private anonymous memory of a fresh process. Multifd with the same number of channels over the
//! same transport, nothing compressed or limited, pages looked at for zeros as QEMU does by default; the guest is
//! paused, so that all is sent once. The clock begins with the first command to either side and ends when the
//! destination has all and the source has the acknowledgement. limosa sends as it does between two processes of one
//! machine if nothing is said, which is by splice; beside it, it copies, as QEMU does.

mod ends;
mod headers;
mod log;
mod neighbour;
mod plain;
mod qemu;
mod records;
mod send_options;
mod sparse;
mod stage;
mod transport;
mod vectors;

use std::cell::RefCell;

use anyhow::{Result, ensure};
use limosa_channel::ZeroCopy;

pub use ends::{END, serve as serve_end};
pub(crate) use ends::{Source, Stress};
pub(crate) use send_options::{SendOptions, ZeroPages};
pub(crate) use stage::{Link, Stage};
use transport::{RECEIVER, SENDER};
pub(crate) use transport::{SENDER_PER_GIB, Transport};

use crate::content::random_memory;
use crate::frame::{Contestant, Frame, Series, interleave};
use crate::machine::Machine;
use crate::namespaces::Loopback;
use crate::options::Options;
use crate::report::{Bound, NOT_RUN, Report, Target, gib_or_mib, ratio};
use crate::vm::{Ram, Role, Vm};

/// Multifd channels.
const CHANNELS: [u8; 3] = [1, 2, 4];

fn case(memory: u64, transport: Transport) -> String {
    format!("{} over {}", gib_or_mib(memory), transport.name())
}

/// Who sends and receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pair {
    Limosa,
    /// limosa, its pages copied.
    Copying,
    /// limosa, the destination's memory faulted in page by page as pages come.
    Faulting,
    Qemu,
    /// QEMU where Reno is preferred, as limosa's channels do between two processes of one machine.
    QemuReno,
    /// Neither: write and read calls.
    Plain,
}

impl Pair {
    const ALL: [Self; 6] = [Self::Limosa, Self::Copying, Self::Faulting, Self::Plain, Self::Qemu, Self::QemuReno];

    fn way(self, channels: u8) -> SendOptions {
        let way = SendOptions::multifd(channels);
        match self {
            Self::Copying => way.leaving(ZeroCopy::Off),
            Self::Faulting => way.faulting(),
            Self::Limosa | Self::Qemu | Self::QemuReno | Self::Plain => way,
        }
    }

    fn variant(self, channels: u8) -> String {
        let who = match self {
            Self::Limosa => "limosa",
            Self::Copying => "limosa, copying",
            Self::Faulting => "limosa, faulting",
            Self::Qemu => "QEMU",
            Self::QemuReno => "QEMU by Reno",
            Self::Plain => return format!("write and read, {channels} connections"),
        };
        if channels == 1 { format!("{who}, 1 channel") } else { format!("{who}, {channels} channels") }
    }

    /// Whether it takes part with this number of channels.
    fn has(self, channels: u8) -> bool {
        matches!(self, Self::Limosa | Self::Qemu) || usize::from(channels) == plain::CONNECTIONS
    }
}

/// Runs the bench.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let machine = Machine::this(&options.qemu);
    let memory = options.size.unwrap_or(1 << 30).next_multiple_of(2 << 20);
    let qemu = options.against_qemu.then(|| machine.qemu.clone()).flatten();
    let network = qemu.as_ref().map(|_| Loopback::new());
    let no_network = network.as_ref().and_then(|network| network.as_ref().err()).map(|error| format!("{error:#}"));
    let network = network.and_then(Result::ok);
    let full = full_rounds(options, memory, qemu.is_some(), network.as_ref())?;
    let sparse = sparse::rounds(options, memory)?;
    let vectors = vectors::Vectors::new(options);
    let records = vectors.rounds(options)?;
    let log = log::rounds(options)?;
    let all: Vec<Series> = full.into_iter().chain(sparse).chain(records).chain(log).collect();
    // Without a cable even all that was asked for may be what this machine cannot show.
    ensure!(!all.is_empty() || vectors.has_wanted(options), "{}", options.none_selected());
    let why = match (options.against_qemu, &qemu) {
        (false, _) => "QEMU was not asked for (--against qemu)",
        (true, None) => "no QEMU was found",
        (true, Some(_)) => NOT_RUN,
    };
    let mut report = Report::new("stream", machine, options.rounds, &all);
    let why = no_network.as_deref().map_or(why.to_owned(), |error| format!("no network namespace: {error}"));
    judge(&mut report, &all, memory, &why);
    sparse::judge(&mut report, &all, memory);
    vectors.judge(&mut report, &all);
    log::judge(&mut report, &all);
    Ok(report)
}

/// The cells of memory that is full.
fn full_rounds(options: &Options, memory: u64, with_qemu: bool, network: Option<&Loopback>) -> Result<Vec<Series>> {
    let mut cells = Vec::new();
    for transport in Transport::ALL {
        for channels in CHANNELS {
            for pair in Pair::ALL.into_iter().filter(|pair| pair.has(channels)) {
                let takes_part = match pair {
                    Pair::Qemu => with_qemu,
                    Pair::QemuReno => with_qemu && transport == Transport::Tcp && network.is_some(),
                    _ => true,
                };
                if takes_part && options.wants(&case(memory, transport), &pair.variant(channels)) {
                    cells.push((transport, channels, pair));
                }
            }
        }
    }
    if cells.is_empty() {
        return Ok(Vec::new());
    }
    options.tell("filling the memory that is sent");
    let content = random_memory(memory)?;
    let any = |wanted| cells.iter().any(|(_, _, pair)| *pair == wanted);
    let limosa = [Pair::Limosa, Pair::Copying, Pair::Faulting].into_iter().any(any);
    let limosa = limosa.then(|| Source::start(&content, memory, None));
    let limosa = limosa.transpose()?.map(RefCell::new);
    let plain = any(Pair::Plain).then(|| Source::start_plain(&content, memory));
    let plain = plain.transpose()?.map(RefCell::new);
    let qemu_in = |network| Vm::start_in(network, &options.qemu, memory, Ram::Shared(&content), Role::Source);
    let qemu = any(Pair::Qemu).then(|| qemu_in(None)).transpose()?;
    let reno = any(Pair::QemuReno).then(|| qemu_in(network)).transpose()?;
    let frame = Frame { touch: options.touch.unwrap_or(memory) };
    let mut contestants = Vec::new();
    for (transport, channels, pair) in cells {
        let (case, variant) = (case(memory, transport), pair.variant(channels));
        let source = if pair == Pair::Plain { &plain } else { &limosa };
        let way = pair.way(channels);
        let run: crate::frame::Run<'_> = match (pair, source, &qemu, &reno) {
            (Pair::Qemu, _, Some(source), _) => {
                let sender = qemu::Sender { vm: source, memory, network: None, transport, channels };
                Box::new(move |_| qemu::run(options, sender, &frame))
            }
            (Pair::QemuReno, _, _, Some(source)) => {
                let sender = qemu::Sender { vm: source, memory, network, transport, channels };
                Box::new(move |_| qemu::run(options, sender, &frame))
            }
            (_, Some(source), _, _) => Box::new(move |_| source.borrow_mut().send(transport, way, || frame.touch())),
            _ => continue,
        };
        contestants.push(Contestant { case, variant, run });
    }
    interleave(&mut contestants, options.rounds, &Frame { touch: 0 }, &mut |line| options.tell(line))
}

fn judge(report: &mut Report, all: &[Series], memory: u64, why: &str) {
    for transport in Transport::ALL {
        let case = case(memory, transport);
        for channels in CHANNELS {
            let [limosa, qemu] = [Pair::Limosa, Pair::Qemu].map(|pair| pair.variant(channels));
            for figure in ["wall", "cpu", SENDER, RECEIVER] {
                report.ratios.extend(ratio(all, &case, &limosa, &qemu, figure));
            }
            if transport == Transport::Tcp && Pair::QemuReno.has(channels) {
                // Both by the same congestion control: the machine's own may spread what is sent over time.
                let reno = Pair::QemuReno.variant(channels);
                for (figure, most) in [("wall", 0.8), ("cpu", 0.7)] {
                    let found = ratio(all, &case, &limosa, &reno, figure);
                    let got = found.as_ref().map(|ratio| ratio.median);
                    let name = format!("{case}: {figure} of {limosa} / {reno}");
                    report.targets.push(Target::new(name, Bound::AtMost(most), got, why));
                    report.ratios.extend(found);
                    report.ratios.extend(ratio(all, &case, &Pair::Copying.variant(channels), &reno, figure));
                }
            }
            if Pair::Copying.has(channels) {
                let copying = Pair::Copying.variant(channels);
                for figure in ["wall", "cpu", SENDER, RECEIVER] {
                    report.ratios.extend(ratio(all, &case, &copying, &qemu, figure));
                }
            }
            if Pair::Faulting.has(channels) {
                let faulting = Pair::Faulting.variant(channels);
                for figure in ["wall", "cpu", RECEIVER] {
                    report.ratios.extend(ratio(all, &case, &limosa, &faulting, figure));
                }
            }
            if Pair::Plain.has(channels) {
                let plain = Pair::Plain.variant(channels);
                // How fast limosa is for how fast they are: the times the other way round.
                let found = ratio(all, &case, &plain, &limosa, "wall");
                let got = found.as_ref().map(|ratio| ratio.median);
                let name = format!("{case}: speed of {limosa} / {plain}");
                report.targets.push(Target::new(name, Bound::AtLeast(0.9), got, NOT_RUN));
                report.ratios.extend(found);
                report.ratios.extend(ratio(all, &case, &limosa, &plain, "cpu"));
            }
        }
    }
}
