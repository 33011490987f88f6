//! The source role of a VM that runs: rounds over what it writes, a pause, and the rest.
//!
//! The order of things, which is the order on the wire: the header and the return path; the layout; the dirty logs
//! begin, *then* the first page is read; a round over all memory, and rounds over what was written meanwhile, until the
//! rest fits into the downtime that is allowed ([`convergence`]); the VM stops, the logs are read for the last time,
//! and the rest goes out; the device sections; a PING, whose answer says that the destination has placed and loaded all
//! of it; and in one write the commit, the end of the stream and the description.
//!
//! **The ownership law.** A failure before the end of the stream was handed to the kernel lets the VM continue here.
//! A failure after it and before the destination's confirmation leaves it [undecided](Undecided): it stands still
//! here until a person who has looked at the destination decides. An acknowledgement that comes too early is not
//! believed.
//!
//! In postcopy ([`PostcopyMode`]) the last byte of the package of device state is what the end of the stream is in
//! precopy, and the answer to the PING in it is the acknowledgement: from then on the VM runs there, and what breaks
//! off is [recovered](PostcopyPausedSource).
//!
//! A failed attempt leaves nothing behind: the dirty logs are off, what they had fetched is forgotten, and another
//! attempt starts with all pages.

mod attempt;
mod checkpoints;
mod convergence;
mod guest;
mod hints;
mod holes;
mod link;
mod outcome;
mod owned;
mod phase;
mod postcopy;
mod precopy;
mod reports;
mod round;
mod run;
mod sent_bitmap;
mod stats;
mod switch;
mod switchover;

use std::collections::BTreeMap;
use std::iter;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use limosa_channel::{Channel, Shutdown, ZeroCopy};
use limosa_memory::dirty::DirtyLogs;
use limosa_memory::{BlockRole, FreePageHinting, MemoryBlock};
use limosa_page::PAGE_SIZE;
use limosa_stream::ReturnMessage;
use limosa_stream::multifd::Compression;
use limosa_stream::postcopy::PING_LOADED;

use self::guest::GuestSource;
use self::hints::Hints;
use self::link::{Link, Loaded, Terms};
use self::outcome::Ended;
use self::owned::Owned;
use self::reports::{Observer, Reports};
use crate::control::{Control, Handle, Phase, Progress};
use crate::error::MigrateError;
use crate::live::{LiveVm, MigrationParams, SharedMemoryMode, TimeoutStrategy};
use crate::pages::PageSource;
use crate::source::dirty_page_queue::DirtyPageQueue;
use crate::source::multifd::{self, Multifd, MultifdSourceOptions, Parts};
use crate::source::postcopy::OpenPreempt;
#[cfg(doc)]
use crate::source::postcopy::PostcopyOptions;
use crate::source::return_path::ReturnPath;

pub use checkpoints::{CheckpointReport, CheckpointSourceOptions, CheckpointsEnded};
pub use link::PostcopyMode;
pub use outcome::{LiveOutcome, PostcopyPausedSource, Undecided};
pub use stats::{HintStats, LiveStats, RoundKind, RoundReport};

/// A VM that runs, on its way to a destination.
///
/// [`run`](Self::run) sends rounds over what the VM writes until the rest fits into the downtime that is allowed, stops
/// the VM, sends the rest and gives the VM away. **A failure before that lets the VM continue here.** A failure after
/// it and before the destination's confirmation leaves it [undecided](Undecided): it stays stopped until a person who
/// has looked at the destination decides. In [postcopy](PostcopyMode) the VM is given away with the package of its
/// devices, and a connection that breaks afterwards is [recovered](PostcopyPausedSource). A failed attempt leaves the
/// dirty logs off; the next one starts with all pages.
///
/// ```no_run
/// # use limosa_memory::dirty::DirtyLogs;
/// # fn send(vm: &dyn limosa_migrate::LiveVm, logs: DirtyLogs) -> Result<(), Box<dyn std::error::Error>> {
/// use limosa_channel::{Channel, Options, Uri};
/// use limosa_migrate::{Handle, LiveOutcome, LiveSource};
///
/// // `vm`: a VM that runs; `logs`: they see every write to its memory.
/// let channel = Channel::connect(&"tcp:192.0.2.7:4444".parse::<Uri>()?, &Options::default())?;
/// let handle = Handle::new();
/// match LiveSource::new(vm, logs, channel, &handle).destination_zeroed(true).run() {
///     LiveOutcome::Completed(stats) => println!("runs there, {:?} of downtime", stats.downtime),
///     LiveOutcome::Resumed { error, .. } => println!("{error}; the VM continues here"),
///     LiveOutcome::ResumeFailed { error, resume, .. } => println!("{error}; the VM does not run here: {resume}"),
///     LiveOutcome::Undecided(given) => println!("{}: look at the destination, then decide", given.why()),
///     LiveOutcome::PostcopyPaused(waits) => println!("{}: the VM waits there for the rest", waits.why()),
/// }
/// # Ok(()) }
/// ```
pub struct LiveSource<'v, 'o, V: LiveVm + ?Sized> {
    vm: &'v V,
    logs: DirtyLogs,
    channel: Arc<Channel>,
    control: Control,
    progress: Progress,
    params: MigrationParams,
    multifd_channels: Vec<Arc<Channel>>,
    multifd: MultifdSourceOptions,
    destination_zeroed: bool,
    shared: SharedMemoryMode,
    postcopy: PostcopyMode,
    page_sizes: BTreeMap<String, u64>,
    open_preempt: Option<OpenPreempt<'o>>,
    free_pages: Option<Arc<dyn FreePageHinting>>,
    observer: Observer<'o>,
}

impl<V: LiveVm + ?Sized> std::fmt::Debug for LiveSource<'_, '_, V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LiveSource").field("channel", &self.channel).field("params", &self.params).finish()
    }
}

impl<'v, 'o, V: LiveVm + ?Sized> LiveSource<'v, 'o, V> {
    /// A source that moves `vm`, whose writes `logs` see, over `channel`, which carries both directions. It keeps a
    /// clone of the handle. Parameters are QEMU's defaults unless [others are set](Self::options).
    pub fn new(vm: &'v V, logs: DirtyLogs, channel: Channel, handle: &Handle) -> Self {
        let Handle { control, progress } = handle.clone();
        let channel = Arc::new(channel);
        Self {
            vm,
            logs,
            channel,
            control,
            progress,
            params: MigrationParams::default(),
            multifd_channels: Vec::new(),
            multifd: MultifdSourceOptions::default(),
            destination_zeroed: false,
            shared: SharedMemoryMode::Sent,
            postcopy: PostcopyMode::Off,
            page_sizes: page_sizes(vm),
            open_preempt: None,
            free_pages: None,
            observer: Box::new(|_| {}),
        }
    }

    /// Sets the parameters.
    #[must_use]
    pub fn options(mut self, params: MigrationParams) -> Self {
        self.params = params;
        self
    }

    /// Sends the pages on these multifd channels, a thread each, to a destination that expects exactly as many. They
    /// were connected after the main one; their order is that of their numbers. When pages are looked at is said by
    /// [`MigrationParams::zero_check`], and not by the options.
    ///
    /// # Errors
    /// More than 16 channels, packets of no page or of more than 128; pages that would be compressed, on channels that
    /// were made to [send them as they are](limosa_channel::Options::zero_copy).
    pub fn channels(mut self, channels: Vec<Channel>, options: MultifdSourceOptions) -> Result<Self, MigrateError> {
        let as_they_are = |channel: &Channel| matches!(channel.zero_copy_setting(), ZeroCopy::Msg | ZeroCopy::Splice);
        if options.compression != Compression::None && channels.iter().any(as_they_are) {
            return Err(MigrateError::ZeroCopy("compressed pages are copies"));
        }
        self.multifd_channels = multifd::checked(channels, &options)?;
        self.multifd = options;
        Ok(self)
    }

    /// Whether the destination's memory is known to be zero wherever nothing was sent: then zero pages of blocks of
    /// [RAM](limosa_memory::BlockRole::Ram) are left out of the first round. False if nothing is said, and it has to be
    /// in another attempt into the same destination, where an earlier one has left pages.
    #[must_use]
    pub fn destination_zeroed(mut self, zeroed: bool) -> Self {
        self.destination_zeroed = zeroed;
        self
    }

    /// Sets the treatment of shared memory, which is sent like any other by default. Not with postcopy.
    #[must_use]
    pub fn shared_memory(mut self, shared: SharedMemoryMode) -> Self {
        self.shared = shared;
        self
    }

    /// Whether the migration may switch to postcopy. The destination has to expect it. With
    /// [`TimeoutStrategy::Postcopy`](crate::live::TimeoutStrategy::Postcopy) it may switch in any case. Not with
    /// multifd channels.
    #[must_use]
    pub fn postcopy(mut self, postcopy: PostcopyMode) -> Self {
        self.postcopy = postcopy;
        self
    }

    /// In postcopy, answers requests on a channel of their own, which `open` connects. The destination has to expect
    /// it. Over TLS a destination of this crate's, which takes it when the package has come, wants it
    /// [deferred](limosa_channel::Tls::with_deferred_handshake); stock QEMU takes it at once.
    #[must_use]
    pub fn preempt(mut self, open: OpenPreempt<'o>) -> Self {
        self.open_preempt = Some(open);
        self
    }

    /// Bytes of the pages that the destination's memory is made of, by RAM block, if postcopy may follow: those of this
    /// VM's own blocks, unless something else is said here. See [`PostcopyOptions::page_sizes`].
    #[must_use]
    pub fn page_sizes(mut self, page_sizes: BTreeMap<String, u64>) -> Self {
        self.page_sizes = page_sizes;
        self
    }

    /// Asks the guest for its free pages, which are not sent: when the first round begins, and with every further one
    /// that is [worth it](MigrationParams::hint_pages); in [postcopy at once](PostcopyMode::AtOnce) before the guest is
    /// stopped, which then continues for [`hint_wait`](MigrationParams::hint_wait) at most. The dirty logs have to see
    /// the guest's writes. What was free is at the destination with any contents; in postcopy it is zero. A guest that
    /// cannot be asked is moved without.
    ///
    /// The device [gives the pages back](FreePageHinting::return_pages) when the VM has been stopped and before it is
    /// asked for the [state of its devices](LiveVm::device_sections), so that a device that is moved says it at the
    /// destination. One that is not moved with the VM has to say it by itself there, or the guest keeps
    /// holding the pages back.
    #[must_use]
    pub fn hint_free_pages(mut self, from: Arc<dyn FreePageHinting>) -> Self {
        self.free_pages = Some(from);
        self
    }

    /// Calls `observer` after every round, on the engine's thread: it must not block.
    #[must_use]
    pub fn on_round(mut self, observer: impl Fn(&RoundReport) + Send + Sync + 'o) -> Self {
        self.observer = Box::new(observer);
        self
    }

    /// Moves the VM, and says who has it.
    ///
    /// A panic in the VMM's code passes through, and the VM continues here. If all bytes of the hand-over had left by
    /// then, the VM stays stopped instead and is in doubt, as in [`LiveOutcome::Undecided`].
    pub fn run(self) -> LiveOutcome<'v, V> {
        let multifd_channels = self.multifd_channels.clone();
        self.drive(false, |Begun { link, terms, vm, open_preempt, set }, reports| {
            let ended = match set {
                Ok(()) => attempt(link, terms, vm, reports, open_preempt),
                Err(error) => Ended::Kept { vm, error },
            };
            link.control.unwatch();
            link.control.release();
            link.outcome(terms, &multifd_channels, std::mem::take(&mut reports.stats), ended)
        })
    }

    /// Does `work` with the VM, which stays here with `goes_on_here`.
    fn drive<R>(self, goes_on_here: bool, work: impl for<'e> FnOnce(Begun<'e, 'v, V>, &mut Reports<'e>) -> R) -> R {
        let Self {
            vm,
            logs,
            channel,
            control,
            progress,
            params,
            multifd_channels,
            multifd: options,
            destination_zeroed,
            ..
        } = self;
        let (page_sizes, open_preempt, shared, observer) =
            (self.page_sizes, self.open_preempt, self.shared, self.observer);
        let postcopy = match self.postcopy {
            PostcopyMode::Off if params.timeout_strategy == TimeoutStrategy::Postcopy => PostcopyMode::Allowed,
            postcopy => postcopy,
        };
        let begun = Instant::now();
        for channel in iter::once(&channel).chain(&multifd_channels) {
            control.watch(channel);
        }
        if params.max_bandwidth.is_some() {
            control.set_max_bandwidth(params.max_bandwidth);
        }
        let return_path = ReturnPath::default();
        let source = GuestSource::new(vm).with_shared(shared);
        let queue = Arc::new(DirtyPageQueue::default());
        let hints =
            self.free_pages.map(|from| Hints::new(from, Arc::clone(&queue), vm.memory().layout(), progress.clone()));
        let zeroed = |block: &MemoryBlock| destination_zeroed && block.role() == BlockRole::Ram;
        let multifd = (!multifd_channels.is_empty()).then(|| {
            Multifd::new(Parts {
                source: &source,
                control: &control,
                progress: &progress,
                options: &options,
                main: &channel,
                channels: &multifd_channels,
                zeroed: vm.memory().blocks().iter().map(zeroed).collect(),
                queue: Arc::clone(&queue),
                return_path: true,
            })
        });
        let all = iter::once(&channel).chain(&multifd_channels).cloned().collect();
        let owned = Owned::new(vm, logs, all).with_shared(shared).with_hints(hints);
        let set = multifd::set_write_timeout(iter::once(&channel).chain(&multifd_channels), params.answer_timeout);
        let set = set.and_then(|()| check(&owned, postcopy, shared, &params, multifd.is_some()));
        let set = set.and_then(|()| match goes_on_here {
            true => check_checkpoints(postcopy, shared, multifd.is_some()),
            false => Ok(()),
        });
        let loaded = Loaded::default();
        let terms = Terms {
            params,
            destination_zeroed,
            postcopy,
            goes_on_here,
            page_sizes: &page_sizes,
            loaded: &loaded,
            begun,
        };
        let link = Link {
            memory: vm.memory(),
            source: &source,
            channel: &channel,
            multifd: multifd.as_ref(),
            return_path: &return_path,
            queue: &queue,
            control: &control,
            progress: &progress,
        };
        let job = Begun { link: &link, terms: &terms, vm: owned, open_preempt, set };
        work(job, &mut Reports::new(&observer))
    }
}

/// A job whose channels are set.
struct Begun<'e, 'v, V: LiveVm + ?Sized> {
    link: &'e Link<'e, 'v>,
    terms: &'e Terms<'e>,
    vm: Owned<'v, V>,
    open_preempt: Option<OpenPreempt<'e>>,
    /// Why it cannot be done.
    set: Result<(), MigrateError>,
}

/// Refuses checkpoints over what carries none.
fn check_checkpoints(postcopy: PostcopyMode, shared: SharedMemoryMode, has_multifd: bool) -> Result<(), MigrateError> {
    let why = match () {
        () if has_multifd => "checkpoints are sent on the main channel alone",
        () if postcopy != PostcopyMode::Off => "a VM whose checkpoints are made stays here, so there is no postcopy",
        () if shared != SharedMemoryMode::Sent => "a checkpoint has shared memory like any other",
        () => return Ok(()),
    };
    Err(MigrateError::Channels(why.into()))
}

/// Refuses what cannot be moved as it is wanted, before anything is sent.
fn check<V: LiveVm + ?Sized>(
    vm: &Owned<'_, V>,
    postcopy: PostcopyMode,
    shared: SharedMemoryMode,
    params: &MigrationParams,
    has_multifd: bool,
) -> Result<(), MigrateError> {
    match postcopy {
        PostcopyMode::Allowed | PostcopyMode::AtOnce if has_multifd => {
            let why = "postcopy brings pages on the main channel and the preempt channel alone";
            Err(MigrateError::Channels(why.into()))
        }
        PostcopyMode::Allowed | PostcopyMode::AtOnce if shared != SharedMemoryMode::Sent => {
            let why = "in postcopy shared memory has to be sent like any other";
            Err(MigrateError::Channels(why.into()))
        }
        PostcopyMode::AtOnce if vm.has_hints() && params.hint_wait.is_zero() => {
            let why = "hint_wait is zero, and postcopy at once stops the guest before it can report its free pages";
            Err(MigrateError::Hints(why))
        }
        // Of a VM that is stopped when its first page is read no write is missed.
        PostcopyMode::AtOnce if !vm.has_hints() => Ok(()),
        PostcopyMode::Off | PostcopyMode::Allowed | PostcopyMode::AtOnce => vm.check_covered(),
    }
}

/// Opens the stream and moves the VM over it, with the return path read and the multifd channels at work meanwhile.
fn attempt<'e, 'v, V: LiveVm + ?Sized>(
    link: &'e Link<'e, 'v>,
    terms: &'e Terms<'e>,
    vm: Owned<'v, V>,
    reports: &mut Reports<'e>,
    open_preempt: Option<OpenPreempt<'e>>,
) -> Ended<'v, V> {
    thread::scope(|scope| {
        let reader = scope.spawn(|| read_return_path(link, terms));
        // A panic in the VMM's code must not leave a thread or the destination waiting: the channel is cut in any case.
        let cut = CutOnDrop(link.channel);
        let ended = match link.open(terms) {
            Ok(()) => {
                let _ending = link.multifd.map(|multifd| multifd.spawn(scope));
                let ended = run::run(link, terms, vm, reports, open_preempt);
                // What failed on any of the channels first is the cause.
                ended.map_err(|error| match link.multifd {
                    Some(multifd) => multifd.fail_with(error),
                    None => error,
                })
            }
            Err(error) => Ended::Kept { vm, error },
        };
        if ended.is_ok() {
            // The return path has ended with the acknowledgement.
            std::mem::forget(cut);
        } else {
            drop(cut);
        }
        let _ = reader.join();
        ended
    })
}

/// The life of the thread that reads the return path.
fn read_return_path(link: &Link<'_, '_>, terms: &Terms<'_>) {
    link.return_path.read_from(link.channel, &link.source.setup().blocks, false, |message| {
        if *message == ReturnMessage::Pong(PING_LOADED) && terms.loaded.answered() {
            // The VM runs there from here on.
            link.progress.set_phase(Phase::PostcopyActive);
            link.control.release();
        }
    });
    if let Some(multifd) = link.multifd {
        // The channels' threads do not look at the return path, and it is over.
        multifd.fail_for(|| link.return_path.outcome());
    }
}

/// The page sizes of the VM's own blocks, where they are above 4096.
fn page_sizes<V: LiveVm + ?Sized>(vm: &V) -> BTreeMap<String, u64> {
    let large = vm.memory().blocks().iter().filter(|block| block.page_size() > PAGE_SIZE);
    large.map(|block| (block.name().to_owned(), block.page_size())).collect()
}

/// Cuts a channel in both directions.
struct CutOnDrop<'a>(&'a Channel);

impl Drop for CutOnDrop<'_> {
    fn drop(&mut self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}
