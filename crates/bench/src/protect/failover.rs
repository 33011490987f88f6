//! The time from the end of a VM until it runs elsewhere: its first beat, and the first frame that it sends.
//!
//! The frame is the one by which QEMU tells the network where the VM is. All QEMUs have their serial port and their
//! network at sockets of the bench.

use std::ffi::OsString;
use std::io::Read as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use limosa_page::to_micros;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, Signal, kill_process};

use super::door::{Door, read_frame};
use super::watched::{Protection, wait_until};
use crate::limosa::Prepared;
use crate::measure::{Measured, Stopwatch};
use crate::options::Options;
use crate::process::{Detached, Process};
use crate::scratch::Scratch;
use crate::vm::{machine, own_memory};

/// Sizes of the guest's memory.
pub(super) const SIZES: [u64; 2] = [1 << 30, 16 << 30];

/// How long checkpoints are made before the VM ends.
const CHECKPOINTS: Duration = Duration::from_secs(1);

/// A way to continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// A keeper's standby, from the moment at which the VM's QEMU is killed.
    Warm,
    /// `limosa protect failover`, from its exec.
    Cold,
    /// Nothing is continued: a QEMU starts, from its exec.
    Start,
}

impl Way {
    pub(super) const ALL: [Self; 3] = [Self::Warm, Self::Cold, Self::Start];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Warm => "limosa keep --standby",
            Self::Cold => "limosa protect failover",
            Self::Start => "QEMU's start alone",
        }
    }
}

/// Ends a VM of this size, and measures how it continues.
pub(super) fn run(options: &Options, qemu: &str, size: u64, way: Way) -> Result<Measured> {
    let place = Place::new()?;
    let line = place.command_line(qemu, size)?;
    if way == Way::Start {
        let mut started = None;
        return place.measure(false, || {
            started = Some(start(&line)?);
            Ok(())
        });
    }
    let primary = Place::new()?;
    let monitor = primary.at("qmp");
    let mut words = primary.command_line(qemu, size)?;
    words.extend(["-qmp".into(), format!("unix:{},server=on,wait=off", monitor.display()).into()]);
    let vm = start(&words)?;
    wait_until("QEMU's monitor", || Ok(monitor.exists().then_some(())))?;
    let arguments = ["--every", "100ms", "--output", "free"];
    let standby = ["--standby", "--fenced", "--when-lost", "60m"];
    let mut protection = match way {
        Way::Warm => Protection::elsewhere(options, &monitor, &arguments, &standby, &line)?,
        _ => Protection::here(options, &monitor, &arguments)?,
    };
    thread::sleep(CHECKPOINTS);
    protection.check()?;
    if way == Way::Warm {
        let pid = i32::try_from(vm.pid()).ok().and_then(Pid::from_raw).context("a process id")?;
        return place.measure(true, || kill_process(pid, Signal::KILL).context("killing QEMU"));
    }
    drop(vm);
    wait_until("limosa to notice", || Ok(protection.check().is_err().then_some(())))?;
    let prepared = Prepared::without_report(options, "protect")?
        .arguments(&["failover", "--fenced"])
        .path(None, &protection.kept())
        .command_line(&line);
    let mut failover = None;
    place.measure(true, || {
        failover = Some(prepared.start()?);
        Ok(())
    })
}

fn start(line: &[OsString]) -> Result<Process> {
    let [program, words @ ..] = line else { return Err(anyhow!("an empty command line")) };
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Process::start(command, None)
}

/// The sockets of one QEMU.
struct Place {
    serial: Door,
    network: Door,
    folder: Scratch,
}

impl Place {
    fn new() -> Result<Self> {
        let folder = Scratch::new_in(&std::env::temp_dir())?;
        let door = |name: &str| Door::open(&folder.path().join(name));
        Ok(Self { serial: door("serial")?, network: door("network")?, folder })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A QEMU whose guest beats, with its serial port and its network here.
    fn command_line(&self, qemu: &str, size: u64) -> Result<Vec<OsString>> {
        let mut line = vec![OsString::from(qemu)];
        line.extend(machine(size, &own_memory(size), self.folder.path())?);
        let network = format!("stream,id=n0,server=off,addr.type=unix,addr.path={}", self.at("network").display());
        let serial = format!("unix:{}", self.at("serial").display());
        let card = "virtio-net-pci,netdev=n0,mac=02:00:00:00:00:02,romfile=";
        for word in ["-serial", &serial, "-netdev", &network, "-device", card] {
            line.push(word.into());
        }
        Ok(line)
    }

    /// Measures from `begin` until the guest that is here beats; and until it is announced to its network, if it is.
    fn measure(&self, is_announced: bool, begin: impl FnOnce() -> Result<()>) -> Result<Measured> {
        let watch = Stopwatch::start(&[])?;
        thread::scope(|scope| {
            let beat = scope.spawn(|| self.wait_beat());
            let frame = is_announced.then(|| scope.spawn(|| self.wait_frame()));
            let begun = Instant::now();
            begin()?;
            let (beat, vm) = beat.join().map_err(|_| anyhow!("a thread panicked"))??;
            let frame = frame.map(|frame| frame.join().map_err(|_| anyhow!("a thread panicked"))?).transpose()?;
            let measured = watch.stop_with(&[vm.pid()])?;
            let since = |at: Instant| at.saturating_duration_since(begun);
            let mut measured = Measured { wall: since(beat), ..measured }.with("first_beat_us", to_micros(since(beat)));
            if let Some(frame) = frame {
                measured = measured.with("first_frame_us", to_micros(since(frame)));
            }
            Ok(measured)
        })
    }

    /// Waits for the first beat, and gets hold of the QEMU.
    fn wait_beat(&self) -> Result<(Instant, Detached)> {
        let mut serial = self.serial.enter()?;
        let vm = Detached::new(socket_peercred(&serial).context("the QEMU behind a serial port")?.pid)?;
        serial.read_exact(&mut [0]).context("the guest's first beat")?;
        Ok((Instant::now(), vm))
    }

    fn wait_frame(&self) -> Result<Instant> {
        read_frame(&mut self.network.enter()?).context("the VM's first frame")?;
        Ok(Instant::now())
    }
}
