//! A packed VM in an object store: downloaded and then restored; restored lazily from the store, without and with the
//! working set that the image holds, and with a warm cache. VMs of two sizes with the same contents. The rates of an
//! upload and of a download.
//!
//! The store is a server on this machine behind a line of 1 Gbit/s with a latency. Every run takes a fresh destination
//! and an empty cache, unless it is the warm one. Once the guest beats it does a fixed piece of work, which writes to
//! 8 MiB scattered over its memory. Three times are taken: the first beat, the end of that work, and all memory there.

mod rates;
mod restores;
mod store;
mod targets;

use anyhow::{Result, ensure};

use self::rates::{Direction, Rates};
use self::restores::{Image, Method};
use crate::frame::{Contestant, Frame, Series, in_parts, interleave};
use crate::machine::Machine;
use crate::options::Options;
use crate::report::{NOT_RUN, Report, gib_or_mib};
use crate::restore::runs::{TO_BEAT, TO_WORK};
use store::{Far, Store};

/// Latencies of the line, in milliseconds.
const LATENCIES: [u32; 3] = [1, 20, 80];
/// The latency of the cases that have one alone.
const LATENCY: u32 = 20;

/// The three times of a restore; the last is the wall time of the run itself.
const FIRST_BEAT: &str = "first beat";
const WORK: &str = "fixed work done";
const ALL_MEMORY: &str = "all memory there";

/// The VMs and the file: sizes, and what they are called.
struct Plan {
    /// Bytes of memory of the VM that is restored in every way, and of the smaller one of two with the same contents.
    size: u64,
    /// Bytes of memory of the larger one.
    wide: u64,
    /// Bytes of contents of both.
    content: u64,
    /// Bytes of the file that is uploaded and downloaded.
    file: u64,
}

impl Plan {
    fn new(options: &Options) -> Self {
        let size = options.size.unwrap_or(1 << 30).next_multiple_of(2 << 20);
        Self { size, wide: size.saturating_mul(16), content: size / 16, file: size / 4 }
    }

    /// The case of the VM that is restored in every way.
    fn restored(&self, latency: u32) -> String {
        format!("{}, {latency} ms", gib_or_mib(self.size))
    }

    /// The case of two VMs with the same contents, whose variants are [`gib_or_mib`] of their sizes.
    fn flat(&self) -> String {
        format!("{} stored, {LATENCY} ms", gib_or_mib(self.content))
    }

    /// The case of uploads and downloads.
    fn rates(&self) -> String {
        format!("{} of random bytes, {LATENCY} ms", gib_or_mib(self.file))
    }
}

/// Runs the bench.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let machine = Machine::this(&options.qemu);
    let plan = Plan::new(options);
    let lacking = machine.lacks_mapped_ram();
    let room = plan.wide >> 30 < machine.memory_gib;
    let all = if lacking.is_none() { rounds(options, &plan, room)? } else { Vec::new() };
    let (rates, restores): (Vec<_>, Vec<_>) = all.into_iter().partition(|series| series.case == plan.rates());
    let mut all = in_parts(&restores, &[(FIRST_BEAT, Some(TO_BEAT)), (WORK, Some(TO_WORK)), (ALL_MEMORY, None)]);
    all.extend(rates);
    let mut report = Report::new("remote", machine, options.rounds, &all);
    let no_room = (!room).then(|| format!("a VM of {} does not fit into this machine", gib_or_mib(plan.wide)));
    let why = lacking.as_deref().unwrap_or(NOT_RUN);
    targets::compare(&mut report, &all, &plan);
    targets::judge(&mut report, &all, &plan, why, lacking.as_deref().or(no_room.as_deref()).unwrap_or(why));
    Ok(report)
}

/// Fills the store with what the selected contestants need, and lets them take turns.
fn rounds(options: &Options, plan: &Plan, room: bool) -> Result<Vec<Series>> {
    let all = LATENCIES.into_iter().flat_map(|latency| Method::ALL.map(|method| (latency, method)));
    let restores: Vec<(u32, Method)> =
        all.filter(|(latency, method)| options.wants(&plan.restored(*latency), method.name())).collect();
    let sizes = [Some(plan.size), room.then_some(plan.wide)].into_iter().flatten();
    let sizes: Vec<u64> = sizes.filter(|size| options.wants(&plan.flat(), &gib_or_mib(*size))).collect();
    let directions: Vec<Direction> =
        Direction::ALL.into_iter().filter(|direction| options.wants(&plan.rates(), direction.name())).collect();
    ensure!(!restores.is_empty() || !sizes.is_empty() || !directions.is_empty(), "{}", options.none_selected());

    let store = &Store::start(options)?;
    let image = if restores.is_empty() {
        None
    } else {
        options.tell("saving the VM, recording its working set, and packing both");
        Some(Image::with_working_set(options, store, plan.size)?)
    };
    let mut flat = Vec::new();
    for size in sizes {
        options.tell(&format!("saving and packing a VM of {} that is almost empty", gib_or_mib(size)));
        flat.push((gib_or_mib(size), Image::sparse(options, store, size, plan.content)?));
    }
    let rates = if directions.is_empty() { None } else { Some(Rates::new(store, plan.file)?) };

    let far = Far { options, store, latency: LATENCY };
    let mut contestants = Vec::new();
    if let Some(image) = &image {
        contestants.extend(restores.into_iter().map(|(latency, method)| Contestant {
            case: plan.restored(latency),
            variant: method.name().to_owned(),
            run: Box::new(move |frame| image.run(Far { options, store, latency }, method, frame)),
        }));
    }
    for (variant, image) in &flat {
        contestants.push(Contestant {
            case: plan.flat(),
            variant: variant.clone(),
            run: Box::new(move |frame| image.run(far, Method::Lazy, frame)),
        });
    }
    if let Some(rates) = &rates {
        contestants.extend(directions.into_iter().map(|direction| Contestant {
            case: plan.rates(),
            variant: direction.name().to_owned(),
            run: Box::new(move |frame| rates.run(far, direction, frame)),
        }));
    }
    let frame = Frame { touch: options.touch.unwrap_or(plan.size) };
    interleave(&mut contestants, options.rounds, &frame, &mut |line| options.tell(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cases_are_named_by_their_sizes_and_latencies() {
        let plan = Plan::new(&Options::default());
        assert_eq!(plan.restored(80), "1 GiB, 80 ms");
        assert_eq!((plan.flat().as_str(), gib_or_mib(plan.wide).as_str()), ("64 MiB stored, 20 ms", "16 GiB"));
        assert_eq!(plan.rates(), "256 MiB of random bytes, 20 ms");
    }
}
