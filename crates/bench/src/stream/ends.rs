//! limosa's side: a process that sends and one that receives, each this very program, told what to do on its standard input.
//!
//! Law: the clock is the bench's own, and a process that answers has done what it says. They are processes of their own, so
//! that what each costs can be told apart.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use limosa_channel::{Channel, Counters, Listener, Options as ChannelOptions, Uri};
use limosa_memory::dirty::{DirtyLogs, Writers};
use limosa_memory::{BlockOptions, GuestMemory};
use limosa_migrate::live::source::{LiveOutcome, LiveSource};
use limosa_migrate::live::{IncomingVm, LiveVm, MigrationParams, VmError};
use limosa_migrate::{
    ArrivalOutcome, Control, Gathering, GatheringOptions, LiveDestination, LiveDestinationOptions, MultifdOptions,
    MultifdSourceOptions, Progress,
};
use limosa_stream::device_sections::OpaqueSection;
use limosa_stream::{Configuration, DeviceSections};
use serde::{Deserialize, Serialize};

use super::{PER_PAGE, RECEIVER, SENDER, Transport};
use crate::Options;
use crate::frame::Frame;
use crate::measure::{Measured, Stopwatch, millis, own_cpu, process_cpu};
use crate::process::Process;
use crate::scratch::Scratch;

/// What the only block is called.
const RAM: &str = "pc.ram";

/// How long anything may take: for one that hangs, not a measure.
const LIMIT: Duration = Duration::from_secs(120);

/// The first line that a process is told.
#[derive(Debug, Serialize, Deserialize)]
enum Setup {
    /// Map so many bytes of the file behind this descriptor, and send them wherever the lines that follow say.
    Source { file: String, memory: u64 },
    /// Receive so many bytes, once.
    Destination { memory: u64, uri: String, channels: u8 },
}

/// A line that tells a source where to.
#[derive(Debug, Serialize, Deserialize)]
struct Send {
    uri: String,
    channels: u8,
}

/// What a process answers.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// The source has its memory.
    Ready,
    /// The destination can be reached there.
    Listening(String),
    /// The destination has all, and its VM runs. Nanoseconds of its CPU since it listened.
    Running { cpu: u64 },
    /// The source has been told so. Nanoseconds of its CPU since it was told to send.
    Sent { pages: u64, calls: u64, bytes: u64, cpu: u64 },
}

/// A child process that is spoken to.
#[derive(Debug)]
struct Child {
    process: Process,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Child {
    fn start(options: &Options, setup: &Setup, file: Option<&File>) -> Result<Self> {
        let mut command = Command::new(options.limosa.as_deref().unwrap_or(Path::new("/proc/self/exe")));
        command.args(["bench", super::END]).stdin(Stdio::piped()).stdout(Stdio::piped());
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
        ensure!(got > 0, "limosa bench {} ended; it has said why", super::END);
        serde_json::from_str(&line).with_context(|| format!("the answer of a child: {line:?}"))
    }
}

/// The sending process.
#[derive(Debug)]
pub(super) struct Source {
    child: Child,
    memory: u64,
}

impl Source {
    /// A process that maps the first `memory` bytes of `content`.
    pub(super) fn start(options: &Options, content: &File, memory: u64) -> Result<Self> {
        let file = format!("/proc/self/fd/{}", content.as_fd().as_raw_fd());
        let mut child = Child::start(options, &Setup::Source { file, memory }, Some(content))?;
        let Answer::Ready = child.answer()? else { bail!("the source is not ready") };
        Ok(Self { child, memory })
    }

    /// Sends it once, to a fresh process.
    pub(super) fn send(
        &mut self,
        options: &Options,
        transport: Transport,
        channels: u8,
        frame: &Frame,
    ) -> Result<Measured> {
        let folder = Scratch::new_in(&std::env::temp_dir())?;
        let uri = match transport {
            Transport::Tcp => "tcp:127.0.0.1:0".to_owned(),
            Transport::Unix => format!("unix:{}", folder.path().join("incoming").display()),
        };
        let mut destination = Child::start(options, &Setup::Destination { memory: self.memory, uri, channels }, None)?;
        let Answer::Listening(uri) = destination.answer()? else { bail!("the destination does not listen") };
        frame.touch()?;
        let (sender, receiver) = (self.child.process.pid(), destination.process.pid());
        let all = Stopwatch::start(&[sender, receiver])?;
        let before = [process_cpu(sender)?, process_cpu(receiver)?];
        let begun = Instant::now();
        self.child.tell(&Send { uri, channels })?;
        let Answer::Sent { pages, calls, bytes, cpu } = self.child.answer()? else { bail!("the source has not sent") };
        let Answer::Running { cpu: received } = destination.answer()? else { bail!("the destination does not run") };
        let wall = begun.elapsed();
        let after = [process_cpu(sender)?, process_cpu(receiver)?];
        let measured = all.stop()?;
        Ok(Measured { wall, ..measured }
            .with(SENDER, millis(after[0].saturating_sub(before[0])))
            .with(RECEIVER, millis(after[1].saturating_sub(before[1])))
            .with(PER_PAGE, (cpu + received) / pages.max(1))
            .with("pages", pages)
            .with("writes", calls)
            .with("bytes", bytes))
    }
}

/// What the hidden command does: one of the two processes.
///
/// # Errors
/// Whatever fails; the bench is told by the end of its output.
pub fn serve() -> Result<()> {
    let mut lines = io::stdin().lock().lines();
    let mut next = || lines.next().transpose().context("standard input");
    let setup = next()?.context("no setup on standard input: this command is a part of limosa bench stream")?;
    match serde_json::from_str(&setup).context("the setup on standard input")? {
        Setup::Source { file, memory } => {
            let file = File::options().read(true).write(true).open(&file).with_context(|| file.clone())?;
            let vm = Still::new(BlockOptions::file(RAM, memory, file.into(), 0))?;
            say(&Answer::Ready)?;
            while let Some(line) = next()? {
                vm.send(&serde_json::from_str(&line).context("a line on standard input")?)?;
            }
            Ok(())
        }
        Setup::Destination { memory, uri, channels } => {
            let vm = Still::new(BlockOptions::anonymous(RAM, memory))?;
            vm.receive(&uri.parse()?, channels)?;
            // What it has stays until it has been measured.
            next().map(drop)
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn say(answer: &Answer) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(answer)?).and_then(|()| out.flush()).context("standard output")
}

/// A VM that stands still: all of it is memory.
#[derive(Debug)]
struct Still {
    memory: GuestMemory,
}

impl Still {
    fn new(block: BlockOptions) -> Result<Self> {
        Ok(Self { memory: GuestMemory::new(vec![block.map()?])? })
    }

    fn send(&self, to: &Send) -> Result<()> {
        let before = own_cpu();
        let (control, progress) = (Control::new(), Progress::new());
        let uri: Uri = to.uri.parse()?;
        let connect = || Channel::connect(&uri, &ChannelOptions::default());
        let logs = DirtyLogs::new(Writers::NONE, Vec::new())?;
        let source = LiveSource::new(self, logs, connect()?, &control, &progress, MigrationParams::default());
        let channels = (0..to.channels).map(|_| connect()).collect::<Result<Vec<_>, _>>()?;
        let source = source.fresh(true).with_channels(channels, MultifdSourceOptions::default())?;
        match source.run() {
            LiveOutcome::Completed(stats) => {
                let all: Counters = stats.channels.iter().copied().chain([stats.main]).sum();
                let pages = stats.sum(|round| round.normal);
                let cpu = nanoseconds(own_cpu().saturating_sub(before));
                say(&Answer::Sent { pages, calls: all.calls_out, bytes: all.bytes_out, cpu })
            }
            other => bail!("{other:?}"),
        }
    }

    fn receive(&self, uri: &Uri, channels: u8) -> Result<()> {
        let (control, progress) = (Control::new(), Progress::new());
        let listener = Listener::bind(uri, &ChannelOptions::default())?;
        say(&Answer::Listening(listener.local_uri().to_string()))?;
        let before = own_cpu();
        let mut gathering = Gathering::new(&listener, GatheringOptions { channels, within: LIMIT, main_first: false });
        let channels = gathering.step(LIMIT)?.context("the channels did not come")?;
        let options = LiveDestinationOptions::default();
        let destination = LiveDestination::new(self, channels.main, &control, &progress, options);
        match destination.with_channels(channels.pages, MultifdOptions::default()).run() {
            ArrivalOutcome::Running(_) => say(&Answer::Running { cpu: nanoseconds(own_cpu().saturating_sub(before)) }),
            other => bail!("{other:?}"),
        }
    }
}

impl LiveVm for Still {
    fn configuration(&self) -> Configuration {
        Configuration::new("limosa-bench")
    }

    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    fn writers(&self) -> Writers {
        Writers::NONE
    }

    fn pause(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn resume(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn device_sections(&self) -> Result<DeviceSections, VmError> {
        let mut sections = DeviceSections::new();
        sections.push("timer", 0, 1, &[0; 8])?;
        Ok(sections)
    }
}

impl IncomingVm for Still {
    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    fn load_device(&self, _section: OpaqueSection<'_>) -> Result<(), VmError> {
        Ok(())
    }

    fn start(&self) -> Result<(), VmError> {
        Ok(())
    }
}
