//! The work of processes that take commands as lines.
//!
//! Law: an answer is sent only after the work it reports is done.

use std::fs::File;
use std::io::{self, BufRead, Write};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use limosa_channel::{Channel, Counters, Listener, Options as ChannelOptions, Uri, ZeroCopy};
use limosa_memory::dirty::{DirtyLogs, SoftwareDirtyLog, Writers};
use limosa_memory::{BlockOptions, FreePageHinting, FreePageSink, FreePagesError, GuestMemory};
use limosa_migrate::live::{LiveDestinationOptions, RecordWriteMode};
use limosa_migrate::multifd::{MultifdAccept, MultifdAcceptOptions, MultifdOptions, MultifdSourceOptions};
use limosa_migrate::{
    Handle, IncomingOutcome, IncomingVm, LiveDestination, LiveOutcome, LiveSource, LiveVm, MigrationParams, VmError,
};
use limosa_page::PAGE_SIZE;
use limosa_stream::{Configuration, DeviceSections, OpaqueSection};

use super::super::send_options::SendOptions;
use super::super::{neighbour, plain};
use super::{Answer, Lent, SendOrder, Setup};
use crate::measure::{nanoseconds, own_cpu};
use crate::raw::Mapping;
use crate::zero_page::Spent;

/// The name of the only block.
const RAM: &str = "pc.ram";

/// How long anything may take: for one that hangs, not a measure.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs the hidden command: one of the processes.
///
/// # Errors
/// Any failure; the bench sees the end of the output.
pub fn serve() -> Result<()> {
    let mut lines = io::stdin().lock().lines();
    let mut next = || lines.next().transpose().context("standard input");
    let setup = next()?.context("no setup on standard input: this command is a part of limosa-bench stream")?;
    match serde_json::from_str(&setup).context("the setup on standard input")? {
        Setup::Source { file, memory, plain: true } => {
            let memory = plain::mapped(&open(&file)?, memory)?;
            send_over_and_over(next, |to| send_plainly(&memory, to))
        }
        Setup::Source { file, memory, plain: false } => {
            let vm = PausedVm::new(BlockOptions::file(RAM, memory, open(&file)?.into(), 0))?;
            send_over_and_over(next, |to| vm.send(vm.logs(!to.free.is_empty())?, to, &Spent::default()))
        }
        // What it has stays until it has been measured.
        Setup::Destination { memory, uri, plain: true, .. } => {
            let _memory = receive_plainly(&uri.parse()?, memory)?;
            next().map(drop)
        }
        Setup::Destination { memory, uri, channels, plain: false, faulting } => {
            let vm = PausedVm::new(BlockOptions::anonymous(RAM, memory))?;
            vm.receive(&uri.parse()?, channels, !faulting)?;
            next().map(drop)
        }
        Setup::Guest { guest, memory } => {
            let (memory, logs, spent) = guest.start(RAM, memory)?;
            let vm = PausedVm { memory, writers: Writers::VCPUS };
            say(&Answer::Ready)?;
            let to = next()?.context("no destination on standard input")?;
            vm.send(logs, &serde_json::from_str(&to).context("a line on standard input")?, &spent)?;
            next().map(drop)
        }
        Setup::Stress => {
            say(&Answer::Ready)?;
            while next()?.is_some() {
                let cores = thread::available_parallelism().map_or(1, usize::from);
                let begun = || say(&Answer::Ready);
                until_asked_to_end(&mut next, cores, begun, |over| {
                    while !over.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                })?;
                say(&Answer::Ready)?;
            }
            Ok(())
        }
        Setup::Neighbour => {
            let chain = neighbour::chain()?;
            say(&Answer::Ready)?;
            while next()?.is_some() {
                let chased = until_asked_to_end(&mut next, 1, || Ok(()), |over| neighbour::chase(&chain, over))?;
                let (steps, cpu) = chased.into_iter().next().context("the neighbour has not run")?;
                say(&Answer::Chased { steps, cpu: nanoseconds(cpu) })?;
            }
            Ok(())
        }
    }
}

/// Runs this number of threads until the next line comes. Returns what they have done.
fn until_asked_to_end<T: Send>(
    next: &mut impl FnMut() -> Result<Option<String>>,
    threads: usize,
    begun: impl FnOnce() -> Result<()>,
    work: impl Fn(&AtomicBool) -> T + Sync,
) -> Result<Vec<T>> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let working: Vec<_> = (0..threads).map(|_| scope.spawn(|| work(&over))).collect();
        let result = begun().and_then(|()| next());
        over.store(true, Ordering::Relaxed);
        let done: Result<Vec<T>, _> = working.into_iter().map(thread::ScopedJoinHandle::join).collect();
        result.and_then(|_| done.map_err(|_| anyhow!("a thread panicked")))
    })
}

fn open(file: &str) -> Result<File> {
    File::options().read(true).write(true).open(file).with_context(|| file.to_owned())
}

fn send_over_and_over(
    mut next: impl FnMut() -> Result<Option<String>>,
    send: impl Fn(&SendOrder) -> Result<()>,
) -> Result<()> {
    say(&Answer::Ready)?;
    while let Some(line) = next()? {
        send(&serde_json::from_str(&line).context("a line on standard input")?)?;
    }
    Ok(())
}

fn send_plainly(memory: &Mapping, to: &SendOrder) -> Result<()> {
    let before = own_cpu();
    let calls = plain::send(memory, &plain::connect(&to.uri.parse()?)?)?;
    let bytes = memory.bytes().len() as u64;
    let cpu = nanoseconds(own_cpu().saturating_sub(before));
    say(&Answer::Sent { pages: bytes / PAGE_SIZE, zeros: 0, calls, bytes, cpu, guest: (0, 0), lent: Lent::default() })
}

fn receive_plainly(uri: &Uri, memory: u64) -> Result<Mapping> {
    let listener = Listener::bind(uri, &ChannelOptions::default())?;
    say(&Answer::Listening(listener.local_uri().to_string()))?;
    let before = own_cpu();
    let memory = plain::receive(&listener, memory)?;
    say(&Answer::Running { cpu: nanoseconds(own_cpu().saturating_sub(before)) })?;
    Ok(memory)
}

fn say(answer: &Answer) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(answer)?).and_then(|()| out.flush()).context("standard output")
}

/// A VM that has only memory. It is paused, except for what its dirty log writes.
#[derive(Debug)]
struct PausedVm {
    memory: Arc<GuestMemory>,
    writers: Writers,
}

impl PausedVm {
    fn new(block: BlockOptions) -> Result<Self> {
        Ok(Self { memory: Arc::new(GuestMemory::new(vec![block.map()?])?), writers: Writers::NONE })
    }

    /// The logs of what is written to it: nothing is. For a guest that reports its free pages, one log has to see the
    /// guest.
    fn logs(&self, guest: bool) -> Result<DirtyLogs> {
        if !guest {
            return Ok(DirtyLogs::new(Writers::NONE, Vec::new())?);
        }
        let log = SoftwareDirtyLog::new(&self.memory, Writers::VCPUS);
        Ok(DirtyLogs::new(Writers::VCPUS, vec![Box::new(log)])?)
    }

    fn send(&self, logs: DirtyLogs, to: &SendOrder, spent: &Spent) -> Result<()> {
        let before = own_cpu();
        let handle = Handle::new();
        let uri: Uri = to.uri.parse()?;
        let connect = |zero_copy| Channel::connect(&uri, &ChannelOptions { zero_copy, ..ChannelOptions::default() });
        let SendOptions { channels, packet_pages, copied, max_bandwidth, zeros, zero_copy, .. } = to.way;
        let put = if copied { RecordWriteMode::Buffered } else { RecordWriteMode::Vectored };
        let (zero_check, zero_method) = zeros.params();
        // A guest that writes does so in all of its rounds.
        let downtime_limit = Duration::ZERO;
        let params = MigrationParams::default()
            .record_write(put)
            .max_bandwidth(max_bandwidth)
            .zero_check(zero_check)
            .zero_method(zero_method)
            .downtime_limit(downtime_limit)
            .hint_wait(LIMIT);
        let source = LiveSource::new(self, logs, connect(ZeroCopy::Off)?, &handle).options(params);
        let channels = (0..channels).map(|_| connect(zero_copy)).collect::<Result<Vec<_>, _>>()?;
        let multifd = MultifdSourceOptions::default();
        let multifd = MultifdSourceOptions { packet_pages: packet_pages.unwrap_or(multifd.packet_pages), ..multifd };
        let source = source.destination_zeroed(true).channels(channels, multifd)?;
        let source = if to.free.is_empty() {
            source
        } else {
            source.hint_free_pages(Arc::new(ReportedFreePages(to.free.clone())))
        };
        match source.run() {
            LiveOutcome::Completed(stats) => {
                let all: Counters = stats.channels.iter().copied().chain([stats.main]).sum();
                let pages = stats.sum(|round| round.normal);
                let zeros = stats.sum(|round| round.zero + round.left_out);
                let cpu = nanoseconds(own_cpu().saturating_sub(before));
                let guest = spent.so_far();
                let lent = Lent {
                    spliced: all.spliced,
                    calls: all.zero_copy_calls,
                    completed: all.zero_copy_completed,
                    copied: all.zero_copy_copied,
                };
                say(&Answer::Sent { pages, zeros, calls: all.calls_out, bytes: all.bytes_out, cpu, guest, lent })
            }
            other => bail!("{other:?}"),
        }
    }

    fn receive(&self, uri: &Uri, channels: u8, populate: bool) -> Result<()> {
        let handle = Handle::new();
        let listener = Listener::bind(uri, &ChannelOptions::default())?;
        say(&Answer::Listening(listener.local_uri().to_string()))?;
        let before = own_cpu();
        let mut gathering =
            MultifdAccept::new(&listener, MultifdAcceptOptions { channels, timeout: LIMIT, main_first: false });
        let channels = gathering.poll(LIMIT)?.context("the migration's channels were not connected")?;
        let options = LiveDestinationOptions { populate, ..LiveDestinationOptions::default() };
        let destination = LiveDestination::new(self, channels.main, &handle).options(options);
        match destination.channels(channels.multifd, MultifdOptions::default()).run() {
            IncomingOutcome::Running(_) => say(&Answer::Running { cpu: nanoseconds(own_cpu().saturating_sub(before)) }),
            other => bail!("{other:?}"),
        }
    }
}

/// The free pages that a guest reported before it was paused.
#[derive(Debug)]
struct ReportedFreePages(Vec<Range<u64>>);

impl FreePageHinting for ReportedFreePages {
    fn request_list(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError> {
        let ranges = self.0.clone();
        let result = thread::Builder::new().name("free pages".into()).spawn(move || {
            ranges.into_iter().for_each(|range| to.add_range(range));
            to.complete();
        });
        result.map(drop).map_err(|error| FreePagesError::Failed { why: error.to_string() })
    }

    fn stop_list(&self) {}

    fn return_pages(&self) {}
}

impl LiveVm for PausedVm {
    fn configuration(&self) -> Configuration {
        Configuration::new("limosa-bench")
    }

    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    fn writers(&self) -> Writers {
        self.writers
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

impl IncomingVm for PausedVm {
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
