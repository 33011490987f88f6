//! `limosa balloon ctl`: requests of people to a balloon that is served.
//!
//! Law: a job whose client interrupts it or disconnects is cancelled; the server restores what was there before.

use limosa_console::quantity;
use std::cell::{Cell, RefCell};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use limosa_page::PAGE_SIZE;
use limosa_qemu::qmp::{Options, Qmp, QmpError};
use serde_json::{Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::line::StatusLine;
use crate::args::{BalloonCtlArgs, BalloonCtlCommand};
use crate::ctl::Server;
use limosa_console::{check_stdout, print_out, say};

const SERVER: Server =
    Server { command: "limosa balloon", what: "a balloon of limosa", or: ", or a QMP socket of QEMU" };
/// How often the server is asked again.
const TICK: Duration = Duration::from_millis(10);
/// How long a guest may take to report its memory.
const ANSWER: Duration = Duration::from_secs(10);
/// The same, where its report is of use and not what was asked for.
const SHORT_ANSWER: Duration = Duration::from_secs(1);

pub(super) fn run(args: &BalloonCtlArgs) -> anyhow::Result<ExitCode> {
    let qmp = Qmp::connect(&args.control, &Options::default()).map_err(explained)?;
    let ctl = Ctl { qmp, json: args.json };
    match &args.what {
        BalloonCtlCommand::Target { size, wait, force } => {
            if !force {
                ctl.check_used(*size)?;
            }
            ctl.target(*size, *wait)?;
        }
        BalloonCtlCommand::Query => ctl.query()?,
        BalloonCtlCommand::Stats { watch } => ctl.stats(*watch)?,
        BalloonCtlCommand::Hint { squeeze, reserve } => ctl.hint(*squeeze, *reserve)?,
        BalloonCtlCommand::Reporting { what } => ctl.reporting(*what)?,
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

struct Ctl {
    qmp: Qmp,
    json: bool,
}

impl Ctl {
    fn ask(&self, command: &str, arguments: Value) -> anyhow::Result<Value> {
        self.qmp.execute(command, arguments).map_err(explained)
    }

    /// Refuses a target below what the guest says that it uses. One that says nothing is not asked for long.
    fn check_used(&self, size: u64) -> anyhow::Result<()> {
        let Progress { driver, actual, .. } = self.progress(size)?;
        if !driver || size >= actual {
            return Ok(());
        }
        // A signal ends limosa as usual: nothing has been set.
        let pause = |time| {
            thread::sleep(time);
            Ok(())
        };
        let Ok(report) = self.fresh_statistics(SHORT_ANSWER, pause) else { return Ok(()) };
        let available = report.get("stats").and_then(|stats| stats.get("available-memory")).and_then(Value::as_u64);
        let Some(used) = available.map(|available| actual.saturating_sub(available)) else { return Ok(()) };
        if size < used {
            bail!(
                "the guest uses {} of its {}: with {} it would end processes of its own, or panic; --force sets that \
                 target all the same",
                quantity::bytes(used),
                quantity::bytes(actual),
                quantity::bytes(size)
            );
        }
        Ok(())
    }

    fn target(&self, size: u64, wait: Option<Duration>) -> anyhow::Result<()> {
        self.ask("balloon", json!({ "value": size }))?;
        let begun = Instant::now();
        let Some(patience) = wait else {
            if self.json {
                print_out!("{}", json!({ "target": size }));
            } else if self.progress(size)?.driver {
                say!("limosa: target set to {}", quantity::bytes(size));
            } else {
                say!("limosa: target set to {}; no balloon driver is active in the guest yet", quantity::bytes(size));
            }
            return Ok(());
        };
        let (line, broken) = (StatusLine::show(), Break::watch()?);
        loop {
            let Progress { driver, ram, actual, target } = self.progress(size)?;
            if ram != 0 && target != whole_pages(size).min(ram) {
                bail!("another client has changed the target to {}", quantity::bytes(target));
            }
            if driver && actual == target {
                drop(line);
                if self.json {
                    print_out!(
                        "{}",
                        json!({ "target": target, "actual": actual, "ms": quantity::millis(begun.elapsed()) })
                    );
                } else {
                    say!("limosa: the guest has {} after {}", quantity::bytes(actual), quantity::time(begun.elapsed()));
                }
                return Ok(());
            }
            if begun.elapsed() >= patience && !driver {
                bail!(
                    "no balloon driver became active in the guest within {}: is virtio_balloon loaded there? The target \
                     stays set",
                    quantity::time(patience)
                );
            }
            if begun.elapsed() >= patience {
                bail!(
                    "the guest has {} after {}, not {}; it may need that memory (see `stats`), or be paused. The target \
                     stays set: set a larger one, or all (1T), to undo that",
                    quantity::bytes(actual),
                    quantity::time(patience),
                    quantity::bytes(target)
                );
            }
            line.set_message(format!("guest has {}, target {}", quantity::bytes(actual), quantity::bytes(target)));
            broken.pause(TICK)?;
        }
    }

    /// How far the guest is.
    fn progress(&self, asked: u64) -> anyhow::Result<Progress> {
        match self.qmp.execute("query-balloon-device", json!({})) {
            Ok(device) => Ok(Progress {
                driver: device.get("driver") == Some(&Value::Bool(true)),
                ram: number(&device, "ram"),
                actual: number(&device, "actual"),
                target: number(&device, "target"),
            }),
            // A stock QEMU's balloon reports less. Its size is in whole pages, and it cannot give a guest more than its
            // RAM.
            Err(error) if error.is_unknown_command() => {
                let ram = stock_ram(
                    &self.ask("query-memory-size-summary", json!({}))?,
                    &self.ask("query-memory-devices", json!({}))?,
                );
                let actual = number(&self.ask("query-balloon", json!({}))?, "actual");
                Ok(Progress { driver: true, ram, actual, target: whole_pages(asked).min(ram) })
            }
            Err(error) => Err(explained(error)),
        }
    }

    fn query(&self) -> anyhow::Result<()> {
        let device = match self.qmp.execute("query-balloon-device", json!({})) {
            // A stock QEMU's own balloon says less.
            Err(error) if error.is_unknown_command() => self.ask("query-balloon", json!({}))?,
            answer => answer.map_err(explained)?,
        };
        if self.json {
            print_out!("{device}");
            return Ok(());
        }
        let actual = quantity::bytes(number(&device, "actual"));
        if device.get("ram").is_none() {
            print_out!("the guest has {actual}");
            return Ok(());
        }
        let (target, ram) = (quantity::bytes(number(&device, "target")), quantity::bytes(number(&device, "ram")));
        if number(&device, "ram") == 0 {
            print_out!("no guest has shared its memory yet");
        } else if device.get("driver") == Some(&Value::Bool(false)) {
            print_out!("no balloon driver is active in the guest; target {target} of {ram}");
        } else {
            print_out!("the guest has {actual} of {ram}; target {target}");
            print_out!("  its driver took {}", device.get("features").and_then(Value::as_str).unwrap_or("nothing"));
        }
        let reporting = device.get("reporting") == Some(&Value::Bool(true));
        print_out!(
            "  pages that it reports as free are {} to the host",
            if reporting { "given back" } else { "left alone" }
        );
        let counters = device.get("counters").and_then(Value::as_object);
        for (name, count) in counters.into_iter().flatten().filter(|(_, count)| count.as_u64() != Some(0)) {
            print_out!("  {name}: {}", quantity::count(count.as_u64().unwrap_or(0)));
        }
        Ok(())
    }

    fn stats(&self, watch: Option<Duration>) -> anyhow::Result<()> {
        let broken = Break::watch()?;
        loop {
            let report = match self.fresh_statistics(ANSWER, |time| broken.pause(time)) {
                // Who watches ends it by a signal: that is no failure.
                Err(_) if watch.is_some() && broken.came() => return Ok(()),
                report => report?,
            };
            if self.json {
                print_out!("{report}");
            } else {
                let stats = report.get("stats").and_then(Value::as_object);
                let parts = stats.into_iter().flatten().map(|(name, value)| {
                    let value = value.as_u64().unwrap_or(0);
                    let is_bytes = name.ends_with("-memory") || name.starts_with("swap-") || name == "disk-caches";
                    format!("{name} {}", if is_bytes { quantity::bytes(value) } else { quantity::count(value) })
                });
                let parts: Vec<_> = parts.collect();
                print_out!("{}", if watch.is_some() { parts.join(", ") } else { parts.join("\n") });
            }
            let Some(every) = watch else { return Ok(()) };
            check_stdout()?;
            if broken.pause(every).is_err() {
                return Ok(());
            }
        }
    }

    /// Asks the guest for new statistics, and waits for them for so long, with `pause` between two looks.
    fn fresh_statistics(
        &self,
        patience: Duration,
        pause: impl Fn(Duration) -> anyhow::Result<()>,
    ) -> anyhow::Result<Value> {
        let before = self.ask("query-balloon-stats", json!({ "refresh": true }))?;
        let asked = Instant::now();
        loop {
            let report = self.ask("query-balloon-stats", json!({}))?;
            if number(&report, "sequence") > number(&before, "sequence") {
                return Ok(report);
            }
            if asked.elapsed() >= patience {
                bail!(
                    "the guest has not answered for {} s: is it paused, or short of processor time?",
                    patience.as_secs()
                );
            }
            pause(TICK)?;
        }
    }

    fn hint(&self, squeeze: bool, reserve: Option<u64>) -> anyhow::Result<()> {
        let mut arguments = json!({ "squeeze": squeeze });
        if let (Some(reserve), Some(arguments)) = (reserve, arguments.as_object_mut()) {
            arguments.insert("reserve".into(), reserve.into());
        }
        let (line, broken) = (StatusLine::show(), Break::watch()?);
        self.ask("balloon-hint-start", arguments)?;
        let job = loop {
            let job = self.ask("query-balloon-hint", json!({}))?;
            let bytes = |name| quantity::bytes(number(&job, name));
            match job.get("phase").and_then(Value::as_str) {
                Some("completed") => break job,
                Some("inflating") => line.set_message(format!("squeezing: the guest has {}", bytes("actual"))),
                Some("deflating") => line.set_message(format!("giving back: the guest has {}", bytes("actual"))),
                Some("hinting") => line.set_message(format!("{} free so far", bytes("bytes"))),
                Some("asking") => {}
                _ => {
                    let why = job.get("error").and_then(Value::as_str).unwrap_or("the server no longer knows this job");
                    bail!("cannot get the list of free pages: {why}");
                }
            }
            if let Err(error) = broken.pause(TICK) {
                self.ask("balloon-hint-stop", json!({}))?;
                return Err(error);
            }
        };
        drop(line);
        if self.json {
            print_out!("{job}");
            return Ok(());
        }
        if let Some(squeezed) = job.get("squeezed").and_then(Value::as_u64) {
            let has = quantity::bytes(number(&job, "actual"));
            if squeezed == 0 {
                say!("limosa: nothing was squeezed: the guest has no more memory available than it keeps (--reserve)");
            } else {
                say!("limosa: {} squeezed out; the guest has {has} again", quantity::bytes(squeezed));
            }
        }
        print_out!(
            "{} free in {} blocks, listed in {:.1} ms",
            quantity::bytes(number(&job, "bytes")),
            quantity::count(number(&job, "blocks")),
            job.get("list-ms").and_then(Value::as_f64).unwrap_or(0.0)
        );
        Ok(())
    }

    fn reporting(&self, on: bool) -> anyhow::Result<()> {
        self.ask("balloon-reporting", json!({ "enable": on }))?;
        if self.json {
            print_out!("{}", json!({ "reporting": on }));
        } else {
            say!("limosa: pages that the guest reports as free are {}", if on { "given back" } else { "left alone" });
        }
        Ok(())
    }
}

/// The progress of a guest with a request.
struct Progress {
    /// Whether its driver has taken the balloon.
    driver: bool,
    /// Bytes that it was given.
    ram: u64,
    /// Bytes that it has without the balloon.
    actual: u64,
    /// Bytes that it has after the request.
    target: u64,
}

fn explained(error: QmpError) -> anyhow::Error {
    crate::ctl::explained(&SERVER, error)
}

/// Rounds a guest's wanted memory up to whole pages.
fn whole_pages(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(PAGE_SIZE).unwrap_or(u64::MAX)
}

fn number(answer: &Value, name: &str) -> u64 {
    answer.get(name).and_then(Value::as_u64).unwrap_or(0)
}

/// The bytes of memory that a stock QEMU's balloon reckons with, of its `query-memory-size-summary` and
/// `query-memory-devices`: what the VM was started with, and DIMMs. NVDIMMs and virtio-mem, `plugged-memory` to QEMU as
/// well, are no part of it (as 10.0.2 answers `query-balloon` beside them).
fn stock_ram(summary: &Value, devices: &Value) -> u64 {
    let devices = devices.as_array().into_iter().flatten();
    let dimms = devices.filter(|device| device.get("type").and_then(Value::as_str) == Some("dimm"));
    let sizes = dimms.filter_map(|dimm| dimm.get("data")).map(|data| number(data, "size"));
    sizes.fold(number(summary, "base-memory"), u64::saturating_add)
}

/// Signals that interrupt a command.
struct Break(RefCell<Signals>, Cell<bool>);

impl Break {
    fn watch() -> anyhow::Result<Self> {
        Ok(Self(Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot handle signals")?.into(), Cell::default()))
    }

    /// Whether there was one.
    fn came(&self) -> bool {
        if self.0.borrow_mut().pending().next().is_some() {
            self.1.set(true);
        }
        self.1.get()
    }

    /// Sleeps, unless there was a signal.
    fn pause(&self, time: Duration) -> anyhow::Result<()> {
        let until = Instant::now() + time;
        loop {
            if self.came() {
                bail!("interrupted by a signal");
            }
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Ok(());
            }
            thread::sleep(rest.min(Duration::from_millis(20)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stock_balloons_memory_is_the_base_and_its_dimms() {
        const MIB: u64 = 1 << 20;
        let summary = json!({ "base-memory": 256 * MIB, "plugged-memory": 320 * MIB });
        let mut devices = json!([
            { "type": "dimm", "data": { "id": "d", "size": 128 * MIB, "hotpluggable": true } },
            { "type": "nvdimm", "data": { "id": "n", "size": 64 * MIB } },
            { "type": "virtio-mem", "data": { "id": "v", "size": 128 * MIB, "max-size": 256 * MIB } },
            { "type": "virtio-pmem", "data": { "id": "p", "size": 16 * MIB } },
        ]);
        assert_eq!(stock_ram(&summary, &devices), 384 * MIB);
        assert_eq!(stock_ram(&summary, &json!([])), 256 * MIB);
        // The answers come from another program: any number may be in them.
        devices[1] = json!({ "type": "dimm", "data": { "size": u64::MAX } });
        devices[2] = json!({ "type": "dimm" });
        assert_eq!(stock_ram(&summary, &devices), u64::MAX);
        assert_eq!(stock_ram(&json!([]), &json!("dimm")), 0);
    }
}
