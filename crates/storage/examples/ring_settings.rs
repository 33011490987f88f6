//! What settings of `io_uring` cost for 4 KiB direct requests at random places of one file.
//!
//! `cargo run --release -p limosa-storage --example ring_settings -- FILE [ROUNDS] [COUNT]`
//!
//! The file has to be there, at least 64 MiB long, and is written to. Each round runs every contestant once, in turn; of each
//! the round with the least CPU time is shown: of this thread (in the kernel, too, but not what the kernel's own threads do for
//! it), its context switches, and the best wall time.
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
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use io_uring::types::{Fd, Fixed};
use io_uring::{IoUring, opcode, squeue};

const SIZE: usize = 4096;
const PLACES: u64 = (64 << 20) / SIZE as u64;

/// How requests are made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// By calls that block.
    Calls,
    /// By a ring: with answers by interrupt, by a signal of the task that does not interrupt it, or when it asks.
    Ring(Answers, Registered),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Answers {
    Plain,
    Cooperative,
    Single,
    Deferred,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Registered {
    file: bool,
    buffers: bool,
    /// The ring's own descriptor.
    ring: bool,
}

#[derive(Clone, Copy)]
struct Load {
    write: bool,
    depth: usize,
    count: usize,
}

#[derive(Clone, Copy)]
struct Used {
    wall: f64,
    cpu: f64,
    switches: i64,
    calls: usize,
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

/// Places in no order, the same for all.
struct Places(u64);

impl Iterator for Places {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Some((self.0 >> 33) % PLACES * SIZE as u64)
    }
}

fn entry(how: Registered, file: RawFd, load: Load, memory: *mut u8, slot: usize, at: u64) -> squeue::Entry {
    let len = SIZE as u32;
    let start = memory.wrapping_add(slot * SIZE);
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

fn by_ring(answers: Answers, how: Registered, file: RawFd, load: Load, memory: *mut u8) -> Result<usize> {
    let mut builder = IoUring::builder();
    builder.setup_cqsize(1024).setup_submit_all();
    match answers {
        Answers::Plain => &mut builder,
        Answers::Cooperative => builder.setup_coop_taskrun().setup_single_issuer(),
        Answers::Single => builder.setup_single_issuer(),
        Answers::Deferred => builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag(),
    };
    let mut ring: IoUring = builder.build(256)?;
    if how.file {
        ring.submitter().register_files(&[file])?;
    }
    if how.buffers {
        // An arena larger than what is used, as a process would have.
        let all = libc::iovec { iov_base: memory.cast(), iov_len: 4 << 20 };
        // SAFETY: the memory is never freed.
        unsafe { ring.submitter().register_buffers(&[all])? };
    }
    if how.ring {
        ring.submitter().register_ring_fd()?;
    }
    let mut places = Places(7);
    let (mut begun, mut done, mut calls) = (0, 0, 0);
    let mut free: Vec<usize> = (0..load.depth).collect();
    while done < load.count {
        while begun < load.count
            && let Some(slot) = free.pop()
        {
            let at = places.next().unwrap_or_default();
            // SAFETY: memory and file outlive the ring.
            unsafe { ring.submission().push(&entry(how, file, load, memory, slot, at))? };
            begun += 1;
        }
        ring.submit_and_wait(1)?;
        calls += 1;
        for answer in ring.completion() {
            ensure!(answer.result() == SIZE as i32, "a request failed: {}", answer.result());
            free.push(answer.user_data() as usize);
            done += 1;
        }
    }
    Ok(calls)
}

fn by_calls(file: RawFd, load: Load, memory: *mut u8) -> Result<usize> {
    for at in Places(7).take(load.count) {
        let done = match load.write {
            // SAFETY: the memory is as long.
            true => unsafe { libc::pwrite(file, memory.cast(), SIZE, at as i64) },
            // SAFETY: as above.
            false => unsafe { libc::pread(file, memory.cast(), SIZE, at as i64) },
        };
        ensure!(done == SIZE as isize, "a request failed: {}", std::io::Error::last_os_error());
    }
    Ok(load.count)
}

fn measured(how: How, file: RawFd, load: Load, memory: usize) -> Result<Used> {
    let memory = std::ptr::with_exposed_provenance_mut(memory);
    let (wall, before, switched) = (Instant::now(), cpu(), switches());
    let calls = match how {
        How::Calls => by_calls(file, load, memory)?,
        How::Ring(answers, registered) => by_ring(answers, registered, file, load, memory)?,
    };
    Ok(Used { wall: wall.elapsed().as_secs_f64(), cpu: cpu() - before, switches: switches() - switched, calls })
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().context("which file is to be read and written?")?;
    let rounds: usize = arguments.next().map_or(Ok(5), |rounds| rounds.parse())?;
    let count: usize = arguments.next().map_or(Ok(4000), |count| count.parse())?;
    let file = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(&path)?;
    ensure!(file.metadata()?.len() >= PLACES * SIZE as u64, "{path} has to be 64 MiB long");
    // SAFETY: the layout has a size.
    let memory = unsafe { alloc_zeroed(Layout::from_size_align(4 << 20, 2 << 20)?) };
    ensure!(!memory.is_null(), "no memory");
    let memory = memory.expose_provenance();
    let none = Registered { file: false, buffers: false, ring: false };
    let files = Registered { file: true, ..none };
    let buffers = Registered { buffers: true, ..none };
    let both = Registered { file: true, buffers: true, ring: false };
    let all = Registered { ring: true, ..both };
    let contestants = [
        ("blocking calls", How::Calls),
        ("plain ring", How::Ring(Answers::Plain, none)),
        ("single issuer", How::Ring(Answers::Single, none)),
        ("single, cooperative", How::Ring(Answers::Cooperative, none)),
        ("single, deferred", How::Ring(Answers::Deferred, none)),
        ("  + ring descriptor", How::Ring(Answers::Deferred, Registered { ring: true, ..none })),
        ("  + file", How::Ring(Answers::Deferred, files)),
        ("  + buffers", How::Ring(Answers::Deferred, buffers)),
        ("  + file, buffers", How::Ring(Answers::Deferred, both)),
        ("  + all three", How::Ring(Answers::Deferred, all)),
    ];
    for (write, depth) in [(false, 1), (false, 16), (true, 1), (true, 16)] {
        let load = Load { write, depth, count };
        let mut best: Vec<Option<Used>> = vec![None; contestants.len()];
        for _ in 0..rounds {
            for ((_, how), best) in contestants.iter().zip(&mut best) {
                if *how == How::Calls && depth > 1 {
                    continue;
                }
                // A ring's registered descriptor is its thread's until that ends.
                let how = *how;
                let used = thread::scope(|scope| scope.spawn(|| measured(how, file.as_raw_fd(), load, memory)).join());
                let used = used.map_err(|_| anyhow!("a measurement panicked"))??;
                let (wall, cpu, switches) =
                    best.map_or((f64::MAX, f64::MAX, i64::MAX), |it| (it.wall, it.cpu, it.switches));
                *best = Some(Used {
                    wall: wall.min(used.wall),
                    cpu: cpu.min(used.cpu),
                    switches: switches.min(used.switches),
                    calls: used.calls,
                });
            }
        }
        println!("{} at depth {depth}", if write { "writes" } else { "reads" });
        for ((name, _), best) in contestants.iter().zip(best) {
            let Some(best) = best else { continue };
            let each = |total: f64| total / count as f64 * 1e6;
            println!(
                "  {name:20} {:7.2} us CPU {:8.2} us wall {:6.2} switches {:6.2} calls",
                each(best.cpu),
                each(best.wall),
                best.switches as f64 / count as f64,
                best.calls as f64 / count as f64
            );
        }
    }
    Ok(())
}
