//! Starting a QEMU that waits for an incoming VM, with a monitor that only this process can use.
//!
//! The monitor is one half of a socket pair, which QEMU inherits: there is no path that another could connect to, or
//! that QEMU would have to reach from where it is confined. It is described in a configuration file (`-readconfig`),
//! inherited too, because `-mon` on the command line would take away the monitor that QEMU gives itself (found with
//! QEMU 10.0.2: the one behind Ctrl-A C of `-nographic`).
#![allow(unsafe_code)] // between fork and exec there is no safe call

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::FdFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::command_line;
use crate::conflict::Conflict;
use crate::job::JobError;
use crate::program;
use crate::qmp::{Options, Qmp, QmpError};

/// The id of the monitor in QEMU.
const ID: &str = "limosa-run";

/// Properties of `memory-backend-file` by which a snapshot is mapped, the newest last: `offset` is there since QEMU
/// 8.1, `rom` since 8.2.
const MEMORY_OPTIONS: [&str; 3] = ["readonly", "offset", "rom"];
/// How long QEMU may take to print its help.
const ASK_WITHIN: Duration = Duration::from_secs(20);
/// More bytes of help than any version prints.
const HELP_LIMIT: usize = 1 << 20;

/// The place from which a QEMU that was started takes its VM.
#[derive(Debug, Clone, Copy)]
pub enum IncomingFrom<'a> {
    /// One end of a socket pair. QEMU ends if the stream ends before it is whole.
    Stream(BorrowedFd<'a>),
    /// It waits until its monitor says (`-incoming defer`).
    Deferred,
}

impl<'a> IncomingFrom<'a> {
    /// Adds it to QEMU's command line. Returns the descriptor that QEMU has to inherit.
    pub(crate) fn add_to(self, command: &mut Command) -> Option<BorrowedFd<'a>> {
        match self {
            Self::Stream(stream) => {
                command.arg("-incoming").arg(format!("fd:{}", stream.as_raw_fd()));
                Some(stream)
            }
            Self::Deferred => {
                command.args(["-incoming", "defer"]);
                None
            }
        }
    }
}

/// A QEMU that was started. Dropping it does not end it.
#[derive(Debug)]
#[non_exhaustive]
pub struct Launched {
    /// The process: QEMU's, or that of the program that was to become QEMU.
    pub child: Child,
    socket: OwnedFd,
}

/// Whether a QEMU with this command line (the program first) can be started here; what limosa has to know of it.
///
/// # Errors
/// [`JobError::Refused`] if it says itself what it waits for, or leaves its terminal.
pub fn check(args: &[OsString]) -> Result<CommandLineProperties, JobError> {
    let own = args.get(command_line::program_index(args)..).unwrap_or_default();
    // QEMU takes its options with one dash and with two.
    let has = |option: &str| own.iter().any(|arg| arg == option || *arg == *format!("-{option}"));
    if has("-incoming") {
        return Err(JobError::conflict(
            "the command line says -incoming, which is added to it",
            Conflict::CommandLine("-incoming"),
        ));
    }
    if has("-daemonize") {
        return Err(JobError::conflict(
            "a QEMU that daemonizes cannot be waited for",
            Conflict::CommandLine("-daemonize"),
        ));
    }
    Ok(CommandLineProperties { paused: has("-S") })
}

/// Checks that the program of a command line exists: a missing one is found before anything is prepared for it.
///
/// # Errors
/// [`JobError::Io`] if it does not.
pub fn check_program(args: &[OsString]) -> Result<(), JobError> {
    let path = env::var_os("PATH");
    find_program(Path::new(first(args)), path.as_deref()).map_err(|source| JobError::Io {
        what: "start",
        path: first(args).into(),
        source,
    })
}

/// Looks for a program as execvp(3) does; `path` is the variable `PATH`.
fn find_program(program: &Path, path: Option<&OsStr>) -> io::Result<()> {
    if program.components().count() > 1 {
        return program.metadata().map(drop);
    }
    // Without a search path the system has one of its own.
    let found = path.is_none_or(|path| env::split_paths(path).any(|folder| folder.join(program).is_file()));
    if found { Ok(()) } else { Err(rustix::io::Errno::NOENT.into()) }
}

/// Properties of the VM in a command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommandLineProperties {
    /// The VM is to stay paused (`-S`).
    pub paused: bool,
}

/// Starts QEMU with `-incoming` and the monitor added to its command line. It shares this process's terminal, process
/// group and standard streams. If this process dies, it continues, unless its VM was still to come from a stream. It
/// inherits `inherited_fds`, under the same numbers.
///
/// # Errors
/// If the program cannot be started.
pub fn launch(
    args: &[OsString],
    incoming: IncomingFrom<'_>,
    inherited_fds: &[BorrowedFd<'_>],
) -> Result<Launched, JobError> {
    let failed = |source: io::Error| JobError::Io { what: "start", path: first(args).into(), source };
    let (socket, peer) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(|errno| failed(errno.into()))?;
    let configuration = configuration(peer.as_raw_fd()).map_err(failed)?;
    let mut command = command(args);
    let stream = incoming.add_to(&mut command);
    command.arg("-readconfig").arg(format!("/dev/fd/{}", configuration.as_raw_fd()));
    let mut inherited_fds = [&[peer.as_fd(), configuration.as_fd()], inherited_fds].concat();
    inherited_fds.extend(stream);
    let child = spawn(&mut command, &inherited_fds).map_err(failed)?;
    Ok(Launched { child, socket })
}

pub(crate) fn first(args: &[OsString]) -> &OsStr {
    args.first().map_or(OsStr::new(""), OsString::as_os_str)
}

pub(crate) fn command(args: &[OsString]) -> Command {
    let mut command = Command::new(first(args));
    command.args(args.get(1..).unwrap_or_default());
    command
}

/// Starts a program that inherits descriptors under the numbers that they have.
pub(crate) fn spawn(command: &mut Command, inherited_fds: &[BorrowedFd<'_>]) -> io::Result<Child> {
    let inherited: Vec<RawFd> = inherited_fds.iter().map(AsRawFd::as_raw_fd).collect();
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; setting the flags of a descriptor is one
    // system call, and nothing is allocated. Whoever calls this holds the descriptors open until it returns.
    unsafe {
        command.pre_exec(move || {
            for descriptor in &inherited {
                rustix::io::fcntl_setfd(BorrowedFd::borrow_raw(*descriptor), FdFlags::empty())?;
            }
            Ok(())
        });
    }
    command.spawn()
}

/// The option that a QEMU lacks to map a snapshot as memory, if it lacks one: asked of the program itself, which starts
/// no guest for it.
#[must_use]
pub fn missing_memory_option(args: &[OsString]) -> Option<&'static str> {
    let own = args.get(..=command_line::program_index(args))?;
    let mut command = Command::new(own.first()?);
    command.args(own.get(1..)?).args(["-object", "memory-backend-file,help"]).stdin(Stdio::null());
    let mut help = Vec::new();
    let ended = program::run(&mut command, ASK_WITHIN, |piece| {
        help.extend_from_slice(piece);
        if help.len() > HELP_LIMIT { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let help = String::from_utf8_lossy(&help);
    // One that prints no help lacks more than an option.
    let helped = ended.is_ok() && help.contains("mem-path");
    let has = |option: &str| help.lines().any(|line| line.trim_start().starts_with(&format!("{option}=")));
    MEMORY_OPTIONS.iter().copied().find(|option| helped && !has(option))
}

/// Returns the configuration for `-readconfig`, in a file without a name.
fn configuration(monitor: RawFd) -> io::Result<OwnedFd> {
    let text = format!(
        "[chardev \"{ID}\"]\n  backend = \"socket\"\n  fd = \"{monitor}\"\n[mon \"{ID}\"]\n  chardev = \"{ID}\"\n  mode = \
         \"control\"\n"
    );
    let mut file = File::from(memfd_create("limosa-run", MemfdFlags::CLOEXEC)?);
    file.write_all(text.as_bytes())?;
    file.seek(SeekFrom::Start(0))?;
    Ok(file.into())
}

impl Launched {
    /// Waits until QEMU greets on its monitor, within `options.greeting`.
    ///
    /// # Errors
    /// As [`Qmp::connect`].
    pub fn connect(self, options: &Options) -> (Child, Result<Qmp, QmpError>) {
        let qmp = Qmp::from_socket(self.socket, "of this QEMU", options).map(|qmp| qmp.with_process(self.child.id()));
        (self.child, qmp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn options_that_are_limosas_to_give_are_refused_with_one_dash_and_with_two() {
        for line in ["qemu-system-x86_64 -incoming defer", "nice qemu-kvm --incoming tcp:0:1", "/x/qemu -daemonize"] {
            assert!(matches!(check(&args(line)), Err(JobError::Refused { .. })), "{line}");
        }
    }

    #[test]
    fn a_program_is_looked_for_in_the_search_path_unless_it_is_a_path_itself() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("qemu"), "").unwrap();
        let path = OsString::from(format!("/no/such:{}", folder.path().display()));
        let find = |program: &Path| find_program(program, Some(&path)).map_err(|error| error.kind());
        assert_eq!(find(Path::new("qemu")), Ok(()));
        assert_eq!(find(&folder.path().join("qemu")), Ok(()));
        for missing in ["qemu-kvm", "./qemu-kvm", "/no/such/qemu", ""] {
            assert_eq!(find(Path::new(missing)), Err(io::ErrorKind::NotFound), "{missing}");
        }
        assert!(find_program(Path::new("qemu-kvm"), None).is_ok());
    }

    #[test]
    fn only_qemus_own_options_count() {
        assert!(check(&args("qemu-system-x86_64 -m 1G -S")).unwrap().paused);
        assert!(!check(&args("unshare -S 0 -- /usr/bin/qemu-system-x86_64 -m 1G")).unwrap().paused);
        assert!(check(&args("start-my-vm --S")).unwrap().paused);
    }
}
