//! The limosa that is measured: a child process.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::options::Options;
use crate::process::Process;
use crate::scratch::Scratch;

/// A limosa that is about to be started, so that a clock can begin with its exec.
#[derive(Debug)]
pub(crate) struct Prepared {
    command: Command,
    folder: Scratch,
}

/// A running limosa.
#[derive(Debug)]
pub(crate) struct Limosa {
    process: Process,
    folder: Scratch,
}

impl Prepared {
    /// limosa with the command `name`, and `--json`.
    pub(crate) fn new(options: &Options, name: &str) -> Result<Self> {
        Ok(Self::without_report(options, name)?.arguments(&["--json"]))
    }

    /// limosa with the command `name`, for one that has no `--json`.
    pub(crate) fn without_report(options: &Options, name: &str) -> Result<Self> {
        let folder = Scratch::new_in(&std::env::temp_dir())?;
        let mut command = Command::new(options.limosa()?);
        let file = |name: &str| File::create(folder.path().join(name)).context("a file for limosa's output");
        command.stdin(Stdio::null()).stdout(file("stdout")?).stderr(file("stderr")?);
        // What it makes beside its file is gone with the folder, even if it is killed.
        command.env("XDG_RUNTIME_DIR", folder.path()).arg(name);
        Ok(Self { command, folder })
    }

    /// With these arguments.
    pub(crate) fn arguments(mut self, arguments: &[&str]) -> Self {
        self.command.args(arguments);
        self
    }

    /// With these environment variables.
    pub(crate) fn variables<V: AsRef<OsStr>>(mut self, variables: impl IntoIterator<Item = (&'static str, V)>) -> Self {
        self.command.envs(variables);
        self
    }

    /// With an option whose value is a path.
    pub(crate) fn path(mut self, option: Option<&str>, path: &Path) -> Self {
        self.command.args(option).arg(path);
        self
    }

    /// With the command line of a QEMU.
    pub(crate) fn command_line(mut self, words: &[OsString]) -> Self {
        self.command.arg("--").args(words);
        self
    }

    /// Runs it.
    pub(crate) fn start(self) -> Result<Limosa> {
        Ok(Limosa { process: Process::start(self.command, None)?, folder: self.folder })
    }
}

impl Limosa {
    /// Returns its stderr so far: the reason if something expected does not happen.
    pub(crate) fn said(&self) -> String {
        fs::read_to_string(self.folder.path().join("stderr")).unwrap_or_default().trim().to_owned()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Fails if it has failed.
    pub(crate) fn check(&mut self) -> Result<()> {
        match self.process.ended()? {
            Some(status) if !status.success() => bail!("limosa ended with {status}: {}", self.said()),
            _ => Ok(()),
        }
    }

    /// Waits for its end and returns what it reports.
    pub(crate) fn finish(mut self) -> Result<Value> {
        let status = self.process.wait()?;
        ensure!(status.success(), "limosa ended with {status}: {}", self.said());
        let json = fs::read_to_string(self.folder.path().join("stdout")).context("what limosa printed")?;
        serde_json::from_str(&json).context("what limosa --json printed")
    }
}
