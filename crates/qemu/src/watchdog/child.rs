//! The watchdog process itself.

use std::cell::Cell;
use std::ffi::OsString;
use std::io::{self, BufReader, IoSliceMut, Read, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use limosa_pack::Access;
use limosa_page::error_with_causes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{HOLD, HeldConnections, UNKNOWN_PROCESS, signals};
use crate::conflict::Conflict;
use crate::job::JobError;
use crate::job_record::{JobRecord, JobRecordError};
use crate::monitor::Monitor;
use crate::process::{Liveness, ProcessIdentity};
use crate::qmp::{Options, Qmp, QmpError};
use crate::restore::unfinished::{KeptSnapshot, Recovery, UnfinishedRestore};
use crate::takeover::{Actor, Outcome, take_over_holding};

/// How long a migration may take to end after it was cancelled: a write to a dead network file system can hold it up.
const PATIENCE: Duration = Duration::from_secs(600);

/// How long QEMU may leave a command unanswered. One that is stopped, or whose disk hangs, may come back any time, and
/// there is no other process that continues its VM then.
const REPLY: Duration = Duration::from_secs(86_400);

/// Advice that the program adds to the watchdog's messages, by its own options and commands.
#[derive(Debug, Clone, Copy)]
pub struct Advice {
    /// For a conflict that rules a recovery out.
    pub conflict: fn(&Conflict) -> String,
    /// For the state in which the VM is left.
    pub outcome: fn(Outcome) -> &'static str,
}

/// Runs the watchdog, with the two arguments that [`super::Watchdog::spawn`] appended. Called by the hidden
/// subcommand; nothing may have been written to stdout before, which is the monitor.
///
/// The snapshot of a lazily restored guest is opened with this access. One that it does not open is left to its user.
#[must_use]
pub fn run(arguments: &[OsString], advice: Advice, access: &Access) -> ExitCode {
    signals::ignore();
    match watch(arguments, advice, access) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The terminal may be gone.
            let advice = match &error {
                ChildError::Recovery(JobError::Refused { conflict: Some(conflict), .. }) => (advice.conflict)(conflict),
                // A snapshot that the watchdog cannot open, encrypted or gone for now, may be opened by its user.
                ChildError::Recovery(_) => (advice.outcome)(Outcome::NeedsRecovery).to_owned(),
                _ => String::new(),
            };
            drop(writeln!(io::stderr(), "limosa watchdog: {}{advice}", error_with_causes(&error)));
            ExitCode::FAILURE
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum ChildError {
    #[error("this is a hidden subcommand that limosa starts by itself")]
    Usage,
    #[error("cannot {0}: {1}")]
    Setup(&'static str, #[source] io::Error),
    #[error(transparent)]
    Record(#[from] JobRecordError),
    #[error("the restore was killed, and its watchdog cannot continue it")]
    Recovery(#[from] JobError),
    #[error("cannot remove {path}")]
    Unlink { path: PathBuf, source: io::Error },
}

/// The last message of limosa before its end.
#[derive(Debug, PartialEq, Eq)]
enum JobEnd {
    Done,
    Dead { temporary: Option<PathBuf>, disk_servers: Vec<PathBuf> },
}

/// The QEMU of the job.
struct Peer<'a> {
    /// Its monitor, for messages.
    monitor: &'a str,
    /// Its process, if it is known.
    process: Option<u32>,
    /// Control sockets of servers of its disks.
    disk_servers: &'a [PathBuf],
}

fn watch(arguments: &[OsString], advice: Advice, access: &Access) -> Result<(), ChildError> {
    let [monitor, qemu, started, pid] = arguments else { return Err(ChildError::Usage) };
    let monitor = monitor.to_string_lossy().into_owned();
    let started = started.to_str().and_then(|started| started.parse().ok()).ok_or(ChildError::Usage)?;
    let pid = pid.to_str().and_then(|pid| pid.parse().ok()).ok_or(ChildError::Usage)?;
    // Another container's limosa may have the same number, and a later one of this container, too.
    let watched = ProcessIdentity { pid, started, ..ProcessIdentity::own() };
    let qemu = match qemu.to_str().ok_or(ChildError::Usage)? {
        UNKNOWN_PROCESS => None,
        qemu => Some(qemu.parse().map_err(|_| ChildError::Usage)?),
    };
    let setup = |what: &'static str| move |error: io::Error| ChildError::Setup(what, error);
    let control = io::stdin().as_fd().try_clone_to_owned().map_err(setup("keep the control channel"))?;
    let socket = io::stdout().as_fd().try_clone_to_owned().map_err(setup("keep the monitor"))?;
    if !is_socket(&control) || !is_socket(&socket) {
        return Err(ChildError::Usage);
    }
    let null = std::fs::File::options().read(true).write(true).open("/dev/null").map_err(setup("open /dev/null"))?;
    rustix::stdio::dup2_stdin(&null).map_err(|errno| ChildError::Setup("leave stdin", errno.into()))?;
    rustix::stdio::dup2_stdout(&null).map_err(|errno| ChildError::Setup("leave stdout", errno.into()))?;
    // Already a session leader: as good.
    let _ = rustix::process::setsid();
    // Keep no directory busy.
    let _ = rustix::process::chdir("/");
    let mut control = UnixStream::from(control);
    // limosa may be dead already; what it said before is still there to be read.
    let _ = control.write_all(b"ready\n");
    let (mut kept, mut far) = (None, None);
    let held = HeldConnections::default();
    let silence = Cell::new(None);
    let control = Control { socket: control, held: &held, silence: &silence, watched: &watched };
    match listen(BufReader::new(control), (&held, &silence), |unfinished| {
        if unfinished.is_far() {
            far = Some(unfinished);
        } else {
            kept = Some(unfinished.keep(access));
        }
    }) {
        JobEnd::Done => Ok(()),
        JobEnd::Dead { temporary, disk_servers } => {
            // Whoever waits for the monitor finds everything done.
            let _connected = socket.try_clone();
            // Opened only now: it may take minutes, in which limosa's end would not be heard of.
            let kept = kept.or_else(|| far.map(|unfinished| unfinished.keep(access)));
            let result = match kept {
                Some(kept) => adopt(kept?, socket, &monitor),
                None => {
                    let peer = Peer { monitor: &monitor, process: qemu, disk_servers: &disk_servers };
                    rescue(socket, peer, &watched, &held, advice)
                }
            };
            if let Some(path) = temporary {
                match std::fs::remove_file(&path) {
                    Err(source) if source.kind() != io::ErrorKind::NotFound => {
                        return result.and(Err(ChildError::Unlink { path, source }));
                    }
                    _ => {}
                }
            }
            result
        }
    }
}

fn is_socket(descriptor: &OwnedFd) -> bool {
    rustix::net::sockopt::socket_type(descriptor).is_ok()
}

/// The control channel, and the connections that come through it, which are held.
struct Control<'h> {
    socket: UnixStream,
    held: &'h HeldConnections,
    /// The longest that limosa may be silent.
    silence: &'h Cell<Option<Duration>>,
    watched: &'h ProcessIdentity,
}

impl Control<'_> {
    /// Waits for a message. A limosa that is silent for too long is ended.
    fn wait(&self) -> io::Result<()> {
        let Some(longest) = self.silence.get() else { return Ok(()) };
        let until = Instant::now() + longest;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
            match poll(&mut fds, Some(&Timespec::try_from(left).unwrap_or_default())) {
                Ok(0) if left.is_zero() => break,
                Ok(0) | Err(Errno::INTR) => {}
                other => return Ok(other.map(drop)?),
            }
        }
        self.silence.set(None);
        let pid = self.watched.pid;
        match end_process(self.watched) {
            Ok(()) => drop(writeln!(io::stderr(), "limosa: process {pid} hung, and was ended by its watchdog")),
            // It may wake up at any moment: what it does then must not meet what is done here.
            Err(error) => drop(writeln!(io::stderr(), "limosa: process {pid} hangs, and cannot be ended: {error}")),
        }
        Ok(())
    }
}

/// Ends this very process at once, and waits for its end.
fn end_process(process: &ProcessIdentity) -> io::Result<()> {
    let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
    let held = pidfd_open(pid, PidfdFlags::empty())?;
    // Looked at behind that: the number is this process's as long as it is held.
    if process.liveness() != Liveness::Alive {
        return Ok(());
    }
    pidfd_send_signal(&held, Signal::KILL)?;
    poll(&mut [PollFd::new(&held, PollFlags::IN)], None)?;
    Ok(())
}

impl Read for Control<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.wait()?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut passed = RecvAncillaryBuffer::new(&mut space);
        let list = &mut [IoSliceMut::new(bytes)];
        let got = recvmsg(&self.socket, list, &mut passed, RecvFlags::CMSG_CLOEXEC)?.bytes;
        for message in passed.drain() {
            if let RecvAncillaryMessage::ScmRights(ends) = message {
                ends.for_each(|end| self.held.hold(end));
            }
        }
        Ok(got)
    }
}

fn listen(
    mut control: impl io::BufRead,
    (held, silence): (&HeldConnections, &Cell<Option<Duration>>),
    mut keep: impl FnMut(UnfinishedRestore),
) -> JobEnd {
    let (mut temporary, mut disk_servers) = (None, Vec::new());
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = control.read_until(b'\n', &mut line);
        // A line that was cut off is not a word.
        if !matches!(read, Ok(1..)) || line.last() != Some(&b'\n') {
            return JobEnd::Dead { temporary, disk_servers };
        }
        line.pop();
        if let Some(hexadecimal) = line.strip_prefix(b"temporary ") {
            temporary = decode(hexadecimal).map(|path| PathBuf::from(OsString::from_vec(path)));
        } else if let Some(hexadecimal) = line.strip_prefix(b"disk-server ") {
            disk_servers.extend(decode(hexadecimal).map(|path| PathBuf::from(OsString::from_vec(path))));
        } else if let Some(hexadecimal) = line.strip_prefix(b"restore ") {
            let unfinished = decode(hexadecimal).and_then(|object| serde_json::from_slice(&object).ok());
            unfinished.into_iter().for_each(&mut keep);
        } else if let Some(millis) = line.strip_prefix(b"alive ") {
            let millis = std::str::from_utf8(millis).ok().and_then(|millis| millis.parse().ok());
            silence.set(millis.filter(|millis| *millis > 0).map(Duration::from_millis));
        } else if line == b"release" {
            held.release();
        } else if line == b"done" {
            return JobEnd::Done;
        }
    }
}

fn decode(hexadecimal: &[u8]) -> Option<Vec<u8>> {
    let digits = std::str::from_utf8(hexadecimal).ok()?;
    let bytes: Option<Vec<u8>> =
        (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok()).collect();
    bytes.filter(|bytes| !bytes.is_empty())
}

/// Brings the missing memory to the guest of a dead limosa.
fn adopt(kept: KeptSnapshot, socket: OwnedFd, monitor: &str) -> Result<(), ChildError> {
    let path = kept.path().display();
    let what = match kept.resume(socket, monitor, &Options { reply_timeout: REPLY, ..Options::default() })? {
        Recovery::Whole => "its watchdog has brought the rest of the memory",
        Recovery::NeverRan => "the guest had not been started: end this QEMU and start a new one",
        Recovery::Unended => {
            "QEMU has its memory but does not end the transfer (a risk of a preempt channel): end this QEMU"
        }
        Recovery::Gone => return Ok(()),
    };
    drop(writeln!(io::stderr(), "limosa: the restore of {path} was killed: {what}"));
    Ok(())
}

/// Takes the VM of a dead limosa over.
fn rescue(
    socket: OwnedFd,
    peer: Peer<'_>,
    watched: &ProcessIdentity,
    held: &HeldConnections,
    advice: Advice,
) -> Result<(), ChildError> {
    // Also if the monitor does not answer.
    held.release_in(HOLD);
    let qmp = match Qmp::adopt(socket, peer.monitor, &Options { reply_timeout: REPLY, ..Options::default() }) {
        Ok(qmp) => qmp,
        // QEMU has gone as well: there is nothing to be done.
        Err(error) if error.is_gone() => return Ok(()),
        Err(other) => return Err(JobRecordError::from(other).into()),
    };
    let monitor = Monitor::new(match peer.process {
        Some(pid) => qmp.with_process(pid),
        None => qmp,
    });
    let record = match JobRecord::read(&monitor) {
        // The job had not begun, or was over; or the monitor's QEMU belongs to another's job.
        Ok(None) => return Ok(()),
        Ok(Some(record)) if !record.process.is_same(watched) => return Ok(()),
        Ok(Some(record)) => record,
        Err(JobRecordError::Qmp(error)) if error.is_gone() => return Ok(()),
        Err(other) => return Err(other.into()),
    };
    match take_over_holding(held, &monitor, &record, Actor::Watchdog, (peer.disk_servers, PATIENCE)) {
        Ok(done) => {
            let (job, path, outcome) = (record.job, &record.path, done.outcome);
            let advice = (advice.outcome)(outcome);
            drop(writeln!(io::stderr(), "limosa: the {job} of {path} was killed: {outcome}{advice}"));
            for notice in &done.notices {
                drop(writeln!(io::stderr(), "limosa: {notice}"));
            }
            Ok(())
        }
        Err(JobRecordError::Qmp(QmpError::Closed { .. } | QmpError::Ending { .. })) => Ok(()),
        Err(other) => Err(other.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The end of the job by these messages, and how long limosa may be silent.
    fn heard(messages: &[u8]) -> (JobEnd, Option<Duration>) {
        let silence = Cell::new(None);
        let end = listen(messages, (&HeldConnections::default(), &silence), |_| {});
        (end, silence.get())
    }

    #[test]
    fn silence_is_allowed_until_a_heartbeat_begins_and_after_it_ends() {
        assert_eq!(heard(b"alive 250\n").1, Some(Duration::from_millis(250)));
        for none in [&b"alive 250\nalive 0\n"[..], b"alive x\n", b"alive \n", b"alive 9"] {
            assert_eq!(heard(none).1, None);
        }
    }

    #[test]
    fn only_the_whole_word_done_ends_the_watch_in_peace() {
        assert_eq!(heard(b"done\n"), (JobEnd::Done, None));
        for words in [&b""[..], b"done", b"don\n", b"novel\n"] {
            assert_eq!(heard(words), (JobEnd::Dead { temporary: None, disk_servers: Vec::new() }, None));
        }
    }

    #[test]
    fn the_temporary_file_is_the_last_one_named() {
        let named = |words: &[u8]| match heard(words) {
            (JobEnd::Dead { temporary, .. }, _) => temporary,
            (JobEnd::Done, _) => None,
        };
        assert_eq!(
            named(b"temporary 2f61\ntemporary 2f0aff\n"),
            Some(PathBuf::from(OsString::from_vec(b"/\n\xff".into())))
        );
        assert_eq!(named(b"temporary 2f61\ntemporary \n"), None);
        assert_eq!(named(b"temporary 2f6\n"), None);
        assert_eq!(named(b"temporary 2f61\ntemporary 2f62"), Some("/a".into()));
    }

    const SILENT: Advice = Advice { conflict: |_| String::new(), outcome: |_| "" };

    #[test]
    fn a_person_who_calls_the_watchdog_is_turned_away() {
        assert!(matches!(watch(&[OsString::from("unix:/x")], SILENT, &Access::default()), Err(ChildError::Usage)));
        assert!(matches!(
            watch(&["unix:/x", "pid"].map(OsString::from), SILENT, &Access::default()),
            Err(ChildError::Usage)
        ));
    }
}
