//! User-mode Linux: a whole Linux kernel as an ordinary process, with devices over vhost-user.
//!
//! Its memory is an unlinked file in its own folder on tmpfs, which it shares with the devices. Laws: nothing of it is
//! left when it is dropped or when the test ends in any way: it is a group of processes, which a small guard ends when
//! this process has gone; and the serial port is drained all the time, so that the guest never waits for us.

use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use tempfile::TempDir;

use crate::busybox::System;
use crate::process::Process;
use crate::requirement::{UML_LIBRARY, uml_folder, uml_skipped};
use crate::serial::Serial;

/// How long the guest may take to boot, or to answer a line.
const LIMIT: Duration = Duration::from_secs(120);

/// Where its memory's file may be: a tmpfs, for holes are punched into it.
const TMPFS: &str = "/dev/shm";

/// The options of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UmlGuest {
    /// MiB of memory.
    pub memory: u64,
    /// Sockets of devices, with their virtio device ids (2: block, 5: balloon). A process listens there already.
    pub devices: Vec<(PathBuf, u32)>,
    /// Modules that it has in `/modules`, and loads at once.
    pub modules: Vec<String>,
    /// More words for the kernel's command line.
    pub kernel_words: String,
    /// Programs of the host that it has too, run by `host NAME ...`.
    pub programs: Vec<PathBuf>,
}

impl Default for UmlGuest {
    fn default() -> Self {
        Self {
            memory: 128,
            devices: Vec::new(),
            modules: Vec::new(),
            kernel_words: String::new(),
            programs: Vec::new(),
        }
    }
}

impl UmlGuest {
    /// Boots it, and waits until it takes commands.
    ///
    /// # Errors
    /// User-mode Linux is not there, or does not boot.
    pub fn start(&self) -> Result<Uml> {
        let parts = uml_folder()?;
        let mode = std::fs::Permissions::from_mode(0o700);
        let folder = tempfile::Builder::new().prefix("limosa-uml-").permissions(mode).tempdir_in(TMPFS);
        let folder = folder.with_context(|| format!("a folder in {TMPFS}, where the guest's memory is"))?;
        let modules: Vec<_> = self.modules.iter().map(String::as_str).collect();
        let modules_in = parts.join("modules");
        let system =
            System { modules: &modules, modules_in: &modules_in, first: "", beside: "", programs: &self.programs };
        let initrd = system.write_initrd(folder.path())?;
        let (ours, theirs) = UnixStream::pair().context("the guest's serial port")?;
        let theirs = || -> Result<OwnedFd> { Ok(theirs.try_clone().context("the guest's serial port")?.into()) };
        let mut command = Command::new(parts.join("linux.uml"));
        command.arg(format!("mem={}M", self.memory)).arg(format!("initrd={}", initrd.display()));
        command.args(["con=null", "con0=fd:0,fd:1", "quiet", "panic=-1"]);
        for (socket, id) in &self.devices {
            command.arg(format!("virtio_uml.device={}:{id}", socket.display()));
        }
        command.args(self.kernel_words.split_whitespace());
        // What it makes besides its memory (a folder for its consoles) goes there, too.
        command.env_clear().env("TMPDIR", folder.path()).env("HOME", folder.path()).env("PATH", "/usr/bin:/bin");
        command.env("LD_PRELOAD", parts.join(UML_LIBRARY));
        command.process_group(0).stdin(theirs()?).stdout(theirs()?).stderr(theirs()?);
        let process = Process::spawn("user-mode Linux", command)?;
        let guard = Guard::over(process.pid(), folder.path())?;
        let guest = Uml { serial: Serial::over(ours)?, process, guard, folder };
        guest.wait_line(0, "ready")?;
        Ok(guest)
    }
}

/// A guest that runs.
#[derive(Debug)]
pub struct Uml {
    serial: Serial,
    process: Process,
    guard: Guard,
    folder: TempDir,
}

impl Uml {
    /// Runs a shell line, and returns what it said.
    ///
    /// # Errors
    /// It fails, does not end, or the guest is gone.
    pub fn shell(&self, line: &str) -> Result<Vec<String>> {
        let from = self.serial.mark();
        self.serial.send(line)?;
        let (end, status) = self.serial.wait_from(from, LIMIT, |text| text.starts_with("done "))?;
        let said: Vec<String> = self.serial.lines().drain(from..end).map(|line| line.text).collect();
        ensure!(status.text == "done 0", "`{line}` in the guest: {} after {said:?}", status.text);
        Ok(said)
    }

    /// Sends a line and does not wait.
    ///
    /// # Errors
    /// The guest is gone.
    pub fn send(&self, line: &str) -> Result<()> {
        self.serial.send(line)
    }

    /// kB of an entry of the guest's /proc/meminfo.
    ///
    /// # Errors
    /// The guest is gone, or there is no such entry.
    pub fn meminfo(&self, entry: &str) -> Result<u64> {
        let said = self.shell(&format!("grep ^{entry}: /proc/meminfo"))?;
        let number = said.iter().find_map(|line| line.split_ascii_whitespace().nth(1)?.parse().ok());
        number.with_context(|| format!("{entry} of the guest's memory: {said:?}"))
    }

    /// Whether it still runs.
    pub fn is_alive(&self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    /// Its main process.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Pauses its kernel, and resumes it. A program in it that computes at that moment runs on to its next system call.
    pub fn pause(&self, pause: bool) {
        self.process.signal(if pause { Signal::STOP } else { Signal::CONT });
    }

    /// Every line on its serial port so far.
    pub fn lines(&self) -> Vec<String> {
        self.serial.lines().into_iter().map(|line| line.text).collect()
    }

    /// Fails if it has ended, with its last lines.
    ///
    /// # Errors
    /// As said.
    pub fn check_alive(&self) -> Result<()> {
        if !self.is_alive() {
            let lines = self.lines();
            bail!("user-mode Linux has ended: {:?}", lines.get(lines.len().saturating_sub(10)..));
        }
        Ok(())
    }

    /// Its folder on tmpfs, in which its memory was made.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn wait_line(&self, from: usize, text: &str) -> Result<()> {
        self.serial.wait_from(from, LIMIT, |line| line == text).map(|_| ())
    }
}

/// Guests of this process that crashed: a signal ended them that no test sent.
static DEATHS: AtomicU32 = AtomicU32::new(0);

/// How often a test is tried whose guest crashes.
const TRIES: u32 = 3;

/// Runs a test whose guest is user-mode Linux; not if `LIMOSA_SKIP_UML=1` is set.
///
/// On a busy host user-mode Linux 6.1 now and then gets more signals at once than it has stack for; the kernel says
/// that it "overflowed sigaltstack", and ends it by SIGSEGV. A test that fails *while a guest crashed like that* is run
/// again, and says so; any other failure is an error.
pub fn on_uml(test: impl Fn()) {
    if uml_skipped() {
        return;
    }
    for left in (0..TRIES).rev() {
        let before = DEATHS.load(Ordering::SeqCst);
        let Err(panic) = catch_unwind(AssertUnwindSafe(&test)) else { return };
        if left == 0 || DEATHS.load(Ordering::SeqCst) == before {
            resume_unwind(panic);
        }
        eprintln!("user-mode Linux was killed by SIGSEGV (see dmesg); the test is run anew");
    }
}

/// Whether a process has ended by SIGSEGV. It is not reaped for that, so that its number stays its own.
fn has_crashed(process: &Process) -> bool {
    let looked = i32::try_from(process.pid()).ok().and_then(Pid::from_raw).and_then(|pid| {
        let how = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(pid), how).ok()
    });
    let signal = match looked {
        Some(ended) => ended.and_then(|ended| ended.terminating_signal()),
        // Another thread has reaped it.
        None => process.try_wait().ok().flatten().and_then(|status| status.signal()),
    };
    signal == Some(Signal::SEGV.as_raw())
}

impl Drop for Uml {
    fn drop(&mut self) {
        if has_crashed(&self.process) {
            DEATHS.fetch_add(1, Ordering::SeqCst);
        }
        // Its helpers are in its group; its main process is not reaped before they are gone, so that the number is
        // still its.
        self.guard.end_group();
        self.process.kill();
    }
}

/// Ends a group of processes, and removes its folder, when this process has gone: a shell that waits for the end of its
/// input.
#[derive(Debug)]
struct Guard {
    group: Pid,
    process: Process,
}

impl Guard {
    fn over(leader: u32, folder: &Path) -> Result<Self> {
        let group = i32::try_from(leader).ok().and_then(Pid::from_raw).context("a process id")?;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "read _; kill -s KILL -- -$0; rm -rf -- \"$1\"", &leader.to_string()]).arg(folder);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        let process = Process::spawn_lasting("the guard of user-mode Linux", command)?;
        Ok(Self { group, process })
    }

    fn end_group(&self) {
        // First the guard, or it might end the process that gets the number next.
        self.process.kill();
        let end = Instant::now() + Duration::from_secs(10);
        while kill_process_group(self.group, Signal::KILL).is_ok() && members(self.group) > 0 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Processes of a group that are no zombies.
fn members(group: Pid) -> usize {
    let Ok(entries) = std::fs::read_dir("/proc") else { return 0 };
    let stats = entries.flatten().filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok());
    stats
        .filter(|stat| {
            // The state and the group follow the name, which is in parentheses (proc_pid_stat(5)).
            let mut fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ');
            let (state, group_id) = (fields.next(), fields.nth(1));
            state.is_some_and(|state| state != "Z" && state != "X")
                && group_id.is_some_and(|id| id == group.as_raw_nonzero().to_string())
        })
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::is_alive;

    #[test]
    fn a_guest_takes_commands_and_leaves_nothing_behind() {
        if uml_skipped() {
            return;
        }
        let guest = UmlGuest { memory: 64, ..UmlGuest::default() }.start().unwrap();
        assert!(guest.shell("uname -r").unwrap()[0].starts_with('6'));
        assert!(guest.shell("false").is_err());
        assert!(guest.meminfo("MemTotal").unwrap() > 30_000);
        guest.check_alive().unwrap();
        let (group, folder) = (guest.guard.group, guest.folder.path().to_path_buf());
        assert!(members(group) > 1, "it is several processes");
        drop(guest);
        assert_eq!((members(group), folder.exists()), (0, false));
    }

    #[test]
    fn a_process_that_crashed_is_distinguished_whether_it_was_reaped_or_not() {
        for (script, crashes) in [("kill -s SEGV $$", true), ("kill -s KILL $$", false), ("exit 11", false)] {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", script]);
            let process = Process::spawn("a shell", command).unwrap();
            let end = Instant::now() + LIMIT;
            while is_alive(process.pid()) {
                assert!(Instant::now() < end, "{script} does not end");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(has_crashed(&process), crashes, "{script}");
            process.wait(LIMIT).unwrap();
            assert_eq!(has_crashed(&process), crashes, "{script}, reaped");
        }
    }

    #[test]
    fn a_test_is_run_anew_only_if_its_guest_has_crashed() {
        let tried = AtomicU32::new(0);
        let test = |crashes: u32| {
            let _ = catch_unwind(|| {
                on_uml(|| {
                    if tried.fetch_add(1, Ordering::SeqCst) < crashes {
                        DEATHS.fetch_add(1, Ordering::SeqCst);
                        panic!("the guest is gone");
                    }
                    panic!("for a reason of its own");
                });
            });
            tried.swap(0, Ordering::SeqCst)
        };
        if uml_skipped() {
            return;
        }
        assert_eq!((test(0), test(1), test(9)), (1, 2, TRIES));
    }

    /// The other half of the test below.
    #[test]
    fn starts_a_guest_and_is_killed_if_set_to() {
        let Some(file) = std::env::var_os("LIMOSA_UML_KILLED") else { return };
        on_uml(|| {
            let guest = UmlGuest { memory: 64, ..UmlGuest::default() }.start().unwrap();
            let (pid, folder) = (guest.pid(), guest.folder.path().display());
            std::fs::write(&file, format!("{pid} {folder}\n")).unwrap();
            let ended = guest.process.wait(LIMIT);
            panic!("it was not killed: {ended:?}");
        });
    }

    #[test]
    fn a_test_that_is_killed_leaves_no_guest_behind() {
        if uml_skipped() {
            return;
        }
        let folder = crate::scratch().unwrap();
        let file = folder.path().join("pid");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "uml::tests::starts_a_guest_and_is_killed_if_set_to", "--nocapture"]);
        let said = folder.path().join("said");
        command.env("LIMOSA_UML_KILLED", &file).stdout(Stdio::null()).stderr(std::fs::File::create(&said).unwrap());
        let killed = Process::spawn("a test", command).unwrap();
        let end = Instant::now() + LIMIT;
        let (group, folder) = loop {
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            if let Some((pid, folder)) = text.strip_suffix('\n').and_then(|line| line.split_once(' ')) {
                let group = pid.parse::<i32>().ok().and_then(Pid::from_raw).unwrap();
                // Otherwise it has crashed, and is started again.
                if members(group) > 1 {
                    break (group, folder.to_owned());
                }
            }
            assert!(Instant::now() < end, "it does not start: {}", std::fs::read_to_string(&said).unwrap());
            assert!(killed.try_wait().unwrap().is_none(), "{}", std::fs::read_to_string(&said).unwrap());
            std::thread::sleep(Duration::from_millis(5));
        };
        killed.kill();
        let end = Instant::now() + LIMIT;
        while members(group) > 0 {
            assert!(Instant::now() < end, "it is still there: {}", std::fs::read_to_string(&said).unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
        while Path::new(&folder).exists() {
            assert!(Instant::now() < end, "its folder is still there: {}", std::fs::read_to_string(&said).unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
