//! Disks served over NBD and vhost-user-blk: by limosa, by QEMU's storage daemon, and raw ones over NBD by nbdkit.
//!
//! Law: the servers of a case serve files that were made the same way, through the page cache, at the same kind of
//! socket; one client puts the same requests on each, and its clock begins with the first one. CPU time is the server's
//! alone. What the client and the socket allow at most is shown by devices that keep nothing.

pub(crate) mod client;
mod epochs;
pub(crate) mod servers;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use self::client::{Front, Load};
use self::servers::{Address, Disk, EPOCHS, LIMOSA, NBDKIT, QEMU, Server, UNRECORDED};
use crate::frame::{Contestant, Frame, Series, interleave};
use crate::machine::Machine;
use crate::measure::{Measured, process_cpu};
use crate::options::Options;
use crate::report::{Bound, NOT_RUN, Report, Target, figure, ratio};
use crate::scratch::Scratch;

const IOPS: &str = "iops";
const CPU: &str = "server_cpu_ns_per_request";
const MEDIAN: &str = "latency_median_ns";
const TAIL: &str = "latency_99_ns";

/// The case whose time is that of a server's start.
const START: &str = "from exec to the first reply";

/// The images of a bench.
#[derive(Debug, Clone)]
struct Images {
    folder: PathBuf,
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
        let null = std::fs::File::create(this.path(Disk::Null)).and_then(|file| file.set_len(size));
        null.context("an empty file")?;
        Ok(this)
    }

    fn path(&self, disk: Disk) -> PathBuf {
        self.folder.join(match disk {
            Disk::Raw => "disk.raw",
            Disk::Qcow2 => "disk.qcow2",
            Disk::Overlay => "overlay.qcow2",
            Disk::Null => "null.raw",
        })
    }

    /// An address that is free.
    fn address(&self, load: &Load) -> Result<Address> {
        let socket = self.folder.join("socket");
        let _ = std::fs::remove_file(&socket);
        Ok(match load.front {
            Front::Unix => Address::Unix(socket),
            // It is closed here, and stays free for a while: ports are given in turn.
            Front::Tcp => Address::Tcp(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port()),
            Front::Device => Address::Device(socket, u16::try_from(load.connections)?),
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
        for server in servers.iter().filter(|server| server.serves(*disk, load)) {
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
    let started = |server: &&Server| [LIMOSA, QEMU].contains(&server.name()) && options.wants(START, server.name());
    for server in servers.iter().filter(started) {
        let (images, server) = (images.clone(), server.clone());
        let variant = server.name().to_owned();
        let run = Box::new(move |_: &Frame| measure_start(&images, &server));
        contestants.push(Contestant { case: START.to_owned(), variant, run });
    }
    let all = interleave(&mut contestants, options.rounds, &frame, &mut |line| options.tell(line))?;
    ensure!(!all.is_empty(), "{}", options.none_selected());
    let mut report = Report::new("serve", machine, options.rounds, &all);
    for (case, _, _) in &cases {
        for other in [QEMU, NBDKIT, UNRECORDED] {
            for figure in [IOPS, CPU, MEDIAN, TAIL] {
                report.ratios.extend(ratio(&all, case, LIMOSA, other, figure));
            }
        }
        report.ratios.extend(ratio(&all, case, EPOCHS, LIMOSA, IOPS));
    }
    report.targets = targets(&all, &cases);
    Ok(report)
}

/// The targets, against QEMU's storage daemon and nbdkit.
fn targets(all: &[Series], cases: &[(String, Disk, Load)]) -> Vec<Target> {
    let mut targets = Vec::new();
    let mut add = |case: &str, other, of: &'static str, bound| {
        let got = ratio(all, case, LIMOSA, other, of).map(|ratio| ratio.median);
        targets.push(Target::new(format!("{case}: {of} of limosa / {other}"), bound, got, NOT_RUN));
    };
    for (case, disk, load) in cases.iter().filter(|(_, disk, _)| *disk != Disk::Null) {
        add(case, QEMU, CPU, Bound::AtMost(0.8));
        match (disk, load) {
            (Disk::Overlay, _) => add(case, QEMU, IOPS, Bound::AtLeast(1.5)),
            (_, Load { step: Some(_), .. }) => {
                add(case, QEMU, IOPS, Bound::AtLeast(1.0));
                if *disk == Disk::Raw {
                    add(case, NBDKIT, IOPS, Bound::AtLeast(1.0));
                }
            }
            (_, Load { depth: 1, .. }) => {
                add(case, QEMU, MEDIAN, Bound::AtMost(1.0));
                add(case, QEMU, TAIL, Bound::AtMost(1.0));
            }
            _ => add(case, QEMU, IOPS, Bound::AtLeast(1.3)),
        }
    }
    let median = |variant| figure(all, START, variant, "wall").map(|wall| wall.median * 1e3);
    let got = median(LIMOSA).zip(median(QEMU)).map(|(limosa, qemu)| limosa - qemu);
    let name = format!("{START}: milliseconds of limosa more than of {QEMU}");
    targets.push(Target::new(name, Bound::AtMost(10.0), got, NOT_RUN));
    for verb in ["read", "write"] {
        let median = |disk: &str| Some(figure(all, &format!("{disk}, 4 KiB {verb}, depth 16"), LIMOSA, IOPS)?.median);
        let got = median("qcow2").zip(median("raw")).map(|(qcow2, raw)| qcow2 / raw);
        let name = format!("4 KiB {verb}, depth 16: {IOPS} of qcow2 / raw");
        targets.push(Target::new(name, Bound::AtLeast(0.9), got, NOT_RUN));
    }
    targets
}

/// The cases on disks of `size` bytes.
fn cases(size: u64) -> Vec<(String, Disk, Load)> {
    let mut cases = Vec::new();
    let load = Load::new(size);
    for (write, verb) in [(false, "read"), (true, "write")] {
        for (depth, count) in [(1, 20_000), (16, 60_000), (64, 60_000)] {
            let load = Load { length: 4096, write, depth, count, ..load.clone() };
            let case = format!("4 KiB {verb}, depth {depth}");
            cases.push((format!("qcow2, {case}"), Disk::Qcow2, load.clone()));
            if depth == 16 {
                cases.push((format!("raw, {case}"), Disk::Raw, load.clone()));
                cases.push((format!("null, {case}"), Disk::Null, load.clone()));
                cases.push((format!("qcow2, {case}, tcp"), Disk::Qcow2, Load { front: Front::Tcp, ..load.clone() }));
                cases.push((format!("qcow2, {case}, 4 connections"), Disk::Qcow2, Load { connections: 4, ..load }));
            }
        }
        for (length, name, most) in [(64_u32 << 10, "64 KiB", 16_384), (1 << 20, "1 MiB", 2048)] {
            let (step, count) = (u64::from(length), (size / u64::from(length)).min(most));
            let load = Load { length, step: Some(step), write, depth: 4, count, ..load.clone() };
            cases.push((format!("raw, {name} {verb}, in order"), Disk::Raw, load.clone()));
            cases.push((format!("qcow2, {name} {verb}, in order"), Disk::Qcow2, load.clone()));
            cases.push((format!("null, {name} {verb}, in order"), Disk::Null, load));
        }
    }
    // Each in a cluster of its own.
    let (step, count) = (64 << 10, (size >> 16).min(8192));
    let first = Load { step: Some(step), count, ..load };
    cases.push(("overlay, first 4 KiB writes, depth 16".to_owned(), Disk::Overlay, first.clone()));
    let first = Load { front: Front::Device, ..first };
    cases.push(("blk: overlay, first 4 KiB writes, depth 16".to_owned(), Disk::Overlay, first));
    cases.extend(device_cases(size));
    cases
}

/// The cases over vhost-user-blk.
fn device_cases(size: u64) -> Vec<(String, Disk, Load)> {
    let mut cases = Vec::new();
    let load = Load { front: Front::Device, ..Load::new(size) };
    for (write, verb) in [(false, "read"), (true, "write")] {
        for (depth, count) in [(1, 20_000), (16, 60_000)] {
            let load = Load { write, depth, count, ..load.clone() };
            let case = format!("4 KiB {verb}, depth {depth}");
            cases.push((format!("blk: qcow2, {case}"), Disk::Qcow2, load.clone()));
            if depth == 16 {
                cases.push((format!("blk: raw, {case}"), Disk::Raw, load.clone()));
                cases.push((format!("blk: null, {case}"), Disk::Null, load.clone()));
                for queues in [2, 4] {
                    let load = Load { connections: queues, ..load.clone() };
                    cases.push((format!("blk: qcow2, {case}, {queues} queues"), Disk::Qcow2, load));
                }
            }
        }
        let (length, step, count) = (64 << 10, Some(64 << 10), (size >> 16).min(16_384));
        let load = Load { length, step, write, depth: 4, count, ..load.clone() };
        cases.push((format!("blk: qcow2, 64 KiB {verb}, in order"), Disk::Qcow2, load));
    }
    cases
}

fn measure(images: &Images, server: &Server, disk: Disk, load: &Load) -> Result<Measured> {
    let file = images.prepare(disk)?;
    let address = images.address(load)?;
    let running = server.start(disk, &file, &address)?;
    let mut connections = client::connect(&address, load)?;
    let before = process_cpu(running.pid())?;
    let mut result = match server.name() {
        EPOCHS => epochs::run(&mut connections, load, &servers::control(&file))?,
        _ => client::run(&mut connections, load)?,
    };
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

fn measure_start(images: &Images, server: &Server) -> Result<Measured> {
    let file = images.prepare(Disk::Qcow2)?;
    let load = Load { count: 1, depth: 1, write: false, ..Load::new(4096) };
    let address = images.address(&load)?;
    let begun = std::time::Instant::now();
    let running = server.start(Disk::Qcow2, &file, &address)?;
    let mut connections = client::connect(&address, &load)?;
    client::run(&mut connections, &load)?;
    let wall = begun.elapsed();
    let cpu = process_cpu(running.pid())?;
    Ok(Measured { wall, cpu, ..Measured::default() })
}
