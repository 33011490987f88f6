//! A VM whose checkpoints are made all the while, and whose output leaves when a checkpoint knows of it.
//!
//! Two processes: the primary has a guest that writes its memory and prints numbered lines; the keeper has its
//! checkpoints. The primary is killed with SIGKILL, and the keeper's guest continues where the newest checkpoint is.
//! **Law: no line was seen that the survivor does not know**: its own lines follow the last number that it knows, and
//! that is not below the last one that was seen.

mod keeper;
mod primary;
mod printer;
mod settings;
mod vm;

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::child::KilledChild;
use crate::error::DemoError;
use crate::folder::Folder;
use crate::report::millis;
use settings::{KNOWN, PATIENCE, READY};

pub use settings::ProtectSettings;

/// Lines that the survivor prints.
const SURVIVOR_LINES: u64 = 20;

/// The lines of one primary that was killed, and of its survivor.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProtectReport {
    /// Lines that the primary has printed until it was killed.
    pub seen: u64,
    /// Number of the last line that the survivor knows.
    pub known: u64,
    /// Number of the last line that the survivor has printed.
    pub last: u64,
    /// From the kill to the survivor's first line, in milliseconds.
    pub failover_ms: f64,
}

/// Is one of the two processes. The arguments are those of [`demonstrate`].
///
/// # Errors
/// It cannot do its part.
pub fn run_process(arguments: &[String]) -> Result<(), DemoError> {
    let [role, socket, settings] = arguments else {
        return Err(DemoError::Settings("only limosa-demo protect starts a process of a demonstration".into()));
    };
    let settings: ProtectSettings =
        serde_json::from_str(settings).map_err(|error| DemoError::Settings(format!("settings: {error}")))?;
    crate::end::end_with_input()?;
    match role.as_str() {
        "primary" => primary::run(Path::new(socket), &settings),
        _ => keeper::run(Path::new(socket), &settings),
    }
}

/// Whether these are arguments of [`run_process`].
pub fn is_process(arguments: &[String]) -> bool {
    matches!(arguments.first().map(String::as_str), Some("primary" | "keeper"))
}

/// Runs both processes, kills the primary after that time, and compares what both have printed. `program` makes a
/// command of this program.
///
/// # Errors
/// A process fails, or the law is broken.
pub fn demonstrate(
    program: impl Fn() -> Command,
    settings: &ProtectSettings,
    after: Duration,
) -> Result<ProtectReport, DemoError> {
    let folder = Folder::new()?;
    let socket = folder.path().join("checkpoints");
    let words = serde_json::to_string(settings).map_err(|error| DemoError::Settings(error.to_string()))?;
    let start = |role: &'static str| Process::start(program(), role, &socket, &words);
    let keeper = start("keeper")?;
    keeper.expect(READY)?;
    let mut primary = start("primary")?;
    let mut seen = primary.line()?.number(1)?;
    thread::sleep(after);
    primary.child.kill();
    let killed = Instant::now();
    while let Ok(line) = primary.lines.recv() {
        seen = Line(line).number(seen.saturating_add(1))?;
    }
    let known = keeper.line()?.known()?;
    if known < seen {
        return Err(DemoError::Differs(format!("line {seen} was seen, and the survivor knows {known} lines")));
    }
    let mut last = keeper.line()?.number(known.saturating_add(1))?;
    let failover_ms = millis(killed.elapsed());
    for _ in 1..SURVIVOR_LINES {
        last = keeper.line()?.number(last.saturating_add(1))?;
    }
    Ok(ProtectReport { seen, known, last, failover_ms })
}

/// A line of a process's output.
struct Line(String);

impl Line {
    /// The number of a printed line, which has to be this one.
    fn number(&self, expected: u64) -> Result<u64, DemoError> {
        match self.0.parse() {
            Ok(number) if number == expected => Ok(number),
            _ => Err(DemoError::Differs(format!("line {expected} was expected, and {:?} was printed", self.0))),
        }
    }

    fn known(&self) -> Result<u64, DemoError> {
        let number = self.0.strip_prefix(KNOWN).and_then(|number| number.trim().parse().ok());
        number.ok_or_else(|| DemoError::Answer(self.0.clone()))
    }
}

/// One of the two processes. Killed when dropped.
struct Process {
    role: &'static str,
    child: KilledChild,
    lines: Receiver<String>,
}

impl Process {
    fn start(mut program: Command, role: &'static str, socket: &Path, settings: &str) -> Result<Self, DemoError> {
        program.args(["end", role]).arg(socket).arg(settings);
        program.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = program.spawn().map_err(DemoError::system(format!("cannot start the {role}")))?;
        let (sender, lines) = channel();
        let output = child.stdout.take();
        thread::spawn(move || {
            let lines = output.map(|output| BufReader::new(output.take(1 << 30)).lines()).into_iter().flatten();
            // Who does not listen any more has seen enough.
            lines.map_while(Result::ok).try_for_each(|line| sender.send(line)).ok();
        });
        Ok(Self { role, child: KilledChild(child), lines })
    }

    /// Its next line.
    fn line(&self) -> Result<Line, DemoError> {
        let late = |_| DemoError::Late { what: "print a line", status: format!("the {} is silent", self.role) };
        self.lines.recv_timeout(PATIENCE).map(Line).map_err(late)
    }

    fn expect(&self, word: &str) -> Result<(), DemoError> {
        let line = self.line()?.0;
        if line == word { Ok(()) } else { Err(DemoError::Answer(line)) }
    }
}
