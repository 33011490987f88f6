//! A keeper elsewhere: one primary after the other, each into the same directory.

use std::fmt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Listener};
use limosa_migrate::output::OutputCounters;
use limosa_page::error_with_causes;
use limosa_qemu::JobContext;
use limosa_snapshot::{CheckpointDirectory, CheckpointOptions};
use parking_lot::Mutex;
use uuid::Uuid;

use super::desk::{Admission, Desk, Visitor};
use super::message::{Farewell, Note};
use super::ownership;
use crate::error::ProtectError;
use crate::primary::Primary;
use crate::report::{KeptCheckpoint, Tally};
use crate::series::{Incoming, Kept, Series, Silence};

/// How long a primary is waited for before it is looked whether the keeper is to end.
const TICK: Duration = Duration::from_millis(50);

/// How often a primary is told that the store is at work.
const TELL_EVERY: Duration = Duration::from_millis(250);

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

/// Where to keep, and how.
#[derive(Clone, Copy)]
pub struct KeepRequest<'a> {
    /// Primaries connect here.
    pub listener: &'a Listener,
    /// The directory of the checkpoints; it is made if it is missing. Each primary's base takes the place of the
    /// checkpoint before, when its first checkpoint is due.
    pub directory: &'a Path,
    /// The options.
    pub options: &'a KeepOptions,
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
            .finish_non_exhaustive()
    }
}

/// An event at a keeper.
#[derive(Debug)]
#[non_exhaustive]
pub enum KeepEvent<'a> {
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
        /// The last word of the primary; `None`: it is lost, or something failed here.
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
    let desk = &Desk::new(directory, options.lost_after);
    let (mut sum, mut newest, mut series) = (Tally::new(), None, 0);
    thread::scope(|scope| {
        let door = thread::Builder::new().name("door".into());
        let report = watch.notice;
        door.spawn_scoped(scope, move || desk.serve(scope, listener, report)).map_err(ProtectError::Thread)?;
        while watch.handle.control.stop_requested().is_none() {
            let Some(visitor) = desk.wait(TICK) else { continue };
            let kept = receive(request, visitor);
            sum.add_all(&kept.tally);
            if kept.newest.is_some() {
                series += 1;
                newest = kept.newest;
            }
            desk.admit(Admission::Anybody);
        }
        desk.close();
        Ok::<_, ProtectError>(())
    })
    .inspect_err(|_| desk.close())?;
    Ok(KeepReport {
        newest,
        series,
        checkpoints: sum.checkpoints,
        pages: sum.pages,
        equal_pages: sum.equal_pages,
        zero_pages: sum.zero_pages,
        bytes: sum.bytes,
        elapsed: begun.elapsed(),
    })
}

/// Keeps what one primary sends until it ends.
fn receive(request: KeepRequest<'_>, visitor: Visitor) -> Kept {
    (request.event)(&KeepEvent::Connected { peer: visitor.channel.peer() });
    let farewell = Mutex::new(None);
    let mut kept = Kept::nothing();
    kept.end = series(request, visitor, &farewell, &mut kept);
    let farewell = *farewell.lock();
    let newest = kept.newest.as_ref().map(|_| kept.tally.checkpoints);
    let error = kept.end.as_ref().err();
    (request.event)(&KeepEvent::Ended { newest, farewell, error });
    if let Some(error) = error {
        tracing::info!("{}", error_with_causes(error));
    }
    kept
}

fn series(
    request: KeepRequest<'_>,
    visitor: Visitor,
    farewell: &Mutex<Option<Farewell>>,
    kept: &mut Kept,
) -> Result<(), ProtectError> {
    let KeepRequest { directory: path, options, watch, event, .. } = request;
    let Visitor { channel, first_bytes, mut manifest, protection } = visitor;
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
    // That of a bare stream is this one connection.
    manifest.protection = Some(protection.unwrap_or_else(Uuid::new_v4));
    let far = FarVm { channel: channel.try_clone()?, is_limosa, told: Mutex::new(Instant::now()), farewell };
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
    let done = series.keep(Incoming { channel, first_bytes, manifest }, base);
    (kept.tally, kept.newest) = (done.tally, done.newest);
    done.end
}

/// A VM on another host, behind a connection.
struct FarVm<'a> {
    channel: Channel,
    /// Whether it understands notes.
    is_limosa: bool,
    /// When it was last told something.
    told: Mutex<Instant>,
    farewell: &'a Mutex<Option<Farewell>>,
}

impl FarVm<'_> {
    fn tell(&self, bytes: &[u8]) -> Result<(), ProtectError> {
        *self.told.lock() = Instant::now();
        Ok(self.channel.write_all(bytes)?)
    }
}

impl Primary for FarVm<'_> {
    fn working(&self) -> Result<(), ProtectError> {
        if self.is_limosa && self.told.lock().elapsed() >= TELL_EVERY {
            let mut bytes = Vec::new();
            Note::Alive(true).encode(&mut bytes);
            self.tell(&bytes)?;
        }
        Ok(())
    }

    /// The primary's own end waits.
    fn wait_due(&self, _before: Option<Instant>) -> Result<(), ProtectError> {
        Ok(())
    }

    /// The primary's own end seals, before it lets the VM continue.
    fn seal(&self, _epoch: u64) -> Result<(), ProtectError> {
        Ok(())
    }

    fn continued(&self) {}

    fn commit(&self, epoch: u64, kept: Option<&KeptCheckpoint>) -> Result<(), ProtectError> {
        if self.is_limosa {
            let mut bytes = Vec::new();
            Note::encode_kept(epoch, kept, &mut bytes);
            self.tell(&bytes)?;
        }
        Ok(())
    }

    fn hear(&self, kind: u8, value: u64) -> bool {
        match Note::of(kind, value) {
            Some(Note::Farewell(reason)) => {
                *self.farewell.lock() = Some(reason);
                true
            }
            _ => false,
        }
    }

    /// The primary's own end counts.
    fn counters(&self) -> Option<OutputCounters> {
        None
    }
}
