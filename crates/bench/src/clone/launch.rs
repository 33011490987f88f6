//! Starting the VMs of one run: the command lines, and the programs that run them.

use std::ffi::OsString;
use std::fs::File;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::guests::Guests;
use crate::guest::Task;
use crate::limosa::{Limosa, Prepared};
use crate::options::Options;
use crate::process::Process;
use crate::stored::Stored;
use crate::vm::{machine, own_memory};

/// How the VMs come to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloneMethod {
    /// Each QEMU boots its firmware: there is no snapshot.
    Bare,
    /// Each QEMU loads the snapshot by itself.
    Eager,
    /// `limosa run --memory lazy` for each.
    Lazy,
    /// One `limosa clone` for all.
    Mapped,
    /// The same, with the working set read ahead.
    ReadAhead,
    /// As mapped, of QEMUs that wait already.
    Pool,
}

impl CloneMethod {
    /// Whether the VMs come from the snapshot.
    pub(super) fn restores(self) -> bool {
        self != Self::Bare
    }
}

/// A program that is about to be started.
pub(super) enum Launch {
    Qemu(Command),
    Limosa(Prepared),
}

/// A program that was started.
enum Launched {
    Qemu(Process),
    Limosa(Limosa),
}

/// The programs that start the VMs of one run.
pub(super) struct Launches {
    waiting: std::vec::IntoIter<Launch>,
    launched: Vec<Launched>,
    /// VMs that each program starts.
    each: usize,
}

impl Launches {
    /// Prepares the start of this number of VMs; for [`CloneMethod::Pool`] their QEMUs wait when this returns.
    pub(super) fn prepare(
        method: CloneMethod,
        options: &Options,
        stored: &Stored,
        guests: &mut Guests,
        vms: usize,
    ) -> Result<Self> {
        let line = command_line(options, stored, guests)?;
        let read_ahead = if method == CloneMethod::ReadAhead { "on" } else { "off" };
        let clones = |option: &str| -> Result<Prepared> {
            Ok(Prepared::new(options, "clone")?
                .arguments(&["--memory", "mapped", "--read-ahead", read_ahead, option, &vms.to_string()])
                .path(Some("--dir"), &guests.folder().path().join("clones"))
                .path(None, &stored.path)
                .command_line(&line))
        };
        let (each, launches) = match method {
            CloneMethod::Bare => (1, (0..vms).map(|_| qemu(&line, guests, &[])).collect::<Result<_>>()?),
            CloneMethod::Eager => {
                let file = format!("file:{}", stored.path.display());
                let globals = ["-global", "migration.mapped-ram=on", "-global", "migration.x-multifd=on"];
                let words = [&globals[..], &["-incoming", &file]].concat();
                (1, (0..vms).map(|_| qemu(&line, guests, &words)).collect::<Result<_>>()?)
            }
            CloneMethod::Lazy => {
                let one = || -> Result<Launch> {
                    let limosa = Prepared::without_report(options, "run")?.arguments(&[
                        "--memory",
                        "lazy",
                        "--read-ahead",
                        "off",
                    ]);
                    Ok(Launch::Limosa(limosa.path(None, &stored.path).command_line(&line)))
                };
                (1, (0..vms).map(|_| one()).collect::<Result<_>>()?)
            }
            CloneMethod::Mapped | CloneMethod::ReadAhead => (vms, vec![Launch::Limosa(clones("--count")?)]),
            CloneMethod::Pool => {
                clones("--pool")?.start()?.finish()?;
                let take = clones("--count")?;
                guests.accept_waiting(vms)?;
                (vms, vec![Launch::Limosa(take)])
            }
        };
        Ok(Self { waiting: launches.into_iter(), launched: Vec::new(), each })
    }

    /// Starts what may be started while `beating` guests run, and fails if a program has failed. At most `at_once` VMs
    /// are between their start and their first beat, unless one program starts them.
    pub(super) fn proceed(&mut self, beating: usize, at_once: usize) -> Result<()> {
        self.launched.iter_mut().try_for_each(Launched::check)?;
        while self.launched.len() * self.each < beating + at_once {
            match self.waiting.next() {
                None => break,
                Some(Launch::Qemu(command)) => self.launched.push(Launched::Qemu(Process::start(command, None)?)),
                Some(Launch::Limosa(limosa)) => self.launched.push(Launched::Limosa(limosa.start()?)),
            }
        }
        Ok(())
    }

    /// The limosas that stay with their VMs.
    pub(super) fn limosas(&self) -> Vec<u32> {
        let pid = |launched: &Launched| match launched {
            Launched::Limosa(limosa) => Some(limosa.pid()),
            Launched::Qemu(_) => None,
        };
        self.launched.iter().filter_map(pid).collect()
    }

    /// Waits for the end of the `limosa clone` that has started all VMs, and proves that they are what is measured.
    pub(super) fn finish_clones(&mut self, method: CloneMethod, vms: usize) -> Result<()> {
        if !matches!(method, CloneMethod::Mapped | CloneMethod::ReadAhead | CloneMethod::Pool) {
            return Ok(());
        }
        let Some(Launched::Limosa(limosa)) = self.launched.pop() else { bail!("no limosa clone was started") };
        let said = limosa.finish()?;
        let clones = said.get("clones").and_then(Value::as_array).context("the clones in limosa's report")?;
        ensure!(clones.len() == vms, "{} clones instead of {vms}", clones.len());
        for clone in clones {
            let mapped = clone.get("mapped_blocks").and_then(Value::as_array).is_some_and(|blocks| !blocks.is_empty());
            ensure!(mapped, "a clone does not map the snapshot: {clone}");
            let from_pool = clone.get("from_pool").and_then(Value::as_bool);
            ensure!(from_pool == Some(method == CloneMethod::Pool), "a clone is not from where it should be: {clone}");
        }
        Ok(())
    }
}

/// Records the working set of a guest that beats and reads its contents once.
pub(super) fn record(options: &Options, stored: &Stored) -> Result<()> {
    let mut guests = Guests::new()?;
    let line = command_line(options, stored, &guests)?;
    let mut limosa = Prepared::new(options, "clone")?
        .arguments(&["--memory", "mapped", "--record-working-set=3s", "--count", "1"])
        .path(Some("--dir"), &guests.folder().path().join("clones"))
        .path(None, &stored.path)
        .command_line(&line)
        .start()?;
    stored.warm()?;
    guests.wait_beats(1, &mut |_| limosa.check())?;
    guests.wait_slow()?;
    guests.all_do(Task::Read, stored.sum)?;
    limosa.finish().map(drop)
}

impl Launched {
    /// Fails if the program has failed.
    fn check(&mut self) -> Result<()> {
        match self {
            Self::Limosa(limosa) => limosa.check(),
            Self::Qemu(process) => match process.ended()? {
                Some(status) => bail!("QEMU ended with {status}"),
                None => Ok(()),
            },
        }
    }
}

/// The command line of every QEMU, of all contestants.
fn command_line(options: &Options, stored: &Stored, guests: &Guests) -> Result<Vec<OsString>> {
    let mut words = vec![OsString::from(&options.qemu)];
    words.extend(machine(stored.memory, &own_memory(stored.memory), guests.folder().path())?);
    words.extend(["-serial".into(), guests.serial_option().into()]);
    Ok(words)
}

/// A QEMU that this process starts. What it says is in a log of the run.
fn qemu(line: &[OsString], guests: &Guests, more: &[&str]) -> Result<Launch> {
    let [program, arguments @ ..] = line else { bail!("no program to run") };
    let log = File::options().create(true).append(true).open(guests.folder().path().join("log"));
    let log = log.context("a log for QEMU")?;
    let mut command = Command::new(program);
    command.args(arguments).args(more).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    Ok(Launch::Qemu(command))
}
