//! The guests of one run: their serial ports, and by these their QEMUs.
//!
//! Each QEMU connects its guest's serial port to one socket of the bench. The kernel names the
//! process at the other end of a connection, so a QEMU that limosa leaves running is counted, looked at and ended like
//! a child.

use std::io::{ErrorKind, Read as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;

use crate::guest::{BEAT, Task};
use crate::process::Detached;
use crate::scratch::Scratch;
use crate::stored::{ask, wait_answer};

/// How long all guests together may take for their first beats: for one that hangs, not a measure.
const LIMIT: Duration = Duration::from_secs(300);

/// How often the programs that start the guests are asked whether they have failed.
const CHECK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// A guest whose QEMU is connected.
struct Guest {
    serial: UnixStream,
    process: Detached,
    /// When its first beat came.
    beat: Option<Instant>,
}

/// The guests of one run.
pub(super) struct Guests {
    all: Vec<Guest>,
    listener: UnixListener,
    folder: Scratch,
}

impl Guests {
    pub(super) fn new() -> Result<Self> {
        // In the temporary directory, because a socket's path is short.
        let folder = Scratch::new_in(&std::env::temp_dir())?;
        let listener = UnixListener::bind(folder.path().join("serial")).context("a socket for serial ports")?;
        Ok(Self { all: Vec::new(), listener, folder })
    }

    /// The directory of the socket, for other files of the run.
    pub(super) fn folder(&self) -> &Scratch {
        &self.folder
    }

    /// The value of QEMU's `-serial`.
    pub(super) fn serial_option(&self) -> String {
        format!("unix:{}", self.folder.path().join("serial").display())
    }

    /// The processes of the QEMUs that are connected.
    pub(super) fn pids(&self) -> Vec<u32> {
        self.all.iter().map(|guest| guest.process.pid()).collect()
    }

    /// Number of guests that have beaten.
    pub(super) fn beating(&self) -> usize {
        self.all.iter().filter(|guest| guest.beat.is_some()).count()
    }

    /// When the first beats came, in order of time.
    pub(super) fn first_beats(&self) -> Vec<Instant> {
        let mut beats: Vec<_> = self.all.iter().filter_map(|guest| guest.beat).collect();
        beats.sort_unstable();
        beats
    }

    /// Accepts this many QEMUs whose guests do not run yet.
    pub(super) fn accept_waiting(&mut self, count: usize) -> Result<()> {
        let end = Instant::now() + LIMIT;
        while self.all.len() < count {
            ensure!(Instant::now() < end, "{} of {count} QEMUs wait after {} s", self.all.len(), LIMIT.as_secs());
            self.look()?;
        }
        ensure!(self.beating() == 0, "a guest runs that was to wait");
        Ok(())
    }

    /// Waits until `wanted` guests have beaten. Before each wait `start` is called with the number of those that have.
    pub(super) fn wait_beats(&mut self, wanted: usize, start: &mut dyn FnMut(usize) -> Result<()>) -> Result<()> {
        let end = Instant::now() + LIMIT;
        loop {
            let beating = self.beating();
            if beating >= wanted {
                return Ok(());
            }
            ensure!(Instant::now() < end, "{beating} of {wanted} guests run after {} s", LIMIT.as_secs());
            start(beating)?;
            self.look()?;
        }
    }

    /// Waits for a while until something happens on a serial port that is watched, and takes note of it.
    fn look(&mut self) -> Result<()> {
        let watched: Vec<usize> =
            self.all.iter().enumerate().filter(|(_, guest)| guest.beat.is_none()).map(|(at, _)| at).collect();
        let mut polled = vec![PollFd::new(&self.listener, PollFlags::IN)];
        polled.extend(watched.iter().filter_map(|&at| Some(PollFd::new(&self.all.get(at)?.serial, PollFlags::IN))));
        poll(&mut polled, Some(&CHECK_EVERY)).context("poll")?;
        let now = Instant::now();
        let [connects, beats @ ..] = polled.as_slice() else { return Ok(()) };
        let connects = !connects.revents().is_empty();
        let ready: Vec<usize> =
            watched.iter().zip(beats).filter(|(_, polled)| !polled.revents().is_empty()).map(|(&at, _)| at).collect();
        for at in ready {
            if let Some(guest) = self.all.get_mut(at) {
                guest.first_beat(now)?;
            }
        }
        if connects {
            let (serial, _) = self.listener.accept().context("accepting a serial port")?;
            let process = Detached::new(socket_peercred(&serial).context("SO_PEERCRED")?.pid)?;
            self.all.push(Guest { serial, process, beat: None });
        }
        Ok(())
    }

    /// Waits until all beat slowly, as they were asked to when they first did.
    pub(super) fn wait_slow(&mut self) -> Result<()> {
        self.all.iter_mut().try_for_each(|guest| wait_answer(&mut guest.serial, Task::Slow).map(drop))
    }

    /// Has all guests do this at the same time; returns how long the last one took.
    pub(super) fn all_do(&mut self, task: Task, sum: u32) -> Result<Duration> {
        let begin = Instant::now();
        self.all.iter_mut().try_for_each(|guest| ask(&mut guest.serial, task))?;
        for guest in &mut self.all {
            let found = wait_answer(&mut guest.serial, task)?;
            ensure!(task != Task::Read || found == sum, "a guest read sum {found:#x} instead of {sum:#x}");
        }
        Ok(begin.elapsed())
    }
}

impl Guest {
    /// Reads the first beat, and asks for slow ones from now on.
    fn first_beat(&mut self, now: Instant) -> Result<()> {
        let mut byte = [0];
        match self.serial.read_exact(&mut byte) {
            Ok(()) => ensure!(byte == [BEAT], "a guest sent {byte:?} instead of a beat"),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => bail!("a QEMU ended before its guest ran"),
            Err(error) => return Err(error).context("reading a serial port"),
        }
        self.beat = Some(now);
        ask(&mut self.serial, Task::Slow)
    }
}
