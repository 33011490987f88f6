//! Cost of `io_uring` settings for direct requests at random offsets of one file.
//!
//! `cargo run --release -p limosa-storage --example ring_settings -- FILE [ROUNDS] [COUNT] [SIZE]`
//!
//! The file has to be there, at least 64 MiB long, and is written to, in requests of 4 KiB or `SIZE`. Each round runs
//! every contestant once, from another one on than the round before. Shown are, of this thread, the least CPU time of a
//! round (in the kernel, too, but not what the kernel's own threads do for it), and the median over the rounds of how
//! it compares with the ring that limosa's were made from, the one that is `cooperative`, in the same round: the latter
//! means something on a machine that is not quiet. Then its context switches, and the best wall time.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "sizes and counts of a measurement are small"
)]
#![allow(unsafe_code, reason = "the kernel is given addresses, and asked what a thread used")]

use std::alloc::{Layout, alloc_zeroed};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use io_uring::types::{Fd, Fixed};
use io_uring::{IoUring, opcode, squeue};

/// How much of the file is used.
const LENGTH: usize = 64 << 20;
/// Memory for requests: an arena larger than what is used, as a process would have.
const MEMORY: usize = 4 << 20;

/// How requests are made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// By calls that block.
    Calls,
    /// By a ring: with completions by interrupt, by a signal of the task that does not interrupt it, or when it asks.
    Ring(Completions, Registered),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Completions {
    Plain,
    Cooperative,
    SingleCooperative,
    SingleDeferred,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Registered {
    file: bool,
    buffers: bool,
}

#[derive(Clone, Copy)]
struct Load {
    write: bool,
    depth: usize,
    count: usize,
    size: usize,
}

#[derive(Clone, Copy)]
struct Used {
    wall: f64,
    cpu: f64,
    switches: i64,
    calls: usize,
}

/// Resources used before a measurement.
struct Begin {
    wall: Instant,
    cpu: f64,
    switches: i64,
}

impl Begin {
    fn now() -> Self {
        Self { wall: Instant::now(), cpu: cpu(), switches: switches() }
    }

    fn used(&self, calls: usize) -> Used {
        let (wall, cpu) = (self.wall.elapsed().as_secs_f64(), cpu() - self.cpu);
        Used { wall, cpu, switches: switches() - self.switches, calls }
    }
}

fn cpu() -> f64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the structure.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut now) };
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

fn switches() -> i64 {
    // SAFETY: a structure of numbers, which the call writes.
    let mut used: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut used) };
    used.ru_nvcsw + used.ru_nivcsw
}

/// Offsets in no order, the same for all.
struct Offsets {
    state: u64,
    size: u64,
}

impl Offsets {
    fn of(size: usize) -> Self {
        Self { state: 7, size: size as u64 }
    }
}

impl Iterator for Offsets {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Some((self.state >> 33) % (LENGTH as u64 / self.size) * self.size)
    }
}

fn entry(how: Registered, file: RawFd, load: Load, (slot, start): (usize, *mut u8), at: u64) -> squeue::Entry {
    let len = load.size as u32;
    macro_rules! with {
        ($file:expr) => {
            match (load.write, how.buffers) {
                (false, false) => opcode::Read::new($file, start, len).offset(at).build(),
                (true, false) => opcode::Write::new($file, start, len).offset(at).build(),
                (false, true) => opcode::ReadFixed::new($file, start, len, 0).offset(at).build(),
                (true, true) => opcode::WriteFixed::new($file, start, len, 0).offset(at).build(),
            }
        };
    }
    let entry = if how.file { with!(Fixed(0)) } else { with!(Fd(file)) };
    entry.user_data(slot as u64)
}

fn by_ring(completions: Completions, how: Registered, file: RawFd, load: Load, memory: *mut u8) -> Result<Used> {
    let mut builder = IoUring::builder();
    builder.setup_cqsize(1024).setup_submit_all();
    match completions {
        Completions::Plain => &mut builder,
        Completions::Cooperative => builder.setup_coop_taskrun().setup_taskrun_flag(),
        Completions::SingleCooperative => builder.setup_coop_taskrun().setup_taskrun_flag().setup_single_issuer(),
        Completions::SingleDeferred => builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag(),
    };
    let mut ring: IoUring = builder.build(256)?;
    if how.file {
        ring.submitter().register_files(&[file])?;
    }
    if how.buffers {
        let all = libc::iovec { iov_base: memory.cast(), iov_len: MEMORY };
        // SAFETY: the memory is never freed.
        unsafe { ring.submitter().register_buffers(&[all])? };
    }
    // What a ring costs once is not a request's.
    let begin = Begin::now();
    let mut offsets = Offsets::of(load.size);
    let (mut begun, mut done, mut calls) = (0, 0, 0);
    let mut free: Vec<usize> = (0..load.depth).collect();
    while done < load.count {
        while begun < load.count
            && let Some(slot) = free.pop()
        {
            let (at, place) = (offsets.next().unwrap_or_default(), (slot, memory.wrapping_add(slot * load.size)));
            // SAFETY: memory and file outlive the ring.
            unsafe { ring.submission().push(&entry(how, file, load, place, at))? };
            begun += 1;
        }
        ring.submit_and_wait(1)?;
        calls += 1;
        for answer in ring.completion() {
            ensure!(answer.result() == load.size as i32, "a request failed: {}", answer.result());
            free.push(answer.user_data() as usize);
            done += 1;
        }
    }
    Ok(begin.used(calls))
}

fn by_calls(file: RawFd, load: Load, memory: *mut u8) -> Result<Used> {
    let begin = Begin::now();
    for at in Offsets::of(load.size).take(load.count) {
        let done = match load.write {
            // SAFETY: the memory is as long.
            true => unsafe { libc::pwrite(file, memory.cast(), load.size, at as i64) },
            // SAFETY: as above.
            false => unsafe { libc::pread(file, memory.cast(), load.size, at as i64) },
        };
        ensure!(done == load.size as isize, "a request failed: {}", std::io::Error::last_os_error());
    }
    Ok(begin.used(load.count))
}

fn measured(how: How, file: RawFd, load: Load, memory: usize) -> Result<Used> {
    let memory = std::ptr::with_exposed_provenance_mut(memory);
    match how {
        How::Calls => by_calls(file, load, memory),
        How::Ring(answers, registered) => by_ring(answers, registered, file, load, memory),
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().context("which file is to be read and written?")?;
    let rounds: usize = arguments.next().map_or(Ok(5), |rounds| rounds.parse())?;
    let count: usize = arguments.next().map_or(Ok(4000), |count| count.parse())?;
    let file = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(&path)?;
    let size: usize = arguments.next().map_or(Ok(4096), |size| size.parse())?;
    ensure!(file.metadata()?.len() >= LENGTH as u64, "{path} has to be 64 MiB long");
    ensure!(size.is_multiple_of(4096) && size > 0 && size * 16 <= MEMORY, "requests are of 4 to 256 KiB");
    // SAFETY: the layout has a size.
    let memory = unsafe { alloc_zeroed(Layout::from_size_align(MEMORY, 2 << 20)?) };
    ensure!(!memory.is_null(), "no memory");
    let memory = memory.expose_provenance();
    let none = Registered { file: false, buffers: false };
    let (files, buffers) = (Registered { file: true, ..none }, Registered { buffers: true, ..none });
    let both = Registered { file: true, buffers: true };
    let contestants = [
        ("cooperative", How::Ring(Completions::Cooperative, none)),
        ("  + file", How::Ring(Completions::Cooperative, files)),
        ("  + buffers", How::Ring(Completions::Cooperative, buffers)),
        ("  + file, buffers", How::Ring(Completions::Cooperative, both)),
        ("plain ring", How::Ring(Completions::Plain, none)),
        ("single, cooperative", How::Ring(Completions::SingleCooperative, none)),
        ("single, deferred", How::Ring(Completions::SingleDeferred, none)),
        ("blocking calls", How::Calls),
    ];
    for (write, depth) in [(false, 1), (false, 16), (true, 1), (true, 16)] {
        let load = Load { write, depth, count, size };
        let rivals = &contestants[..contestants.len() - usize::from(depth > 1)];
        let mut all: Vec<Vec<Used>> = vec![Vec::new(); rivals.len()];
        for round in 0..rounds {
            for turn in 0..rivals.len() {
                let which = (round + turn) % rivals.len();
                all[which].push(measured(rivals[which].1, file.as_raw_fd(), load, memory)?);
            }
        }
        println!("{} of {} KiB at depth {depth}", if write { "writes" } else { "reads" }, size >> 10);
        for ((name, _), used) in rivals.iter().zip(&all) {
            let least = |of: fn(&Used) -> f64| used.iter().map(of).fold(f64::MAX, f64::min) / count as f64;
            let mut ratios: Vec<f64> = used.iter().zip(&all[0]).map(|(ours, plain)| ours.cpu / plain.cpu).collect();
            ratios.sort_by(f64::total_cmp);
            let ratio = ratios.get(rounds / 2).copied().unwrap_or(f64::NAN);
            println!(
                "  {name:20} {:7.2} us CPU {ratio:6.3} {:8.2} us wall {:6.2} switches {:6.2} calls",
                least(|it| it.cpu) * 1e6,
                least(|it| it.wall) * 1e6,
                least(|it| it.switches as f64),
                least(|it| it.calls as f64),
            );
        }
    }
    Ok(())
}
