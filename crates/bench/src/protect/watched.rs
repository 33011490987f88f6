//! One series of checkpoints: who keeps them, and what is seen of it for some seconds.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use limosa_page::to_u64;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::bare::Bare;
use super::load::{Guest, Load};
use super::pauses::{self, quantile_us};
use crate::limosa::{Limosa, Prepared};
use crate::measure::{Measured, Stopwatch, millis, process_cpu};
use crate::options::Options;
use crate::scratch::Scratch;
use crate::vm::{Ram, Role, Vm};

/// How long a series is watched.
const TIME: Duration = Duration::from_secs(4);
/// How long the guest is watched before, for what it does unprotected.
const BEFORE: Duration = Duration::from_secs(2);
/// How long a program may take for what is expected of it: for one that hangs, not a measure.
const LIMIT: Duration = Duration::from_secs(120);

/// The way in which checkpoints are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// `limosa protect DIR`.
    Here,
    /// `limosa protect --to` a `limosa keep` of this machine, over TCP.
    Elsewhere,
    /// limosa's receiver with nothing behind it.
    Bare,
}

impl Way {
    pub(super) const ALL: [Self; 3] = [Self::Here, Self::Elsewhere, Self::Bare];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Here => "limosa protect",
            Self::Elsewhere => "limosa protect --to",
            Self::Bare => "bare keeper",
        }
    }
}

/// Watches one series.
pub(super) fn run(options: &Options, qemu: &str, size: u64, (load, period): (Load, u64), way: Way) -> Result<Measured> {
    let vm = Vm::start(qemu, size, Ram::Own { content: None }, Role::Source)?;
    let guest = Guest::start(vm.serial()?, load)?;
    vm.run()?;
    guest.wait_beats(100)?;
    let before = guest.beats_in(BEFORE);
    let period_text = format!("{period}ms");
    let arguments = ["--every", period_text.as_str(), "--output", "free"];
    let monitor = vm.limosa_monitor();
    let keeper = match way {
        Way::Here => Keeper::Limosa(Protection::here(options, &monitor, &arguments)?),
        Way::Elsewhere => Keeper::Limosa(Protection::elsewhere(options, &monitor, &arguments, &[], &[])?),
        Way::Bare => Keeper::Bare(Bare::start(&vm, period)?),
    };
    vm.forget_events()?;
    let qemu_before = process_cpu(vm.pid())?;
    let watch = Stopwatch::start(&keeper.pids(&vm))?;
    let beats = guest.beats();
    let pauses = pauses::watch(&vm, TIME)?;
    let beats = guest.beats().saturating_sub(beats);
    let measured = watch.stop()?;
    let qemu_cpu = process_cpu(vm.pid())?.saturating_sub(qemu_before);
    let said = keeper.finish(&vm)?;
    ensure!(!pauses.is_empty(), "no checkpoint was made in {} s", TIME.as_secs());
    let rate = |beats: u64, time: Duration| beats.saturating_mul(1000) / millis(time).max(1);
    let permille = rate(beats, measured.wall).saturating_mul(1000) / rate(before, BEFORE).max(1);
    let keeper_cpu = measured.cpu.saturating_sub(qemu_cpu);
    let mut measured = measured
        .with("pause_median_us", quantile_us(&pauses, 0.5))
        .with("pause_p95_us", quantile_us(&pauses, 0.95))
        .with("pause_p99_us", quantile_us(&pauses, 0.99))
        .with("pause_max_us", quantile_us(&pauses, 1.0))
        .with("checkpoints", to_u64(pauses.len()))
        .with("beats_permille", permille)
        .with("qemu_cpu_ms", millis(qemu_cpu))
        .with("keeper_cpu_ms", millis(keeper_cpu));
    let pages = said.get("pages");
    let number = |name: &str| pages.and_then(|pages| pages.get(name)).and_then(Value::as_u64);
    if let (Some(sent), Some(unchanged)) = (number("contents"), number("unchanged")) {
        let kept = sent.saturating_sub(unchanged);
        measured = measured.with("pages", sent).with("kept_permille", kept.saturating_mul(1000) / sent.max(1));
    }
    Ok(measured)
}

/// The keeper of the checkpoints.
enum Keeper {
    Limosa(Protection),
    Bare(Bare),
}

impl Keeper {
    fn pids(&self, vm: &Vm) -> Vec<u32> {
        let mut pids = vec![vm.pid()];
        if let Self::Limosa(protection) = self {
            pids.extend(protection.pids());
        }
        pids
    }

    /// Ends the series; returns its report, if it makes one.
    fn finish(self, vm: &Vm) -> Result<Value> {
        match self {
            Self::Limosa(protection) => protection.finish(),
            Self::Bare(bare) => bare.finish(vm).map(|()| Value::Null),
        }
    }
}

/// A VM's protection by limosa.
pub(super) struct Protection {
    // Ends before its folder.
    protect: Option<Limosa>,
    keep: Option<Limosa>,
    folder: Scratch,
}

impl Protection {
    /// `limosa protect`, once its first checkpoint counts.
    pub(super) fn here(options: &Options, monitor: &Path, arguments: &[&str]) -> Result<Self> {
        let mut protection = Self::prepare(options)?;
        let prepared = Prepared::new(options, "protect")?.arguments(arguments).path(Some("--qmp"), monitor);
        protection.protect = Some(prepared.path(None, &protection.kept()).start()?);
        protection.wait_first()
    }

    /// `limosa protect --to` a `limosa keep` with these options, and with this QEMU if there is one.
    pub(super) fn elsewhere(
        options: &Options,
        monitor: &Path,
        arguments: &[&str],
        keep: &[&str],
        qemu: &[OsString],
    ) -> Result<Self> {
        let mut protection = Self::prepare(options)?;
        let mut prepared = Prepared::without_report(options, "keep")?.arguments(keep).arguments(&["tcp:127.0.0.1:0"]);
        prepared = prepared.path(None, &protection.kept());
        if !qemu.is_empty() {
            prepared = prepared.command_line(qemu);
        }
        let mut keeper = prepared.start()?;
        let uri = wait_until("the keeper to listen", || {
            keeper.check()?;
            let said = keeper.said();
            let line = said.lines().find_map(|line| line.split_once("listening on "));
            Ok(line.map(|(_, uri)| uri.to_owned()))
        })?;
        protection.keep = Some(keeper);
        let prepared = Prepared::new(options, "protect")?.arguments(arguments).path(Some("--qmp"), monitor);
        protection.protect = Some(prepared.arguments(&["--to", &uri]).start()?);
        protection.wait_first()
    }

    fn prepare(options: &Options) -> Result<Self> {
        let folder = Scratch::new_in(&options.dir.clone().unwrap_or_else(std::env::temp_dir))?;
        Ok(Self { protect: None, keep: None, folder })
    }

    /// The directory of the checkpoints.
    pub(super) fn kept(&self) -> PathBuf {
        self.folder.path().join("kept")
    }

    fn wait_first(mut self) -> Result<Self> {
        let first = self.kept().join("checkpoint.limosa");
        wait_until("the first checkpoint", || {
            self.check()?;
            Ok(first.exists().then_some(()))
        })?;
        Ok(self)
    }

    pub(super) fn pids(&self) -> impl Iterator<Item = u32> {
        self.protect.iter().chain(&self.keep).map(Limosa::pid)
    }

    /// Fails if one of its programs has failed.
    pub(super) fn check(&mut self) -> Result<()> {
        self.protect.iter_mut().chain(&mut self.keep).try_for_each(Limosa::check)
    }

    /// Ends it; its report.
    pub(super) fn finish(mut self) -> Result<Value> {
        self.check()?;
        let limosa = self.protect.take().context("a protection that has not ended")?;
        let pid = i32::try_from(limosa.pid()).ok().and_then(Pid::from_raw).context("a process id")?;
        kill_process(pid, Signal::INT).context("ending limosa")?;
        limosa.finish()
    }
}

/// Waits until `found` finds something.
pub(super) fn wait_until<T>(what: &str, mut found: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(found) = found()? {
            return Ok(found);
        }
        ensure!(Instant::now() < end, "waited {} s for {what}", LIMIT.as_secs());
        thread::sleep(Duration::from_millis(2));
    }
}
