//! The guard process itself.

use std::ffi::OsString;
use std::io::{self, BufReader, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use super::signals;
use crate::marker::{JobMarker, MarkerError};
use crate::monitor::Monitor;
use crate::qmp::{Options, Qmp, QmpError};
use crate::takeover::{Actor, take_over};

/// How long a migration may take to end after it was cancelled: a write to a dead network file system can hold it up.
const PATIENCE: Duration = Duration::from_secs(600);

/// How long QEMU may leave a command unanswered. One that is stopped, or whose disk hangs, may come back any time, and there is
/// nobody else to continue its VM then.
const REPLY: Duration = Duration::from_secs(86_400);

/// The guard's life, with the two arguments that [`super::Guard::spawn`] appended. Called by the hidden subcommand; nothing may have
/// been written to stdout before, which is the monitor.
#[must_use]
pub fn run(arguments: &[OsString]) -> ExitCode {
    signals::ignore();
    match watch(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The terminal may be gone.
            drop(writeln!(io::stderr(), "limosa guard: {error}"));
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
    Marker(#[from] MarkerError),
    #[error("cannot remove {path}: {source}")]
    Unlink { path: PathBuf, source: io::Error },
}

/// What limosa said before it fell silent.
#[derive(Debug, PartialEq, Eq)]
enum Word {
    Done,
    Dead { temporary: Option<PathBuf> },
}

fn watch(arguments: &[OsString]) -> Result<(), ChildError> {
    let [monitor, pid] = arguments else { return Err(ChildError::Usage) };
    let monitor = monitor.to_string_lossy().into_owned();
    let pid = pid.to_str().and_then(|pid| pid.parse().ok()).ok_or(ChildError::Usage)?;
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
    control.write_all(b"ready\n").map_err(setup("report to limosa"))?;
    match listen(BufReader::new(control)) {
        Word::Done => Ok(()),
        Word::Dead { temporary } => {
            let result = rescue(socket, &monitor, pid);
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

fn listen(mut control: impl io::BufRead) -> Word {
    let mut temporary = None;
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = control.read_until(b'\n', &mut line);
        // A line that was cut off is not a word.
        if !matches!(read, Ok(1..)) || line.last() != Some(&b'\n') {
            return Word::Dead { temporary };
        }
        line.pop();
        match line.strip_prefix(b"temporary ") {
            Some(hexadecimal) => temporary = decode(hexadecimal),
            None if line == b"done" => return Word::Done,
            None => {}
        }
    }
}

fn decode(hexadecimal: &[u8]) -> Option<PathBuf> {
    let digits = std::str::from_utf8(hexadecimal).ok()?;
    let bytes: Option<Vec<u8>> =
        (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok()).collect();
    bytes.filter(|bytes| !bytes.is_empty()).map(|bytes| PathBuf::from(OsString::from_vec(bytes)))
}

/// limosa is dead: does for its VM what has to be done.
fn rescue(socket: OwnedFd, monitor: &str, pid: u32) -> Result<(), ChildError> {
    let qmp = match Qmp::adopt(socket, monitor, &Options { reply: REPLY, ..Options::default() }) {
        Ok(qmp) => qmp,
        // QEMU has gone as well: there is nothing to be done.
        Err(error) if error.is_gone() => return Ok(()),
        Err(other) => return Err(MarkerError::from(other).into()),
    };
    let monitor = Monitor::new(qmp);
    let marker = match JobMarker::read(&monitor) {
        // The job had not begun, or was over; or the monitor's QEMU belongs to another's job.
        Ok(None) => return Ok(()),
        Ok(Some(marker)) if marker.process.pid != pid => return Ok(()),
        Ok(Some(marker)) => marker,
        Err(MarkerError::Qmp(error)) if error.is_gone() => return Ok(()),
        Err(other) => return Err(other.into()),
    };
    match take_over(&monitor, &marker, Actor::Guard, PATIENCE) {
        Ok(done) => {
            drop(writeln!(io::stderr(), "limosa: the {} of {} was killed: {}", marker.job, marker.path, done.outcome));
            Ok(())
        }
        Err(MarkerError::Qmp(QmpError::Closed { .. })) => Ok(()),
        Err(other) => Err(other.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_word_done_ends_the_watch_in_peace() {
        assert_eq!(listen(&b"done\n"[..]), Word::Done);
        for words in [&b""[..], b"done", b"don\n", b"novel\n"] {
            assert_eq!(listen(words), Word::Dead { temporary: None });
        }
    }

    #[test]
    fn the_temporary_file_is_the_last_one_named() {
        let named = |words: &[u8]| match listen(words) {
            Word::Dead { temporary } => temporary,
            Word::Done => None,
        };
        assert_eq!(
            named(b"temporary 2f61\ntemporary 2f0aff\n"),
            Some(PathBuf::from(OsString::from_vec(b"/\n\xff".into())))
        );
        assert_eq!(named(b"temporary 2f61\ntemporary \n"), None);
        assert_eq!(named(b"temporary 2f6\n"), None);
        assert_eq!(named(b"temporary 2f61\ntemporary 2f62"), Some("/a".into()));
    }

    #[test]
    fn a_person_who_calls_the_guard_is_turned_away() {
        assert!(matches!(watch(&[OsString::from("unix:/x")]), Err(ChildError::Usage)));
        assert!(matches!(watch(&["unix:/x", "pid"].map(OsString::from)), Err(ChildError::Usage)));
    }
}
