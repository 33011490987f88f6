//! Starting a QEMU that outlives this process: in a session of its own, and written down before it begins.
//!
//! Law: **no QEMU begins that is not recorded.** A process is forked, its id is handed to the caller, and only when the
//! caller has written it down does it become QEMU. If this process is killed in between, the forked one finds its gate,
//! a pipe, at its end, and ends too.
#![allow(unsafe_code)] // between fork and exec there is no safe call

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::thread;

use parking_lot::Mutex;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::job::JobError;
use crate::launch::{IncomingFrom, command, first, spawn};

/// One at a time: a process that was forked and waits has copies of all descriptors, the other gates' included, and two
/// that wait would keep each other's gates open after this process was killed.
static FORKED: Mutex<()> = Mutex::new(());

/// Starts a QEMU with a session of its own, whose output goes to the end of `log`. It inherits `inherited_fds`, under
/// the same numbers. `record` is called with its process id before it begins; it does not begin if that fails.
///
/// # Errors
/// If the program cannot be started; the error of `record`.
pub fn launch_detached<E: From<JobError>>(
    args: &[OsString],
    incoming: IncomingFrom<'_>,
    inherited_fds: &[BorrowedFd<'_>],
    log: &File,
    record: impl FnOnce(u32) -> Result<(), E>,
) -> Result<Child, E> {
    let failed = |source: io::Error| JobError::Io { what: "start", path: first(args).into(), source };
    let mut command = command(args);
    let mut inherited_fds = inherited_fds.to_vec();
    inherited_fds.extend(incoming.add_to(&mut command));
    command.stdin(Stdio::null()).stdout(log.try_clone().map_err(failed)?).stderr(log.try_clone().map_err(failed)?);
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; this is one system call.
    unsafe {
        command.pre_exec(|| rustix::process::setsid().map(|_| ()).map_err(io::Error::from));
    }
    let _one_at_a_time = FORKED.lock();
    let (mut gate, report) = wait_before_exec(&mut command).map_err(failed)?;
    // Forking returns when the program has begun, or has failed to.
    thread::scope(|scope| {
        let spawned = scope.spawn(|| {
            let spawned = spawn(&mut command, &inherited_fds);
            // The other end of `report` is open in the command: closed here, a fork that failed ends the wait below.
            drop(command);
            spawned
        });
        let mut pid = [0; 4];
        let recorded = match File::from(report).read_exact(&mut pid) {
            Ok(()) => record(u32::from_ne_bytes(pid)),
            // It was not forked; spawning says why.
            Err(_) => Ok(()),
        };
        if recorded.is_ok() {
            // Nobody reads it if it was not forked.
            let _ = gate.write_all(&[1]);
        }
        drop(gate);
        let spawned = spawned.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        recorded?;
        Ok(spawned.map_err(failed)?)
    })
}

/// Has the command, once forked, tell its process id and wait for a byte before it executes its program. Returns the
/// gate, which takes that byte, and the end that gives the id. The command holds the other ends.
fn wait_before_exec(command: &mut Command) -> io::Result<(File, OwnedFd)> {
    let (gate_end, gate) = pipe_with(PipeFlags::CLOEXEC)?;
    let (report, tell) = pipe_with(PipeFlags::CLOEXEC)?;
    let gate = File::from(gate);
    let raw_gate = gate.as_raw_fd();
    // SAFETY: between fork and exec only async-signal-safe calls are allowed: these are system calls, and nothing is
    // allocated. The gate is this process's: closing the copy that the fork has of it touches nothing else there.
    unsafe {
        command.pre_exec(move || {
            let pid = rustix::process::getpid().as_raw_nonzero().get();
            rustix::io::close(raw_gate);
            if rustix::io::write(&tell, &pid.to_ne_bytes())? != 4 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            let mut byte = [0];
            loop {
                return match rustix::io::read(&gate_end, &mut byte) {
                    Ok(1) => Ok(()),
                    // The process that would open it has ended, or could not write down the id.
                    Ok(_) => Err(io::ErrorKind::Interrupted.into()),
                    Err(rustix::io::Errno::INTR) => continue,
                    Err(error) => Err(error.into()),
                };
            }
        });
    }
    Ok((gate, report))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(args: &[&str], record: impl FnOnce(u32) -> Result<(), JobError>) -> Result<Child, JobError> {
        let args: Vec<OsString> = args.iter().map(Into::into).collect();
        launch_detached(&args, IncomingFrom::Deferred, &[], &tempfile::tempfile().unwrap(), record)
    }

    #[test]
    fn a_program_begins_after_it_was_recorded_under_its_own_process_id() {
        let mut recorded = None;
        let mut child = launch(&["sh", "-c", "exit 7"], |pid| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
            assert_ne!(name.trim(), "sh", "it has begun");
            recorded = Some(pid);
            Ok(())
        })
        .unwrap();
        assert_eq!(recorded, Some(child.id()));
        assert_eq!(child.wait().unwrap().code(), Some(7));
    }

    #[test]
    fn a_program_that_cannot_be_recorded_does_not_begin() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("begun");
        let refused = launch(&["touch", mark.to_str().unwrap()], |_| Err(JobError::refused("no room")));
        assert!(refused.unwrap_err().to_string().contains("no room"));
        assert!(!mark.exists());
        // The next one is not held up.
        launch(&["sh", "-c", "exit 0"], |_| Ok(())).unwrap().wait().unwrap();
    }

    #[test]
    fn a_program_that_does_not_exist_is_an_error() {
        let missing = launch(&["/nowhere/qemu"], |_| Ok(())).unwrap_err();
        assert!(matches!(missing, JobError::Io { what: "start", .. }), "{missing:?}");
    }
}
