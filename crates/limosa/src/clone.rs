//! `limosa clone`: many VMs of one snapshot.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use limosa_clone::{
    Backing, CloneError, CloneMemory, CloneOutcome, CommandTemplate, FailedClone, Fleet, FleetOptions, FleetReport,
    ListedClone, PooledClone, RemoveOptions, StartedClone, State, StopOptions, list, remove, stop,
};
use limosa_console::{check_stdout, error_line, print_out, quantity, say};
use limosa_memory::MemcgHeadroom;
use limosa_qemu::{GuestClock, MappedVm, RunChoice, check_command_line, check_program, missing_memory_option};
use limosa_snapshot::{ReadAhead, Snapshot};
use serde_json::{Value, json};

use crate::args::{
    BackingArg, CloneArgs, CloneCommand, CloneMemoryArg, KeyArgs, ListClonesArgs, MakeClonesArgs, RemoveClonesArgs,
    SetClockArg, StopClonesArgs,
};
use crate::clock::{self, ClockOutcome};
use crate::packed;
use crate::remote;
use crate::restore::PAUSED;
use crate::usage::misused;
use crate::working_set::{Recorded, Recording, StopSignals, WorkingSetUse, read_ahead_object, tell_read_ahead};

pub(crate) fn run(args: &CloneArgs) -> anyhow::Result<ExitCode> {
    match (&args.command, &args.make) {
        (Some(CloneCommand::List(args)), _) => list_clones(args),
        (Some(CloneCommand::Stop(args)), _) => stop_clones(args),
        (Some(CloneCommand::Rm(args)), _) => remove_clones(args),
        (None, Some(clones)) => make(clones, &args.key),
        (None, None) => bail!("nothing to clone: see limosa clone --help"),
    }
}

fn make(args: &MakeClonesArgs, key: &KeyArgs) -> anyhow::Result<ExitCode> {
    packed::define_key(key)?;
    let begun = Instant::now();
    let line = check_command_line(&args.command)?;
    check_program(&args.command)?;
    if args.set_clock == SetClockArg::On && args.state().choice_for(line) == RunChoice::Paused {
        misused("--set-clock on cannot be used for clones that stay paused");
    }
    if args.working_set().record_working_set.is_some() && (args.memory == CloneMemoryArg::Eager || args.count.is_none())
    {
        misused("--record-working-set is for clones that are started and whose memory is mapped");
    }
    if args.working_set().record_working_set.is_some() && args.state().choice_for(line) == RunChoice::Paused {
        misused(PAUSED);
    }
    if args.qmp.is_some() {
        remote::refuse_target(&args.snapshot, "give a file")?;
    }
    let forked = args
        .qmp
        .as_ref()
        .map(|address| crate::save::save_to_clone(address, &args.snapshot, args.force, args.overlay_dir.clone()));
    let forked = forked.transpose()?;
    let given = packed::open(&args.snapshot)?;
    given.warnings().iter().for_each(|warning| say!("limosa: {warning}"));
    given.lock_serving()?;
    let working_set = WorkingSetUse::prepare(&args.working_set(), &given, &|line| say!("limosa: {line}"))?;
    let wants_mapping = args.memory != CloneMemoryArg::Eager;
    let snapshot = match wants_mapping.then(|| packed::copy_to_map(&given, &args.dir)).transpose()?.flatten() {
        Some(copy) => copy,
        None if args.memory == CloneMemoryArg::Mapped && given.not_plain_reason().is_some() => {
            bail!("{}", packed::unmappable(&given))
        }
        None => given,
    };
    let mut options = FleetOptions::default();
    options.jobs = args.jobs;
    options.backing = match args.backing {
        BackingArg::Absolute => Backing::Absolute,
        BackingArg::Relative => Backing::Relative,
    };
    options.run = args.state().choice_for(line);
    options.set_clock = args.set_clock != SetClockArg::Off;
    options.memory = match args.memory {
        CloneMemoryArg::Auto => CloneMemory::Auto,
        CloneMemoryArg::Mapped => CloneMemory::Mapped,
        CloneMemoryArg::Eager => CloneMemory::Copied,
    };
    let made = Made::mapped_or_copied(args, &snapshot, options, &working_set, begun)?;
    let Made { mut clones, started_after, mut waiting, read_ahead } = made;
    let signals = StopSignals::register(&working_set)?;
    let recording = begin_recording(working_set, &clones.started, &snapshot);
    // They are being set side by side.
    let clocks: Vec<_> =
        clones.started.iter_mut().map(|started| started.clock.take().map(GuestClock::finish)).collect();
    for failure in clones.failed.iter().chain(&waiting.failed) {
        say!("limosa: clone {:03} was not started: {}", failure.number, error_line(&*failure.error));
    }
    tell_started(args, &clones.started, started_after);
    let recorded =
        recording.and_then(|recording| recording.map(|recording| recording.finish_or_signal(&signals)).transpose());
    let read_ahead = read_ahead.map(|read_ahead| signals.finish(read_ahead));
    if args.json {
        let mut object = object(&clones, &clocks, &waiting);
        object["saved"] = forked.as_ref().map_or(Value::Null, crate::save::object);
        object["recorded_working_set"] = recorded.iter().flatten().next().map_or(Value::Null, Recorded::object);
        object["read_ahead"] = read_ahead.as_ref().map_or(Value::Null, read_ahead_object);
        remote::add_cost(&mut object);
        print_out!("{object}");
    }
    check_stdout()?;
    recorded.iter().flatten().for_each(Recorded::tell);
    read_ahead.iter().for_each(tell_read_ahead);
    remote::tell_cost();
    let clocks_not_set = tell_clocks(args, &clones.started, &clocks);
    if let (Some(first), Some(last)) = (waiting.started.first(), waiting.started.last()) {
        let (count, dir) = (waiting.started.len(), args.dir.display());
        say!("{count} more wait for the next clones; {} to {} in {dir}", first.name, last.name);
    }
    clones.failed.append(&mut waiting.failed);
    failures(&clones.failed, clones.not_tried + waiting.not_tried)?;
    if !clocks_not_set.is_empty() {
        bail!("the clocks of clones that run are not set: {}", clocks_not_set.join(", "));
    }
    recorded.context("the clones run, but no working set is recorded")?;
    Ok(ExitCode::SUCCESS)
}

/// Begins to record the first clone, if that was asked for.
fn begin_recording(
    working_set: WorkingSetUse,
    started: &[StartedClone],
    snapshot: &Snapshot,
) -> anyhow::Result<Option<Recording>> {
    // That none was started is an error already.
    let Some(first) = started.first() else { return Ok(None) };
    let pid = first.record.process.as_ref().map(|process| process.pid);
    working_set.begin(snapshot, None, || match pid {
        _ if first.mapped_blocks.is_empty() => bail!("nothing shows what a guest with a copy of the memory touches"),
        None => bail!("the process of clone {} is not known", first.name),
        Some(pid) => Ok(MappedVm::of_process(pid, snapshot)?),
    })
}

/// Tells about the clones' clocks. Returns the names of those whose clocks must be set and are not.
fn tell_clocks<'a>(args: &MakeClonesArgs, started: &'a [StartedClone], clocks: &[ClockOutcome]) -> Vec<&'a str> {
    let mut not_set = Vec::new();
    let mut set: u64 = 0;
    for (started, outcome) in started.iter().zip(clocks) {
        if let Some(why) = clock::failure(outcome, args.set_clock) {
            say!("limosa: clone {}: {why}", started.name);
            not_set.push(started.name.as_str());
        } else if matches!(outcome, Some(Ok(_))) {
            set += 1;
        } else {
            clock::tell(outcome, &format!("clone {}: ", started.name));
        }
    }
    if set > 0 {
        say!("  clocks set to the host's: {}", quantity::count(set));
    }
    not_set
}

/// Clones, and QEMUs that wait for the next ones.
struct Made {
    clones: FleetReport<StartedClone>,
    started_after: Duration,
    waiting: FleetReport<PooledClone>,
    /// The working set that is still being read ahead.
    read_ahead: Option<ReadAhead>,
}

impl Made {
    /// Starts them, again with copies if this QEMU is found to be too old to map the snapshot: it ends at once.
    fn mapped_or_copied(
        args: &MakeClonesArgs,
        snapshot: &Snapshot,
        mut options: FleetOptions,
        working_set: &WorkingSetUse,
        begun: Instant,
    ) -> anyhow::Result<Self> {
        let made = Self::new(args, snapshot, options.clone(), working_set, begun)?;
        if !made.is_nothing() || options.memory == CloneMemory::Copied {
            return Ok(made);
        }
        let Some(option) = missing_memory_option(&args.command) else { return Ok(made) };
        let program = args.command.first().map_or_else(Default::default, |program| program.to_string_lossy());
        let why = format!("{program} has no option {option} of memory-backend-file; QEMU 8.2 and newer have it");
        if options.memory == CloneMemory::Mapped {
            bail!("the memory cannot be mapped: {why}; use --memory auto");
        }
        say!("limosa: each clone gets a copy of the memory, because it cannot be mapped: {why}");
        options.memory = CloneMemory::Copied;
        Self::new(args, snapshot, options, working_set, begun)
    }

    fn new(
        args: &MakeClonesArgs,
        snapshot: &Snapshot,
        options: FleetOptions,
        working_set: &WorkingSetUse,
        begun: Instant,
    ) -> anyhow::Result<Self> {
        let wants_mapping = options.memory != CloneMemory::Copied;
        let fleet = Fleet::new(snapshot, &args.dir, CommandTemplate::new(args.command.clone()), options)?;
        fleet.notices().iter().for_each(|notice| say!("limosa: {notice}"));
        if wants_mapping && !snapshot.is_mappable() {
            say!("limosa: {}", packed::unmappable(snapshot));
        }
        let (count, pool) = (args.count.map_or(0, NonZeroU64::get), args.pool.map_or(0, NonZeroU64::get));
        if !args.overcommit {
            check_memory(&fleet, count.saturating_add(pool))?;
        }
        // Their first touches are not far.
        let read_ahead = working_set.set.as_ref().filter(|_| working_set.reads_ahead && fleet.is_mapped() && count > 0);
        let read_ahead = read_ahead.map(|set| ReadAhead::start(snapshot, set)).transpose()?;
        let clones = fleet.start(count);
        let started_after = begun.elapsed();
        let waiting = fleet.fill_pool(pool);
        Ok(Self { clones, started_after, waiting, read_ahead })
    }

    /// Whether all that was tried has failed.
    fn is_nothing(&self) -> bool {
        let failed = self.clones.failed.len() + self.waiting.failed.len();
        failed > 0 && self.clones.started.is_empty() && self.waiting.started.is_empty()
    }
}

fn tell_started(args: &MakeClonesArgs, started: &[StartedClone], after: Duration) {
    let (Some(first), Some(last)) = (started.first(), started.last()) else { return };
    let how = if first.mapped_blocks.is_empty() { "each with a copy of the memory" } else { "sharing its memory" };
    say!(
        "{} of {}: {} after {}, {how}; {} to {} in {}",
        if started.len() == 1 { "1 clone".to_owned() } else { format!("{} clones", started.len()) },
        args.snapshot.display(),
        first.state,
        quantity::time(after),
        first.name,
        last.name,
        args.dir.display()
    );
}

/// Returns the error that names what was not started.
fn failures(failed: &[FailedClone], not_tried: u64) -> anyhow::Result<()> {
    if failed.is_empty() {
        return Ok(());
    }
    let names: Vec<_> = failed.iter().map(|failure| format!("{:03}", failure.number)).collect();
    let rest = if not_tried > 0 { format!(" ({not_tried} more were not tried)") } else { String::new() };
    let left: Vec<_> = failed.iter().flat_map(|failure| &failure.leftover_files).collect();
    let left = match left.as_slice() {
        [] => "nothing is left of them".to_owned(),
        left => left.iter().map(|path| format!("{} is left", path.display())).collect::<Vec<_>>().join(", "),
    };
    bail!("not started: {}{rest}; {left}", names.join(", "))
}

/// Refuses, before anything is started, more clones than the host's memory and the control groups' limits allow.
fn check_memory(fleet: &Fleet<'_>, count: u64) -> anyhow::Result<()> {
    let needed = fleet.estimate_memory(count);
    match MemcgHeadroom::of_this_process().left() {
        Some(left) if needed > left => bail!(
            "{count} clones need {} at least, before their guests write anything, and {} of memory can be had here; \
             start fewer, or use --overcommit",
            quantity::bytes(needed),
            quantity::bytes(left)
        ),
        _ => Ok(()),
    }
}

fn object(clones: &FleetReport<StartedClone>, clocks: &[ClockOutcome], waiting: &FleetReport<PooledClone>) -> Value {
    let started = clones.started.iter().zip(clocks).map(|(started, clock)| {
        let record = &started.record;
        json!({
            "name": started.name,
            "number": record.number,
            "pid": record.process.as_ref().map(|process| process.pid),
            "dir": started.folder,
            "monitor": started.folder.join("qmp"),
            "log": started.folder.join("log"),
            "overlays": record.overlays.iter().map(|overlay| json!({
                "path": started.folder.join(&overlay.name),
                "backing": overlay.backing,
            })).collect::<Vec<_>>(),
            "mapped_blocks": started.mapped_blocks,
            "from_pool": started.child.is_none(),
            "sent_pages": started.sent_pages,
            "vm_state": started.state,
            "clock": clock::object(clock),
            "loaded_ms": quantity::millis(started.time_to_loaded),
            "running_ms": quantity::millis(started.time_to_running),
        })
    });
    let pool = waiting.started.iter().map(|waiting| {
        let pid = waiting.record.process.as_ref().map(|process| process.pid);
        json!({ "name": waiting.name, "number": waiting.record.number, "pid": pid, "dir": waiting.folder })
    });
    let failed =
        clones.failed.iter().chain(&waiting.failed).map(
            |failure| json!({ "number": failure.number, "error": error_line(&*failure.error), "left": failure.leftover_files }),
        );
    json!({
        "clones": started.collect::<Vec<_>>(),
        "pool": pool.collect::<Vec<_>>(),
        "failed": failed.collect::<Vec<_>>(),
        "not_tried": clones.not_tried + waiting.not_tried,
    })
}

fn list_clones(args: &ListClonesArgs) -> anyhow::Result<ExitCode> {
    let clones = list(&args.dir)?;
    if args.json {
        print_out!("{}", json!({ "clones": clones }));
    } else {
        for clone in &clones {
            print_out!("{}  {}  {}", clone.name, state_line(clone), clone.monitor.display());
        }
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

/// The state of a clone, and what can be done about it.
fn state_line(clone: &ListedClone) -> String {
    let pid = clone.record.as_ref().and_then(|record| record.process.as_ref()).map_or(0, |process| process.pid);
    match clone.state {
        State::Prepared if clone.busy => "prepared".to_owned(),
        State::Prepared => "prepared, never started; remove it with limosa clone rm".to_owned(),
        State::Waiting if clone.record.as_ref().is_some_and(|record| record.pool.is_some()) => {
            format!("waiting in the pool  pid {pid}")
        }
        State::Waiting => format!("waiting  pid {pid}"),
        State::Loaded => format!("loaded  pid {pid}"),
        State::Running => format!("running  pid {pid}"),
        State::Ended => "ended".to_owned(),
        State::Unknown => {
            format!("unknown: process {pid} was started under another boot, on another host or in another container")
        }
        State::Damaged => format!("damaged: {}", clone.error.as_deref().unwrap_or("its record cannot be read")),
    }
}

/// The names on the command line, or those of all clones.
fn names(dir: &Path, named: &[String]) -> Result<Vec<String>, CloneError> {
    if !named.is_empty() {
        let mut seen = BTreeSet::new();
        return Ok(named.iter().filter(|name| seen.insert(*name)).cloned().collect());
    }
    Ok(list(dir)?.into_iter().map(|clone| clone.name).collect())
}

/// Prints each failure. The exit status says whether there was one.
fn status_of<T>(done: &[CloneOutcome<T>], what: &str) -> ExitCode {
    let failed = done.iter().filter_map(|done| Some((&done.name, done.result.as_ref().err()?)));
    let mut status = ExitCode::SUCCESS;
    for (name, error) in failed {
        let remedy = match error {
            CloneError::Unreachable { .. } => "; if it has ended, remove the clone with limosa clone rm --force",
            CloneError::Running { .. } => "; end it with limosa clone stop",
            CloneError::Io { .. } => "; if its record is damaged, end its QEMU and remove its directory",
            _ => "",
        };
        say!("limosa: clone {name} is not {what}: {}{remedy}", error_line(error));
        status = ExitCode::FAILURE;
    }
    status
}

fn stop_clones(args: &StopClonesArgs) -> anyhow::Result<ExitCode> {
    let mut options = StopOptions::default();
    options.power_down_timeout = args.power_down;
    let done = stop(&args.dir, &names(&args.dir, &args.names)?, options);
    let count = |ran| done.iter().filter(|done| done.result.as_ref().is_ok_and(|found| *found == ran)).count() as u64;
    if done.is_empty() || done.iter().any(|done| done.result.is_ok()) {
        say!("{} ended, {} had ended before", quantity::count(count(true)), quantity::count(count(false)));
    }
    Ok(status_of(&done, "ended"))
}

fn remove_clones(args: &RemoveClonesArgs) -> anyhow::Result<ExitCode> {
    let mut options = RemoveOptions::default();
    options.force = args.force;
    let done = remove(&args.dir, &names(&args.dir, &args.names)?, options);
    let removed: Vec<_> = done.iter().filter_map(|done| done.result.as_ref().ok()).collect();
    for kept in removed.iter().flat_map(|removed| &removed.kept) {
        say!("limosa: {} does not belong to a clone, and stays", kept.display());
    }
    for needed in removed.iter().flat_map(|removed| &removed.needed) {
        let by: Vec<_> = needed.needed_by.iter().map(|path| path.display().to_string()).collect();
        say!("limosa: {} stays: {} needs it", needed.disk.display(), by.join(", "));
    }
    if done.is_empty() || !removed.is_empty() {
        say!("{} removed", quantity::count(removed.len() as u64));
    }
    Ok(status_of(&done, "removed"))
}
