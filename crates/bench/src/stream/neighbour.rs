//! A neighbour that lives in a core's cache: how much slower its memory gets when memory is sent on the same core.
//!
//! Law: the neighbour's own CPU time is the clock, so what it waits for the core does not count, and what it misses in
//! the cache does. It follows a chain through half as much memory as the core's second-level cache holds, each line of
//! it once a turn, in no order that a prefetcher would guess: alone it finds all of it there. The sender is limited to
//! 1 Gbit/s, and so both are there all the time. Spliced pages leave on a multifd channel, in packets, and are not
//! copied at this end.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use limosa_channel::ZeroCopy;
use limosa_page::to_usize;

use super::ends::Neighbour;
use super::records::{COPIED, GATHERED, GIGABIT};
use super::send_options::SendOptions;
use super::stage::{Link, Stage};
use crate::caches::{self, Caches};
use crate::frame::{Contestant, Frame, Series};
use crate::measure::{Measured, thread_cpu};
use crate::options::Options;
use crate::process::first_core;
use crate::raw::Mapping;
use crate::report::{Report, gib_or_mib, ratio};

/// Picoseconds of its CPU for a step.
const STEP: &str = "neighbour_ps_per_step";

const ALONE: &str = "alone";
const SPLICED: &str = "spliced";

/// How long it runs alone.
const WHILE: Duration = Duration::from_secs(1);

/// Bytes of a cache line.
const LINE: usize = 64;

/// Steps between two looks whether to continue.
const STEPS: u64 = 1 << 16;

fn case(memory: u64) -> String {
    format!("neighbour of {}, cold, over tcp at 1 GbE", gib_or_mib(memory))
}

fn variant(way: &str) -> String {
    format!("beside {way}")
}

/// Whether any of them is wanted.
pub(super) fn wanted(options: &Options, memory: u64) -> bool {
    let variants = [COPIED, GATHERED, SPLICED].map(variant);
    variants.iter().map(String::as_str).chain([ALONE]).any(|variant| options.wants(&case(memory), variant))
}

/// Those that are wanted. The neighbour and the sender are on the first core; where there is only one, so are all other
/// processes.
pub(super) fn contestants<'s>(
    options: &'s Options,
    stage: &'s Stage<'_>,
    neighbour: &'s RefCell<Neighbour>,
    memory: u64,
) -> Vec<Contestant<'s>> {
    let alone = move |_: &Frame| {
        let mut neighbour = neighbour.borrow_mut();
        let begun = Instant::now();
        neighbour.begin()?;
        thread::sleep(WHILE);
        let (steps, cpu) = neighbour.end()?;
        let measured = Measured { wall: begun.elapsed(), cpu, ..Measured::default() };
        Ok(measured.with(STEP, per_step(steps, cpu)))
    };
    let with_neighbour = move |way| {
        let way = SendOptions { max_bandwidth: GIGABIT, ..way };
        stage.pin(Some(first_core()?))?;
        let mut neighbour = neighbour.borrow_mut();
        let measured = stage.send(Link::Tcp, way, Caches::Cold, || neighbour.begin());
        stage.pin(None)?;
        let (steps, cpu) = neighbour.end()?;
        Ok(measured?.with(STEP, per_step(steps, cpu)))
    };
    let copied = SendOptions { copied: true, ..SendOptions::default() };
    let spliced = SendOptions::multifd(1).leaving(ZeroCopy::Splice);
    let all: [(String, crate::frame::Run<'s>); 4] = [
        (ALONE.into(), Box::new(alone)),
        (variant(COPIED), Box::new(move |_| with_neighbour(copied))),
        (variant(GATHERED), Box::new(move |_| with_neighbour(SendOptions::default()))),
        (variant(SPLICED), Box::new(move |_| with_neighbour(spliced))),
    ];
    let wanted = all.into_iter().filter(|(variant, _)| options.wants(&case(memory), variant));
    wanted.map(|(variant, run)| Contestant { case: case(memory), variant, run }).collect()
}

fn per_step(steps: u64, cpu: Duration) -> u64 {
    u64::try_from(cpu.as_nanos() * 1000 / u128::from(steps.max(1))).unwrap_or(u64::MAX)
}

pub(super) fn compare(report: &mut Report, all: &[Series], memory: u64) {
    for (of, to) in [COPIED, GATHERED, SPLICED].map(|of| (of, ALONE)) {
        report.ratios.extend(ratio(all, &case(memory), &variant(of), to, STEP));
    }
    report.ratios.extend(ratio(all, &case(memory), &variant(GATHERED), &variant(COPIED), STEP));
}

/// The loop of the process between two words on its standard input. Returns its steps and their CPU time.
pub(super) fn chase(chain: &Mapping, over: &AtomicBool) -> (u64, Duration) {
    let begun = thread_cpu();
    let (mut at, mut steps) = (0, 0);
    let lines = chain.bytes().as_chunks::<LINE>().0;
    while !over.load(Ordering::Relaxed) {
        for _ in 0..STEPS {
            at = lines.get(at).map_or(0, next);
        }
        steps += STEPS;
    }
    std::hint::black_box(at);
    (steps, thread_cpu().saturating_sub(begun))
}

/// The line that a line names.
fn next(line: &[u8; LINE]) -> usize {
    line.first_chunk().map_or(0, |bytes| usize::from_le_bytes(*bytes))
}

/// A chain through half as many lines as the second-level cache has: one round trip visits each once.
pub(super) fn chain() -> Result<Mapping> {
    let len = usize::try_from(caches::second_level() / 2).map_err(|_| anyhow!("a cache larger than memory"))?;
    let mut memory = Mapping::anonymous(len).context("memory for a neighbour")?;
    link(memory.bytes_mut());
    Ok(memory)
}

/// Sattolo's algorithm: a permutation that is one cycle.
fn link(memory: &mut [u8]) {
    let lines = memory.as_chunks_mut::<LINE>().0;
    let mut order: Vec<usize> = (0..lines.len()).collect();
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    for last in (1..order.len()).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        order.swap(last, to_usize(random % last as u64));
    }
    for (line, to) in lines.iter_mut().zip(order) {
        if let Some(bytes) = line.first_chunk_mut() {
            *bytes = to.to_le_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_comes_by_every_line_before_it_begins_anew() {
        let mut memory = vec![0; 1000 * LINE];
        link(&mut memory);
        let lines = memory.as_chunks::<LINE>().0;
        let mut seen = vec![false; lines.len()];
        let mut at = 0;
        for _ in 0..lines.len() {
            assert!(!std::mem::replace(&mut seen[at], true), "line {at} twice");
            at = next(&lines[at]);
        }
        assert_eq!(at, 0);
    }

    #[test]
    fn a_chase_counts_its_steps_until_it_is_over() {
        let (chain, over) = (chain().expect("memory"), AtomicBool::new(false));
        let (steps, cpu) = thread::scope(|scope| {
            let chasing = scope.spawn(|| chase(&chain, &over));
            thread::sleep(Duration::from_millis(20));
            over.store(true, Ordering::Relaxed);
            chasing.join().expect("ends")
        });
        assert!(steps.is_multiple_of(STEPS) && (steps == 0 || cpu > Duration::ZERO));
    }
}
