//! A demonstration from beginning to end: two processes, a guest that moves between them while it runs, and the proof
//! that nothing of it was lost.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use limosa_channel::Uri;
use serde::Serialize;
use serde_json::{Value, json};

use crate::error::DemoError;
use crate::folder::Folder;
use crate::monitor::EndMonitor;
use crate::pair::{End, EndOptions};
use crate::report::{DestinationReport, MemoryReport, SourceReport};
use crate::settings::{Settings, Transport};
use crate::state::{Role, State, Status};
use crate::trace::{Mark, Trace, TraceRound, duration};

/// How long the guest runs before it is moved, and afterwards before it is looked at.
const RUNS: Duration = Duration::from_millis(400);
/// How often the ends are asked.
const TICK: Duration = Duration::from_millis(5);
/// How long a destination may take to know what the source knows already.
const CATCH_UP: Duration = Duration::from_secs(30);

/// How a demonstration is run.
pub struct LiveOptions<'a> {
    /// This program, or a command that becomes it.
    pub program: &'a dyn Fn() -> Command,
    /// Settings of the demonstration.
    pub settings: &'a Settings,
    /// Path of the source's control socket, if it has one; the destination's is beside it.
    pub control: Option<&'a Path>,
    /// Told in a line what happens.
    pub notice: &'a dyn Fn(&str),
}

/// The report of a demonstration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LiveReport {
    /// Its settings.
    pub settings: Settings,
    /// The end that has the guest.
    pub runs_at: Role,
    /// The source's report.
    pub source: SourceReport,
    /// The destination's report.
    pub destination: DestinationReport,
    /// From the guest's last write at the source to its first at the destination, in milliseconds.
    pub stood_ms: Option<f64>,
    /// Pages that it wrote before it moved, and since.
    pub writes: (u64, u64),
    /// The check of the memory that the source kept, if it kept any of its own.
    pub memory_at_source: Option<MemoryReport>,
    /// The check of the memory that the guest runs in now.
    pub memory: MemoryReport,
}

impl LiveReport {
    /// Whether the guest has moved, and nothing of it is lost.
    pub fn succeeded(&self) -> bool {
        self.runs_at == Role::Destination
            && self.memory.error.is_none()
            && self.memory_at_source.iter().all(|found| found.error.is_none())
    }
}

/// Runs a demonstration.
///
/// # Errors
/// The machine cannot do it, or an end is lost. A migration that fails is a report.
pub fn run(options: &LiveOptions<'_>) -> Result<LiveReport, DemoError> {
    if let Some(why) = options.settings.contradiction() {
        return Err(DemoError::Settings(why.to_owned()));
    }
    let folder = Folder::new()?;
    let witness = folder.path().join("witness");
    let (here, there) = match options.control {
        Some(path) => (path.to_owned(), PathBuf::from(format!("{}.destination", path.display()))),
        None => (folder.path().join("source"), folder.path().join("destination")),
    };
    let start = |role, control: &Path| {
        let ends = EndOptions { settings: options.settings, control, witness: &witness };
        End::start((options.program)(), role, &ends)
    };
    let (mut source_end, mut destination_end) = (start(Role::Source, &here)?, start(Role::Destination, &there)?);
    let (source, destination) = (source_end.connect()?, destination_end.connect()?);
    std::thread::sleep(RUNS);

    let before = source.status()?.beats;
    let at = match options.settings.transport {
        Transport::Tcp => Uri::Tcp { host: "127.0.0.1".into(), port: 0 },
        Transport::Unix => Uri::Unix(folder.path().join("migration")),
    };
    let at = destination.listen("migrate-incoming", &at)?;
    (options.notice)(&format!("the guest runs and has written {before} pages; it moves to {at}"));
    let ordered = source.execute("migrate", json!({ "uri": at.to_string(), "fresh": true }));
    if ordered.is_err() && source.status().is_ok() {
        ordered?;
    }
    // A source that ended before it answered may have sent all the same: the state of both ends is checked.
    let runs_at = find_guest(&source, &destination)?;

    let runs = if runs_at == Role::Source { &source } else { &destination };
    let found = runs.status()?.beats;
    std::thread::sleep(RUNS);
    let status = runs.status()?;
    // Memory that was passed is one and the same: the guest writes it on, and the source's state is of no use for it.
    let kept = runs_at == Role::Source || !options.settings.same_host;
    let memory_at_source = match kept.then(|| verify(&source)) {
        // A source that has been discarded has none.
        Some(Err(_)) if runs_at == Role::Destination => None,
        found => found.transpose()?,
    };
    let memory = match (runs_at, &memory_at_source) {
        (Role::Source, Some(found)) => found.clone(),
        _ => verify(&destination)?,
    };
    Ok(LiveReport {
        settings: options.settings.clone(),
        runs_at,
        source: source.typed("query-report").unwrap_or_default(),
        destination: destination.typed("query-report").unwrap_or_default(),
        stood_ms: status.stood_ms,
        writes: (found, status.beats),
        memory_at_source,
        memory,
    })
}

/// Waits until it is certain where the guest runs: while the state is undecided, for the operator's decision.
fn find_guest(source: &EndMonitor, destination: &EndMonitor) -> Result<Role, DemoError> {
    let runs = |status: &Status| status.state == State::Running && status.running;
    let died = |end: Role| Err(DemoError::Guest(format!("it ended with the process of the {}", end.name())));
    loop {
        match (source.status(), destination.status()) {
            (Ok(here), _) if runs(&here) => return Ok(Role::Source),
            // A source that has been discarded is gone, and so is one that was killed.
            (Ok(Status { state: State::Gone | State::Failed, .. }) | Err(_), Ok(there)) if runs(&there) => {
                return Ok(Role::Destination);
            }
            (Err(_), Ok(Status { state: State::Failed | State::Waiting, .. })) => return died(Role::Source),
            (Ok(Status { state: State::Gone, .. }), Err(_)) => return died(Role::Destination),
            (Err(error), Err(_)) => return Err(error),
            // On its way, or the operator has to decide.
            _ => std::thread::sleep(TICK),
        }
    }
}

/// Has an end look at all of its guest's memory.
///
/// # Errors
/// It cannot: it is busy, or gone.
pub fn verify(end: &EndMonitor) -> Result<MemoryReport, DemoError> {
    end.execute("verify-memory", Value::Null)?;
    let deadline = Instant::now() + CATCH_UP;
    loop {
        let found: Option<MemoryReport> = end.typed("query-verify-memory")?;
        if let Some(found) = found {
            return Ok(found);
        }
        if Instant::now() >= deadline {
            return Err(DemoError::Late { what: "look at its memory", status: format!("{:?}", end.status()?) });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl LiveReport {
    /// The rounds as a picture.
    pub fn trace(&self) -> Trace {
        let rounds = &self.source.rounds;
        let page = limosa_page::PAGE_SIZE;
        let drawn = |at: usize| -> Option<TraceRound> {
            let round = rounds.get(at)?;
            let took = round.took_ms.max(1e-3);
            #[expect(clippy::cast_precision_loss, reason = "a picture")]
            let (bandwidth, dirtied) = (round.bytes as f64 / took * 1e3, round.dirty_rate as f64);
            Some(TraceRound {
                begin_ms: round.begin_ms,
                end_ms: round.begin_ms + round.took_ms,
                left: round.pages.saturating_mul(page),
                unsent: unsent(round).saturating_mul(page),
                dirtied: (!round.last).then_some(dirtied),
                bandwidth: (!round.last).then_some(bandwidth),
            })
        };
        let sent = self.source.postcopy;
        let stopped = rounds.iter().find(|round| round.last).map(|last| last.begin_ms);
        let stopped = stopped.or(sent.map(|sent| sent.begin_ms));
        let pause = stopped.zip(self.stood_ms).map(|(from, stood)| (from, from + stood));
        let followed = sent.map(|sent| {
            let ran = pause.map_or(sent.begin_ms, |(_, ran)| ran);
            (ran, ran.max(sent.begin_ms + sent.took_ms))
        });
        Trace {
            title: self.title(),
            summary: self.summary(),
            rounds: (0..rounds.len()).filter_map(drawn).collect(),
            pause,
            postcopy: followed,
            postcopy_left: sent.map_or(0, |sent| sent.pages.saturating_mul(page)),
            marks: Vec::<Mark>::new(),
        }
    }

    fn title(&self) -> String {
        let settings = &self.settings;
        format!(
            "A guest of {} MiB, set to write {} MiB/s, moves while it runs",
            settings.memory >> 20,
            settings.dirty_rate >> 20
        )
    }

    fn summary(&self) -> String {
        let rounds = self.source.rounds.len();
        let sent: u64 = self.source.rounds.iter().map(|round| round.bytes).sum();
        let stood = self.stood_ms.map_or(String::new(), |stood| format!("; paused for {}", duration(stood)));
        format!("{rounds} rounds, {} MiB sent in {}{stood}", sent >> 20, duration(self.source.total_ms))
    }
}

/// Pages of a round that it did not get to, if it was broken off.
fn unsent(round: &crate::report::Round) -> u64 {
    round.pages.saturating_sub(round.normal + round.zero + round.left_out + round.hinted)
}
