//! A VM into a file: limosa, through the socket and by file, compared with stock QEMU.
//!
//! Every run saves a fresh paused VM whose RAM is the same random bytes. The clock begins with limosa's exec, or with
//! the first command to QEMU, and ends when the file is durable: QEMU syncs nothing, so that is done here. In
//! memory (tmpfs) nothing is synced. How fast QEMU's single channel is at most shows where a receiver throws all of it
//! away.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use limosa_qemu::monitor::MigrationStatus;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
use serde_json::Value;

use crate::content::random_memory;
use crate::frame::{Contestant, Frame, interleave};
use crate::limosa::Prepared;
use crate::machine::Machine;
use crate::measure::{Measured, Stopwatch, millis, process_cpu};
use crate::options::Options;
use crate::report::{Bound, NOT_RUN, Report, Target, ratio};
use crate::scratch::Scratch;
use crate::vm::{Ram, Role, Vm};

/// The variant that the others are compared with.
const QEMU: &str = "QEMU mapped-ram, multifd";
const SOCKET: &str = "limosa --via socket";
const SOCKET_2: &str = "limosa --via socket, 2 channels";
const SOCKET_4: &str = "limosa --via socket, 4 channels";
const ZSTD_2: &str = "limosa --via socket, 2 channels zstd";
const ZSTD_4: &str = "limosa --via socket, 4 channels zstd";
const FILE: &str = "limosa --via file";

/// How the VM is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SaveMethod {
    /// limosa, with these arguments.
    Limosa(&'static [&'static str]),
    /// QEMU writes the file with two multifd channels.
    Multifd,
    /// QEMU's main channel, thrown away.
    Nowhere,
}

/// A variant's name and method, and its most allowed wall time in terms of QEMU's.
const METHODS: &[(&str, SaveMethod, Option<f64>)] = &[
    (QEMU, SaveMethod::Multifd, None),
    (SOCKET, SaveMethod::Limosa(&["--via", "socket"]), Some(1.25)),
    (SOCKET_2, SaveMethod::Limosa(&["--via", "socket", "--channels", "2"]), None),
    (SOCKET_4, SaveMethod::Limosa(&["--via", "socket", "--channels", "4"]), None),
    // Bytes that do not compress are the worst case; QEMU's own file knows no compression at all.
    (ZSTD_2, SaveMethod::Limosa(&["--via", "socket", "--channels", "2", "--compression", "zstd"]), None),
    (ZSTD_4, SaveMethod::Limosa(&["--via", "socket", "--channels", "4", "--compression", "zstd"]), None),
    (FILE, SaveMethod::Limosa(&["--via", "file"]), Some(1.05)),
    ("QEMU main channel, thrown away", SaveMethod::Nowhere, None),
];

/// Where the file goes.
struct Location {
    case: &'static str,
    dir: PathBuf,
    durable: bool,
}

/// The contents of the VM's RAM, the same in every run.
struct Content {
    file: File,
    size: u64,
}

/// Runs the bench.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let machine = Machine::this(&options.qemu);
    let size = options.size.unwrap_or(2 << 30).next_multiple_of(2 << 20);
    let locations = [
        Location { case: "disk", dir: options.dir.clone().unwrap_or_else(std::env::temp_dir), durable: true },
        Location { case: "tmpfs", dir: PathBuf::from("/dev/shm"), durable: false },
    ];
    let lacking = machine.lacks_mapped_ram();
    let mut all = Vec::new();
    if lacking.is_none() {
        options.tell("filling the VM's memory");
        let memory = &Content { file: random_memory(size)?, size };
        let mut contestants = Vec::new();
        for location in &locations {
            for &(name, method, _) in METHODS {
                if options.wants(location.case, name) {
                    contestants.push(Contestant {
                        case: location.case.to_owned(),
                        variant: name.to_owned(),
                        run: Box::new(move |frame| save(options, location, method, memory, frame)),
                    });
                }
            }
        }
        let frame = Frame { touch: options.touch.unwrap_or(size) };
        all = interleave(&mut contestants, options.rounds, &frame, &mut |line| options.tell(line))?;
    }
    let mut report = Report::new("save", machine, options.rounds, &all);
    let why = lacking.unwrap_or_else(|| NOT_RUN.to_owned());
    for location in &locations {
        for &(name, _, most) in METHODS.iter().filter(|(name, ..)| *name != QEMU) {
            let found = ["wall", "cpu"].map(|figure| ratio(&all, location.case, name, QEMU, figure));
            if let Some(most) = most {
                let got = found.first().and_then(Option::as_ref).map(|ratio| ratio.median);
                let name = format!("{}: wall of {name} / {QEMU}", location.case);
                report.targets.push(Target::new(name, Bound::AtMost(most), got, &why));
            }
            report.ratios.extend(found.into_iter().flatten());
        }
    }
    Ok(report)
}

/// Saves a fresh VM once.
fn save(
    options: &Options,
    location: &Location,
    method: SaveMethod,
    memory: &Content,
    frame: &Frame,
) -> Result<Measured> {
    let scratch = Scratch::new_in(&location.dir)?;
    let path = scratch.path().join("snapshot");
    let vm = Vm::start(&options.qemu, memory.size, Ram::Shared(&memory.file), Role::Source)?;
    let limosa = match method {
        SaveMethod::Limosa(how) => {
            let sync: &[&str] = if location.durable { &[] } else { &["--no-sync"] };
            let prepared = Prepared::new(options, "save")?.arguments(how).arguments(sync);
            Some(prepared.path(Some("--qmp"), &vm.limosa_monitor()).path(None, &path))
        }
        SaveMethod::Multifd | SaveMethod::Nowhere => None,
    };
    // What the last contestant left to be written is not this one's.
    rustix::fs::syncfs(&File::open(scratch.path())?).context("syncfs")?;
    frame.touch()?;

    let qemu_before = process_cpu(vm.pid())?;
    let watch = Stopwatch::start(&[vm.pid()])?;
    let mut moved = 0;
    let mut said = Value::Null;
    match (method, limosa) {
        (SaveMethod::Nowhere, _) => moved = throw_away(&vm)?,
        (_, Some(prepared)) => said = prepared.start()?.finish()?,
        (_, None) => write_by_qemu(&vm, &path)?,
    }
    if method == SaveMethod::Multifd && location.durable {
        make_durable(&path)?;
    }
    let measured = watch.stop()?;
    let qemu = process_cpu(vm.pid())?.saturating_sub(qemu_before);
    if method != SaveMethod::Nowhere {
        moved = fs::metadata(&path).with_context(|| path.display().to_string())?.blocks() * 512;
    }
    ensure!(moved >= memory.size, "only {moved} of {} bytes were saved", memory.size);
    let others = measured.cpu.saturating_sub(qemu);
    let counter = |name: &str| said.pointer(name).and_then(Value::as_u64);
    let (reads, writes) = (counter("/channel/calls_in"), counter("/file/calls_out"));
    let mut measured = measured.with("qemu_cpu_ms", millis(qemu)).with("receiver_cpu_ms", millis(others));
    for (name, value) in [("reads", reads), ("writes", writes)] {
        if let Some(value) = value {
            measured = measured.with(name, value);
        }
    }
    Ok(measured)
}

/// QEMU's own save: mapped-ram with two multifd channels.
fn write_by_qemu(vm: &Vm, path: &Path) -> Result<()> {
    vm.tune(&[("mapped-ram", true), ("multifd", true)])?;
    vm.monitor.migrate(&format!("file:{}", path.display()), false)?;
    vm.wait_migration(&MigrationStatus::Completed).map(drop)
}

/// The file's bytes and its name are on the disk when this returns.
fn make_durable(path: &Path) -> Result<()> {
    let sync = |path: &Path| rustix::fs::fdatasync(File::open(path)?).map_err(std::io::Error::from);
    let folder = path.parent().context("a file in a directory")?;
    sync(path).and_then(|()| File::open(folder)?.sync_all()).with_context(|| format!("syncing {}", path.display()))
}

/// QEMU's main channel into a receiver that looks at nothing; returns how much came.
fn throw_away(vm: &Vm) -> Result<u64> {
    vm.tune(&[])?;
    let (theirs, ours) = pair(Some(WIDE))?;
    vm.monitor.getfd("nowhere", theirs.as_fd())?;
    drop(theirs);
    vm.monitor.migrate("fd:nowhere", false)?;
    let moved = drain(&ours)?;
    vm.wait_migration(&MigrationStatus::Completed)?;
    Ok(moved)
}

/// Reads into a buffer that stays in the cache until the other side closes.
fn drain(stream: &OwnedFd) -> Result<u64> {
    let mut buffer = vec![0; 256 << 10];
    let mut total = 0;
    loop {
        match rustix::io::read(stream, &mut buffer[..]) {
            Ok(0) => return Ok(total),
            Ok(length) => total += length as u64,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("reading QEMU's stream"),
        }
    }
}

/// The send buffer of the pair that `limosa save` gives to QEMU, in bytes.
const WIDE: usize = 512 << 10;

/// Two ends of a local stream socket, as limosa makes them for QEMU: the sender's and the receiver's. The send buffer
/// has this size, or else the system's default.
fn pair(buffer: Option<usize>) -> Result<(OwnedFd, OwnedFd)> {
    let (sender, receiver) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).context("socketpair")?;
    if let Some(bytes) = buffer {
        // The forced form passes the system's limit and needs CAP_NET_ADMIN.
        if sockopt::set_socket_send_buffer_size_force(&sender, bytes).is_err() {
            sockopt::set_socket_send_buffer_size(&sender, bytes).context("SO_SNDBUF")?;
        }
    }
    Ok((sender, receiver))
}
