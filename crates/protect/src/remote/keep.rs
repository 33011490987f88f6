//! A keeper elsewhere: one primary after the other, each into the same directory.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Listener};
use limosa_migrate::MigrateError;
use limosa_migrate::output::OutputCounters;
use limosa_migrate::stored::StreamSetup;
use limosa_page::error_with_causes;
use limosa_qemu::JobContext;
use limosa_snapshot::{CheckpointDirectory, CheckpointOptions, CheckpointPair};
use parking_lot::Mutex;
use uuid::Uuid;

use super::desk::{Admission, Desk, Visitor, VmName};
use super::failover::{Fate, Lost, StandbyOptions};
use super::message::{Farewell, Note};
use super::ownership;
use crate::error::ProtectError;
use crate::keeper::is_cut;
use crate::primary::Primary;
use crate::report::{KeptCheckpoint, Tally};
use crate::series::{Incoming, Kept, Series, Silence};
use crate::standby::Standby;

/// How long a primary is waited for before it is looked whether the keeper is to end.
const TICK: Duration = Duration::from_millis(50);

/// How often a primary is told that the store is at work.
const TELL_EVERY: Duration = Duration::from_millis(250);

/// Time that is allowed for a fence when a primary is told when its VM is failed over.
const FENCE_WITHIN: Duration = Duration::from_secs(10);

/// How checkpoints of VMs elsewhere are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeepOptions {
    /// Longest silence of a primary that is a limosa, while its VM runs: it is lost then.
    pub lost_after: Duration,
    /// Longest silence in the middle of a checkpoint.
    pub stall_timeout: Duration,
    /// Bytes of a checkpoint's pages that wait in memory until the VM continues.
    pub buffer: u64,
    /// How checkpoints are kept.
    pub store: CheckpointOptions,
}

impl Default for KeepOptions {
    /// A primary is lost after 3 s, a checkpoint after 10 s; 128 MiB of pages in memory, checkpoints that survive the
    /// end of any process.
    fn default() -> Self {
        Self {
            lost_after: Duration::from_secs(3),
            stall_timeout: Duration::from_secs(10),
            buffer: 128 << 20,
            store: CheckpointOptions::default(),
        }
    }
}

/// A directory for checkpoints of VMs elsewhere, and how they are kept.
#[derive(Clone, Copy)]
pub struct KeepRequest<'a> {
    /// Primaries connect here.
    pub listener: &'a Listener,
    /// The directory of the checkpoints; it is made if it is missing. Each primary's base takes the place of the
    /// checkpoint before, when its first checkpoint is due.
    pub directory: &'a Path,
    /// The options.
    pub options: &'a KeepOptions,
    /// Has the VM continue here when it is lost; `None`: a failover is somebody else's to begin.
    pub standby: Option<StandbyOptions<'a>>,
    /// The handles by which the job is watched and stopped; notices are about connections that were refused.
    pub watch: JobContext<'a>,
    /// Called with what happens, on the thread that receives.
    pub event: &'a (dyn Fn(&KeepEvent<'_>) + Sync),
}

impl fmt::Debug for KeepRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeepRequest")
            .field("listener", &self.listener)
            .field("directory", &self.directory)
            .field("options", &self.options)
            .field("standby", &self.standby)
            .finish_non_exhaustive()
    }
}

/// An event at a keeper.
#[derive(Debug)]
#[non_exhaustive]
pub enum KeepEvent<'a> {
    /// Primaries may connect.
    Listening,
    /// A primary has connected, and its base comes.
    Connected {
        /// Its address.
        peer: &'a str,
    },
    /// A checkpoint counts.
    Kept(&'a KeptCheckpoint),
    /// There will be no more checkpoints of this primary. A checkpoint that counts stays.
    Ended {
        /// Number of the newest checkpoint; `None` if not even the base counts.
        newest: Option<u64>,
        /// The primary's own reason; `None`: it is lost, or something failed here.
        farewell: Option<Farewell>,
        /// The failure, if there was one.
        error: Option<&'a ProtectError>,
    },
}

/// The counters of a keeper that has ended.
#[derive(Debug)]
#[non_exhaustive]
pub struct KeepReport {
    /// The newest whole checkpoint; `None` if none came.
    pub newest: Option<PathBuf>,
    /// Primaries whose base counted.
    pub series: u64,
    /// Number of checkpoints behind the bases that counted.
    pub checkpoints: u64,
    /// Pages that came with contents.
    pub pages: u64,
    /// Those of them that had not changed, and were not written.
    pub equal_pages: u64,
    /// Pages that came as zero.
    pub zero_pages: u64,
    /// Bytes that came for checkpoints.
    pub bytes: u64,
    /// Whether the VM was failed over, and its survivor has ended.
    pub failed_over: bool,
    /// From the first listening to the end.
    pub elapsed: Duration,
}

/// Keeps checkpoints of the primaries that connect, one at a time, until it is told to stop.
///
/// # Errors
/// Another process has the directory, or it cannot be made.
pub fn keep(request: KeepRequest<'_>) -> Result<KeepReport, ProtectError> {
    let KeepRequest { listener, directory, options, watch, .. } = request;
    let begun = Instant::now();
    // Held only while there is a primary: a failover takes it otherwise.
    drop(CheckpointDirectory::open(directory)?);
    (request.event)(&KeepEvent::Listening);
    let takes_disks = request.standby.is_none_or(|standby| !standby.disk_servers.is_empty());
    let desk = &Desk::new(directory, options.lost_after, takes_disks);
    let (mut sum, mut newest, mut series, mut failed_over) = (Tally::new(), None, 0, false);
    thread::scope(|scope| {
        let door = thread::Builder::new().name("door".into());
        let report = watch.notice;
        door.spawn_scoped(scope, move || desk.serve(scope, listener, report)).map_err(ProtectError::Thread)?;
        let mut lost = None::<Lost>;
        let mut serve = || {
            while watch.handle.control.stop_requested().is_none() {
                let fate = match (&mut lost, &request.standby) {
                    (Some(lost), Some(standby)) => lost.wait(desk, standby, directory, watch)?,
                    _ => match desk.wait(TICK) {
                        Some(visitor) => Fate::Back(Box::new(visitor)),
                        None => continue,
                    },
                };
                match fate {
                    Fate::Back(visitor) => {
                        let kept = receive(request, *visitor, &mut lost);
                        sum.add_all(&kept.tally);
                        if kept.newest.is_some() {
                            series += 1;
                            newest = kept.newest;
                        }
                        let waits_for = lost.as_ref().filter(|_| request.standby.is_some());
                        desk.admit(waits_for.map_or(Admission::Anybody, Lost::admission));
                    }
                    Fate::Gone => {
                        lost = None;
                        desk.admit(Admission::Anybody);
                    }
                    Fate::FailedOver => {
                        failed_over = true;
                        break;
                    }
                    Fate::Ended => break,
                }
            }
            Ok::<_, ProtectError>(())
        };
        let served = serve();
        desk.close();
        served
    })?;
    Ok(KeepReport {
        newest,
        series,
        checkpoints: sum.checkpoints,
        pages: sum.pages,
        equal_pages: sum.equal_pages,
        zero_pages: sum.zero_pages,
        bytes: sum.bytes,
        failed_over,
        elapsed: begun.elapsed(),
    })
}

/// Keeps what one primary sends until it ends. `lost` is the VM that was lost before, until a base takes its place, and
/// this one afterwards, if it is lost too.
fn receive(request: KeepRequest<'_>, mut visitor: Visitor, lost: &mut Option<Lost>) -> Kept {
    (request.event)(&KeepEvent::Connected { peer: visitor.channel.peer() });
    let far = Far {
        farewell: Mutex::new(None),
        standby: Mutex::new(None),
        before: Mutex::new(lost.take()),
        setup: OnceLock::new(),
        prepared: AtomicU64::new(0),
    };
    // That of a bare stream is this one connection.
    let protection = visitor.protection.unwrap_or_else(Uuid::new_v4);
    visitor.manifest.protection = Some(protection);
    let (name, is_limosa) = (VmName::of(&visitor.manifest), visitor.protection.is_some());
    let mut kept = Kept::nothing();
    kept.end = series(request, visitor, &far, &mut kept);
    let farewell = *far.farewell.lock();
    let (standby, before) = (far.standby.into_inner(), far.before.into_inner());
    let newest = kept.newest.as_ref().map(|_| kept.tally.checkpoints);
    let error = kept.end.as_ref().err();
    // An order that came before is about another loss.
    if let Some(standby) = &request.standby {
        standby.now.store(false, Ordering::Release);
    }
    (request.event)(&KeepEvent::Ended { newest, farewell, error });
    if let Some(error) = error {
        tracing::info!("{}", error_with_causes(error));
    }
    let is_lost = newest.is_some() && matches!(farewell, None | Some(Farewell::VmLost));
    if is_lost {
        // A bare stream ends in the same way when its VM is shut down, and a store that fails here says nothing of it.
        let by_itself = is_limosa && kept.end.as_ref().err().is_none_or(is_of_the_line);
        *lost = Some(Lost::new(
            (name, protection),
            farewell,
            standby.filter(|standby| standby.holds().is_some()),
            by_itself,
        ));
    } else {
        // One that says goodbye is not lost, neither by what was before.
        let is_gone = matches!(farewell, None | Some(Farewell::VmLost));
        *lost = before.filter(|_| is_gone).map(Lost::outdated);
        if let Some(standby) = standby {
            standby.end();
        }
    }
    kept
}

/// Whether a series has ended because nothing more comes from its primary.
fn is_of_the_line(error: &ProtectError) -> bool {
    match error {
        ProtectError::Ended { .. } => true,
        ProtectError::Migrate(error) => is_cut(error),
        _ => false,
    }
}

/// A primary elsewhere, beside its stream.
struct Far {
    farewell: Mutex<Option<Farewell>>,
    /// The QEMU that is fed with its checkpoints.
    standby: Mutex<Option<Standby>>,
    /// The VM that was lost before, while its checkpoint is there.
    before: Mutex<Option<Lost>>,
    /// The layout of its memory.
    setup: OnceLock<StreamSetup>,
    /// The newest checkpoint that its disks are prepared for.
    prepared: AtomicU64,
}

fn series(request: KeepRequest<'_>, visitor: Visitor, far: &Far, kept: &mut Kept) -> Result<(), ProtectError> {
    let KeepRequest { directory: path, options, standby, watch, event, .. } = request;
    let Visitor { channel, first_bytes, manifest, protection } = visitor;
    let directory = CheckpointDirectory::open(path)?;
    let failed = |source| ProtectError::Ownership { directory: path.to_owned(), source };
    // A failover may have had the directory since the greeting.
    if let Some(protection) = protection
        && ownership::is_taken_over(path, protection).map_err(failed)?
    {
        return Err(ProtectError::Refused("the VM was failed over meanwhile".into()));
    }
    let base = directory.receive_base(options.store)?;
    let is_limosa = protection.is_some();
    let (warm, notice) = (standby.filter(|standby| standby.warm), watch.notice);
    let told = Mutex::new(Told { at: Instant::now(), is_storing: false });
    let has_disks = !manifest.protected_disks.is_empty();
    let when_lost = standby.and_then(|standby| standby.when_lost);
    let fails_over = when_lost.map(|after| after.saturating_add(options.lost_after).saturating_add(FENCE_WITHIN));
    let takes_within = options.lost_after / 2;
    let channel_back = channel.try_clone()?;
    let far = FarVm { channel: channel_back, is_limosa, has_disks, fails_over, told, far, warm, takes_within, notice };
    let silence = is_limosa.then_some(options.lost_after);
    let series = Series {
        primary: &far,
        handle: watch.handle,
        began: &|_| {},
        kept: &|kept| event(&KeepEvent::Kept(kept)),
        buffer: options.buffer,
        stall_timeout: options.stall_timeout,
        silence: Silence { request: silence, reply: silence, runs_after_reply: true },
    };
    let (ended, wait_end) = mpsc::channel::<()>();
    let vm = &far;
    let done = thread::scope(|scope| {
        let beat = move || vm.beat(&wait_end);
        thread::Builder::new().name("alive".into()).spawn_scoped(scope, beat).map_err(ProtectError::Thread)?;
        let done = series.keep(Incoming { channel, multifd: Vec::new(), first_bytes, manifest }, base);
        drop(ended);
        Ok::<_, ProtectError>(done)
    })?;
    (kept.tally, kept.newest) = (done.tally, done.newest);
    done.end
}

/// The words for a primary, which two threads say.
struct Told {
    /// When the last one was said.
    at: Instant,
    /// A checkpoint that has come is being stored: nobody else writes to the primary.
    is_storing: bool,
}

/// A VM on another host, behind a connection.
struct FarVm<'a> {
    channel: Channel,
    /// Whether it understands notes.
    is_limosa: bool,
    /// Whether disks belong to its checkpoints. Its own end has them begin, seal and keep epochs.
    has_disks: bool,
    /// The time from its loss until it is failed over; `None`: not by itself.
    fails_over: Option<Duration>,
    /// The words for it.
    told: Mutex<Told>,
    far: &'a Far,
    /// How a standby is started.
    warm: Option<StandbyOptions<'a>>,
    /// How long it may take no bytes: not as long as the primary waits for a word.
    takes_within: Duration,
    notice: &'a (dyn Fn(&str) + Sync),
}

impl FarVm<'_> {
    fn tell(&self, bytes: &[u8]) -> Result<(), ProtectError> {
        let mut told = self.told.lock();
        told.is_storing = false;
        self.say(&mut told, bytes)
    }

    fn say(&self, told: &mut Told, bytes: &[u8]) -> Result<(), ProtectError> {
        told.at = Instant::now();
        Ok(self.channel.write_all(bytes)?)
    }

    /// Says that the keeper is there if it has said nothing for a while.
    fn say_alive(&self, told: &mut Told) -> Result<(), ProtectError> {
        if !self.is_limosa || told.at.elapsed() < TELL_EVERY {
            return Ok(());
        }
        let mut bytes = Vec::new();
        Note::Alive(true).encode(&mut bytes);
        self.say(told, &bytes)
    }

    /// Says that the keeper is there while it stores a checkpoint, which takes long on a disk that is slow, until the
    /// series has ended.
    fn beat(&self, ended: &mpsc::Receiver<()>) {
        while ended.recv_timeout(TELL_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
            let mut told = self.told.lock();
            // A primary that does not hear it is lost, as the series finds out.
            if told.is_storing && self.say_alive(&mut told).is_err() {
                return;
            }
        }
    }

    /// Starts a standby. It may take longer than the primary waits for a word.
    fn start(&self, options: StandbyOptions<'_>) -> Result<Result<Standby, ProtectError>, ProtectError> {
        thread::scope(|scope| {
            let start = || Standby::start(options.command, options.start_within, self.takes_within);
            let starting = thread::Builder::new().name("standby".into()).spawn_scoped(scope, start);
            let starting = starting.map_err(ProtectError::Thread)?;
            while !starting.is_finished() {
                self.working()?;
                thread::sleep(TICK / 10);
            }
            let panicked = |_| MigrateError::Protocol("the thread that starts the standby panicked".into());
            Ok(starting.join().map_err(panicked)?)
        })
    }

    /// Feeds the standby with what counts. Without one the VM is kept all the same.
    fn feed(&self, pair: &CheckpointPair) -> Result<(), ProtectError> {
        if pair.number() == 0 {
            // Its checkpoint has been replaced.
            drop(self.far.before.lock().take());
        }
        let Some(options) = self.warm else { return Ok(()) };
        let mut standby = self.far.standby.lock();
        let failed = |error: &ProtectError| {
            (self.notice)(&format!("there is no standby: {}", error_with_causes(error)));
        };
        if pair.number() == 0 {
            match self.start(options)? {
                Ok(started) => *standby = Some(started),
                Err(error) => failed(&error),
            }
        }
        if let (Some(fed), Some(setup)) = (standby.as_mut(), self.far.setup.get()) {
            match fed.feed(setup, pair, &|| self.working()) {
                Ok(()) => {}
                Err(error @ (ProtectError::Standby { .. } | ProtectError::Snapshot(_))) => {
                    failed(&error);
                    *standby = None;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Primary for FarVm<'_> {
    fn arrived(&self, setup: &StreamSetup) {
        let _ = self.far.setup.set(setup.clone());
    }

    fn working(&self) -> Result<(), ProtectError> {
        self.say_alive(&mut self.told.lock())
    }

    /// The primary's own end waits.
    fn wait_due(&self, _before: Option<Instant>) -> Result<(), ProtectError> {
        Ok(())
    }

    /// The primary's own end seals, before it lets the VM continue.
    fn seal(&self, _epoch: u64) -> Result<(), ProtectError> {
        Ok(())
    }

    fn continued(&self) {
        self.told.lock().is_storing = true;
    }

    fn prepare_disks(&self, epoch: u64) -> Result<bool, ProtectError> {
        Ok(!self.has_disks || self.far.prepared.load(Ordering::Acquire) >= epoch)
    }

    fn commit(&self, pair: &CheckpointPair, kept: Option<&KeptCheckpoint>) -> Result<(), ProtectError> {
        let told = if self.is_limosa {
            let mut bytes = Vec::new();
            if let Some(time) = self.fails_over.filter(|_| pair.number() == 0) {
                let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
                Note::FailsOver(millis).encode(&mut bytes);
            }
            Note::encode_kept(pair.number(), kept, &mut bytes);
            self.tell(&bytes)
        } else {
            Ok(())
        };
        // Also if the primary may not have heard it: it may have, and has let the output out.
        self.feed(pair).and(told)
    }

    fn hear(&self, kind: u8, value: u64) -> bool {
        match Note::of(kind, value) {
            Some(Note::Farewell(reason)) => {
                *self.far.farewell.lock() = Some(reason);
                true
            }
            Some(Note::Prepared(epoch)) => {
                self.far.prepared.store(epoch, Ordering::Release);
                false
            }
            _ => false,
        }
    }

    /// The primary's own end counts.
    fn counters(&self) -> Option<OutputCounters> {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use limosa_channel::{ChannelError, Operation};

    use super::*;

    #[test]
    fn a_store_that_fails_says_nothing_of_the_vm() {
        let failed = |source| ProtectError::Ownership { directory: PathBuf::new(), source };
        assert!(!is_of_the_line(&failed(io::Error::from(io::ErrorKind::StorageFull))));
        assert!(!is_of_the_line(&ProtectError::Migrate(MigrateError::Sink("a full disk".into()))));
        assert!(is_of_the_line(&ProtectError::Ended { reason: String::new() }));
        assert!(is_of_the_line(&ProtectError::Migrate(MigrateError::Cancelled)));
    }

    #[test]
    fn a_connection_that_the_kernel_gives_up_is_a_line_that_is_lost() {
        let failed = |kind: io::ErrorKind| {
            let (operation, peer) = (Operation::Read, "tcp:10.8.0.1:4447".into());
            let error = ChannelError::Io { operation, peer, offset: Some(7), source: kind.into() };
            is_of_the_line(&ProtectError::Migrate(error.into()))
        };
        for kind in [io::ErrorKind::TimedOut, io::ErrorKind::HostUnreachable, io::ErrorKind::NetworkDown] {
            assert!(failed(kind), "{kind:?}");
        }
        assert!(!failed(io::ErrorKind::OutOfMemory));
    }
}
