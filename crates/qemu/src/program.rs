//! Other programs, run to their end or ended: neither their time nor what they print is without bound.

use std::io::{self, Read as _};
use std::ops::ControlFlow;
use std::os::fd::AsFd as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Most bytes of a program's error output that are kept.
const COMPLAINT_LIMIT: u64 = 4096;

/// How a program ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// By itself; with its error output in one line.
    Itself(ExitStatus, String),
    /// limosa ended it, because it had read enough.
    Enough,
}

/// A program that is ended with its owner.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `command` and passes its output to `take`, piece by piece, until it ends or `take` has enough.
///
/// # Errors
/// It cannot be started, its output cannot be read, or, as [`io::ErrorKind::TimedOut`], it takes longer than
/// `patience`.
pub(crate) fn run(
    command: &mut Command,
    patience: Duration,
    mut take: impl FnMut(&[u8]) -> ControlFlow<()>,
) -> io::Result<Ended> {
    let end = Instant::now() + patience;
    let mut running = Running(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?);
    let lost = || io::Error::other("its output is lost");
    let (mut output, complaint) =
        (running.0.stdout.take().ok_or_else(lost)?, running.0.stderr.take().ok_or_else(lost)?);
    let mut piece = vec![0; 64 << 10];
    loop {
        wait(&mut [PollFd::new(&output.as_fd(), PollFlags::IN)], end)?;
        match output.read(&mut piece) {
            Ok(0) => break,
            Ok(came) => {
                if take(piece.get(..came).unwrap_or_default()).is_break() {
                    return Ok(Ended::Enough);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    wait(&mut [PollFd::new(&complaint.as_fd(), PollFlags::IN)], end)?;
    let mut said = Vec::new();
    complaint.take(COMPLAINT_LIMIT).read_to_end(&mut said)?;
    let said = String::from_utf8_lossy(&said).trim().replace('\n', " ");
    loop {
        if let Some(status) = running.0.try_wait()? {
            return Ok(Ended::Itself(status, said));
        }
        if Instant::now() > end {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until there is something to read, or the end of the output.
fn wait(what: &mut [PollFd<'_>], end: Instant) -> io::Result<()> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        match poll(what, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            other => return other.map(|_| ()).map_err(io::Error::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        command
    }

    #[test]
    fn what_a_program_prints_arrives_with_how_it_ended() {
        let mut printed = Vec::new();
        let ended = run(&mut shell("echo one; echo two; echo why >&2; exit 3"), Duration::from_secs(60), |piece| {
            printed.extend_from_slice(piece);
            ControlFlow::Continue(())
        });
        let Ended::Itself(status, said) = ended.unwrap() else { panic!("it was ended early") };
        assert_eq!((&printed[..], status.code(), &said[..]), (&b"one\ntwo\n"[..], Some(3), "why"));
    }

    #[test]
    fn a_program_that_never_ends_is_ended() {
        let ended = run(&mut shell("yes"), Duration::from_secs(60), |_| ControlFlow::Break(()));
        assert!(matches!(ended.unwrap(), Ended::Enough));
        let error = run(&mut shell("exec sleep 600"), Duration::from_millis(50), |_| ControlFlow::Continue(()));
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
