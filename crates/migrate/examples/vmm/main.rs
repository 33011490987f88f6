//! A VMM in miniature, of rust-vmm's parts, whose guest moves to another process while it runs.
//!
//! `cargo run --example vmm` boots a guest under /dev/kvm, starts itself once more as the destination, and migrates the
//! guest there over a socket. `machine` is what a VMM has anyway: memory by `vm-memory`, a vCPU by `kvm-ioctls`, a
//! device. This file is what migration adds to it: two traits, the dirty logs, and a page of glue for each end.

mod machine;

use std::env;
use std::io;
use std::os::fd::AsFd as _;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use limosa_channel::Channel;
use limosa_memory::GuestMemory;
use limosa_memory::dirty::KvmLog;
use limosa_memory::dirty::{DirtyLogs, SoftwareDirtyLog, Writers};
use limosa_memory::rust_vmm::attach_dirty_bitmap;
use limosa_migrate::live::TimeoutStrategy;
use limosa_migrate::{
    Handle, IncomingOutcome, IncomingVm, LiveDestination, LiveOutcome, LiveSource, LiveVm, MigrationParams, VmError,
};
use limosa_page::error_with_causes;
use limosa_stream::{Configuration, DeviceSections, OpaqueSection};
use machine::Machine;

/// Name of the machine in the stream: both ends must be the same.
const MACHINE: &str = "example-vmm-1";

/// The source's side.
impl LiveVm for Machine {
    fn configuration(&self) -> Configuration {
        Configuration::new(MACHINE)
    }

    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The vCPU, whose writes KVM logs, and the device, whose writes `vm-memory` marks.
    fn writers(&self) -> Writers {
        Writers::VCPUS | Writers::DEVICES
    }

    fn pause(&self) -> Result<(), VmError> {
        Ok(self.stop()?)
    }

    fn resume(&self) -> Result<(), VmError> {
        self.go();
        Ok(())
    }

    fn device_sections(&self) -> Result<DeviceSections, VmError> {
        let mut sections = DeviceSections::new();
        sections.push("vcpu", 0, 1, &self.state())?;
        Ok(sections)
    }
}

/// The destination's side.
impl IncomingVm for Machine {
    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    fn load_device(&self, section: OpaqueSection<'_>) -> Result<(), VmError> {
        match (section.name, section.version) {
            ("vcpu", 1) => Ok(self.load(section.state)?),
            (name, version) => Err(format!("there is no device {name} of version {version}").into()),
        }
    }

    fn start(&self) -> Result<(), VmError> {
        // All of its memory is here: nothing the guest wrote was lost.
        self.check()?;
        self.go();
        Ok(())
    }
}

/// Boots a guest and gives it away.
fn source() -> Result<()> {
    let machine = Machine::new()?;
    machine.boot()?;
    machine.go();
    machine.wait_for_laps(20)?;

    // The logs: every writer of memory is covered by one of them, or this is refused.
    let marks = SoftwareDirtyLog::new(&machine.memory, Writers::DEVICES);
    attach_dirty_bitmap(&machine.devices, &machine.memory, &marks.bitmap())?;
    let logs = vec![Box::new(KvmLog::new(machine.slots.clone())) as _, Box::new(marks) as _];
    let logs = DirtyLogs::new(machine.writers(), logs)?;

    // The other process, at the other end of a socket pair. A listener would do as well: `Channel::connect`.
    let (channel, far) = Channel::pair()?;
    let mut destination = Command::new(env::current_exe()?).arg("incoming").stdin(Stdio::from(far)).spawn()?;

    let handle = Handle::new();
    let params = MigrationParams::default()
        .downtime_limit(Duration::from_millis(5))
        .stalled_rounds(Some(5))
        .timeout_strategy(TimeoutStrategy::Pause);
    let role = LiveSource::new(&machine, logs, channel, &handle).options(params).destination_zeroed(true);
    let outcome = role.on_round(|round| println!("source: {:?}, {} pages", round.kind, round.normal)).run();
    match outcome {
        LiveOutcome::Completed(stats) => {
            println!("source: the guest left after {} laps and stood still for {:?}", machine.laps(), stats.downtime);
        }
        // The guest runs on here: another attempt may be made.
        LiveOutcome::Resumed { error, .. } => Err(error).context("the guest stays here")?,
        // Only a look at the destination tells which end has it: `resume` or `discard`.
        LiveOutcome::Undecided(undecided) => bail!("look at the destination: {}", error_with_causes(undecided.why())),
        other => bail!("{other:?}"),
    }
    let status = destination.wait()?;
    if status.success() { Ok(()) } else { bail!("destination: {status}") }
}

/// Waits for a guest and lets it run for a while.
fn destination() -> Result<()> {
    let machine = Machine::new()?;
    let channel = Channel::from_fd(io::stdin().as_fd().try_clone_to_owned()?)?;
    let handle = Handle::new();
    let role = LiveDestination::new(&machine, channel, &handle);
    match role.run() {
        IncomingOutcome::Running(stats) => {
            let pages = stats.received.normal_pages;
            println!("destination: the guest came with {pages} pages, {} laps behind it", machine.laps());
        }
        IncomingOutcome::Failed(error) => Err(error).context("nothing runs here")?,
        IncomingOutcome::Undecided(arrival) => bail!("look at the source: {}", error_with_causes(arrival.why())),
        other => bail!("{other:?}"),
    }
    let arrived = machine.laps();
    machine.wait_for_laps(arrived + 20)?;
    machine.stop()?;
    machine.check()?;
    println!("destination: it has run {} laps more and its memory is whole", machine.laps() - arrived);
    Ok(())
}

fn main() -> ExitCode {
    let end = if env::args().nth(1).as_deref() == Some("incoming") { "destination" } else { "source" };
    let done = if end == "destination" { destination() } else { source() };
    match done.with_context(|| end) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
