//! Two ends of a demonstration, a connection that can be cut, and an operator who decides by what the ends print.
//!
//! Law: nothing is believed that an end says of the other. Who ran when is read from the witness, whose lock is the
//! kernel's; whether memory is right is computed by the guest from its state; and what is undecided is decided by the
//! very command that the end has printed.
#![allow(dead_code, reason = "each test program uses a part of it")]

pub(crate) mod dice;
pub(crate) mod network;
pub(crate) mod proxied_migration;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use limosa_channel::Uri;
use limosa_demo::Settings;
use limosa_demo::live::verify;
use limosa_demo::monitor::EndMonitor;
use limosa_demo::pair::{End, EndOptions};
use limosa_demo::report::MemoryReport;
use limosa_demo::settings::Transport;
use limosa_demo::state::{Role, State, Status};
use limosa_demo::witness::{Witness, WitnessLine};
use limosa_testkit::scratch;
use serde_json::json;
use tempfile::TempDir;

/// For what should take moments on any machine: a limit for the stuck, not a measure.
pub(crate) const SOON: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(1);

/// The program under test.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_limosa-demo");

/// How many trials of a kind, and the first seed.
pub(crate) fn trials(usual: u64) -> std::ops::Range<u64> {
    let number =
        |name: &str| std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}: {text}")));
    let first = number("LIMOSA_CHAOS_SEED").unwrap_or(1);
    first..first + number("LIMOSA_CHAOS_TRIALS").unwrap_or(usual)
}

/// A guest of 16 MiB, in which a migration takes a moment.
pub(crate) fn small() -> Settings {
    Settings { memory: 16 << 20, dirty_rate: 100 << 20, transport: Transport::Unix, ..Settings::default() }
}

/// The process of one end, and the connection to its control socket.
pub(crate) struct EndProcess {
    pub(crate) end: End,
    pub(crate) monitor: EndMonitor,
    pub(crate) control: PathBuf,
    pub(crate) dead: bool,
}

impl EndProcess {
    /// Returns its status; `None` if it is gone.
    pub(crate) fn status(&mut self) -> Option<Status> {
        if self.dead {
            return None;
        }
        let status = self.monitor.status().ok();
        self.dead = status.is_none();
        status
    }

    pub(crate) fn kill(&mut self) {
        self.end.kill();
        self.dead = true;
    }

    /// All of its memory, by the guest's own knowledge.
    #[track_caller]
    pub(crate) fn memory(&self) -> MemoryReport {
        let found = verify(&self.monitor).unwrap();
        assert_eq!(found.error, None, "the memory at {}", self.control.display());
        found
    }
}

/// A folder with a witness, and the ends that were started in it.
pub(crate) struct Scene {
    pub(crate) folder: TempDir,
    count: u32,
}

impl Scene {
    pub(crate) fn new() -> Self {
        Self { folder: scratch().unwrap(), count: 0 }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts an end, in the network namespace of this name if there is one.
    pub(crate) fn start(&mut self, role: Role, settings: &Settings, namespace: Option<&str>) -> End {
        self.count += 1;
        let control = self.path(&format!("{}{}", role.name(), self.count));
        let witness = self.path("witness");
        let mut command = match namespace {
            None => Command::new(PROGRAM),
            Some(name) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", name, PROGRAM]);
                command
            }
        };
        let words = std::fs::File::create(control.with_extension("words")).unwrap();
        command.stderr(Stdio::from(words));
        End::start(command, role, &EndOptions { settings, control: &control, witness: &witness }).unwrap()
    }

    /// Waits until an end can be talked to.
    #[track_caller]
    pub(crate) fn meet(&self, mut end: End) -> EndProcess {
        let control = end.control().to_owned();
        let monitor = end.connect().unwrap_or_else(|error| panic!("{error}: {}", words(&control)));
        EndProcess { end, monitor, control, dead: false }
    }

    /// Who ran and stood, in order.
    pub(crate) fn testimonies(&self) -> Vec<WitnessLine> {
        Witness::read(&self.path("witness")).unwrap()
    }
}

/// Returns an end's stderr.
pub(crate) fn words(control: &Path) -> String {
    std::fs::read_to_string(control.with_extension("words")).unwrap_or_default()
}

/// Has a source send its guest there.
#[track_caller]
pub(crate) fn migrate(source: &EndProcess, to: &Uri, fresh: bool) {
    source.monitor.execute("migrate", json!({ "uri": to.to_string(), "fresh": fresh })).unwrap();
}

/// Whether an end waits for nothing but people.
fn is_stable(status: &Status) -> bool {
    match status.state {
        State::Sending | State::Receiving => false,
        State::Running => status.running,
        _ => true,
    }
}

/// Waits until both ends are stable, or gone.
#[track_caller]
pub(crate) fn wait_stable(source: &mut EndProcess, destination: &mut EndProcess) -> (Option<Status>, Option<Status>) {
    let deadline = Instant::now() + SOON;
    loop {
        let now = (source.status(), destination.status());
        if [&now.0, &now.1].into_iter().all(|status| status.as_ref().is_none_or(is_stable)) {
            return now;
        }
        if Instant::now() >= deadline {
            panic!("not stable: {now:?}\n{}\n{}", words(&source.control), words(&destination.control));
        }
        std::thread::sleep(TICK);
    }
}

/// Types the command with this verb that the end has printed.
#[track_caller]
pub(crate) fn decide(end: &mut EndProcess, verb: &str) {
    let status = end.status().expect("an end that can be told something");
    let command = status.decide.iter().find(|command| command.starts_with(&format!("limosa-demo {verb} ")));
    let command = command.unwrap_or_else(|| panic!("no {verb} among {:?}", status.decide));
    assert!(words(&end.control).contains(command.as_str()), "it was not printed: {command}");
    let arguments = command.split_whitespace().skip(1);
    let output = Command::new(PROGRAM).args(arguments).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    if verb == "discard" {
        end.end.wait(SOON).unwrap();
        end.dead = true;
    }
}

/// Where the guest is in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whereabouts {
    Source,
    Destination,
    /// It ended with the process it ran in, as any VM does.
    Lost,
}

/// Does what an operator does who finds the two ends like this, and says where the guest runs then. `killed` is the end
/// that was killed, if one was; `choice` decides where both ways are right.
#[track_caller]
pub(crate) fn operate(
    source: &mut EndProcess,
    destination: &mut EndProcess,
    killed: Option<Role>,
    choice: bool,
) -> Whereabouts {
    let found = wait_stable(source, destination);
    let state = |status: &Option<Status>| status.as_ref().map(|status| status.state);
    let outcome = match (state(&found.0), state(&found.1)) {
        (Some(State::Running), None | Some(State::Failed | State::Waiting)) => Whereabouts::Source,
        (Some(State::Running), Some(State::Undecided)) => {
            decide(destination, "discard");
            Whereabouts::Source
        }
        (Some(State::Undecided), None | Some(State::Failed)) => {
            decide(source, "resume");
            Whereabouts::Source
        }
        (Some(State::Undecided), Some(State::Running)) => {
            decide(source, "discard");
            Whereabouts::Destination
        }
        (Some(State::Undecided), Some(State::Undecided)) if choice => {
            decide(source, "discard");
            decide(destination, "start");
            Whereabouts::Destination
        }
        (Some(State::Undecided), Some(State::Undecided)) => {
            decide(destination, "discard");
            decide(source, "resume");
            Whereabouts::Source
        }
        (Some(State::Gone) | None, Some(State::Running)) => Whereabouts::Destination,
        // All pages have come, and the word of that was lost.
        (Some(State::PostcopyPaused), Some(State::Running)) => {
            decide(source, "discard");
            Whereabouts::Destination
        }
        // The guest's state there is lost; here it is as it left.
        (Some(State::PostcopyPaused), None) => {
            decide(source, "resume");
            Whereabouts::Source
        }
        (None, Some(State::PostcopyPaused)) if killed == Some(Role::Source) => {
            decide(destination, "discard");
            Whereabouts::Lost
        }
        (None, Some(State::Undecided)) => {
            decide(destination, "start");
            Whereabouts::Destination
        }
        // Nothing that limosa did: the guest's own process was killed, and not all of it was at the other end.
        (None, Some(State::Failed)) if killed == Some(Role::Source) => Whereabouts::Lost,
        (Some(State::Gone), None) if killed == Some(Role::Destination) => Whereabouts::Lost,
        other => panic!(
            "no operator could decide this: {other:?}, {found:?}\n{}\n{}",
            words(&source.control),
            words(&destination.control)
        ),
    };
    let runs = (source.status(), destination.status());
    let running = |status: &Option<Status>| status.as_ref().is_some_and(|status| status.running);
    let expected = (outcome == Whereabouts::Source, outcome == Whereabouts::Destination);
    assert_eq!((running(&runs.0), running(&runs.1)), expected, "{outcome:?}: {runs:?}");
    outcome
}

/// Whether the guest runs at the destination and waits for pages that the source still has.
pub(crate) fn can_recover(source: &mut EndProcess, destination: &mut EndProcess) -> bool {
    let (here, there) = wait_stable(source, destination);
    let waits = there.is_some_and(|status| status.state == State::PostcopyPaused);
    waits && here.is_some_and(|status| matches!(status.state, State::PostcopyPaused | State::Undecided))
}

/// The witness saw one runner at a time, and no source that ran again by itself once the destination had run.
#[track_caller]
pub(crate) fn assert_lawful(scene: &Scene, resumed_by_hand: bool) {
    let seen = scene.testimonies();
    assert!(!seen.iter().any(|line| matches!(line, WitnessLine::Refused(_))), "run twice: {seen:?}");
    let first = seen.iter().position(|line| *line == WitnessLine::Ran("destination".into()));
    let later = first.map_or(&[][..], |first| &seen[first..]);
    let again = later.contains(&WitnessLine::Ran("source".into()));
    assert!(!again || resumed_by_hand, "the source ran again by itself: {seen:?}");
}
