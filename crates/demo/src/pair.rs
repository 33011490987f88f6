//! Two processes on this machine, between which a guest moves.
//!
//! Each end is this program, started again. It runs as long as its standard input is open, so none outlives the process
//! that started it: not even one that waits for the operator's decision.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::child::KilledChild;
use crate::error::DemoError;
use crate::monitor::EndMonitor;
use crate::settings::Settings;
use crate::state::Role;

/// How long an end may take to start: it fills its guest's memory first.
const START: Duration = Duration::from_secs(120);

/// Most bytes of why an end could not start.
const WORDS: u64 = 4096;

/// One of the two processes. Killed when dropped.
#[derive(Debug)]
pub struct End {
    child: KilledChild,
    control: PathBuf,
}

/// The options of an end.
#[derive(Debug, Clone)]
pub struct EndOptions<'a> {
    /// Settings of the demonstration.
    pub settings: &'a Settings,
    /// Path of the end's control socket.
    pub control: &'a Path,
    /// The witness that both ends share.
    pub witness: &'a Path,
}

impl End {
    /// Starts an end: `program` is this program, or a command that becomes it.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(mut program: Command, role: Role, options: &EndOptions<'_>) -> Result<Self, DemoError> {
        let settings =
            serde_json::to_string(options.settings).map_err(|error| DemoError::Settings(error.to_string()))?;
        program.arg("end").arg(role.name()).arg(options.control).arg(options.witness).arg(settings);
        program.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = program.spawn().map_err(DemoError::system(format!("cannot start the {}", role.name())))?;
        Ok(Self { child: KilledChild(child), control: options.control.to_owned() })
    }

    /// Connects to it, once it is there.
    ///
    /// # Errors
    /// It has ended, and why, if it has said so.
    pub fn connect(&mut self) -> Result<EndMonitor, DemoError> {
        let deadline = Instant::now() + START;
        loop {
            if let Ok(monitor) = EndMonitor::connect(&self.control) {
                return Ok(monitor);
            }
            if let Some(status) = self.ended()? {
                let mut why = String::new();
                if let Some(said) = &mut self.child.0.stdout {
                    // What it cannot be read for is no reason of its own.
                    let _ = said.take(WORDS).read_to_string(&mut why);
                }
                return Err(match why.trim_end() {
                    "" => DemoError::Guest(format!("the end at {} has ended: {status}", self.control.display())),
                    why => DemoError::Settings(why.to_owned()),
                });
            }
            if Instant::now() >= deadline {
                return Err(DemoError::Late { what: "start", status: "nothing".into() });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Its control socket.
    pub fn control(&self) -> &Path {
        &self.control
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// The system's.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>, DemoError> {
        self.child.0.try_wait().map_err(DemoError::system("cannot wait for an end"))
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Kills it with SIGKILL, and waits until it is gone.
    pub fn kill(&mut self) {
        self.child.kill();
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It lives on.
    pub fn wait(&mut self, within: Duration) -> Result<ExitStatus, DemoError> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                return Err(DemoError::Late { what: "end", status: "nothing".into() });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
