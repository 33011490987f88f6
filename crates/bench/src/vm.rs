//! The QEMU processes that take part.
//!
//! Law: all VMs of a bench are the same machine, so that what one saves another can load. Every one has two monitors:
//! the bench's own and one for limosa.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use limosa_qemu::monitor::{MigrationStatus, Monitor, Settings};
use limosa_qemu::qmp::{self, Event, Qmp};
use serde_json::{Value, json};

use crate::guest;
use crate::namespaces::Loopback;
use crate::process::Process;
use crate::scratch::Scratch;

/// How long QEMU may take for any one answer or event: for one that hangs, not a measure.
const LIMIT: Duration = Duration::from_secs(120);

/// The kind of RAM.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ram<'a> {
    /// A file, shared with other processes that map it.
    Shared(&'a File),
    /// QEMU's own, with this file's bytes as the guest's contents if there is one.
    Own { content: Option<&'a Path> },
    /// A memory backend: the value of QEMU's `-object`.
    Object(&'a str),
}

/// The purpose of the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// To be saved or sent; its CPU waits for `cont`.
    Source,
    /// To be restored into.
    Destination,
}

/// A QEMU process; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Vm {
    // Before the directory of its sockets.
    process: Process,
    /// The bench's own monitor.
    pub(crate) monitor: Monitor,
    folder: Scratch,
}

impl Vm {
    /// Starts a QEMU and waits until its monitor answers.
    pub(crate) fn start(qemu: &str, memory: u64, ram: Ram<'_>, role: Role) -> Result<Self> {
        Self::start_in(None, qemu, memory, ram, role)
    }

    /// The same in its own network.
    pub(crate) fn start_in(
        network: Option<&Loopback>,
        qemu: &str,
        memory: u64,
        ram: Ram<'_>,
        role: Role,
    ) -> Result<Self> {
        // Always in the temporary directory, because a socket's path is short.
        let folder = Scratch::new_in(&std::env::temp_dir())?;
        let at = |name: &str| folder.path().join(name);
        let object = match ram {
            Ram::Shared(file) => {
                format!("memory-backend-file,id=mem,size={memory},mem-path=/proc/self/fd/{},share=on", file.as_raw_fd())
            }
            Ram::Own { .. } => own_memory(memory),
            Ram::Object(object) => object.to_owned(),
        };
        let mut command = Command::new(qemu);
        command.args(machine(memory, &object, folder.path())?);
        if let Ram::Own { content: Some(path) } = ram {
            let units = guest::read_units(fs::metadata(path).with_context(|| path.display().to_string())?.len())?;
            let path = path.to_str().context("a temporary directory whose path is not UTF-8")?.replace(',', ",,");
            for loaded in [
                format!("file={path},addr={:#x},force-raw=on", guest::CONTENTS_AT),
                format!("addr={:#x},data={units:#x},data-len=4", guest::READ_LEN_AT),
            ] {
                command.arg("-device").arg(format!("loader,{loaded}"));
            }
        }
        for monitor in ["qmp", "qmp-limosa"] {
            command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", at(monitor).display()));
        }
        command.arg("-serial").arg(format!("unix:{},server=on,wait=off", at("serial").display()));
        command.args(if role == Role::Destination { &["-incoming", "defer"][..] } else { &["-S"][..] });
        let log = File::create(at("log")).context("a log for QEMU")?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let hand = if let Ram::Shared(file) = ram { Some(file.as_fd()) } else { None };
        if let Some(network) = network {
            network.plug(&mut command)?;
        }
        let mut process = Process::start(command, hand)?;
        let monitor = connect(&at("qmp"), &mut || match process.ended()? {
            None => Ok(()),
            Some(status) => bail!("QEMU ended with {status}"),
        });
        let monitor = monitor.and_then(negotiate).with_context(|| match fs::read_to_string(at("log")) {
            Ok(text) if !text.trim().is_empty() => format!("QEMU printed: {}", text.trim()),
            _ => "QEMU does not answer".to_owned(),
        })?;
        let vm = Self { process, monitor, folder };
        vm.monitor.apply_settings(&Settings::new().capability("events", true))?;
        Ok(vm)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The path of the monitor for limosa.
    pub(crate) fn limosa_monitor(&self) -> PathBuf {
        self.at("qmp-limosa")
    }

    /// A place for a socket or a log, gone with the VM.
    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Connects to the serial port. Once connected, its output must be read, or the guest is held up; without a
    /// connection the output is dropped.
    pub(crate) fn serial(&self) -> Result<UnixStream> {
        connect(&self.at("serial"), &mut || Ok(()))
    }

    /// Lets the CPU run.
    pub(crate) fn run(&self) -> Result<()> {
        Ok(self.monitor.cont()?)
    }

    /// Stops the CPU.
    pub(crate) fn stop(&self) -> Result<()> {
        Ok(self.monitor.stop()?)
    }

    /// Sets capabilities, and what speed needs: no limit on the bandwidth, two channels if there are several.
    pub(crate) fn tune(&self, capabilities: &[(&str, bool)]) -> Result<()> {
        let settings = Settings::new().parameter("max-bandwidth", 0).parameter("multifd-channels", 2);
        let settings = capabilities.iter().fold(settings, |settings, (name, on)| settings.capability(name, *on));
        Ok(self.monitor.apply_settings(&settings)?)
    }

    /// Sends the VM to `uri`, as a postcopy from the first moment.
    pub(crate) fn postcopy_to(&self, uri: &str) -> Result<()> {
        let commands = [("migrate", json!({ "uri": uri })), ("migrate-start-postcopy", Value::Null)];
        let [begun, switched] = self.monitor.qmp().execute_all(commands)?;
        begun?;
        Ok(switched.map(drop)?)
    }

    /// Drops the events that have come so far.
    pub(crate) fn forget_events(&self) -> Result<()> {
        Ok(self.monitor.qmp().take_events().map(drop)?)
    }

    /// Waits for the event that says that the guest runs; when that was.
    pub(crate) fn wait_resumed(&self) -> Result<SystemTime> {
        let event = self.wait(|event| event.name == "RESUME").context("waiting for the guest to run")?;
        at(&event)
    }

    /// Waits until a migration has this status; when that was.
    pub(crate) fn wait_migration(&self, wanted: &MigrationStatus) -> Result<SystemTime> {
        let event = self.wait(|event| status(event).as_ref() == Some(wanted));
        at(&event.with_context(|| format!("waiting for a migration to be {wanted}"))?)
    }

    /// Waits until an incoming migration has become a postcopy.
    pub(crate) fn wait_postcopy(&self) -> Result<()> {
        let begun =
            |event: &Event| matches!(status(event), Some(MigrationStatus::PostcopyActive | MigrationStatus::Completed));
        let event = self.wait(begun).context("waiting for a migration to become a postcopy")?;
        let is_postcopy = status(&event) == Some(MigrationStatus::PostcopyActive);
        ensure!(is_postcopy, "all memory was sent before postcopy began: use a larger --size");
        Ok(())
    }

    /// The next event that `wanted` accepts; the others are kept. A migration that fails is an error.
    fn wait(&self, wanted: impl Fn(&Event) -> bool) -> Result<Event> {
        let failed = |event: &Event| {
            use MigrationStatus::{Cancelled, Failed, PostcopyPaused};
            matches!(status(event), Some(Failed | Cancelled | PostcopyPaused))
        };
        let event = self.monitor.qmp().wait_event_where(|event| wanted(event) || failed(event), LIMIT)?;
        let event = event.with_context(|| format!("no such event within {} s", LIMIT.as_secs()))?;
        if !wanted(&event) {
            bail!("the migration has failed: {}", self.monitor.migration()?.raw);
        }
        Ok(event)
    }
}

/// The value of `-object` for memory that is QEMU's own.
pub(crate) fn own_memory(bytes: u64) -> String {
    format!("memory-backend-ram,id=mem,size={bytes}")
}

/// The arguments of the machine that all VMs of a bench are, without its sockets. Writes the firmware into `folder`.
pub(crate) fn machine(memory: u64, memory_object: &str, folder: &Path) -> Result<Vec<OsString>> {
    let firmware = folder.join("firmware");
    fs::write(&firmware, guest::firmware()).context("writing the guest's firmware")?;
    let mut words: Vec<OsString> = ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        .into_iter()
        .chain(["-machine", "q35,memory-backend=mem", "-accel", "tcg", "-smp", "1", "-m"])
        .map(OsString::from)
        .collect();
    words.extend([format!("{memory}B").into(), "-bios".into(), firmware.into()]);
    words.extend(["-object".into(), memory_object.into()]);
    Ok(words)
}

/// The status in a `MIGRATION` event.
fn status(event: &Event) -> Option<MigrationStatus> {
    let status = event.data.get("status").filter(|_| event.name == "MIGRATION")?;
    status.as_str().map(MigrationStatus::from)
}

/// When an event happened, by QEMU's clock, which is this machine's.
fn at(event: &Event) -> Result<SystemTime> {
    Ok(UNIX_EPOCH + event.at.context("an event without a time stamp")?)
}

/// Connects to a socket that a starting process is about to make; `alive` fails if that has ended.
pub(crate) fn connect(path: &Path, alive: &mut dyn FnMut() -> Result<()>) -> Result<UnixStream> {
    let end = Instant::now() + LIMIT;
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() >= end => {
                return Err(error).with_context(|| format!("{}: cannot connect", path.display()));
            }
            Err(_) => {
                alive()?;
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

/// A monitor over a new connection.
fn negotiate(stream: UnixStream) -> Result<Monitor> {
    let options = qmp::Options {
        greeting_timeout: LIMIT,
        negotiation_timeout: LIMIT,
        reply_timeout: LIMIT,
        ..qmp::Options::default()
    };
    Ok(Monitor::new(Qmp::from_socket(stream.into(), "of the bench's QEMU", &options)?))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::time::Duration;

    use super::*;
    use crate::content::random_memory;

    /// Whether the tests that need QEMU were switched off; that one is skipped is said in the file named for it.
    fn skipped() -> bool {
        if std::env::var_os("LIMOSA_SKIP_QEMU").is_none_or(|value| value != "1") {
            return false;
        }
        let line = format!("SKIPPED (LIMOSA_SKIP_QEMU=1): {}\n", std::thread::current().name().unwrap_or("a test"));
        eprint!("{line}");
        if let Some(path) = std::env::var_os("LIMOSA_SKIP_LOG") {
            let mut log = File::options().append(true).create(true).open(path).expect("the log of skipped tests");
            std::io::Write::write_all(&mut log, line.as_bytes()).expect("writes");
        }
        true
    }

    fn start(memory: u64, ram: Ram<'_>) -> Vm {
        let vm = Vm::start("qemu-system-x86_64", memory, ram, Role::Source);
        vm.expect("this test needs QEMU: run `cargo xtask setup` (or skip with LIMOSA_SKIP_QEMU=1)")
    }

    #[test]
    fn the_guest_beats_in_shared_memory_full_of_random_bytes() {
        if skipped() {
            return;
        }
        let memory = random_memory(16 << 20).expect("fills");
        let vm = start(16 << 20, Ram::Shared(&memory));
        let mut serial = vm.serial().expect("connects");
        serial.set_read_timeout(Some(Duration::from_secs(120))).expect("sets");
        vm.run().expect("runs");
        let mut beats = [0; 100];
        serial.read_exact(&mut beats).expect("beats");
        assert_eq!(beats, [guest::BEAT; 100]);
    }

    #[test]
    fn a_vm_leaves_nothing_behind() {
        if skipped() {
            return;
        }
        let vm = start(16 << 20, Ram::Own { content: None });
        let (folder, entry) = (vm.at(""), PathBuf::from(format!("/proc/{}", vm.pid())));
        assert!(folder.exists() && entry.exists());
        drop(vm);
        assert!(!folder.exists() && !entry.exists());
    }

    #[test]
    fn a_qemu_that_refuses_is_quoted() {
        if skipped() {
            return;
        }
        let ram = Ram::Object("memory-backend-file,id=mem,size=16M,mem-path=/no/such/file");
        let error = Vm::start("qemu-system-x86_64", 16 << 20, ram, Role::Source).expect_err("no such file");
        assert!(error.to_string().contains("/no/such"), "{error:#}");
    }
}
