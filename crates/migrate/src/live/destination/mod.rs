//! The destination of a live migration: a VM that waits in this process gets its memory and its devices, and runs.
//!
//! The law: **the VM is never started here before the source has given it away.** A source of this kind commits
//! (PING 7) once it knows that every page and every device section is in its place (PING 6). The VM starts when the
//! commit and the rest of the stream, up to the last byte of the description, have come. A stock QEMU source has no
//! commit: it has given the VM away with the end of its stream, and takes it back by itself if the channel ends before
//! it hears that the VM runs. Only a VM that runs is reported to the source as arrived (SHUT 0).
//!
//! So there are three ends. Until the source is told that all is in its place, a failure is
//! [`IncomingOutcome::Failed`]: the source keeps the VM. From then on and before its commit, it is not known here
//! whether the source has given the VM away: [`IncomingOutcome::Undecided`]. The VM is here as a whole, and a person
//! who has looked at the source decides. With the commit the VM runs. A stock QEMU source that is gone before the VM is
//! started leaves it undecided too; one that is told that the VM does not run (SHUT 1) keeps it.
//!
//! A source that switches to postcopy gives the VM away with the package of its devices: see [`PostcopyPaused`] for
//! a connection that breaks from there on.

mod devices;
mod huge_pages;
mod layout;
mod memory_limit;
mod outcome;
mod postcopy;
mod ram;

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use limosa_channel::{Channel, Shutdown};
use limosa_memory::dirty::Writers;
use limosa_memory::{FaultHandler, FaultOptions};
use limosa_stream::PageSizes;
use limosa_stream::devices::TAIL_LIMIT;
use parking_lot::Mutex;

pub use layout::LayoutDifference;
pub use outcome::{IncomingOutcome, IncomingStats, UndecidedIncoming};
pub use postcopy::{AcceptPreempt, PostcopyIncomingStats, PostcopyPaused};

use super::shared_memory::passed_blocks;
use super::{IncomingVm, SharedMemoryMode};
use crate::control::{Handle, Phase, Progress};
use crate::destination::{
    Broken, Destination, DestinationOptions, Hooks, MultifdOptions, Ownership, Received, ReceivedStream, SourceNow,
};
use crate::error::MigrateError;
use crate::pages::StreamSetup;
use postcopy::PreemptListener;
use ram::{GuestRam, RamSink};

/// The settings of a destination.
#[derive(Debug, Clone)]
pub struct LiveDestinationOptions {
    /// Most bytes of device state to accept.
    pub max_device_state: u64,
    /// Longest silence of the source, which always has something to say while a migration runs; and how long it may
    /// leave an answer unread.
    pub answer_timeout: Option<Duration>,
    /// How long nothing may come behind the end of a stock QEMU source's stream before that is believed: what looks
    /// like an end could lie in a device's memory. The VM is stopped meanwhile. (A source of this kind says where its
    /// end is.)
    pub end_of_stream_timeout: Duration,
    /// Whether the source may switch to postcopy. One that announces it is refused at once where this process cannot
    /// handle faults (userfaultfd).
    pub postcopy: bool,
    /// The treatment of shared memory. The source's has to be the same.
    pub shared_memory: SharedMemoryMode,
    /// Whether memory is populated before pages are read to it, so that they do not fault one by one; where a processor
    /// is left besides those that read the channels, by a thread that keeps ahead of them: at most a 32nd more than
    /// what comes.
    pub populate: bool,
}

impl Default for LiveDestinationOptions {
    fn default() -> Self {
        Self {
            max_device_state: TAIL_LIMIT,
            answer_timeout: Some(Duration::from_secs(60)),
            end_of_stream_timeout: Duration::from_millis(5),
            postcopy: true,
            shared_memory: SharedMemoryMode::Sent,
            populate: true,
        }
    }
}

/// The destination role for a VM in this process.
///
/// The VM is started when all of it is in its place and the source has given it away. So there are three ends before it
/// runs: a failure while the source still owns the VM ([`IncomingOutcome::Failed`]); a connection that breaks when only
/// the source knows whether it has given the VM away ([`IncomingOutcome::Undecided`]); and the VM running here
/// ([`IncomingOutcome::Running`]). In postcopy a connection may also break while the VM runs here on a part of its
/// memory ([`IncomingOutcome::PostcopyPaused`]).
///
/// ```no_run
/// # fn receive(vm: &dyn limosa_migrate::IncomingVm) -> Result<(), Box<dyn std::error::Error>> {
/// use limosa_channel::{Listener, Options, Uri};
/// use limosa_migrate::{Handle, IncomingOutcome, LiveDestination};
///
/// // `vm`: a VM whose memory is mapped and whose vCPUs wait.
/// let listener = Listener::bind(&"tcp:0.0.0.0:4444".parse::<Uri>()?, &Options::default())?;
/// let handle = Handle::new();
/// match LiveDestination::new(vm, listener.accept(None)?, &handle).run() {
///     IncomingOutcome::Running(stats) => println!("runs here after {} pages", stats.received.normal_pages),
///     IncomingOutcome::Failed(error) => println!("{error}; the VM continues at the source"),
///     IncomingOutcome::PostcopyPaused(paused) => {
///         println!("{}: {} pages are missing", paused.why(), paused.missing_pages());
///     }
///     IncomingOutcome::Undecided(arrived) => println!("{}: look at the source, then decide", arrived.why()),
/// }
/// # Ok(()) }
/// ```
pub struct LiveDestination<'a, V: IncomingVm + ?Sized> {
    vm: &'a V,
    channel: Channel,
    pages: Vec<Channel>,
    multifd: MultifdOptions,
    accept_preempt: Option<AcceptPreempt<'a>>,
    handle: Handle,
    options: LiveDestinationOptions,
}

impl<V: IncomingVm + ?Sized> std::fmt::Debug for LiveDestination<'_, V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LiveDestination").field("channel", &self.channel).field("options", &self.options).finish()
    }
}

impl<'a, V: IncomingVm + ?Sized> LiveDestination<'a, V> {
    /// A destination for `vm` that reads from `channel`. It keeps a clone of the handle.
    pub fn new(vm: &'a V, channel: Channel, handle: &Handle) -> Self {
        Self {
            vm,
            channel,
            pages: Vec::new(),
            multifd: MultifdOptions::default(),
            accept_preempt: None,
            handle: handle.clone(),
            options: LiveDestinationOptions::default(),
        }
    }

    /// Sets the options.
    #[must_use]
    pub fn options(mut self, options: LiveDestinationOptions) -> Self {
        self.options = options;
        self
    }

    /// With multifd channels, in the order of their numbers, their initial packets read: those of a
    /// [`MultifdChannels`](crate::multifd::MultifdChannels).
    #[must_use]
    pub fn channels(mut self, pages: Vec<Channel>, options: MultifdOptions) -> Self {
        (self.pages, self.multifd) = (pages, options);
        self
    }

    /// With a second channel for requested pages in postcopy (QEMU's `postcopy-preempt`): `accept` waits for the
    /// source's next connection, from when [`run`](Self::run) is called. It is waited for no longer when the VM has
    /// come without it.
    ///
    /// Nothing comes on it at first, so its bytes do not identify it. Over TLS `accept` should take no connection that
    /// has not completed the handshake, and drive that handshake at once, because a stock QEMU continues only behind
    /// it: [`Acceptor`](limosa_channel::Acceptor) does both. A stranger in its place ends the connection, and the VM
    /// waits for its pages until it is recovered.
    #[must_use]
    pub fn preempt(mut self, accept: AcceptPreempt<'a>) -> Self {
        self.accept_preempt = Some(accept);
        self
    }

    /// Receives the VM and runs it. In postcopy this returns when all of its memory has come.
    pub fn run(mut self) -> IncomingOutcome<'a, V> {
        let accept = self.accept_preempt.take();
        thread::scope(|scope| match accept.map(|accept| PreemptListener::open(scope, accept)).transpose() {
            Ok(listener) => self.receive(listener),
            Err(error) => IncomingOutcome::Failed(error),
        })
    }

    fn receive(self, listener: Option<PreemptListener>) -> IncomingOutcome<'a, V> {
        let Self { vm, channel, pages, multifd, accept_preempt: _, handle, options } = self;
        // A thread that has no processor to itself would only take time from those that read.
        let ahead = thread::available_parallelism().is_ok_and(|processors| processors.get() > pages.len() + 1);
        let ram = Arc::new(GuestRam::new(options.populate, ahead));
        let passing = match expect_memory(options.shared_memory, &channel) {
            Ok(passing) => Mutex::new(passing),
            Err(error) => return IncomingOutcome::Failed(error),
        };
        let (postcopy, shared) = (options.postcopy, options.shared_memory);
        let hooks = VmHooks { vm, ram: &ram, shared, passing, postcopy, faults: Mutex::default() };
        let role = DestinationOptions {
            max_device_state: options.max_device_state,
            answer_timeout: options.answer_timeout,
            end_of_stream_timeout: options.end_of_stream_timeout,
            ..DestinationOptions::default()
        };
        let mut sink = RamSink(&ram);
        let destination = Destination::new(&mut sink, channel, &handle).options(role).channels(pages, multifd);
        let came = thread::scope(|scope| {
            // Ends it before the memory may be handled by faults, and however this ends.
            let _stop = StopsPopulating(&ram);
            if options.populate && ahead {
                // Without it pages take a little longer to arrive.
                let _ = thread::Builder::new().name("populate".into()).spawn_scoped(scope, || ram.populate());
            }
            destination.hooks(&hooks).arrive()
        });
        match came {
            Ok(Received::Whole(incoming)) => arrived(vm, &incoming, &handle.progress),
            Ok(Received::PostcopySwitchover(switched)) => {
                let Some(faults) = hooks.faults.into_inner() else {
                    let _ = switched.channel.shutdown(Shutdown::Both);
                    let offset = switched.decoder.offset();
                    return IncomingOutcome::Failed(MigrateError::SwitchedToPostcopy { offset });
                };
                let (answer_timeout, max_device_state) = (options.answer_timeout, options.max_device_state);
                let role =
                    postcopy::PostcopyIncoming { vm, ram, faults, listener, handle, answer_timeout, max_device_state };
                postcopy::run(role, *switched)
            }
            Err(Broken { error, answered: true }) => IncomingOutcome::Undecided(UndecidedIncoming::new(vm, error)),
            Err(Broken { error, answered: false }) => IncomingOutcome::Failed(error),
        }
    }
}

/// Ends the thread that populates when it is dropped.
struct StopsPopulating<'r, 'a>(&'r GuestRam<'a>);

impl Drop for StopsPopulating<'_, '_> {
    fn drop(&mut self) {
        self.0.stop_populating();
    }
}

/// Loads and starts a VM whose stream has ended.
fn arrived<'a, V: IncomingVm + ?Sized>(
    vm: &'a V,
    incoming: &ReceivedStream,
    progress: &Progress,
) -> IncomingOutcome<'a, V> {
    let owner = incoming.owner();
    // A stock source that is refused resumes its VM; one without a return path has given it away before.
    let refused = |error: MigrateError| {
        let _ = incoming.refuse();
        IncomingOutcome::Failed(error)
    };
    if owner != Ownership::Committed
        && let Err(error) = devices::load_found(vm, &incoming.tail, &incoming.devices)
    {
        return refused(error);
    }
    match (owner, incoming.source_now()) {
        (Ownership::Awaited, SourceNow::Gone) => {
            let error = MigrateError::Protocol("the source is gone and was not told that its VM has arrived".into());
            return IncomingOutcome::Undecided(UndecidedIncoming::new(vm, error));
        }
        (Ownership::Awaited, SourceNow::Sends) => {
            let why = "the stream continues behind what looked like its end: what was received is incomplete";
            return refused(MigrateError::Protocol(why.into()));
        }
        (Ownership::Awaited, SourceNow::Waits) | (Ownership::Committed | Ownership::Unanswerable, _) => {}
    }
    if let Err(source) = vm.start() {
        let error = MigrateError::Vm { what: "run", source };
        return match owner {
            Ownership::Awaited => refused(error),
            Ownership::Committed | Ownership::Unanswerable => {
                IncomingOutcome::Undecided(UndecidedIncoming::new(vm, error))
            }
        };
    }
    progress.set_phase(Phase::Completed);
    // It runs, whether or not the source is told.
    let unheard = incoming.acknowledge().err();
    IncomingOutcome::Running(IncomingStats { received: incoming.stats, postcopy: None, acknowledge_error: unheard })
}

/// Returns the channel that descriptors of memory will come through, if any are expected.
fn expect_memory(shared: SharedMemoryMode, channel: &Channel) -> Result<Option<Channel>, MigrateError> {
    if shared != SharedMemoryMode::Passed {
        return Ok(None);
    }
    if !channel.passes_descriptors() {
        return Err(MigrateError::Protocol(
            "memory is passed through a unix socket alone, and the channel is another one".into(),
        ));
    }
    channel.allow_descriptors(usize::MAX);
    Ok(Some(channel.try_clone()?))
}

/// The VM that waits, to the engine.
struct VmHooks<'a, 'r, V: IncomingVm + ?Sized> {
    vm: &'a V,
    ram: &'r GuestRam<'a>,
    shared: SharedMemoryMode,
    /// The channel that descriptors of memory have come through, until they are taken.
    passing: Mutex<Option<Channel>>,
    postcopy: bool,
    /// Had as soon as the source says that it may be needed.
    faults: Mutex<Option<FaultHandler>>,
}

impl<V: IncomingVm + ?Sized> Hooks for VmHooks<'_, '_, V> {
    fn begin(&self, start: &StreamSetup, advised: Option<PageSizes>) -> Result<(), MigrateError> {
        let passing = self.passing.lock().take();
        if let Some(channel) = passing {
            channel.allow_descriptors(0);
            // Before anything of the VM is touched.
            self.shared.check(start, advised.is_some())?;
            let blocks = passed_blocks(start, channel.take_descriptors())?;
            let adopted = self.vm.map_passed_memory(blocks);
            adopted.map_err(|source| MigrateError::Vm { what: "take the memory that the source passes", source })?;
        }
        let postcopy = advised.is_some() && self.postcopy;
        if postcopy && self.vm.memory_users().contains(Writers::VHOST) {
            let why = "its vhost back ends map its memory too, and would find zeros where pages have not come: postcopy is \
                       not possible";
            return Err(MigrateError::Vm { what: "run before its memory has come", source: why.into() });
        }
        self.ram.begin(self.vm.memory(), self.shared, start, advised)?;
        if postcopy {
            // What the VMM gives back while it runs is zero, which is what a page that has come is taken for.
            let options = FaultOptions { removals: false, ..FaultOptions::default() };
            let faults = FaultHandler::open(options).map_err(|error| MigrateError::Sink(error.into()))?;
            *self.faults.lock() = Some(faults);
        }
        Ok(())
    }

    fn postcopy(&self) -> bool {
        self.faults.lock().is_some()
    }

    fn discard(&self, block: usize, ranges: &[Range<u64>]) -> Result<(), MigrateError> {
        self.ram.discard(block, ranges)
    }

    fn load(&self, sections: &[u8]) -> Result<(), MigrateError> {
        devices::load_delimited(self.vm, sections)
    }
}
