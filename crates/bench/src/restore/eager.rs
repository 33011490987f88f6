//! The eager cells: a saved VM sent to a QEMU by limosa, compared with the same VM sent there by another QEMU.
//!
//! Law: both senders do the same. The pages are the same, and so are destination, unix socket and number of channels;
//! nothing is compressed, limited, or looked at for zeros on the channels. The VM is paused, so that all is sent once.
//! What the sender costs is a separate process either way, and counted by itself: it is what a host with guests on it
//! has to spare.

use std::time::SystemTime;

use anyhow::{Context, Result};
use limosa_qemu::monitor::{MigrationStatus, Settings};
use serde_json::Value;

use super::runs::{RATE, rate};
use crate::frame::{Frame, Series};
use crate::limosa::Prepared;
use crate::measure::{Measured, Stopwatch, millis, process_cpu};
use crate::options::Options;
use crate::report::{Bound, Report, Target, ratio};
use crate::stored::Stored;
use crate::vm::{Ram, Role, Vm};

/// Milliseconds of CPU of the sending process.
const SENDER: &str = "sender_cpu_ms";

/// Multifd channels; with 0 the main channel carries all.
const CHANNELS: [Option<u8>; 4] = [None, Some(1), Some(2), Some(4)];

/// Who sends, and on how many channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Eager {
    limosa: bool,
    channels: Option<u8>,
}

impl Eager {
    /// All of them, those to compare next to each other.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        CHANNELS.into_iter().flat_map(|channels| [true, false].map(|limosa| Self { limosa, channels }))
    }

    /// As the report calls it.
    pub(super) fn name(self) -> String {
        let who = if self.limosa { "limosa" } else { "QEMU" };
        match self.channels {
            None => format!("{who}, main channel"),
            Some(1) => format!("{who}, 1 channel"),
            Some(count) => format!("{who}, {count} channels"),
        }
    }

    /// Sends the VM once, to a fresh destination.
    pub(super) fn run(self, options: &Options, stored: &Stored, source: &Vm, frame: &Frame) -> Result<Measured> {
        let vm = Vm::start(&options.qemu, stored.memory, Ram::Own { content: None }, Role::Destination)?;
        stored.warm()?;
        frame.touch()?;
        let before = process_cpu(vm.pid())?;
        let (begin, measured) =
            if self.limosa { self.by_limosa(options, stored, &vm)? } else { self.by_qemu(source, &vm)? };
        let end = vm.wait_migration(&MigrationStatus::Completed)?;
        let wall = end.duration_since(begin).context("the clock was set back meanwhile")?;
        let destination = process_cpu(vm.pid())?.saturating_sub(before);
        Ok(Measured { wall, ..measured }
            .with(RATE, rate(stored.content, wall))
            .with("destination_cpu_ms", millis(destination)))
    }

    fn by_limosa(self, options: &Options, stored: &Stored, vm: &Vm) -> Result<(SystemTime, Measured)> {
        let count = self.channels.map(|count| count.to_string());
        let channels = count.as_deref().map_or(vec![], |count| vec!["--channels", count]);
        let prepared = Prepared::new(options, "restore")?
            .arguments(&["--memory", "eager", "--via", "socket", "--paused"])
            .arguments(&channels)
            .path(Some("--qmp"), &vm.limosa_monitor())
            .path(None, &stored.path);
        let (all, sender) = (Stopwatch::start(&[vm.pid()])?, Stopwatch::start(&[])?);
        let begin = SystemTime::now();
        let said = prepared.start()?.finish()?;
        let (sender, mut measured) = (sender.stop()?, all.stop()?);
        measured = measured.with(SENDER, millis(sender.cpu));
        for (name, place) in [("pages", "/pages/normal"), ("writes", "/channel/calls_out")] {
            if let Some(value) = said.pointer(place).and_then(Value::as_u64) {
                measured = measured.with(name, value);
            }
        }
        Ok((begin, measured))
    }

    fn by_qemu(self, source: &Vm, vm: &Vm) -> Result<(SystemTime, Measured)> {
        let uri = format!("unix:{}", vm.at("incoming").display());
        // QEMU does not send a VM again that has not run since it was sent.
        source.run()?;
        source.stop()?;
        source.forget_events()?;
        let all = Stopwatch::start(&[vm.pid(), source.pid()])?;
        let before = process_cpu(source.pid())?;
        let begin = SystemTime::now();
        for side in [source, vm] {
            side.tune(&[("multifd", self.channels.is_some())])?;
            let parameters = Settings::new()
                .parameter("multifd-channels", self.channels.unwrap_or(2))
                .parameter("zero-page-detection", "none");
            side.monitor.apply_settings(&parameters)?;
        }
        vm.monitor.migrate_incoming(&uri)?;
        source.monitor.migrate(&uri, false)?;
        source.wait_migration(&MigrationStatus::Completed)?;
        let sender = process_cpu(source.pid())?.saturating_sub(before);
        let mut measured = all.stop()?.with(SENDER, millis(sender));
        if let Some(ram) = source.monitor.migration()?.ram {
            measured = measured.with("pages", ram.normal);
        }
        Ok((begin, measured))
    }
}

/// limosa compared with QEMU on as many channels: wall time, and what the sender costs.
pub(super) fn judge(report: &mut Report, all: &[Series], case: &str, why: &str) {
    for channels in CHANNELS {
        let [limosa, qemu] = [true, false].map(|limosa| Eager { limosa, channels }.name());
        for (figure, most) in [("wall", 1.0), (SENDER, 0.7)] {
            let found = ratio(all, case, &limosa, &qemu, figure);
            // On the main channel each page has its own header, so limosa reads the file where QEMU has the memory at
            // hand: a copy more, which is reported and promised nothing.
            if channels.is_some() || figure == "wall" {
                let name = format!("{case}: {figure} of {limosa} / {qemu}");
                let got = found.as_ref().map(|ratio| ratio.median);
                report.targets.push(Target::new(name, Bound::AtMost(most), got, why));
            }
            report.ratios.extend(found);
        }
        report.ratios.extend(ratio(all, case, &limosa, &qemu, "cpu"));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::machine::Machine;

    #[test]
    fn the_two_that_are_compared_follow_each_other() {
        let names: Vec<_> = Eager::all().map(Eager::name).collect();
        assert_eq!(names.len(), 8);
        assert_eq!(names[..2], ["limosa, main channel", "QEMU, main channel"]);
        assert_eq!(names[6..], ["limosa, 4 channels", "QEMU, 4 channels"]);
    }

    #[test]
    fn wall_and_sender_have_a_target_on_every_number_of_multifd_channels() {
        let series = |name: &str, wall: u64, sender: u64| Series {
            case: "1 GiB eagerly".into(),
            variant: name.into(),
            runs: vec![Measured { wall: Duration::from_millis(wall), ..Measured::default() }.with(SENDER, sender)],
        };
        let all = [series("limosa, 2 channels", 900, 300), series("QEMU, 2 channels", 1000, 400)];
        let mut report = Report::new("restore", Machine::this("/none"), 1, &all);
        judge(&mut report, &all, "1 GiB eagerly", crate::report::NOT_RUN);
        let found: Vec<_> = report.targets.iter().map(|target| (target.got, target.met)).collect();
        let none = (None, None);
        let expected = [none, none, none, (Some(0.9), Some(true)), (Some(0.75), Some(false)), none, none];
        assert_eq!(found, expected);
        assert_eq!(report.targets[4].name, "1 GiB eagerly: sender_cpu_ms of limosa, 2 channels / QEMU, 2 channels");
    }
}
