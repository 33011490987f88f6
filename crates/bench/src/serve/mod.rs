//! Disks served over NBD: by limosa, by QEMU's storage daemon, and raw ones by nbdkit.
//!
//! Law: the servers of a case serve files that were made the same way, through the page cache, at a unix socket; one
//! client puts the same requests on each, and its clock begins with the first one. CPU time is the server's alone.

mod client;
mod servers;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use self::client::Load;
use self::servers::Server;
use crate::frame::{Contestant, Frame, interleave};
use crate::machine::Machine;
use crate::measure::{Measured, process_cpu};
use crate::options::Options;
use crate::report::{Report, ratio};
use crate::scratch::Scratch;

const IOPS: &str = "iops";
const CPU: &str = "server_cpu_ns_per_request";
const MEDIAN: &str = "latency_median_ns";
const TAIL: &str = "latency_99_ns";

/// The images of a bench.
#[derive(Debug, Clone)]
struct Images {
    folder: PathBuf,
}

/// The disk that is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Disk {
    /// A raw file with contents.
    Raw,
    /// A qcow2 image with all contents.
    Qcow2,
    /// A new qcow2 image over a raw one, for each run.
    Overlay,
}

impl Images {
    fn make(folder: &Path, size: u64) -> Result<Self> {
        let this = Self { folder: folder.to_owned() };
        let block: Vec<u8> = (0..1 << 20).map(|at: u32| (at.wrapping_mul(0x9e37_79b9) >> 24) as u8 | 1).collect();
        let raw = this.path(Disk::Raw);
        let mut file = std::fs::File::create(&raw).with_context(|| raw.display().to_string())?;
        for _ in 0..size >> 20 {
            std::io::Write::write_all(&mut file, &block).context("filling a disk")?;
        }
        qemu_img(&["convert", "-f", "raw", "-O", "qcow2"], &[&raw, &this.path(Disk::Qcow2)])?;
        Ok(this)
    }

    fn path(&self, disk: Disk) -> PathBuf {
        self.folder.join(match disk {
            Disk::Raw => "disk.raw",
            Disk::Qcow2 => "disk.qcow2",
            Disk::Overlay => "overlay.qcow2",
        })
    }

    /// The file that is served, made if each run has a new one.
    fn prepare(&self, disk: Disk) -> Result<PathBuf> {
        let path = self.path(disk);
        if disk == Disk::Overlay {
            let base = self.path(Disk::Raw);
            let backing = base.to_str().context("a folder whose path is UTF-8")?;
            qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", backing], &[&path])?;
        }
        Ok(path)
    }
}

fn qemu_img(words: &[&str], paths: &[&Path]) -> Result<()> {
    let mut command = Command::new("qemu-img");
    let status = command.args(words).args(paths).stdout(Stdio::null()).status().context("cannot start qemu-img")?;
    ensure!(status.success(), "qemu-img {}: {status}", words.join(" "));
    Ok(())
}

/// Runs the bench.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let machine = Machine::this(&options.qemu);
    let size = options.size.unwrap_or(512 << 20).max(64 << 20).next_multiple_of(1 << 20);
    let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir);
    let folder = Scratch::new_in(&parent)?;
    options.tell("making the images");
    let images = Images::make(folder.path(), size)?;
    let limosa = options.limosa()?;
    let servers = servers::all(&limosa);
    let mut contestants = Vec::new();
    let cases = cases(size);
    for (case, disk, load) in &cases {
        for server in servers.iter().filter(|server| server.serves(*disk)) {
            if !options.wants(case, server.name()) {
                continue;
            }
            let variant = server.name().to_owned();
            let (images, server, disk, load) = (images.clone(), server.clone(), *disk, load.clone());
            let run = Box::new(move |_: &Frame| measure(&images, &server, disk, &load));
            contestants.push(Contestant { case: case.clone(), variant, run });
        }
    }
    let frame = Frame { touch: options.touch.unwrap_or(0) };
    let all = interleave(&mut contestants, options.rounds, &frame, &mut |line| options.tell(line))?;
    ensure!(!all.is_empty(), "{}", options.none_selected());
    let mut report = Report::new("serve", machine, options.rounds, &all);
    for (case, _, _) in &cases {
        for other in [servers::QEMU, servers::NBDKIT] {
            for figure in [IOPS, CPU, MEDIAN, TAIL] {
                report.ratios.extend(ratio(&all, case, servers::LIMOSA, other, figure));
            }
        }
    }
    Ok(report)
}

/// The cases on disks of `size` bytes.
fn cases(size: u64) -> Vec<(String, Disk, Load)> {
    let mut cases = Vec::new();
    for (write, verb) in [(false, "read"), (true, "write")] {
        for (depth, count) in [(1, 20_000), (16, 60_000), (64, 60_000)] {
            let load = Load { size, length: 4096, step: None, write, depth, count, connections: 1 };
            cases.push((format!("qcow2, 4 KiB {verb}, depth {depth}"), Disk::Qcow2, load.clone()));
            if depth == 16 {
                cases.push((format!("raw, 4 KiB {verb}, depth {depth}"), Disk::Raw, load.clone()));
                let load = Load { connections: 4, ..load };
                cases.push((format!("qcow2, 4 KiB {verb}, depth {depth}, 4 connections"), Disk::Qcow2, load));
            }
        }
        let count = (size >> 20).min(2048);
        let load = Load { size, length: 1 << 20, step: Some(1 << 20), write, depth: 4, count, connections: 1 };
        cases.push((format!("raw, 1 MiB {verb}"), Disk::Raw, load.clone()));
        cases.push((format!("qcow2, 1 MiB {verb}"), Disk::Qcow2, load));
    }
    // Each in a cluster of its own.
    let (step, count) = (64 << 10, (size >> 16).min(8192));
    let load = Load { size, length: 4096, step: Some(step), write: true, depth: 16, count, connections: 1 };
    cases.push(("overlay, first 4 KiB writes, depth 16".to_owned(), Disk::Overlay, load));
    cases
}

fn measure(images: &Images, server: &Server, disk: Disk, load: &Load) -> Result<Measured> {
    let file = images.prepare(disk)?;
    let socket = images.folder.join("nbd");
    let running = server.start(disk, &file, &socket)?;
    let mut connections = client::connect(&socket, load)?;
    let before = process_cpu(running.pid())?;
    let mut result = client::run(&mut connections, load)?;
    let cpu = process_cpu(running.pid())?.saturating_sub(before);
    drop((connections, running));
    result.latencies.sort_unstable();
    let at = |part: usize| result.latencies.get(result.latencies.len() * part / 100).copied().unwrap_or(0);
    let requests = load.count.max(1);
    let measured = Measured { wall: result.wall, cpu, ..Measured::default() };
    let nanoseconds = crate::measure::nanoseconds(result.wall).max(1);
    let iops = u128::from(requests) * 1_000_000_000 / u128::from(nanoseconds);
    Ok(measured
        .with(IOPS, u64::try_from(iops).unwrap_or(u64::MAX))
        .with(CPU, crate::measure::nanoseconds(cpu) / requests)
        .with(MEDIAN, at(50))
        .with(TAIL, at(99)))
}
