//! The costs of a run: wall seconds, CPU seconds of all processes that worked for it, and how busy others kept the
//! machine.
//!
//! CPU seconds are the steadier figure on a shared machine, so every run has them. They are those of this process, of
//! its children that ended during the run, and of named processes such as a QEMU.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use limosa_page::{to_millis, to_nanos};
use rustix::time::{ClockId, clock_gettime};

use crate::raw;

/// The costs of one run.
#[derive(Debug, Clone, Default)]
pub struct Measured {
    /// From start to the end that the bench defines, such as a file's durability.
    pub wall: Duration,
    /// User and system time of all who worked.
    pub cpu: Duration,
    /// Named counts and figures; a name ends in its unit where it is not a plain count.
    pub counters: BTreeMap<&'static str, u64>,
}

impl Measured {
    /// Adds a counter.
    pub fn with(mut self, name: &'static str, value: u64) -> Self {
        self.counters.insert(name, value);
        self
    }
}

/// A running measurement.
#[derive(Debug)]
pub struct Stopwatch {
    start: Instant,
    own: Duration,
    children: Duration,
    machine: Duration,
    pids: Vec<(u32, Duration)>,
}

impl Stopwatch {
    /// Starts the clocks; `pids` are processes whose CPU time counts besides this one's and its children's.
    pub fn start(pids: &[u32]) -> Result<Self> {
        let pids = pids.iter().map(|&pid| Ok((pid, process_cpu(pid)?))).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            machine: machine_cpu()?,
            children: raw::children_cpu().context("getrusage of children")?,
            own: own_cpu(),
            pids,
            start: Instant::now(),
        })
    }

    /// Wall time so far.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Stops the clocks. The processes named at the start must still be there, or be waited-for children of this one.
    pub fn stop(&self) -> Result<Measured> {
        self.stop_with(&[])
    }

    /// Stops the clocks. `new` are processes that were started since then and are still there: they count as well.
    pub fn stop_with(&self, new: &[u32]) -> Result<Measured> {
        let wall = self.start.elapsed();
        let mut cpu = own_cpu().saturating_sub(self.own);
        cpu += raw::children_cpu().context("getrusage of children")?.saturating_sub(self.children);
        for &(pid, before) in &self.pids {
            cpu += process_cpu(pid)?.saturating_sub(before);
        }
        for &pid in new {
            cpu += process_cpu(pid)?;
        }
        // What the machine did besides: other people's programs, and kernel threads such as write-back.
        let others = machine_cpu()?.saturating_sub(self.machine).saturating_sub(cpu);
        Ok(Measured { wall, cpu, counters: BTreeMap::new() }.with("others_cpu_ms", millis(others)))
    }
}

/// Whole milliseconds, saturating.
pub(crate) fn millis(duration: Duration) -> u64 {
    to_millis(duration)
}

/// Whole nanoseconds, saturating.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    to_nanos(duration)
}

/// CPU time of the calling thread since it began.
pub(crate) fn thread_cpu() -> Duration {
    cpu_clock(ClockId::ThreadCPUTime)
}

/// CPU time of this process.
pub(crate) fn own_cpu() -> Duration {
    cpu_clock(ClockId::ProcessCPUTime)
}

fn cpu_clock(clock: ClockId) -> Duration {
    Duration::try_from(clock_gettime(clock)).unwrap_or_default()
}

/// CPU time of a process and all its threads, also of those that have ended, as precise as the scheduler counts. (The
/// `/proc/PID/stat`, the usual source, has ticks of 10 ms, a large part of a run of 200.)
pub(crate) fn process_cpu(pid: u32) -> Result<Duration> {
    raw::process_cpu(pid).with_context(|| format!("process {pid} ended before it was measured"))
}

/// A process's memory in KiB; what it shares with others counts in equal parts (its PSS).
pub(crate) fn pss_kib(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    kib_of(&text, "Pss:").with_context(|| format!("{path}: no line Pss"))
}

/// The most memory that a process has had at a time, in KiB.
pub(crate) fn peak_kib(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    kib_of(&text, "VmHWM:").with_context(|| format!("{path}: no line VmHWM"))
}

/// The value of a line such as `Pss:     1234 kB`.
fn kib_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// Time that all cores together were not idle.
fn machine_cpu() -> Result<Duration> {
    let stat = fs::read_to_string("/proc/stat").context("/proc/stat")?;
    let fields: Vec<u64> =
        stat.lines().next().unwrap_or_default().split_ascii_whitespace().skip(1).flat_map(str::parse).collect();
    ensure!(fields.len() >= 8, "/proc/stat: first line has {} numbers, expected at least 8", fields.len());
    // user nice system idle iowait irq softirq steal
    let busy = fields.iter().take(8).enumerate().filter(|(at, _)| !matches!(at, 3 | 4)).map(|(_, value)| value).sum();
    Ok(ticks(busy))
}

fn ticks(count: u64) -> Duration {
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Duration::from_millis(count.saturating_mul(1000) / per_second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_done_between_start_and_stop_is_counted_as_cpu_time() {
        let watch = Stopwatch::start(&[]).expect("start");
        let mut sum = 0u64;
        while watch.elapsed() < Duration::from_millis(30) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        let measured = watch.stop().expect("stop");
        assert!(measured.wall >= Duration::from_millis(30));
        assert!(measured.cpu > Duration::ZERO && sum > 0);
    }

    #[test]
    fn the_cpu_time_of_a_named_process_is_read() {
        let [before, named, after] = [own_cpu(), process_cpu(std::process::id()).expect("this process"), own_cpu()];
        assert!(before <= named && named <= after);
        assert!(process_cpu(u32::MAX).is_err());
    }

    #[test]
    fn this_process_has_memory() {
        assert!(pss_kib(std::process::id()).expect("this process") > 100);
        assert!(peak_kib(std::process::id()).expect("this process") > 100);
        assert_eq!(kib_of("Rss:    9 kB\nPss:                1234 kB\nPss_Dirty: 7 kB\n", "Pss:"), Some(1234));
    }
}
