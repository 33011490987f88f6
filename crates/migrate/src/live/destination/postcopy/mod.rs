//! A VM that runs here before its memory is here.
//!
//! The package of device sections is the source's word: with its last byte the VM is this side's. What has not come is
//! made missing, and an access to it waits; a thread learns of that and asks the source, the pages that come are placed
//! one host page at a time. The device sections are loaded by a thread of their own, because loading them may touch
//! missing memory as well.
//!
//! Three laws. **Missing memory never reads as zeros** as long as the stream has not said its last word: a connection
//! that breaks leaves the guest waiting ([`IncomingOutcome::PostcopyPaused`]), whatever is dropped. **The VM is started
//! once or never,** whichever comes first: the thread that has loaded its devices, or a failure before that. **No
//! request is lost:** a page that is waited for is requested again over every new connection.
//!
//! What was received as zero before the VM ran has no memory; a guest that touches it is given zeros here, without
//! asking.

mod package;
mod paused;
mod placer;
mod preempt;
mod records;
mod requests;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use limosa_channel::{Channel, Shutdown};
use limosa_memory::{Fault, FaultError, FaultEvent, FaultHandler};
use limosa_page::{AtomicPageBitmap, broken, to_usize};
use limosa_stream::{Command, Decoder, Event, ReturnMessage};

pub use paused::PostcopyPaused;
pub use preempt::AcceptPreempt;

use super::devices;
use super::outcome::{IncomingOutcome, IncomingStats};
use super::ram::GuestRam;
use crate::control::{Control, Handle, Phase, Progress};
use crate::destination::{DestinationStats, PostcopySwitchover};
use crate::error::MigrateError;
use crate::live::{IncomingVm, VmError};
use crate::pages::StreamSetup;
use placer::Placer;
pub(super) use preempt::PreemptListener;
use records::Records;
use requests::Requests;

/// Most bytes of a package that are taken at once: memory grows with what has come.
const PACKAGE_STEP: usize = 1 << 20;

/// What was counted from the package on.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PostcopyIncomingStats {
    /// Pages placed with contents.
    pub normal_pages: u64,
    /// Pages placed as zero.
    pub zero_pages: u64,
    /// Pages that came although they were there, and were dropped.
    pub repeated_pages: u64,
    /// Faults that were told, and those of them that were answered here: the page was known to be zero.
    pub faults: u64,
    /// Pages of faults that were answered with zeros here.
    pub local_zero_pages: u64,
    /// Requests to the source, repeated ones included.
    pub requests: u64,
    /// From the moment a fault was told to the moment its page was in place, nanoseconds; faults whose page was asked
    /// for.
    pub fault_latency: Histogram<u64>,
    /// From the package's last byte to the VM's start.
    pub load_elapsed: Duration,
    /// Connections after the first.
    pub recoveries: u32,
}

/// Counters of all threads.
#[derive(Debug, Default)]
pub(super) struct Counts {
    normal: AtomicU64,
    zero: AtomicU64,
    repeated: AtomicU64,
    faults: AtomicU64,
    local: AtomicU64,
    load_nanos: AtomicU64,
}

impl Counts {
    fn moved(&self, normal: u64, zero: u64) {
        self.normal.fetch_add(normal, Relaxed);
        self.zero.fetch_add(zero, Relaxed);
    }

    fn repeated(&self, pages: u64) {
        self.repeated.fetch_add(pages, Relaxed);
    }
}

/// A VM whose memory comes while it runs: what lives as long as pages are missing, over all connections.
pub(super) struct PostcopyVm<'a> {
    ram: Arc<GuestRam<'a>>,
    faults: FaultHandler,
    requests: Requests,
    counts: Counts,
    /// Host pages, by block and first page, that one of the channels has in hand or has placed.
    claimed: Vec<AtomicPageBitmap>,
    start: StreamSetup,
    progress: Progress,
    answer_timeout: Option<Duration>,
    received: DestinationStats,
    recoveries: u32,
}

/// The channels of one connection, and what stops its threads.
struct Connection<'l, 'a> {
    live: &'l PostcopyVm<'a>,
    main: Arc<Channel>,
    preempt: Option<Arc<Channel>>,
    over: AtomicBool,
    /// The main channel has said its last word.
    ended: AtomicBool,
    failure: Mutex<Option<MigrateError>>,
}

/// A VM whose source has switched to postcopy: what receiving it needs besides the stream.
pub(super) struct PostcopyIncoming<'a, V: IncomingVm + ?Sized> {
    pub(super) vm: &'a V,
    pub(super) ram: Arc<GuestRam<'a>>,
    pub(super) faults: FaultHandler,
    /// Where the channel for requested pages comes in, if there is to be one.
    pub(super) listener: Option<PreemptListener>,
    pub(super) handle: Handle,
    pub(super) answer_timeout: Option<Duration>,
    pub(super) max_device_state: u64,
}

/// Takes over a stream at its package.
pub(super) fn run<'a, V: IncomingVm + ?Sized>(
    role: PostcopyIncoming<'a, V>,
    switched: PostcopySwitchover,
) -> IncomingOutcome<'a, V> {
    let (control, channel) = (role.handle.control.clone(), Arc::clone(&switched.channel));
    let outcome = begin(role, switched);
    control.unwatch();
    match outcome {
        Ok(outcome) => outcome,
        Err(error) => {
            // It never ran, and never will: a source that still can is to know.
            let mut refusal = Vec::new();
            if ReturnMessage::Shut(1).encode(&mut refusal).is_ok() {
                let _ = channel.write_all(&refusal);
            }
            let _ = channel.shutdown(Shutdown::Both);
            IncomingOutcome::Failed(control.explain(error))
        }
    }
}

/// On `Err` the VM has not run.
fn begin<'a, V: IncomingVm + ?Sized>(
    role: PostcopyIncoming<'a, V>,
    switched: PostcopySwitchover,
) -> Result<IncomingOutcome<'a, V>, MigrateError> {
    let PostcopyIncoming { vm, ram, mut faults, listener, handle, answer_timeout, max_device_state } = role;
    let Handle { control, progress } = handle;
    let PostcopySwitchover { start, decoder, arrived, length, stats, channel, .. } = switched;
    if u64::from(length) > max_device_state {
        return Err(MigrateError::Protocol(format!(
            "a package of {length} bytes of device state, and at most {max_device_state} are taken"
        )));
    }
    let (package, rest) = take_package(&channel, arrived, length)?;
    let begun = Instant::now();
    let package = package::read(&package)?;
    let preempt = listener.map(|listener| listener.take(&control, answer_timeout)).transpose()?;
    if let Err(error) = ram.seal(&mut faults) {
        // What is missing already will not come, and another attempt must not wait for it.
        faults.abandon();
        return Err(error);
    }
    let requests = Requests::new(ram.blocks(), Arc::clone(&channel));
    let (counts, received, recoveries) = (Counts::default(), stats, 0);
    let claimed = ram.blocks().iter().map(|block| AtomicPageBitmap::new(block.received.len())).collect();
    let live =
        PostcopyVm { ram, faults, requests, counts, claimed, start, progress, answer_timeout, received, recoveries };
    let vm_start = StartOnce::default();
    let records = Records::new(Arc::clone(&channel), decoder, &rest);
    let connection = Connection::new(&live, channel, preempt);
    let followed = thread::scope(|scope| {
        let load = || {
            // A panic in the VMM's code must not leave the connection's threads waiting.
            let abort = AbortOnDrop { vm_start: &vm_start, connection: &connection };
            if let Err(error) = bring_up(vm, &package, &live, &vm_start, begun) {
                connection.fail(error);
            }
            std::mem::forget(abort);
        };
        let loading = thread::Builder::new().name("load devices".into()).spawn_scoped(scope, load);
        let followed = loading.map_err(MigrateError::Thread).and_then(|_| connection.follow(records));
        // The thread that loads the devices may wait for a page. After the stream's last word what has not come is
        // zero; and where the VM will not run, what is loaded is not used.
        match followed {
            Ok(()) => live.release(),
            Err(error) if vm_start.abort() => {
                let _ = live.release();
                Err(error)
            }
            Err(error) => Err(error),
        }
    });
    let failure = connection.failure();
    if vm_start.is_running() {
        return Ok(conclude(vm, Box::new(live), &control, followed));
    }
    Err(followed.err().or(failure).unwrap_or_else(|| MigrateError::Protocol("the VM was not started".into())))
}

/// Loads the devices and starts the VM, unless it has been given up meanwhile.
fn bring_up<V: IncomingVm + ?Sized>(
    vm: &V,
    package: &package::Package<'_>,
    live: &PostcopyVm<'_>,
    vm_start: &StartOnce,
    begun: Instant,
) -> Result<(), MigrateError> {
    match &package.sections {
        Some(sections) => devices::load_each(vm, sections.iter().copied()),
        None => vm
            .load_package(package.bytes)
            .map_err(|source| MigrateError::Vm { what: "take the state of its devices", source }),
    }
    .inspect_err(|_| {
        vm_start.abort();
    })?;
    vm_start.start(|| vm.start())?;
    live.progress.enter(Phase::PostcopyActive);
    live.counts.load_nanos.store(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX), Relaxed);
    // The VM runs, whether or not the source is told.
    package.ping.map_or(Ok(()), |token| live.requests.say(&ReturnMessage::Pong(token)))
}

/// What became of a VM that was started.
fn conclude<'a, V: IncomingVm + ?Sized>(
    vm: &'a V,
    live: Box<PostcopyVm<'a>>,
    control: &Control,
    followed: Result<(), MigrateError>,
) -> IncomingOutcome<'a, V> {
    match followed {
        Ok(()) => {
            let unheard = live.requests.say(&ReturnMessage::Shut(0)).err();
            live.progress.enter(Phase::Completed);
            IncomingOutcome::Running(IncomingStats {
                received: live.received,
                postcopy: Some(Box::new(live.stats())),
                unheard,
            })
        }
        Err(error) => {
            live.requests.disconnect();
            IncomingOutcome::PostcopyPaused(PostcopyPaused::new(vm, live, control.explain(error)))
        }
    }
}

/// Reads the package; what has arrived behind it.
fn take_package(channel: &Channel, mut arrived: Vec<u8>, length: u32) -> Result<(Vec<u8>, Vec<u8>), MigrateError> {
    let length = to_usize(length.into());
    if arrived.len() >= length {
        let rest = arrived.split_off(length);
        return Ok((arrived, rest));
    }
    while arrived.len() < length {
        let begin = arrived.len();
        arrived.resize(length.min(begin.saturating_add(PACKAGE_STEP)), 0);
        channel.read_exact(
            arrived.get_mut(begin..).ok_or_else(|| broken("room for a package grows before it is read"))?,
        )?;
    }
    Ok((arrived, Vec::new()))
}

/// The VM's start, which happens once or never.
#[derive(Debug, Default)]
struct StartOnce(Mutex<Option<bool>>);

impl StartOnce {
    /// Starts it, unless it was given up.
    fn start(&self, start: impl FnOnce() -> Result<(), VmError>) -> Result<(), MigrateError> {
        let mut vm_start = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if vm_start.is_some() {
            return Err(MigrateError::Protocol("the VM was given up before its devices were loaded".into()));
        }
        // A panic half-way may have let it run.
        *vm_start = Some(true);
        let started = start();
        *vm_start = Some(started.is_ok());
        started.map_err(|source| MigrateError::Vm { what: "run", source })
    }

    /// Gives it up, unless it runs: whether it does not.
    fn abort(&self) -> bool {
        !*self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(false)
    }

    fn is_running(&self) -> bool {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) == Some(true)
    }
}

/// Ends a connection whose VM will not be started.
struct AbortOnDrop<'c, 'l, 'a> {
    vm_start: &'c StartOnce,
    connection: &'c Connection<'l, 'a>,
}

impl Drop for AbortOnDrop<'_, '_, '_> {
    fn drop(&mut self) {
        self.vm_start.abort();
        self.connection.fail(MigrateError::Protocol("the VMM panicked as its devices were loaded".into()));
    }
}

impl PostcopyVm<'_> {
    /// What is missing is zero from now on.
    fn release(&self) -> Result<(), MigrateError> {
        let release = || self.faults.hold().handler()?.finish();
        release().map_err(|error: FaultError| MigrateError::Sink(error.into()))
    }

    /// Answers a fault, or asks the source to.
    fn fault(&self, fault: Fault) -> Result<(), MigrateError> {
        self.counts.faults.fetch_add(1, Relaxed);
        let known = self.ram.block_of(fault.block);
        let (index, block) = known.ok_or_else(|| broken("only blocks of the stream are registered for faults"))?;
        if block.received.get(fault.pages.start) {
            // It is there, or known to be zero.
            let zero = self.faults.zero(fault.block, fault.pages).map_err(|error| MigrateError::Sink(error.into()))?;
            self.counts.local.fetch_add(zero.placed.len(), Relaxed);
            return Ok(());
        }
        self.requests.wait_for(index, fault.pages, || block.received.get(fault.pages.start))
    }

    fn stats(&self) -> PostcopyIncomingStats {
        let read = |count: &AtomicU64| count.load(Relaxed);
        PostcopyIncomingStats {
            normal_pages: read(&self.counts.normal),
            zero_pages: read(&self.counts.zero),
            repeated_pages: read(&self.counts.repeated),
            faults: read(&self.counts.faults),
            local_zero_pages: read(&self.counts.local),
            requests: self.requests.sent.load(Relaxed),
            fault_latency: self.requests.latency(),
            load_elapsed: Duration::from_nanos(read(&self.counts.load_nanos)),
            recoveries: self.recoveries,
        }
    }
}

impl<'l, 'a> Connection<'l, 'a> {
    fn new(live: &'l PostcopyVm<'a>, main: Arc<Channel>, preempt: Option<Arc<Channel>>) -> Self {
        let (over, ended, failure) = (AtomicBool::new(false), AtomicBool::new(false), Mutex::default());
        Self { live, main, preempt, over, ended, failure }
    }

    /// Something went wrong: every thread of the connection ends. The first failure counts.
    fn fail(&self, error: MigrateError) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.close();
    }

    fn failure(&self) -> Option<MigrateError> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn close(&self) {
        for channel in std::iter::once(&self.main).chain(&self.preempt) {
            let _ = channel.shutdown(Shutdown::Both);
        }
    }

    /// Reads to the stream's last word, with faults answered and the other channel read meanwhile.
    fn follow(&self, records: Records) -> Result<(), MigrateError> {
        let waker = self.live.faults.waker();
        let spawned = |name: &str| thread::Builder::new().name(name.into());
        thread::scope(|scope| {
            let faults =
                spawned("faults").spawn_scoped(scope, || self.answer_faults().map_err(|error| self.fail(error)));
            let preempt = self.preempt.as_ref().map(|channel| {
                spawned("preempt").spawn_scoped(scope, || self.read_preempt(channel).map_err(|error| self.fail(error)))
            });
            let begun = faults.map(drop).and_then(|()| preempt.transpose().map(drop)).map_err(MigrateError::Thread);
            let read = begun.and_then(|()| self.read_main(records)).and_then(|()| self.wait_for_requested());
            self.over.store(true, Ordering::SeqCst);
            waker.wake();
            if let Some(channel) = &self.preempt {
                let _ = channel.shutdown(Shutdown::Both);
            }
            // The first failure is the cause: a thread that failed has closed the channels, and closing them here makes
            // the threads that still use them fail.
            read.map_err(|error| self.failure().unwrap_or(error)).inspect_err(|_| self.close())
        })
    }

    fn answer_faults(&self) -> Result<(), MigrateError> {
        let mut events = Vec::new();
        loop {
            events.clear();
            let waited = self.live.faults.wait(&mut events, None);
            waited.map_err(|error| MigrateError::Sink(error.into()))?;
            for event in &events {
                if let FaultEvent::Fault(fault) = event {
                    // Reported once: it goes on the list even where no source can be asked any more.
                    self.live.fault(*fault)?;
                }
            }
            if self.over.load(Ordering::SeqCst) {
                return Ok(());
            }
        }
    }

    fn read_main(&self, mut records: Records) -> Result<(), MigrateError> {
        let mut placer = Placer::new(self.live);
        let still = || self.is_served();
        loop {
            match records.next(&still)? {
                Event::Command(Command::Ping(token)) => self.live.requests.say(&ReturnMessage::Pong(token))?,
                Event::EndOfStream if placer.is_between_host_pages() => {
                    self.ended.store(true, Ordering::SeqCst);
                    return Ok(());
                }
                Event::EndOfStream => return Err(MigrateError::Protocol("the stream ends inside a huge page".into())),
                Event::SectionPart { .. }
                | Event::SectionEnd { .. }
                | Event::SectionFooter { .. }
                | Event::EndOfSection => {}
                event => records.place(&event, &mut placer, &still)?,
            }
        }
    }

    fn read_preempt(&self, channel: &Arc<Channel>) -> Result<(), MigrateError> {
        let mut placer = Placer::new(self.live);
        let mut records = Records::new(Arc::clone(channel), Decoder::for_records(&self.live.start.blocks)?, &[]);
        let done = || self.over.load(Ordering::SeqCst) || self.ended.load(Ordering::SeqCst);
        loop {
            match records.next(&|| true) {
                // The source closes it when it has nothing more to say; what is still asked for is waited for
                // elsewhere.
                Err(_) if done() && records.is_between_records() => return Ok(()),
                Ok(Event::EndOfStream) => return Ok(()),
                event => records.place(&event?, &mut placer, &|| true)?,
            }
        }
    }

    /// Behind the main channel's last word: what was asked for on the other one is waited for.
    fn wait_for_requested(&self) -> Result<(), MigrateError> {
        let over = || self.failure.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        if self.preempt.is_none() || self.live.requests.wait_until_answered(self.live.answer_timeout, over) {
            return Ok(());
        }
        Err(MigrateError::Protocol("the source has ended its stream and owes pages that were asked for".into()))
    }

    /// Whether a silent source may go on being silent: no request is in flight, or not for long.
    fn is_served(&self) -> bool {
        self.live.answer_timeout.is_none_or(|answer_timeout| self.live.requests.longest_wait() < answer_timeout)
    }
}
