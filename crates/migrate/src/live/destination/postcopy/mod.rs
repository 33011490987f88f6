//! A VM that runs here before its memory is here.
//!
//! The package of device sections is the source's commit: with its last byte the VM is this side's. Pages that have not
//! come are made missing, and an access to them waits. A thread asks the source for them; pages that come are placed
//! one host page at a time. The device sections are loaded by a thread of their own, because loading them may touch
//! missing memory as well.
//!
//! Three laws. **Missing memory never reads as zeros** before the end of the stream: a connection that breaks leaves
//! the guest waiting ([`IncomingOutcome::PostcopyPaused`]), also if everything is dropped. **The VM is started once or
//! never,** whichever comes first: the thread that has loaded its devices, or a failure before that. **No request is
//! lost:** a page that is waited for is requested again over every new connection.
//!
//! Pages received as zero before the VM ran have no memory; a guest that touches one is given zeros here, without a
//! request.

mod connection;
mod package;
mod paused;
mod placer;
mod preempt;
mod records;
mod requests;
mod start;
mod vm;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Shutdown};
use limosa_memory::FaultHandler;
use limosa_page::{AtomicPageBitmap, broken_invariant, to_usize};
use limosa_stream::ReturnMessage;

use super::devices;
use super::outcome::IncomingOutcome;
use super::ram::GuestRam;
use crate::control::{Handle, Phase};
use crate::destination::PostcopySwitchover;
use crate::error::MigrateError;
use crate::live::IncomingVm;
use connection::Connection;
pub use paused::PostcopyPaused;
use paused::conclude;
pub use preempt::AcceptPreempt;
pub(super) use preempt::PreemptListener;
use records::Records;
use requests::Requests;
use start::StartOnce;
pub use vm::PostcopyIncomingStats;
use vm::{Counts, PostcopyVm};

/// Most bytes of a package that are taken at once: memory grows with what has come.
const PACKAGE_STEP: usize = 1 << 20;

/// A VM whose source has switched to postcopy: what receiving it needs besides the stream.
pub(super) struct PostcopyIncoming<'a, V: IncomingVm + ?Sized> {
    pub(super) vm: &'a V,
    pub(super) ram: Arc<GuestRam<'a>>,
    pub(super) faults: FaultHandler,
    /// The listener for the channel of requested pages, if one is expected.
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
        // The thread that loads the devices may wait for a page. After the end of the stream missing pages are
        // zero; and where the VM will not run, the loaded state is not used.
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
    live.progress.set_phase(Phase::PostcopyActive);
    live.counts.load_nanos.store(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX), Relaxed);
    // The VM runs, whether or not the source is told.
    package.ping.map_or(Ok(()), |token| live.requests.say(&ReturnMessage::Pong(token)))
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
            arrived.get_mut(begin..).ok_or_else(|| broken_invariant("room for a package grows before it is read"))?,
        )?;
    }
    Ok((arrived, Vec::new()))
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
