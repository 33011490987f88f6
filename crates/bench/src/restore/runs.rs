//! One run of each method.

use std::os::unix::net::UnixStream;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use limosa_page::to_micros;
use limosa_qemu::monitor::{MigrationStatus, Settings};
use serde_json::Value;

use crate::frame::Frame;
use crate::limosa::Prepared;
use crate::measure::{Measured, Stopwatch, millis, process_cpu};
use crate::options::Options;
use crate::stored::{Stored, wait_beat};
use crate::vm::{Ram, Role, Vm};

/// How the VM gets to its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RestoreMethod {
    /// The destination's memory is the snapshot file.
    Mapped,
    Lazy {
        preempt: bool,
    },
    Eager,
    Postcopy {
        preempt: bool,
    },
}

/// Microseconds until the guest ran.
pub(super) const TO_GUEST: &str = "to_guest_us";
/// Microseconds until its first beat arrived.
pub(crate) const TO_BEAT: &str = "to_beat_us";
/// Microseconds until the guest has done its work.
pub(crate) const TO_WORK: &str = "to_work_us";
/// MiB of pages with content per second until all memory was there.
pub(super) const RATE: &str = "rate_mib_s";

/// MiB a second.
pub(super) fn rate(bytes: u64, time: Duration) -> u64 {
    let rate = u128::from(bytes >> 20) * 1_000_000 / time.as_micros().max(1);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

/// The context of one run.
pub(crate) struct Stage<'a> {
    pub(crate) options: &'a Options,
    pub(crate) stored: &'a Stored,
    /// The QEMU that still has the VM, for a postcopy.
    pub(crate) source: Option<&'a Vm>,
}

/// When things happened.
struct Times {
    begin: SystemTime,
    guest: SystemTime,
    beat: SystemTime,
    resident: SystemTime,
}

impl Times {
    /// Follows a destination from the guest's start to the last page. A destination that loads all memory first says
    /// both at about the same time, and not always in this order.
    fn follow(begin: SystemTime, vm: &Vm, serial: &mut UnixStream, lazy: bool) -> Result<Self> {
        let guest = vm.wait_resumed()?;
        wait_beat(serial)?;
        let beat = SystemTime::now();
        let resident = if lazy { vm.wait_migration(&MigrationStatus::Completed)? } else { guest };
        Ok(Self { begin, guest, beat, resident })
    }
}

impl Stage<'_> {
    /// Restores into a fresh destination once.
    pub(crate) fn run(&self, method: RestoreMethod, frame: &Frame) -> Result<Measured> {
        let Self { options, stored, .. } = self;
        let object = if method == RestoreMethod::Mapped { Some(stored.mapped_object(options)?) } else { None };
        let ram = object.as_deref().map_or(Ram::Own { content: None }, Ram::Object);
        let vm = Vm::start(&options.qemu, stored.memory, ram, Role::Destination)?;
        let mut serial = vm.serial()?;
        if !matches!(method, RestoreMethod::Postcopy { .. }) {
            stored.warm()?;
        }
        frame.touch()?;
        let destination_before = process_cpu(vm.pid())?;
        let (measured, times) = match method {
            RestoreMethod::Mapped => self.by_limosa(&vm, &mut serial, &["--memory", "mapped"], false)?,
            RestoreMethod::Lazy { preempt } => {
                let options = ["--memory", "lazy", "--preempt", if preempt { "on" } else { "off" }];
                self.by_limosa(&vm, &mut serial, &options, true)?
            }
            RestoreMethod::Eager => self.by_load(&vm, &mut serial)?,
            RestoreMethod::Postcopy { preempt } => self.by_postcopy(&vm, &mut serial, preempt)?,
        };
        let destination = process_cpu(vm.pid())?.saturating_sub(destination_before);
        let since = |at: SystemTime| at.duration_since(times.begin).context("the clock was set back meanwhile");
        let micros = |at| since(at).map(to_micros);
        let resident = since(times.resident)?;
        Ok(Measured { wall: resident, ..measured }
            .with(TO_GUEST, micros(times.guest)?)
            .with(TO_BEAT, micros(times.beat)?)
            .with(RATE, rate(stored.content, resident))
            .with("destination_cpu_ms", millis(destination)))
    }

    fn by_limosa(&self, vm: &Vm, serial: &mut UnixStream, memory: &[&str], lazy: bool) -> Result<(Measured, Times)> {
        let prepared = Prepared::new(self.options, "restore")?
            .arguments(memory)
            .arguments(&["--run"])
            .arguments(&self.stored.key.iter().map(String::as_str).collect::<Vec<_>>())
            .path(Some("--qmp"), &vm.limosa_monitor())
            .path(None, &self.stored.path);
        let watch = Stopwatch::start(&[vm.pid()])?;
        let before = process_cpu(vm.pid())?;
        let begin = SystemTime::now();
        let limosa = prepared.start()?;
        let times = Times::follow(begin, vm, serial, lazy).with_context(|| format!("limosa: {}", limosa.said()))?;
        let said = limosa.finish()?;
        let mut measured = watch.stop()?;
        let destination = process_cpu(vm.pid())?.saturating_sub(before);
        measured = measured.clone().with("limosa_cpu_ms", millis(measured.cpu.saturating_sub(destination)));
        if let Some(requests) = said.pointer("/lazy/requests").and_then(Value::as_u64) {
            measured = measured.with("requests", requests);
        }
        Ok((measured, times))
    }

    fn by_load(&self, vm: &Vm, serial: &mut UnixStream) -> Result<(Measured, Times)> {
        let watch = Stopwatch::start(&[vm.pid()])?;
        let begin = SystemTime::now();
        vm.tune(&[("mapped-ram", true), ("multifd", true)])?;
        vm.monitor.migrate_incoming(&format!("file:{}", self.stored.path.display()))?;
        let times = Times::follow(begin, vm, serial, false)?;
        Ok((watch.stop()?, times))
    }

    fn by_postcopy(&self, vm: &Vm, serial: &mut UnixStream, preempt: bool) -> Result<(Measured, Times)> {
        let source = self.source.context("a source to send the VM")?;
        let uri = format!("unix:{}", vm.at("incoming").display());
        for side in [source, vm] {
            // Off first: what is on from a round before would forbid the other.
            side.monitor.apply_settings(&Settings::new().capability("postcopy-preempt", false))?;
            side.tune(&[("postcopy-ram", true), ("postcopy-preempt", preempt)])?;
        }
        vm.monitor.migrate_incoming(&uri)?;
        // From here on the guest runs, as the one did that was saved.
        source.run()?;
        source.forget_events()?;
        let watch = Stopwatch::start(&[vm.pid(), source.pid()])?;
        let before = process_cpu(source.pid())?;
        let begin = SystemTime::now();
        source.postcopy_to(&uri)?;
        vm.wait_postcopy()?;
        let times = Times::follow(begin, vm, serial, true)?;
        let measured = watch.stop()?.with("source_cpu_ms", millis(process_cpu(source.pid())?.saturating_sub(before)));
        source.wait_migration(&MigrationStatus::Completed)?;
        let state = source.monitor.migration()?.raw;
        let early = state.pointer("/ram/precopy-bytes").and_then(Value::as_u64).unwrap_or(0);
        Ok((measured.with("precopy_mib", early >> 20), times))
    }
}
