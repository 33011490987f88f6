//! Checkpoints of a running VM: `limosa protect`, compared with a keeper that throws all of it away.
//!
//! Every run has a fresh VM of the newest QEMU (TCG) whose guest beats all the while and rewrites none of its memory,
//! or 32 MiB in turns. Pauses are those of QEMU's own events `STOP` and `RESUME`, for both contestants alike. The clock
//! runs from the first checkpoint on, for [`TIME`].

mod bare;
mod load;
mod pauses;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use limosa_testkit::Series as QemuSeries;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use self::load::Load;
use crate::frame::{Contestant, Frame, interleave};
use crate::limosa::{Limosa, Prepared};
use crate::machine::Machine;
use crate::measure::{Measured, Stopwatch, millis, process_cpu};
use crate::options::Options;
use crate::report::{Bound, NOT_RUN, Report, Target, figure, ratio};
use crate::scratch::Scratch;
use crate::vm::{Ram, Role, Vm};

/// How long a series is watched.
const TIME: Duration = Duration::from_secs(4);
/// How long a first checkpoint may take.
const FIRST: Duration = Duration::from_secs(60);

const LIMOSA: &str = "limosa protect";
const BARE: &str = "bare keeper";

/// The periods, in milliseconds.
const PERIODS: [u64; 4] = [10, 20, 100, 1000];

/// The guest's loads, and their names.
const LOADS: [(&str, Load); 3] = [("idle", Load::None), ("moderate", Load::Moderate), ("heavy", Load::Heavy)];

/// Runs the bench.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let qemu = QemuSeries::Newest.program()?;
    let qemu = qemu.to_str().context("a path that is not UTF-8")?;
    let size = options.size.unwrap_or(256 << 20);
    let mut contestants = Vec::new();
    for (name, load) in LOADS {
        for period in PERIODS {
            let case = format!("{name}, {period} ms");
            for (variant, limosa) in [(LIMOSA, true), (BARE, false)] {
                if options.wants(&case, variant) {
                    contestants.push(Contestant {
                        case: case.clone(),
                        variant: variant.to_owned(),
                        run: Box::new(move |_| one(options, qemu, size, (load, period), limosa)),
                    });
                }
            }
        }
    }
    ensure!(!contestants.is_empty(), options.none_selected());
    let all = interleave(&mut contestants, options.rounds, &Frame { touch: 0 }, &mut |line| options.tell(line))?;
    let mut report = Report::new("protect", Machine::this(qemu), options.rounds, &all);
    for (name, _) in LOADS {
        for period in PERIODS {
            let case = format!("{name}, {period} ms");
            for name in ["pause_median_us", "pause_p99_us"] {
                report.ratios.extend(ratio(&all, &case, LIMOSA, BARE, name));
            }
        }
    }
    let of = |case: &str, name: &str| figure(&all, case, LIMOSA, name).map(|spread| spread.median);
    let mut target = |name: String, bound, got| report.targets.push(Target::new(name, bound, got, NOT_RUN));
    target("idle, 20 ms: median pause, us".into(), Bound::AtMost(2000.0), of("idle, 20 ms", "pause_median_us"));
    target("idle, 20 ms: 99% of pauses, us".into(), Bound::AtMost(5000.0), of("idle, 20 ms", "pause_p99_us"));
    let heavy = ratio(&all, "heavy, 100 ms", LIMOSA, BARE, "pause_median_us").map(|ratio| ratio.median);
    target(format!("heavy, 100 ms: median pause of {LIMOSA} / {BARE}"), Bound::AtMost(1.2), heavy);
    let kept = of("heavy, 100 ms", "kept_permille");
    target("heavy, 100 ms: pages kept of 1000 sent".into(), Bound::AtMost(1000.0), kept);
    let beats = of("moderate, 100 ms", "beats_permille");
    target("moderate, 100 ms: beats of 1000 unprotected".into(), Bound::AtLeast(900.0), beats);
    Ok(report)
}

/// Watches one series.
fn one(options: &Options, qemu: &str, size: u64, (load, period): (Load, u64), limosa: bool) -> Result<Measured> {
    let vm = Vm::start(qemu, size, Ram::Own { content: None }, Role::Source)?;
    let guest = load::Guest::start(vm.serial()?, load)?;
    vm.run()?;
    guest.wait_beats(100)?;
    let before = guest.beats_in(Duration::from_secs(1));
    let mut keeper = match limosa {
        true => Keeper::limosa(options, &vm, period)?,
        false => Keeper::Bare(bare::Bare::start(&vm, period)?),
    };
    vm.forget_events()?;
    let qemu_before = process_cpu(vm.pid())?;
    let watch = Stopwatch::start(&keeper.pids(&vm))?;
    let beats = guest.beats();
    let pauses = pauses::watch(&vm, TIME)?;
    let beats = guest.beats().saturating_sub(beats);
    let measured = watch.stop()?;
    let qemu_cpu = process_cpu(vm.pid())?.saturating_sub(qemu_before);
    keeper.check()?;
    let said = keeper.finish(&vm)?;
    ensure!(pauses.count() > 0, "no checkpoint was made in {} s", TIME.as_secs());
    let rate = |beats: u64, time: Duration| beats.saturating_mul(1000) / millis(time).max(1);
    let permille = rate(beats, measured.wall).saturating_mul(1000) / rate(before, Duration::from_secs(1)).max(1);
    let keeper_cpu = measured.cpu.saturating_sub(qemu_cpu);
    let mut measured = measured
        .with("pause_median_us", pauses.quantile_us(0.5))
        .with("pause_p95_us", pauses.quantile_us(0.95))
        .with("pause_p99_us", pauses.quantile_us(0.99))
        .with("pause_max_us", pauses.quantile_us(1.0))
        .with("checkpoints", pauses.count())
        .with("beats_permille", permille)
        .with("qemu_cpu_ms", millis(qemu_cpu))
        .with("keeper_cpu_ms", millis(keeper_cpu));
    let number = |name: &str| said.get(name).and_then(Value::as_u64);
    if let (Some(pages), Some(equal)) = (number("pages"), number("equal_pages")) {
        measured = measured.with("pages", pages);
        measured = measured.with("kept_permille", pages.saturating_sub(equal).saturating_mul(1000) / pages.max(1));
    }
    Ok(measured)
}

/// The keeper of the checkpoints.
enum Keeper {
    Limosa { limosa: Limosa, _folder: Scratch },
    Bare(bare::Bare),
}

impl Keeper {
    fn limosa(options: &Options, vm: &Vm, period: u64) -> Result<Self> {
        let folder = Scratch::new_in(&options.dir.clone().unwrap_or_else(std::env::temp_dir))?;
        let kept = folder.path().join("kept");
        let prepared = Prepared::new(options, "protect")?
            .arguments(&["--every", &format!("{period}ms"), "--output", "free"])
            .path(Some("--qmp"), &vm.limosa_monitor())
            .path(None, &kept);
        let mut limosa = prepared.start()?;
        wait_for(&kept.join("checkpoint.limosa"), || limosa.check())?;
        Ok(Self::Limosa { limosa, _folder: folder })
    }

    fn pids(&self, vm: &Vm) -> Vec<u32> {
        match self {
            Self::Limosa { limosa, .. } => vec![vm.pid(), limosa.pid()],
            Self::Bare(_) => vec![vm.pid()],
        }
    }

    fn check(&mut self) -> Result<()> {
        match self {
            Self::Limosa { limosa, .. } => limosa.check(),
            Self::Bare(_) => Ok(()),
        }
    }

    /// Ends the series; returns its report, if it makes one.
    fn finish(self, vm: &Vm) -> Result<Value> {
        match self {
            Self::Limosa { limosa, _folder } => {
                let pid = i32::try_from(limosa.pid()).ok().and_then(Pid::from_raw).context("a process id")?;
                kill_process(pid, Signal::INT).context("ending limosa")?;
                limosa.finish()
            }
            Self::Bare(bare) => bare.finish(vm).map(|()| Value::Null),
        }
    }
}

/// Waits until a file is there; `alive` fails if it will not be.
fn wait_for(path: &Path, mut alive: impl FnMut() -> Result<()>) -> Result<()> {
    let end = Instant::now() + FIRST;
    while !path.exists() {
        alive()?;
        ensure!(Instant::now() < end, "{} did not appear within {} s", path.display(), FIRST.as_secs());
        thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}
