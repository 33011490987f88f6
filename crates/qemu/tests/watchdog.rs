//! The watchdog, with jobs that are killed with SIGKILL at every kind of moment, against stock QEMU.
//!
//! This executable plays all parts: started with `watchdog` it is the watchdog, with `job` a limosa that works on a VM,
//! and otherwise the tests; the name of one or a part of it may be given.

mod stock;

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::Duration;

use limosa_pack::Access;
use limosa_qemu::monitor::{MigrationStatus, Monitor, RunState, Settings};
use limosa_qemu::qmp::{Options, Qmp};
use limosa_qemu::takeover::Outcome;
use limosa_qemu::{
    JobKind, JobPhase, JobRecord, JobRecordError, Liveness, ResumeError, ResumeOptions, VmAfterJob, Watchdog,
    WatchdogAdvice, WatchdogEnd, resume, run_watchdog,
};
use serde_json::Value;
use stock::{Stock, eventually, run_state};
use uuid::Uuid;

/// A program that adds nothing to the watchdog's messages.
const SILENT: WatchdogAdvice = WatchdogAdvice { conflict: |_| String::new(), outcome: |_| "" };

const TESTS: &[(&str, fn())] = &[
    ("a_save_killed_while_memory_moves_is_cancelled_and_undone", killed_while_memory_moves),
    ("a_save_killed_while_qemu_waits_for_the_receiver_leaves_the_vm_running", killed_in_device_state),
    ("a_save_killed_before_the_vm_was_continued_continues_it", killed_before_cont),
    ("a_vm_that_was_stopped_before_stays_stopped", stopped_before),
    ("a_published_save_that_stops_the_vm_leaves_it_stopped", published_and_stopped),
    ("an_undecided_vm_waits_for_a_person", undecided),
    ("a_job_killed_in_the_middle_of_sending_a_command_is_undone", killed_while_sending),
    ("a_job_killed_in_the_middle_of_reading_an_answer_is_undone", killed_while_reading),
    ("a_job_killed_before_it_placed_its_record_changes_nothing", killed_before_record),
    ("a_job_of_another_process_of_the_same_number_is_left_alone", killed_beside_a_job_of_the_same_number),
    ("a_restore_killed_before_it_began_leaves_a_usable_qemu", restore_killed_early),
    ("a_lazy_restore_killed_half_way_is_kept_for_recovery", lazy_restore_killed),
    ("a_watchdog_that_is_told_goes_and_touches_nothing", report),
    ("a_watchdog_that_is_dropped_takes_over", dropped),
    ("a_watchdog_ignores_the_signals_of_the_terminal", signals),
    ("when_the_watchdog_dies_too_resume_does_its_work", both_killed),
    ("a_save_killed_at_random_moments_always_leaves_the_vm_running", random_moments),
];

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match arguments.first().and_then(|first| first.to_str()) {
        Some("watchdog") => run_watchdog(arguments.get(1..).unwrap_or_default(), SILENT, &Access::default()),
        Some("job") => job(&arguments),
        _ => tests(&arguments),
    }
}

fn tests(arguments: &[OsString]) -> ExitCode {
    let words: Vec<&str> = arguments.iter().filter_map(|word| word.to_str()).collect();
    let filter = words.iter().find(|word| !word.starts_with('-'));
    let chosen = TESTS.iter().filter(|(name, _)| filter.is_none_or(|filter| name.contains(*filter)));
    if words.contains(&"--list") {
        chosen.for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    if stock::skipped() {
        return ExitCode::SUCCESS;
    }
    let mut failed = 0;
    for (name, test) in chosen {
        let passed = std::panic::catch_unwind(test).is_ok();
        println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
        failed += i32::from(!passed);
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

// ---- The job's part -----------------------------------------------------------------------------------------------

/// A limosa that works on the VM behind the socket up to the point that `scenario` names, says so, and sleeps.
fn job(arguments: &[OsString]) -> ExitCode {
    let [_, socket, scenario, file] = arguments else { return ExitCode::FAILURE };
    let (scenario, file) = (scenario.to_str().unwrap(), PathBuf::from(file));
    let address = limosa_qemu::qmp::MonitorAddress::Unix(socket.into());
    let patient = Options { greeting_timeout: Duration::from_secs(60), ..Options::default() };
    let monitor = Monitor::new(Qmp::connect(&address, &patient).unwrap());
    let mut watchdog = Watchdog::spawn(Path::new("/proc/self/exe"), ["watchdog"], monitor.qmp()).unwrap();
    if scenario == "before-record" {
        arrive();
    }
    let restore = scenario.starts_with("restore-");
    let wish = match scenario {
        "device" => Settings::new().capability("return-path", true).parameter("max-bandwidth", 0),
        "moving" => Settings::new().capability("mapped-ram", true).parameter("max-bandwidth", 1 << 20),
        "restore-early" | "restore-lazy" => Settings::new().capability("postcopy-ram", true),
        _ => Settings::new().capability("mapped-ram", true).parameter("max-bandwidth", 0),
    };
    let change = monitor.plan_settings(&wish.capability("events", true)).unwrap();
    let was_running = run_state(&monitor) == RunState::Running;
    let kind = if restore { JobKind::Restore } else { JobKind::Save };
    let mut record = JobRecord::new(kind, Uuid::from_u128(1), &file, was_running || restore, change.undo);
    record.descriptors = vec!["limosa".to_owned()];
    if scenario == "same-number" {
        // Of a process that had this number before, or has it in another container.
        record.process.started += 1;
    }
    record.create(&monitor).unwrap();
    if scenario == "same-number" {
        arrive();
    }
    monitor.apply_settings(&change.set).unwrap();
    match scenario {
        "restore-early" => arrive(),
        "restore-lazy" => {
            monitor.migrate_incoming(&format!("unix:{}.in", file.display())).unwrap();
            announce();
            eventually("handed over", || monitor.migration().unwrap().status == MigrationStatus::PostcopyActive);
            arrive();
        }
        "device" => {
            let (ours, theirs) = UnixStream::pair().unwrap();
            monitor.getfd("limosa", theirs.as_fd()).unwrap();
            drop(theirs);
            let receiver = ours.try_clone().unwrap();
            std::thread::spawn(move || std::io::copy(&mut &receiver, &mut std::io::sink()));
            monitor.migrate("fd:limosa", false).unwrap();
            eventually("device", || monitor.migration().unwrap().status == MigrationStatus::Device);
            arrive();
        }
        "sending-text" | "sending-object" => {
            monitor.stop().unwrap();
            let command = r#"{"execute": "migrate", "arguments": {"uri": "file:x"#;
            // Cut inside a text, and where another object could follow.
            raw(&monitor, command.as_bytes().get(..if scenario == "sending-text" { 47 } else { 44 }).unwrap());
            arrive();
        }
        "reading" => {
            monitor.stop().unwrap();
            let mut socket =
                raw(&monitor, b"{\"execute\": \"query-migrate-parameters\", \"id\": 1}\n".repeat(5).as_slice());
            socket.read_exact(&mut [0; 100]).unwrap();
            arrive();
        }
        _ => {}
    }
    watchdog.set_temporary_file(Some(&file)).unwrap();
    let output = File::options().write(true).create(true).truncate(true).open(&file).unwrap();
    let set = monitor.add_fd(output.as_fd(), None, "limosa").unwrap();
    record.descriptor_sets = vec![set.id];
    record.update(&monitor).unwrap();
    if scenario == "random" {
        announce();
    }
    monitor.migrate(&format!("file:{}", set.path()), false).unwrap();
    if scenario == "moving" {
        eventually("active", || monitor.migration().unwrap().status == MigrationStatus::Active);
        arrive();
    }
    eventually("completed", || monitor.migration().unwrap().status == MigrationStatus::Completed);
    match scenario {
        "completed" => arrive(),
        "published-stop" => {
            record.phase = JobPhase::Published;
            record.vm_after = VmAfterJob::Stopped;
            record.update(&monitor).unwrap();
            arrive();
        }
        "undecided" => {
            record.phase = JobPhase::Undecided;
            record.update(&monitor).unwrap();
            arrive();
        }
        "unfinished" => {
            println!("{}", watchdog.pid());
            arrive();
        }
        _ => {}
    }
    monitor.cont().unwrap();
    monitor.restore_settings(&record.undo).unwrap();
    monitor.remove_fd(set.id).unwrap();
    watchdog.set_temporary_file(None).unwrap();
    if scenario == "drop" {
        drop(watchdog);
        return ExitCode::SUCCESS;
    }
    JobRecord::remove(&monitor).unwrap();
    if scenario == "report" {
        // What comes after the job is limosa's own affair.
        monitor.stop().unwrap();
    }
    assert_eq!(watchdog.finish().unwrap(), WatchdogEnd::Dismissed);
    ExitCode::SUCCESS
}

/// Bytes past the client, and the socket to go on with.
fn raw(monitor: &Monitor, bytes: &[u8]) -> UnixStream {
    let mut socket = UnixStream::from(monitor.qmp().descriptor().try_clone_to_owned().unwrap());
    socket.write_all(bytes).unwrap();
    socket
}

fn announce() {
    println!("here");
    std::io::stdout().flush().unwrap();
}

/// Says that the point is reached, and waits to be killed there.
fn arrive() -> ! {
    announce();
    loop {
        std::thread::sleep(Duration::from_secs(1000));
    }
}

// ---- The tests' part ----------------------------------------------------------------------------------------------

struct Job {
    child: Child,
    output: BufReader<ChildStdout>,
    /// Lines before the announcement.
    said: Vec<String>,
}

impl Job {
    /// Reads what the job says up to a line, or to its end.
    fn heard(&mut self, word: &str) {
        let lines = self.output.by_ref().lines().map(Result::unwrap);
        self.said = lines.take_while(|line| line != word).collect();
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Starts a job and waits for its announcement (or its end).
fn start(stock: &Stock, scenario: &str) -> Job {
    let mut child = Command::new("/proc/self/exe")
        .arg("job")
        .arg(stock.path("qmp"))
        .arg(scenario)
        .arg(stock.path("snapshot"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let mut job = Job { child, output, said: Vec::new() };
    job.heard("here");
    job
}

/// Brings a job to a point and kills it there; returns when the watchdog has let go of the monitor.
fn kill_at(stock: &Stock, scenario: &str) -> Monitor {
    let mut job = start(stock, scenario);
    job.child.kill().unwrap();
    job.child.wait().unwrap();
    stock.monitor()
}

/// The VM's settings and objects before a job, to compare with those after.
fn before(stock: &Stock) -> (Settings, Vec<(String, String)>) {
    // With QEMU's monitor serving one client, this one has to be gone before the job comes.
    let monitor = stock.monitor();
    eventually("the firmware runs", || run_state(&monitor) != RunState::Prelaunch);
    (monitor.settings().unwrap(), monitor.qom_list("/objects").unwrap())
}

fn assert_undone(monitor: &Monitor, before: &(Settings, Vec<(String, String)>)) {
    assert_eq!(monitor.settings().unwrap(), before.0);
    assert_eq!(monitor.qom_list("/objects").unwrap(), before.1);
    assert_eq!(monitor.descriptor_sets().unwrap(), []);
    assert_eq!(JobRecord::read(monitor).unwrap(), None);
}

fn killed_while_memory_moves() {
    let stock = Stock::start(&[]);
    let before = before(&stock);
    let monitor = kill_at(&stock, "moving");
    assert_eq!(run_state(&monitor), RunState::Running);
    assert_eq!(monitor.migration().unwrap().status, MigrationStatus::Cancelled);
    assert_undone(&monitor, &before);
    assert!(!stock.path("snapshot").exists(), "the unfinished file is gone");
}

fn killed_in_device_state() {
    let stock = Stock::start(&[]);
    let before = before(&stock);
    let monitor = kill_at(&stock, "device");
    assert_eq!(run_state(&monitor), RunState::Running);
    assert_undone(&monitor, &before);
}

fn killed_before_cont() {
    let stock = Stock::start(&[]);
    let before = before(&stock);
    let monitor = kill_at(&stock, "completed");
    assert_eq!(run_state(&monitor), RunState::Running);
    assert_eq!(monitor.migration().unwrap().status, MigrationStatus::Completed);
    assert_undone(&monitor, &before);
}

fn stopped_before() {
    let stock = Stock::start(&[]);
    let before = before(&stock);
    stock.monitor().stop().unwrap();
    let monitor = kill_at(&stock, "completed");
    assert_eq!(run_state(&monitor), RunState::Postmigrate);
    assert_undone(&monitor, &before);
}

fn published_and_stopped() {
    let stock = Stock::start(&[]);
    let before = before(&stock);
    let monitor = kill_at(&stock, "published-stop");
    assert_eq!(run_state(&monitor), RunState::Postmigrate);
    assert_undone(&monitor, &before);
}

fn undecided() {
    let stock = Stock::start(&[]);
    let before = before(&stock);
    let monitor = kill_at(&stock, "undecided");
    assert_eq!(run_state(&monitor), RunState::Postmigrate);
    assert_eq!(JobRecord::read(&monitor).unwrap().unwrap().phase, JobPhase::Undecided);
    let resumed = resume(&monitor, &ResumeOptions::default()).unwrap();
    assert_eq!(resumed.takeover.outcome, Outcome::Running);
    assert!(resumed.why.contains("may run elsewhere"), "{}", resumed.why);
    assert_undone(&monitor, &before);
}

fn killed_beside_a_job_of_the_same_number() {
    let stock = Stock::start(&[]);
    drop(before(&stock));
    let monitor = kill_at(&stock, "same-number");
    assert!(JobRecord::read(&monitor).unwrap().is_some(), "the job of another process is left alone");
}

fn killed_while_sending() {
    for scenario in ["sending-text", "sending-object"] {
        let stock = Stock::start(&[]);
        let before = before(&stock);
        let monitor = kill_at(&stock, scenario);
        assert_eq!(run_state(&monitor), RunState::Running);
        assert_eq!(monitor.migration().unwrap().status, MigrationStatus::None, "the half command was not carried out");
        assert_undone(&monitor, &before);
    }
}

fn killed_while_reading() {
    let stock = Stock::start(&[]);
    let before = before(&stock);
    let monitor = kill_at(&stock, "reading");
    assert_eq!(run_state(&monitor), RunState::Running);
    assert_undone(&monitor, &before);
}

fn killed_before_record() {
    let stock = Stock::start(&[]);
    let before = before(&stock);
    stock.monitor().stop().unwrap();
    let monitor = kill_at(&stock, "before-record");
    assert_eq!(run_state(&monitor), RunState::Paused, "the VM is none of this job's business");
    assert_undone(&monitor, &before);
}

fn restore_killed_early() {
    let stock = Stock::start(&["-incoming", "defer"]);
    let before = before(&stock);
    let monitor = kill_at(&stock, "restore-early");
    assert_eq!(run_state(&monitor), RunState::Inmigrate);
    assert_undone(&monitor, &before);
    let address = format!("unix:{}", stock.path("migration").display());
    monitor.migrate_incoming(&address).unwrap();
}

fn lazy_restore_killed() {
    let destination = Stock::start(&["-incoming", "defer"]);
    let mut job = start(&destination, "restore-lazy");
    // Another QEMU plays the pager: slow, and dead together with the job.
    let source = Stock::start(&[]);
    let pager = source.monitor();
    let slow = Settings::new().capability("postcopy-ram", true).parameter("max-bandwidth", 1 << 20);
    pager.apply_settings(&slow.parameter("max-postcopy-bandwidth", 1 << 20)).unwrap();
    pager.migrate(&format!("unix:{}.in", destination.path("snapshot").display()), false).unwrap();
    pager.migrate_start_postcopy().unwrap();
    job.heard("here");
    job.child.kill().unwrap();
    job.child.wait().unwrap();
    drop((pager, source));
    let monitor = destination.monitor();
    assert_eq!(monitor.migration().unwrap().status, MigrationStatus::PostcopyPaused);
    let mut record = JobRecord::read(&monitor).unwrap().unwrap();
    assert_eq!((record.job, record.snapshot), (JobKind::Restore, Uuid::from_u128(1)));
    let resumed = resume(&monitor, &ResumeOptions::default()).unwrap();
    assert_eq!(resumed.takeover.outcome, Outcome::NeedsRecovery);
    // The one who recovers makes the record its own.
    record.claim(&monitor).unwrap();
    assert!(matches!(resume(&monitor, &ResumeOptions::default()), Err(ResumeError::Record(JobRecordError::Busy(_)))));
}

fn report() {
    let stock = Stock::start(&[]);
    let before = before(&stock);
    let mut job = start(&stock, "report");
    assert!(job.child.wait().unwrap().success());
    let monitor = stock.monitor();
    assert_eq!(run_state(&monitor), RunState::Paused, "the watchdog has not continued what limosa stopped");
    assert_undone(&monitor, &before);
    assert!(stock.path("snapshot").exists());
}

fn dropped() {
    let stock = Stock::start(&[]);
    let before = before(&stock);
    let mut job = start(&stock, "drop");
    assert!(job.child.wait().unwrap().success());
    let monitor = stock.monitor();
    assert_eq!(run_state(&monitor), RunState::Running);
    assert_undone(&monitor, &before);
    assert!(stock.path("snapshot").exists(), "it was no longer named as unfinished");
}

fn signals() {
    let stock = Stock::start(&[]);
    let before = before(&stock);
    let mut job = start(&stock, "unfinished");
    let watchdog = rustix::process::Pid::from_raw(job.said[0].parse().unwrap()).unwrap();
    use rustix::process::Signal;
    for signal in [Signal::INT, Signal::HUP, Signal::TERM, Signal::QUIT] {
        rustix::process::kill_process(watchdog, signal).unwrap();
    }
    assert_eq!(rustix::process::getsid(Some(watchdog)).unwrap(), watchdog, "it has a session of its own");
    job.child.kill().unwrap();
    job.child.wait().unwrap();
    let monitor = stock.monitor();
    assert_eq!(run_state(&monitor), RunState::Running);
    assert_undone(&monitor, &before);
}

fn both_killed() {
    let stock = Stock::start(&[]);
    let before = before(&stock);
    let mut job = start(&stock, "unfinished");
    let watchdog = rustix::process::Pid::from_raw(job.said[0].parse().unwrap()).unwrap();
    rustix::process::kill_process(watchdog, rustix::process::Signal::KILL).unwrap();
    job.child.kill().unwrap();
    job.child.wait().unwrap();
    let monitor = stock.monitor();
    assert_eq!(run_state(&monitor), RunState::Postmigrate, "nothing was there to continue it");
    let record = JobRecord::read(&monitor).unwrap().unwrap();
    assert_eq!(record.process.liveness(), Liveness::Dead);
    let another = JobRecord::new(JobKind::Save, Uuid::from_u128(2), Path::new("/other"), true, Settings::new());
    assert!(matches!(another.create(&monitor).unwrap_err(), JobRecordError::LeftOver(_)));
    let resumed = resume(&monitor, &ResumeOptions::default()).unwrap();
    assert_eq!(resumed.takeover.outcome, Outcome::Running);
    assert!(resumed.why.contains("being saved") && resumed.why.contains("snapshot"), "{}", resumed.why);
    assert_eq!(run_state(&monitor), RunState::Running);
    assert_undone(&monitor, &before);
    assert_eq!(monitor.qmp().execute("query-name", Value::Null).unwrap(), serde_json::json!({}));
}

fn random_moments() {
    let stock = Stock::start(&[]);
    let before = before(&stock);
    for round in 0..12_u64 {
        let mut job = start(&stock, "random");
        // From the first command of the migration to well past its end.
        std::thread::sleep(Duration::from_micros(round * round * 1500));
        drop(job.child.kill());
        job.child.wait().unwrap();
        let monitor = stock.monitor();
        assert_eq!(run_state(&monitor), RunState::Running, "round {round}");
        assert_undone(&monitor, &before);
    }
}
