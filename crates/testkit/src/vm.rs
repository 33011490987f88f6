//! A running QEMU process: its monitors, its serial port, its memory.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::heartbeat::{Heartbeat, HeartbeatGuest, pass_number};
use crate::machine::{Guest, Machine};
use crate::process::{Process, listens};
use crate::qmp::Qmp;
use crate::serial::{LINE, Line, Serial};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Running,
    Stopped,
    Incoming,
    IncomingStopped,
}

/// A QEMU process that ends when this value is dropped.
#[derive(Debug)]
pub struct Vm {
    // Dropped in this order: the process goes before the files it uses.
    process: Process,
    qmp: Mutex<Qmp>,
    serial: Serial,
    memory_file: Option<File>,
    machine: Machine,
    folder: TempDir,
}

impl Vm {
    pub(crate) fn start(machine: &Machine, role: Role) -> Result<Self> {
        let program = machine.series.program()?;
        let folder = crate::scratch()?;
        let at = |name: &str| folder.path().join(name);
        let (memory_object, made) = machine.prepare_memory()?;
        let mut command = Command::new(program);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command.args(machine.definition(&memory_object, folder.path())?);
        for monitor in ["qmp-test", "qmp"] {
            let path = at(monitor);
            command.arg("-chardev").arg(format!("socket,id={monitor},path={},server=on,wait=off", path.display()));
            command.arg("-mon").arg(format!("chardev={monitor},mode=control"));
        }
        command.arg("-chardev").arg(format!("socket,id=serial0,path={},server=on,wait=off", at("serial").display()));
        command.args(["-serial", "chardev:serial0"]);
        if matches!(role, Role::Incoming | Role::IncomingStopped) {
            command.args(["-incoming", "defer"]);
        }
        // Always stopped at first: the serial port must have its reader before the guest writes.
        let starts_stopped = !matches!(role, Role::Incoming);
        if starts_stopped {
            command.arg("-S");
        }
        let log = File::create(at("log")).context("QEMU's log")?;
        let errors = log.try_clone().context("QEMU's log")?;
        command.stdin(Stdio::null()).stdout(log).stderr(errors);
        let process = Process::spawn("QEMU", command)?;
        let connected = connect(&process, &at("qmp-test"), &at("serial"));
        let (qmp, serial) = connected.with_context(|| match std::fs::read_to_string(at("log")) {
            Ok(text) if !text.trim().is_empty() => format!("QEMU says: {}", text.trim()),
            _ => "QEMU does not answer".to_owned(),
        })?;
        let memory_file = match made {
            Some(file) => Some(file),
            None => machine.backend.open_of(process.pid()).ok(),
        };
        let vm = Self { process, qmp: Mutex::new(qmp), serial, memory_file, machine: machine.clone(), folder };
        if role == Role::Running {
            vm.execute("cont", json!({}))?;
        }
        Ok(vm)
    }

    /// The process id of QEMU.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The process of QEMU.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// The machine that this VM was started from.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The folder of the VM's sockets (mode 0700, gone with the VM): a place for more.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A QMP monitor without a connection: limosa's.
    pub fn qmp_socket(&self) -> PathBuf {
        self.folder.path().join("qmp")
    }

    /// The testkit's own monitor, also for tests that wait for events.
    pub fn qmp(&self) -> MutexGuard<'_, Qmp> {
        self.qmp.lock()
    }

    /// Runs one command on the testkit's own monitor.
    ///
    /// # Errors
    /// As [`Qmp::execute`]; a [`crate::QmpFailure`] can be found by downcast.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        self.qmp().execute(command, arguments)
    }

    /// QEMU's run state: `running`, `paused`, `inmigrate`, `postmigrate`, ...
    ///
    /// # Errors
    /// The VM is gone.
    pub fn run_state(&self) -> Result<String> {
        let status = self.execute("query-status", json!({}))?;
        Ok(status["status"].as_str().context("query-status has no status")?.to_owned())
    }

    /// Waits for the run state to be `wanted`.
    ///
    /// # Errors
    /// It is another one after `limit`.
    pub fn wait_run_state(&self, wanted: &str, limit: Duration) -> Result<()> {
        let end = std::time::Instant::now() + limit;
        loop {
            let state = self.run_state()?;
            if state == wanted {
                return Ok(());
            }
            if std::time::Instant::now() >= end {
                bail!("the VM is {state} instead of {wanted} after {limit:?}");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Stops the CPU.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn stop(&self) -> Result<()> {
        self.execute("stop", json!({})).map(drop)
    }

    /// Lets the CPU continue.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn cont(&self) -> Result<()> {
        self.execute("cont", json!({})).map(drop)
    }

    /// Returns QEMU's standard output and error.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// The serial port.
    pub fn serial(&self) -> &Serial {
        &self.serial
    }

    /// The guest's RAM as a file, for backends other than [`crate::MemoryBackend::Anonymous`]: offset 0 is the first
    /// byte of the RAM block `mem`.
    ///
    /// # Errors
    /// The backend is anonymous.
    pub fn memory_file(&self) -> Result<&File> {
        self.memory_file.as_ref().with_context(|| format!("{:?} memory has no file", self.machine.backend))
    }

    /// Reads `bytes` (offsets in the RAM block) through QEMU. The CPU should be stopped, or it is no picture of one
    /// instant. On a destination in postcopy this waits for pages that have not arrived.
    ///
    /// # Errors
    /// The range is not RAM.
    pub fn read_memory(&self, bytes: Range<u64>) -> Result<Vec<u8>> {
        let below = self.below_4g();
        let mut all = Vec::new();
        let pieces = [bytes.start.min(below)..bytes.end.min(below), bytes.start.max(below)..bytes.end.max(below)];
        for piece in pieces.into_iter().filter(|piece| !piece.is_empty()) {
            let address = if piece.start < below { piece.start } else { piece.start - below + (4 << 30) };
            all.extend(self.read_physical(address, piece.end - piece.start)?);
        }
        Ok(all)
    }

    /// Reads guest-physical memory.
    fn read_physical(&self, address: u64, size: u64) -> Result<Vec<u8>> {
        let path = self.folder.path().join("picture");
        match self.execute("pmemsave", json!({ "val": address, "size": size, "filename": path })) {
            Ok(_) => {}
            // QEMU 11.1 refuses it until a lazy restore has ended.
            Err(error) if format!("{error:#}").contains("not allowed during migration") => {
                return self.examine_physical(address, size);
            }
            Err(error) => return Err(error),
        }
        let picture = std::fs::read(&path).context("the picture of the memory")?;
        std::fs::remove_file(&path).context("the picture of the memory")?;
        if picture.len() as u64 != size {
            bail!("pmemsave wrote {} bytes instead of {size}", picture.len());
        }
        Ok(picture)
    }

    /// Reads guest-physical memory with the command for people: three bytes of text for a byte.
    fn examine_physical(&self, address: u64, size: u64) -> Result<Vec<u8>> {
        const AT_ONCE: u64 = 64 << 10;
        let mut bytes = Vec::new();
        for from in (0..size.div_ceil(AT_ONCE)).map(|number| number * AT_ONCE) {
            let words = (size - from).min(AT_ONCE).div_ceil(8);
            let line = format!("xp /{words}gx {:#x}", address + from);
            let said = self.execute("human-monitor-command", json!({ "command-line": line }))?;
            let said = said.as_str().with_context(|| format!("{line}: {said}"))?;
            for word in said.split_whitespace().filter_map(|word| word.strip_prefix("0x")) {
                let value = u64::from_str_radix(word, 16).with_context(|| format!("{line}: {word}"))?;
                bytes.extend(value.to_le_bytes());
            }
        }
        if (bytes.len() as u64) < size {
            bail!("{} bytes at {address:#x} instead of {size}", bytes.len());
        }
        bytes.truncate(usize::try_from(size)?);
        Ok(bytes)
    }

    /// How much of the RAM is below 4 GiB (QEMU docs and sources: the PCI hole of `q35` and `pc`).
    fn below_4g(&self) -> u64 {
        let (limit, then) =
            if self.machine.kind.contains("q35") { (0xb000_0000, 0x8000_0000) } else { (0xe000_0000, 0xc000_0000) };
        if self.machine.memory >= limit { then } else { self.machine.memory }
    }

    fn heartbeat_guest(&self) -> Result<HeartbeatGuest> {
        self.machine.heartbeat_guest().context("this VM runs no heartbeat guest")
    }

    /// Waits for `count` heartbeats that had not been there when this was called; returns the last.
    ///
    /// # Errors
    /// The guest sends no heartbeat.
    pub fn wait_heartbeats(&self, count: usize) -> Result<Line> {
        self.heartbeat_guest()?;
        let mut from = self.serial.mark();
        let mut last = None;
        for _ in 0..count {
            let (position, line) = self.serial.wait_from(from, LINE, |text| pass_number(text).is_some())?;
            (from, last) = (position + 1, Some(line));
        }
        last.context("no heartbeat to wait for")
    }

    /// The number of the last pass that the guest has announced on the serial port.
    pub fn last_pass(&self) -> Option<u32> {
        self.serial.lines().iter().rev().find_map(|line| pass_number(&line.text))
    }

    /// Proves that the heartbeat guest's memory and its CPU are of one instant. A running VM is stopped for that and
    /// continues.
    ///
    /// # Errors
    /// A [`crate::HeartbeatError`] (by downcast) if they are not.
    pub fn check_heartbeat(&self) -> Result<Heartbeat> {
        let guest = self.heartbeat_guest()?;
        let running = self.run_state()? == "running";
        if running {
            self.stop()?;
        }
        let checked = guest.check(|range| self.read_memory(range));
        if running {
            self.cont()?;
        }
        checked
    }

    /// Writes into the guest's RAM from outside: how a test shows that its own check would notice.
    ///
    /// # Errors
    /// The backend is anonymous.
    pub fn tamper(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.memory_file()?.write_all_at(bytes, offset).context("writing guest memory")
    }

    /// Waits for the Linux guest's count, as [`Serial::wait_counts`].
    ///
    /// # Errors
    /// It does not count.
    pub fn wait_counts(&self, times: usize) -> Result<u64> {
        self.serial.wait_counts(times)
    }

    /// Runs one shell line in the Linux guest, as [`shell_within`](Self::shell_within), in the time that a line has.
    ///
    /// # Errors
    /// It fails or does not end, or the guest is another one.
    pub fn shell(&self, line: &str) -> Result<Vec<String>> {
        self.shell_within(line, LINE)
    }

    /// Runs one shell line in the Linux guest, as [`Serial::shell_within`].
    ///
    /// # Errors
    /// It fails or does not end in time, or the guest is another one.
    pub fn shell_within(&self, line: &str, limit: Duration) -> Result<Vec<String>> {
        if !matches!(self.machine.guest, Guest::Linux(_)) {
            bail!("this VM runs no Linux guest");
        }
        self.serial.shell_within(line, limit)
    }
}

/// Waits until QEMU listens; a QEMU that has ended is noticed at once.
fn connect(process: &Process, qmp: &Path, serial: &Path) -> Result<(Qmp, Serial)> {
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while !listens(process.pid(), qmp) {
        if let Some(status) = process.try_wait()? {
            bail!("QEMU ended: {status}");
        }
        if std::time::Instant::now() >= end {
            bail!("QEMU opened no monitor within 60 s");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok((Qmp::connect(qmp, Duration::from_secs(60))?, Serial::connect(serial)?))
}
