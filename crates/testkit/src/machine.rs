//! The description of a VM: one value, from which a source and a destination are started that match.
//!
//! Law: the same value gives the same devices with the same ids at the same addresses, in each role.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::backend::MemoryBackend;
use crate::heartbeat::HeartbeatGuest;
use crate::linux::LinuxGuest;
use crate::series::Series;
use crate::vm::{Role, Vm};

/// The accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Accelerator {
    /// QEMU's own translator: works everywhere.
    #[default]
    Tcg,
    /// The kernel. That /dev/kvm opens does not mean that a guest runs: see [`Accelerator::kvm_runs_guests`].
    Kvm,
}

impl Accelerator {
    /// Whether a heartbeat guest really runs under KVM here; tried once per process. Where KVM has to emulate a guest's
    /// instructions one by one, it does, at one pass in minutes: that is no guest to test with.
    pub fn kvm_runs_guests() -> bool {
        static RUNS: OnceLock<bool> = OnceLock::new();
        *RUNS.get_or_init(|| {
            let beats = |vm: Vm| {
                let mut heard = 0;
                let end = Instant::now() + Duration::from_secs(4);
                while heard < 10 {
                    let left = end.saturating_duration_since(Instant::now());
                    match vm.serial().wait_from(heard, left, |_| true) {
                        Ok((line, _)) => heard = line + 1,
                        Err(_) => return false,
                    }
                }
                true
            };
            Path::new("/dev/kvm").exists()
                && Machine::heartbeat(HeartbeatGuest::default()).accelerator(Self::Kvm).start().is_ok_and(beats)
        })
    }
}

/// Format of a disk image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskFormat {
    /// The bytes of the disk.
    Raw,
    /// QEMU's own format.
    Qcow2,
}

impl DiskFormat {
    fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// A virtio disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// The image.
    pub path: PathBuf,
    /// Its format.
    pub format: DiskFormat,
    /// Whether the guest may write.
    pub writable: bool,
}

impl Disk {
    /// Makes an empty image of `bytes` with qemu-img; writable.
    ///
    /// # Errors
    /// qemu-img fails.
    pub fn create(path: &Path, format: DiskFormat, bytes: u64) -> Result<Self> {
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", format.name()]).arg(path).arg(bytes.to_string());
        let output = command.output().context("cannot start qemu-img: run `cargo xtask setup`")?;
        if !output.status.success() {
            bail!("qemu-img create {}: {}", path.display(), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(Self { path: path.to_path_buf(), format, writable: true })
    }
}

/// The guest of the VM.
#[derive(Debug, Clone)]
pub(crate) enum Guest {
    Heartbeat(HeartbeatGuest),
    Linux(LinuxGuest),
    /// Nothing: the CPU is never started.
    Paused,
}

/// A VM to be started, as source or as destination.
#[derive(Debug, Clone)]
pub struct Machine {
    pub(crate) guest: Guest,
    pub(crate) kind: String,
    pub(crate) series: Series,
    pub(crate) accelerator: Accelerator,
    pub(crate) memory: u64,
    pub(crate) backend: MemoryBackend,
    pub(crate) disks: Vec<Disk>,
    pub(crate) balloon: bool,
    pub(crate) arguments: Vec<String>,
    pub(crate) memory_object: Option<String>,
}

impl Machine {
    fn new(guest: Guest, memory: u64) -> Self {
        Self {
            guest,
            kind: "q35".to_owned(),
            series: Series::default(),
            accelerator: Accelerator::default(),
            memory,
            backend: MemoryBackend::default(),
            disks: Vec::new(),
            balloon: false,
            arguments: Vec::new(),
            memory_object: None,
        }
    }

    /// A VM that boots the heartbeat guest from a read-only disk, with 64 MiB beyond the end of its span.
    pub fn heartbeat(guest: HeartbeatGuest) -> Self {
        Self::new(Guest::Heartbeat(guest), (guest.span().end + (64 << 20)).next_multiple_of(2 << 20))
    }

    /// A VM with 256 MiB that boots Linux.
    pub fn linux(guest: LinuxGuest) -> Self {
        Self::new(Guest::Linux(guest), 256 << 20)
    }

    /// A VM whose CPU is never started, with `bytes` of shared memory to be filled from outside ([`Vm::memory_file`]).
    pub fn paused(bytes: u64) -> Self {
        Self::new(Guest::Paused, bytes).backend(MemoryBackend::File)
    }

    /// QEMU's machine type; `q35` by default.
    #[must_use]
    pub fn kind(mut self, kind: &str) -> Self {
        kind.clone_into(&mut self.kind);
        self
    }

    /// The QEMU that runs it; the one in `PATH` by default.
    #[must_use]
    pub fn series(self, series: Series) -> Self {
        Self { series, ..self }
    }

    /// Sets the accelerator; TCG by default.
    #[must_use]
    pub fn accelerator(mut self, accelerator: Accelerator) -> Self {
        self.accelerator = accelerator;
        self
    }

    /// RAM in bytes.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// The backing of the RAM.
    #[must_use]
    pub fn backend(mut self, backend: MemoryBackend) -> Self {
        self.backend = backend;
        self
    }

    /// Adds a virtio disk: node `disk0-format`, device `disk0`, then 1, ...
    #[must_use]
    pub fn disk(mut self, disk: Disk) -> Self {
        self.disks.push(disk);
        self
    }

    /// Adds a virtio balloon with free-page hinting and its I/O thread: device `balloon0`, iothread `io0`.
    #[must_use]
    pub fn balloon(mut self) -> Self {
        self.balloon = true;
        self
    }

    /// Adds one argument for QEMU, of source and destination alike.
    #[must_use]
    pub fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    /// The value of `-object` that makes the memory backend `mem`, instead of the backend's own.
    #[must_use]
    pub fn memory_object(mut self, option: &str) -> Self {
        self.backend = MemoryBackend::Anonymous;
        self.memory_object = Some(option.to_owned());
        self
    }

    /// The value of `-object` for the memory backend, and the file that was made for it.
    pub(crate) fn prepare_memory(&self) -> Result<(String, Option<File>)> {
        match &self.memory_object {
            Some(option) => Ok((option.clone(), None)),
            None => self.backend.prepare(self.memory),
        }
    }

    /// RAM in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.memory
    }

    /// The heartbeat guest, if that is what the VM boots.
    pub fn heartbeat_guest(&self) -> Option<HeartbeatGuest> {
        if let Guest::Heartbeat(guest) = self.guest { Some(guest) } else { None }
    }

    /// Starts the VM; its CPU runs unless the machine is a paused one.
    ///
    /// # Errors
    /// QEMU is missing or refuses; the message holds its own words.
    pub fn start(&self) -> Result<Vm> {
        Vm::start(self, if matches!(self.guest, Guest::Paused) { Role::Stopped } else { Role::Running })
    }

    /// Starts the VM with its CPU stopped (`-S`).
    ///
    /// # Errors
    /// As [`Machine::start`].
    pub fn start_stopped(&self) -> Result<Vm> {
        Vm::start(self, Role::Stopped)
    }

    /// Starts a destination (`-incoming defer`) that will run the guest once it has it.
    ///
    /// # Errors
    /// As [`Machine::start`].
    pub fn start_incoming(&self) -> Result<Vm> {
        Vm::start(self, Role::Incoming)
    }

    /// Starts a destination that leaves the guest paused (`-incoming defer -S`).
    ///
    /// # Errors
    /// As [`Machine::start`].
    pub fn start_incoming_stopped(&self) -> Result<Vm> {
        Vm::start(self, Role::IncomingStopped)
    }

    /// Starts a source and a destination.
    ///
    /// # Errors
    /// As [`Machine::start`].
    pub fn pair(&self) -> Result<VmPair> {
        Ok(VmPair { source: self.start()?, destination: self.start_incoming()? })
    }

    /// QEMU's command line for this VM without monitors, its first serial port on standard input and output: for what
    /// starts QEMU itself. `folder` is where the guest's files go.
    ///
    /// # Errors
    /// The files cannot be made, or the memory is of a file, which would go with this process.
    pub fn command_line(&self, folder: &Path) -> Result<Vec<String>> {
        let program = self.series.program()?;
        let (memory_object, made) = self.prepare_memory()?;
        if made.is_some() {
            bail!("{:?} memory belongs to a Vm", self.backend);
        }
        let program = program.to_str().context("a path that is no text")?;
        let mut words: Vec<String> =
            [program, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"]
                .map(str::to_owned)
                .into();
        words.extend(self.definition(&memory_object, folder)?);
        Ok(words)
    }

    /// The arguments that define the VM, without its role and sockets. `folder` is where the guest's files go.
    pub(crate) fn definition(&self, memory_object: &str, folder: &Path) -> Result<Vec<String>> {
        let accelerator = match self.accelerator {
            Accelerator::Tcg => "tcg",
            Accelerator::Kvm => "kvm",
        };
        let mut words: Vec<String> = Vec::new();
        let mut add = |name: &str, value: String| words.extend([name.to_owned(), value]);
        add("-machine", format!("{},memory-backend=mem", self.kind));
        add("-accel", accelerator.to_owned());
        add("-m", format!("{}B", self.memory));
        add("-object", memory_object.to_owned());
        match &self.guest {
            Guest::Heartbeat(guest) => {
                let image = folder.join("heartbeat.img");
                write_boot_disk(&image, guest)?;
                let boot = Disk { path: image, format: DiskFormat::Raw, writable: false };
                add_disk(&mut add, "boot", &boot, ",bootindex=0");
            }
            Guest::Linux(guest) => {
                for (name, value) in guest.arguments(folder)? {
                    add(name, value);
                }
            }
            Guest::Paused => {}
        }
        for (index, disk) in self.disks.iter().enumerate() {
            add_disk(&mut add, &format!("disk{index}"), disk, "");
        }
        if self.balloon {
            add("-object", "iothread,id=io0".to_owned());
            add("-device", "virtio-balloon-pci,id=balloon0,free-page-hint=on,iothread=io0".to_owned());
        }
        words.extend(self.arguments.iter().cloned());
        Ok(words)
    }
}

fn add_disk(add: &mut impl FnMut(&str, String), id: &str, disk: &Disk, more: &str) {
    let read_only = if disk.writable { "off" } else { "on" };
    // A comma inside an option's value is written twice.
    let path = disk.path.to_string_lossy().replace(',', ",,");
    let format = disk.format.name();
    add("-blockdev", format!("driver=file,node-name={id}-file,read-only={read_only},filename={path}"));
    add("-blockdev", format!("driver={format},node-name={id}-format,read-only={read_only},file={id}-file"));
    add("-device", format!("virtio-blk-pci,id={id},drive={id}-format{more}"));
}

/// A disk of 8 MiB, all hole but for the boot sector: the BIOS reads none of a disk smaller than one cylinder.
pub(crate) fn write_boot_disk(path: &Path, guest: &HeartbeatGuest) -> Result<()> {
    let write = || {
        let mut image = File::create_new(path)?;
        image.write_all(&guest.boot_sector())?;
        image.set_len(8 << 20)
    };
    write().with_context(|| path.display().to_string())
}

/// A source and a destination of the same machine.
#[derive(Debug)]
pub struct VmPair {
    /// Runs the guest.
    pub source: Vm,
    /// Waits for it (`-incoming defer`).
    pub destination: Vm,
}
