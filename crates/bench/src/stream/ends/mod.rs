//! limosa's side: a process that sends and one that receives, each this very program, with its orders on its standard
//! input. What they do then is in [`served`].
//!
//! Law: the clock is the bench's own, and a process that answers has done what it says. They are processes of their
//! own, so that the costs of each can be measured.

mod served;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

pub use served::serve;

use super::send_options::SendOptions;
use super::transport::{PER_PAGE, RECEIVER, SENDER, SENDER_PER_GIB, Transport};
use crate::measure::{Measured, Stopwatch, millis, process_cpu};
use crate::namespaces::{Cable, End};
use crate::process::Process;
use crate::scratch::Scratch;
use crate::zero_page::Guest;

/// The hidden bench that the processes of this one are.
pub const END: &str = "stream-end";

/// The first line that a process gets.
#[derive(Debug, Serialize, Deserialize)]
enum Setup {
    /// Map this many bytes of the file behind the descriptor, and send them where the lines that follow say.
    Source { file: String, memory: u64, plain: bool },
    /// Receive this many bytes, once.
    Destination { memory: u64, uri: String, channels: u8, plain: bool, faulting: bool },
    /// Be a guest with this much memory, and send it where the line that follows says.
    Guest { guest: Guest, memory: u64 },
    /// Live in the cache of a core from one line to the next.
    Neighbour,
    /// Keep every core busy from one line to the next.
    Stress,
}

/// An order to a source to send.
#[derive(Debug, Serialize, Deserialize)]
struct SendOrder {
    uri: String,
    way: SendOptions,
    /// Bytes that the guest has no use for.
    #[serde(default)]
    free: Vec<Range<u64>>,
}

/// The answer of a process.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// The source, or the neighbour, has its memory.
    Ready,
    /// The destination can be reached there.
    Listening(String),
    /// The destination has all, and its VM runs. Nanoseconds of its CPU since it listened.
    Running { cpu: u64 },
    /// The source has its confirmation. Nanoseconds of its CPU since its order to send; `guest`: of the clock and of
    /// its CPU that its guest has spent, which are among them.
    Sent { pages: u64, zeros: u64, calls: u64, bytes: u64, cpu: u64, guest: (u64, u64), lent: Lent },
    /// How far the neighbour has come, and nanoseconds of its CPU.
    Chased { steps: u64, cpu: u64 },
}

/// The bytes that a source's channels did not copy themselves.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct Lent {
    /// Bytes that were spliced.
    spliced: u64,
    /// Calls that lent pages, those of them that the kernel has finished, and those whose pages it copied.
    calls: u64,
    completed: u64,
    copied: u64,
}

/// A child process that is spoken to.
#[derive(Debug)]
struct Child {
    process: Process,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Child {
    fn start(setup: &Setup, file: Option<&File>, at: Option<(&Cable, End)>) -> Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg(END).stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some((cable, end)) = at {
            cable.plug(end, &mut command)?;
        }
        let mut process = Process::start(command, file.map(AsFd::as_fd))?;
        let (to, from) = process.pipes().context("the pipes of a child")?;
        let mut child = Self { process, to, from: BufReader::new(from) };
        child.tell(setup)?;
        Ok(child)
    }

    fn tell(&mut self, line: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_string(line)?;
        line.push('\n');
        self.to.write_all(line.as_bytes()).context("telling a child what to do")
    }

    fn answer(&mut self) -> Result<Answer> {
        let mut line = String::new();
        let got = self.from.read_line(&mut line).context("the answer of a child")?;
        ensure!(got > 0, "limosa-bench {} ended; its error is above", END);
        serde_json::from_str(&line).with_context(|| format!("the answer of a child: {line:?}"))
    }
}

/// The sending process.
#[derive(Debug)]
pub(crate) struct Source<'c> {
    child: Child,
    memory: u64,
    /// The network that it and the receiver are in, if it is not the machine's own.
    cable: Option<&'c Cable>,
    /// Whether both are [no more than calls](plain).
    plain: bool,
}

impl<'c> Source<'c> {
    /// A process that maps the first `memory` bytes of `content`, at the near end of `cable` if there is one.
    pub(crate) fn start(content: &File, memory: u64, cable: Option<&'c Cable>) -> Result<Self> {
        Self::start_as(content, memory, cable, false)
    }

    /// The same without limosa: its way is plain write calls.
    pub(super) fn start_plain(content: &File, memory: u64) -> Result<Self> {
        Self::start_as(content, memory, None, true)
    }

    fn start_as(content: &File, memory: u64, cable: Option<&'c Cable>, plain: bool) -> Result<Self> {
        let file = format!("/proc/self/fd/{}", content.as_fd().as_raw_fd());
        let at = cable.map(|cable| (cable, End::Near));
        let mut child = Child::start(&Setup::Source { file, memory, plain }, Some(content), at)?;
        let Answer::Ready = child.answer()? else { bail!("the source is not ready") };
        Ok(Self { child, memory, cable, plain })
    }

    /// A process that is a guest.
    pub(crate) fn start_guest(guest: Guest, memory: u64) -> Result<Self> {
        let mut child = Child::start(&Setup::Guest { guest, memory }, None, None)?;
        let Answer::Ready = child.answer()? else { bail!("the guest is not ready") };
        Ok(Self { child, memory, cable: None, plain: false })
    }

    /// Has it run on one core, or on all.
    pub(super) fn pin(&self, core: Option<usize>) -> Result<()> {
        self.child.process.pin(core)
    }

    /// Sends it once, to a fresh process. `ready` is called right before the clock starts. What a guest takes to write
    /// between rounds is taken out of all figures.
    pub(crate) fn send(
        &mut self,
        transport: Transport,
        way: SendOptions,
        ready: impl FnOnce() -> Result<()>,
    ) -> Result<Measured> {
        self.send_but(transport, way, Vec::new(), ready)
    }

    /// The same, of a guest that has no use for these bytes of its memory, and says so.
    pub(crate) fn send_but(
        &mut self,
        transport: Transport,
        way: SendOptions,
        free: Vec<Range<u64>>,
        ready: impl FnOnce() -> Result<()>,
    ) -> Result<Measured> {
        let folder = Scratch::new_in(&std::env::temp_dir())?;
        let uri = match (transport, self.cable) {
            (Transport::Tcp, None) => "tcp:127.0.0.1:0".to_owned(),
            (Transport::Tcp, Some(_)) => format!("tcp:{}:0", End::Far.address()),
            (Transport::Unix, _) => format!("unix:{}", folder.path().join("incoming").display()),
        };
        let (memory, plain, SendOptions { channels, faulting, .. }) = (self.memory, self.plain, way);
        let setup = Setup::Destination { memory, uri, channels, plain, faulting };
        let at = self.cable.map(|cable| (cable, End::Far));
        let mut destination = Child::start(&setup, None, at)?;
        let Answer::Listening(uri) = destination.answer()? else { bail!("the destination does not listen") };
        ready()?;
        let (sender, receiver) = (self.child.process.pid(), destination.process.pid());
        let all = Stopwatch::start(&[sender, receiver])?;
        let before = [process_cpu(sender)?, process_cpu(receiver)?];
        let begun = Instant::now();
        self.child.tell(&SendOrder { uri, way, free })?;
        let Answer::Sent { pages, zeros, calls, bytes, cpu, guest, lent } = self.child.answer()? else {
            bail!("the source has not sent")
        };
        let Answer::Running { cpu: received } = destination.answer()? else { bail!("the destination does not run") };
        let wall = begun.elapsed();
        let after = [process_cpu(sender)?, process_cpu(receiver)?];
        let measured = all.stop()?;
        let (guest_wall, guest_cpu) = (Duration::from_nanos(guest.0), Duration::from_nanos(guest.1));
        let (wall, all_cpu) = (wall.saturating_sub(guest_wall), measured.cpu.saturating_sub(guest_cpu));
        Ok(Measured { wall, cpu: all_cpu, ..measured }
            .with(SENDER, millis(after[0].saturating_sub(before[0]).saturating_sub(guest_cpu)))
            .with(RECEIVER, millis(after[1].saturating_sub(before[1])))
            .with(SENDER_PER_GIB, cpu.saturating_sub(guest.1).saturating_mul(1 << 20) / memory.max(1))
            .with(PER_PAGE, (cpu.saturating_sub(guest.1) + received) / pages.max(1))
            .with("pages", pages)
            .with("zero_pages", zeros)
            .with("writes", calls)
            .with("bytes", bytes)
            .with("spliced", lent.spliced)
            .with("lent", lent.calls)
            .with("lent_completed", lent.completed)
            .with("lent_copied", lent.copied))
    }
}

/// A process that leaves no core idle.
#[derive(Debug)]
pub(crate) struct Stress {
    child: Child,
}

impl Stress {
    /// Starts it; it does nothing yet.
    pub(crate) fn start() -> Result<Self> {
        let mut child = Child::start(&Setup::Stress, None, None)?;
        let Answer::Ready = child.answer()? else { bail!("the stress is not ready") };
        Ok(Self { child })
    }

    /// Has it begin.
    pub(crate) fn begin(&mut self) -> Result<()> {
        self.child.tell(&"begin")?;
        let Answer::Ready = self.child.answer()? else { bail!("the stress has not begun") };
        Ok(())
    }

    /// Has it stop.
    pub(crate) fn end(&mut self) -> Result<()> {
        self.child.tell(&"end")?;
        let Answer::Ready = self.child.answer()? else { bail!("the stress has not ended") };
        Ok(())
    }
}

/// A process that only uses its core's cache.
#[derive(Debug)]
pub(super) struct Neighbour {
    child: Child,
}

impl Neighbour {
    /// Starts it on a core, where it stays.
    pub(super) fn start(core: usize) -> Result<Self> {
        let mut child = Child::start(&Setup::Neighbour, None, None)?;
        let Answer::Ready = child.answer()? else { bail!("the neighbour is not ready") };
        child.process.pin(Some(core))?;
        Ok(Self { child })
    }

    /// Has it begin.
    pub(super) fn begin(&mut self) -> Result<()> {
        self.child.tell(&"begin")
    }

    /// Has it stop: how far it has come, and its CPU time.
    pub(super) fn end(&mut self) -> Result<(u64, Duration)> {
        self.child.tell(&"end")?;
        let Answer::Chased { steps, cpu } = self.child.answer()? else { bail!("the neighbour has not run") };
        Ok((steps, Duration::from_nanos(cpu)))
    }
}
