//! One run: this many VMs of one snapshot, from the first exec until all have done their work.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use limosa_page::to_micros;

use super::guests::Guests;
use super::launch::{CloneMethod, Launches};
use crate::frame::Frame;
use crate::guest::Task;
use crate::measure::{Measured, Stopwatch, pss_kib};
use crate::options::Options;
use crate::stored::Stored;

/// Microseconds from exec until the first of the guests has beaten.
pub(super) const TO_FIRST: &str = "to_first_beat_us";
/// Microseconds from exec until half of the guests have beaten.
pub(super) const TO_HALF: &str = "to_half_of_beats_us";
/// Microseconds that the last guest took to read the contents.
pub(super) const WORK: &str = "work_us";
/// Microseconds of CPU that this took.
pub(super) const WORK_CPU: &str = "work_cpu_us";
/// PSS of all processes when all guests beat, in KiB.
pub(super) const PSS_IDLE: &str = "pss_idle_kib";
/// PSS of all processes after the contents were read, in KiB.
pub(super) const PSS_READ: &str = "pss_read_kib";
/// PSS of all processes after each guest has also written its pages, in KiB.
pub(super) const PSS_WRITTEN: &str = "pss_written_kib";
/// MiB that the machine has read from disks, from exec until the contents were read.
pub(super) const PAGED_IN: &str = "paged_in_mib";

/// The context of a run.
pub(super) struct Stage<'a> {
    pub(super) options: &'a Options,
    pub(super) stored: &'a Stored,
    pub(super) vms: usize,
    /// Whether the snapshot is on disk alone when the clock starts.
    pub(super) cold: bool,
}

impl Stage<'_> {
    /// Starts the VMs once. The wall time is that until the last guest's first beat.
    pub(super) fn run(&self, method: CloneMethod, frame: &Frame) -> Result<Measured> {
        let Self { options, stored, vms, cold } = *self;
        let mut guests = Guests::new()?;
        let mut launches = Launches::prepare(method, options, stored, &mut guests, vms)?;
        frame.touch()?;
        if cold {
            stored.chill()?;
        } else {
            stored.warm()?;
        }
        let at_once = std::thread::available_parallelism().map_or(1, usize::from);
        let waiting = guests.pids();
        let paged_in = paged_in_kib()?;
        let watch = Stopwatch::start(&waiting)?;
        let begin = Instant::now();
        guests.wait_beats(vms, &mut |beating| launches.proceed(beating, at_once))?;
        // A limosa that reads ahead stays until it has.
        let reads_ahead = method == CloneMethod::ReadAhead;
        if !reads_ahead {
            launches.finish_clones(method, vms)?;
        }
        let processes = if reads_ahead { guests.pids() } else { self.processes(&guests, &launches) };
        let new: Vec<u32> = processes.iter().copied().filter(|pid| !waiting.contains(pid)).collect();
        let up = watch.stop_with(&new)?;
        guests.wait_slow()?;
        let mut measured = beats(&guests, begin, up)?;
        if method != CloneMethod::Lazy {
            // While its memory follows, there is no idle to look at.
            measured = measured.with(PSS_IDLE, pss(&processes)?);
        }
        if method.restores() {
            let watch = Stopwatch::start(&processes)?;
            let time = guests.all_do(Task::Read, stored.sum)?;
            let cpu = watch.stop()?.cpu;
            if reads_ahead {
                launches.finish_clones(method, vms)?;
            }
            let read = (paged_in_kib()?.saturating_sub(paged_in)) >> 10;
            ensure!(!cold || read >= stored.read >> 20, "the snapshot was not cold: name a --dir on a disk");
            measured = measured.with(WORK, to_micros(time)).with(WORK_CPU, to_micros(cpu)).with(PAGED_IN, read);
            measured = measured.with(PSS_READ, pss(&processes)?);
            guests.all_do(Task::Write, 0)?;
            measured = measured.with(PSS_WRITTEN, pss(&processes)?);
        }
        // The QEMUs first: a limosa that loses its QEMU ends, a QEMU that loses its limosa may wait for another.
        drop(guests);
        Ok(measured)
    }

    /// The processes that stay: the QEMUs, and the limosas that bring memory.
    fn processes(&self, guests: &Guests, launches: &Launches) -> Vec<u32> {
        let mut all = guests.pids();
        all.extend(launches.limosas());
        all
    }
}

/// The times of the first beats.
fn beats(guests: &Guests, begin: Instant, up: Measured) -> Result<Measured> {
    let beats = guests.first_beats();
    let [first, .., last] = beats.as_slice() else {
        let only = beats.first().context("a guest that beats")?;
        return Ok(Measured { wall: only.duration_since(begin), ..up });
    };
    let half = beats.get((beats.len() - 1) / 2).unwrap_or(last);
    let micros = |at: &Instant| to_micros(at.duration_since(begin));
    Ok(Measured { wall: last.duration_since(begin), ..up }.with(TO_FIRST, micros(first)).with(TO_HALF, micros(half)))
}

fn pss(processes: &[u32]) -> Result<u64> {
    processes.iter().map(|&pid| pss_kib(pid)).sum()
}

/// KiB that the machine has read from its disks since it was started.
fn paged_in_kib() -> Result<u64> {
    let text = fs::read_to_string("/proc/vmstat").context("/proc/vmstat")?;
    let value = text.lines().find_map(|line| line.strip_prefix("pgpgin "));
    value.and_then(|value| value.parse().ok()).context("/proc/vmstat: no pgpgin")
}
