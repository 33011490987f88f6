//! The VM's side of a keeper elsewhere: QEMU's stream to the keeper, and the keeper's answers to QEMU.
//!
//! Laws: **an epoch is sealed before the VM continues, and let out when the keeper says that its checkpoint counts**;
//! **the VM is stopped by an answer of this side alone**, when a checkpoint is due. QEMU's bytes are passed on unread.
//! The keeper's are decoded, and only those that are due reach QEMU.
//!
//! ```text
//! keeper:   READY       │ KEPT n-1, REPLY                 │ RECEIVED, LOADED  │ KEPT n
//! relay:    seal 0, ──► │ commit n-1, wait until due, ──► │ seal n, ──►       │ commit n
//! QEMU:     runs        │                          stops  │           runs    │
//! ```
//!
//! While the VM runs nothing is on the way to the keeper but QEMU's request and this side's notes, which do not fall
//! into the middle of it. They say that the VM is there, that its disks are prepared for a checkpoint, which counts
//! then and not before, and in the end why there will be no more checkpoints.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, ChannelError, Shutdown};
use limosa_migrate::MigrateError;
use limosa_page::{broken_invariant, to_u64};
use limosa_qemu::JobError;
use limosa_snapshot::ProtectedDisk;
use limosa_stream::colo::{COLO_MESSAGE_LIMIT, ColoMessage};
use limosa_stream::{ReturnDecoder, ReturnMessage};
use parking_lot::{Condvar, Mutex};

use super::message::{Farewell, KeptNotes, Note, closed_early, timed_out};
use crate::error::ProtectError;
use crate::options::OnLoss;
use crate::primary::{LocalVm, Primary as _, TELL_EVERY};
use crate::report::{KeptBase, KeptCheckpoint};
use crate::series::Kept;

/// Bytes that are passed on at once.
const PIECE: usize = 256 << 10;
/// How long a read of the keeper takes at a stretch: what else ends the wait is looked at in between.
const TICK: Duration = Duration::from_millis(20);
/// How long it may take until the monitor of a QEMU whose stream has ended says why.
const REASON_WITHIN: Duration = Duration::from_millis(300);
/// Bytes of QEMU's request for a checkpoint.
const REQUEST: u64 = 4;
/// How long the rest of a request may take whose first bytes have come.
const REQUEST_WITHIN: Duration = Duration::from_secs(1);
/// How often it is looked at.
const REQUEST_TICK: Duration = Duration::from_micros(200);

/// A QEMU and its keeper.
pub(crate) struct Relay<'a> {
    pub(crate) vm: LocalVm<'a>,
    pub(crate) qemu: &'a Channel,
    pub(crate) keeper: &'a Channel,
    /// The disks that belong to the checkpoints, as the keeper was told of them.
    pub(crate) disks: &'a [ProtectedDisk],
    /// Whether QEMU reads a return path until its base is answered.
    pub(crate) return_path: bool,
    /// How long the keeper may owe an answer while the VM runs.
    pub(crate) lost_after: Duration,
    pub(crate) began: &'a (dyn Fn(&KeptBase) + Sync),
    pub(crate) kept: &'a (dyn Fn(&KeptCheckpoint) + Sync),
}

/// State that both threads share.
#[derive(Debug, Default)]
struct Shared {
    /// QEMU's stream has ended.
    qemu_ended: AtomicBool,
    /// Bytes of QEMU since the VM was last let continue.
    passed: AtomicU64,
    /// Held by who writes to the keeper.
    writing: Mutex<()>,
    /// The keeper takes no more bytes.
    lost: Mutex<Option<ChannelError>>,
}

/// The keeper's answer that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    /// READY: the base is on the way.
    Ready,
    /// KEPT of this number.
    Kept(u64),
    /// REPLY: the last checkpoint counts.
    Reply,
    /// RECEIVED and LOADED: a checkpoint is on the way.
    Received,
    Loaded,
}

/// Cuts a relay's connections: its threads end.
pub(crate) fn cut(qemu: &Channel, keeper: &Channel) {
    for channel in [qemu, keeper] {
        // It may be closed already.
        let _ = channel.shutdown(Shutdown::Both);
    }
}

impl Relay<'_> {
    /// Passes checkpoints on until QEMU, the keeper or the job ends.
    pub(crate) fn run(&self) -> Kept {
        let (mut kept, shared) = (Kept::nothing(), Shared::default());
        kept.end = thread::scope(|scope| {
            let passing = thread::Builder::new().name("relay".into());
            let passing = passing.spawn_scoped(scope, || self.pass(&shared)).map_err(ProtectError::Thread)?;
            let mut turns = Turns::new(self, &shared);
            let end = turns.run(&mut kept);
            turns.take_leave(&end);
            turns.hold_vm(&end);
            cut(self.qemu, self.keeper);
            passing.join().map_err(|_| MigrateError::Protocol("the thread of the relay panicked".into()))?;
            end
        });
        kept
    }

    /// Passes QEMU's bytes on to the keeper.
    fn pass(&self, shared: &Shared) {
        let mut bytes = vec![0; PIECE];
        loop {
            let got = match self.qemu.read(&mut bytes) {
                Ok(got) if got > 0 => got,
                Ok(_) => break,
                Err(error) => {
                    tracing::info!("{error}");
                    break;
                }
            };
            self.vm.pulse.add_bytes(to_u64(got));
            let written = {
                let _alone = shared.writing.lock();
                shared.passed.fetch_add(to_u64(got), Ordering::AcqRel);
                self.keeper.write_all(bytes.get(..got).unwrap_or_default())
            };
            if let Err(error) = written {
                *shared.lost.lock() = Some(error);
                break;
            }
        }
        if shared.lost.lock().is_none() {
            shared.qemu_ended.store(true, Ordering::Release);
        }
        // The other thread may wait until a checkpoint is due.
        self.vm.outputs.signal().nearly_full();
    }

    /// Tells the keeper something while the VM runs: QEMU has sent nothing then but its request, or a part of it.
    fn tell(&self, shared: &Shared, note: Note) -> Result<(), ProtectError> {
        let mut bytes = Vec::with_capacity(COLO_MESSAGE_LIMIT);
        note.encode(&mut bytes);
        let begun = Instant::now();
        loop {
            let alone = shared.writing.lock();
            if [0, REQUEST].contains(&shared.passed.load(Ordering::Acquire)) {
                return self.keeper.write_all(&bytes).map_err(|error| self.lost(error));
            }
            drop(alone);
            if begun.elapsed() >= REQUEST_WITHIN {
                return Err(self.lost(MigrateError::Protocol("QEMU's request has come in part only".into())));
            }
            thread::sleep(REQUEST_TICK);
        }
    }

    fn lost(&self, source: impl Into<MigrateError>) -> ProtectError {
        ProtectError::LineLost { keeper: self.keeper.peer().to_owned(), source: Box::new(source.into()) }
    }
}

/// The turns of the keeper.
struct Turns<'r> {
    relay: &'r Relay<'r>,
    shared: &'r Shared,
    due: Due,
    /// The return path of the base, until it ends.
    return_path: Option<ReturnDecoder>,
    arrived: Vec<u8>,
    offset: u64,
    begun: Instant,
    /// When the keeper last spoke, or something became due.
    heard: Instant,
    /// QEMU's bytes until then.
    heard_at: u64,
    /// No more is written to the keeper.
    left: bool,
    /// The last stop of the VM for a checkpoint, and the one before.
    stopped: Option<Instant>,
    before: Option<Instant>,
    /// The checkpoint that was last loaded, and how long the VM stood still for it.
    number: u64,
    pause: Duration,
    /// Its bytes.
    bytes: u64,
    notes: KeptNotes,
}

/// The keeper's words.
enum Heard {
    Colo(ColoMessage),
    /// The connection has ended, when QEMU's had.
    End,
}

impl<'r> Turns<'r> {
    fn new(relay: &'r Relay<'r>, shared: &'r Shared) -> Self {
        Self {
            relay,
            shared,
            due: Due::Ready,
            // A keeper answers no more than pings in it.
            return_path: relay.return_path.then(|| ReturnDecoder::new(0)),
            arrived: Vec::new(),
            offset: 0,
            begun: Instant::now(),
            heard: Instant::now(),
            heard_at: 0,
            left: false,
            stopped: None,
            before: None,
            number: 0,
            pause: Duration::ZERO,
            bytes: 0,
            notes: KeptNotes::default(),
        }
    }

    /// Hears the keeper until one side ends.
    fn run(&mut self, kept: &mut Kept) -> Result<(), ProtectError> {
        let Relay { vm, keeper, lost_after, .. } = *self.relay;
        keeper.set_timeouts(Some(TICK), Some(lost_after))?;
        loop {
            match self.hear()? {
                Heard::End => return Ok(()),
                Heard::Colo(ColoMessage::Note { kind, value }) => {
                    let number = Note::of(kind, value).and_then(|note| self.notes.take(note));
                    if let Some(number) = number {
                        self.expect(Due::Kept(number))?;
                        self.count(number, kept)?;
                        self.due = Due::Reply;
                    }
                }
                Heard::Colo(ColoMessage::CheckpointReady) => {
                    self.expect(Due::Ready)?;
                    vm.begin_disks(self.relay.disks)?;
                    vm.seal(0)?;
                    vm.check_held()?;
                    let mut bytes = Vec::new();
                    if self.relay.return_path {
                        ReturnMessage::Shut(0).encode(&mut bytes).map_err(MigrateError::from)?;
                    }
                    self.bytes = self.shared.passed.swap(0, Ordering::AcqRel);
                    self.answer(ColoMessage::CheckpointReady, bytes)?;
                    vm.continued();
                    self.due = Due::Kept(0);
                }
                Heard::Colo(ColoMessage::CheckpointReply) => {
                    self.expect(Due::Reply)?;
                    vm.wait_due_telling(self.stopped, &|runs| self.tell(Note::Alive(runs)))?;
                    self.before = self.stopped.replace(Instant::now());
                    self.bytes = self.shared.passed.load(Ordering::Acquire);
                    self.answer(ColoMessage::CheckpointReply, Vec::new())?;
                    self.due = Due::Received;
                }
                Heard::Colo(ColoMessage::VmstateReceived) => {
                    self.expect(Due::Received)?;
                    self.due = Due::Loaded;
                }
                Heard::Colo(ColoMessage::VmstateLoaded) => {
                    self.expect(Due::Loaded)?;
                    self.load()?;
                }
                Heard::Colo(other) => return Err(self.out_of_turn(&format!("{other:?}"))),
            }
        }
    }

    /// The keeper has a whole checkpoint: the VM continues.
    fn load(&mut self) -> Result<(), ProtectError> {
        let vm = self.relay.vm;
        let number = self.number + 1;
        let sealed = vm.seal_disks(number).and_then(|()| vm.seal(number)).and_then(|()| vm.check_held());
        self.bytes = self.shared.passed.swap(0, Ordering::AcqRel).saturating_sub(self.bytes);
        let mut bytes = Vec::new();
        ColoMessage::VmstateReceived.encode(&mut bytes);
        let answered = self.answer(ColoMessage::VmstateLoaded, bytes);
        vm.continued();
        self.pause = self.stopped.map_or(Duration::ZERO, |stopped| stopped.elapsed());
        (self.number, self.due) = (number, Due::Kept(number));
        sealed?;
        // A QEMU that has died meanwhile does not hear it; the checkpoint counts all the same.
        match answered {
            Err(ProtectError::Channel(error)) if !error.is_shut_down() => tracing::info!("{error}"),
            other => other?,
        }
        if self.relay.disks.is_empty() { Ok(()) } else { self.prepare(number) }
    }

    /// Prepares the disks for a checkpoint. The keeper waits for it, and is told meanwhile that the VM is there.
    fn prepare(&mut self, number: u64) -> Result<(), ProtectError> {
        let (relay, shared) = (self.relay, self.shared);
        let (prepared, changed) = (Mutex::new(false), Condvar::new());
        thread::scope(|scope| {
            let telling = || {
                let mut prepared = prepared.lock();
                while !*prepared {
                    if changed.wait_for(&mut prepared, TELL_EVERY).timed_out()
                        && let Err(error) = relay.tell(shared, Note::Alive(true))
                    {
                        // It is noticed where the keeper is heard.
                        return tracing::info!("{error}");
                    }
                }
            };
            let teller = thread::Builder::new().name("disks".into());
            teller.spawn_scoped(scope, telling).map_err(ProtectError::Thread)?;
            let done = relay.vm.prepare_disks(number);
            *prepared.lock() = true;
            changed.notify_all();
            done
        })?;
        self.heard = Instant::now();
        self.tell(Note::Prepared(number))
    }

    /// The keeper has stored a checkpoint.
    fn count(&mut self, number: u64, kept: &mut Kept) -> Result<(), ProtectError> {
        let (vm, notes) = (self.relay.vm, std::mem::take(&mut self.notes));
        kept.newest.get_or_insert_with(|| self.relay.keeper.peer().into());
        if let Some(time) = notes.fails_over {
            // Otherwise others would see output of a VM that is about to continue without it.
            vm.outputs.hold_when_lost(time).map_err(ProtectError::Gate)?;
        }
        let released = vm.counts(number);
        if number > 0 {
            let period = self.stopped.zip(self.before).map(|(now, before)| now.saturating_duration_since(before));
            let (pause, bytes, output) = (self.pause, self.bytes, vm.counters());
            let KeptNotes { stored, commit, catch_up, .. } = notes;
            let one = KeptCheckpoint { number, pause, commit, catch_up, period, bytes, stored, output };
            kept.tally.add(&one);
            (self.relay.kept)(&one);
        } else {
            let (bytes, elapsed) = (self.bytes, self.begun.elapsed());
            (self.relay.began)(&KeptBase { path: self.relay.keeper.peer().into(), bytes, elapsed });
        }
        released
    }

    /// Has a VM that is to stand still without protection do so before QEMU learns of the loss.
    fn hold_vm(&self, end: &Result<(), ProtectError>) {
        let vm = self.relay.vm;
        if vm.options.on_loss == OnLoss::Pause
            && matches!(end, Err(ProtectError::LineLost { .. }))
            && matches!(self.due, Due::Kept(_) | Due::Reply)
            && let Err(error) = vm.monitor.stop()
        {
            tracing::info!("{error}");
        }
    }

    /// Says why there will be no more checkpoints, if that can be said.
    fn take_leave(&mut self, end: &Result<(), ProtectError>) {
        let ended = self.shared.qemu_ended.load(Ordering::Acquire);
        match end {
            Err(ProtectError::LineLost { .. }) => {}
            // Said when it was seen.
            Ok(()) => {}
            Err(error) => {
                let is_gone = ended
                    || matches!(error, ProtectError::Qmp(error) | ProtectError::Job(JobError::Qmp(error)) if error.is_gone())
                    // It may have been lost together with a server of its disks, whose end was seen first.
                    || self.relay.vm.monitor.status().is_err_and(|error| error.is_gone());
                let farewell = if is_gone { self.reason() } else { Some(Farewell::Unprotected) };
                self.say_farewell(farewell);
            }
        }
    }

    /// Tells the keeper the end if it is known, unless QEMU's bytes end in the middle of something.
    fn say_farewell(&mut self, farewell: Option<Farewell>) {
        if std::mem::replace(&mut self.left, true) {
            return;
        }
        let is_between = matches!(self.due, Due::Kept(_) | Due::Reply);
        if is_between
            && let Some(farewell) = farewell
            && let Err(error) = self.tell(Note::Farewell(farewell))
        {
            tracing::info!("{error}");
        }
        let _ = self.relay.keeper.shutdown(Shutdown::Write);
    }

    /// The reason why QEMU's stream has ended; `None`: it cannot be said. A keeper that is told nothing takes the VM
    /// for lost, and fences it.
    fn reason(&self) -> Option<Farewell> {
        let begun = Instant::now();
        loop {
            match self.relay.vm.pulse.end() {
                Some(reason) => return Some(reason),
                // A large VM takes a while to end, descriptor by descriptor.
                None if begun.elapsed() >= REASON_WITHIN => {
                    return match self.relay.vm.monitor.status() {
                        Ok(_) => Some(Farewell::Unprotected),
                        Err(error) if error.is_gone() => self.relay.vm.pulse.end().or(Some(Farewell::VmLost)),
                        Err(_) => None,
                    };
                }
                None => thread::sleep(TICK / 4),
            }
        }
    }

    fn tell(&self, note: Note) -> Result<(), ProtectError> {
        self.relay.tell(self.shared, note)
    }

    /// Writes `before` and a message to QEMU.
    fn answer(&mut self, message: ColoMessage, mut before: Vec<u8>) -> Result<(), ProtectError> {
        message.encode(&mut before);
        self.heard = Instant::now();
        // Who reads from it may not have seen its end yet.
        let written = self.relay.qemu.write_all(&before);
        Ok(written.inspect_err(|_| self.shared.qemu_ended.store(true, Ordering::Release))?)
    }

    fn expect(&self, due: Due) -> Result<(), ProtectError> {
        if self.due == due { Ok(()) } else { Err(self.out_of_turn(&format!("{due:?}"))) }
    }

    fn out_of_turn(&self, found: &str) -> ProtectError {
        let due = self.due;
        self.relay.lost(MigrateError::Protocol(format!("the keeper says {found}, where {due:?} is due")))
    }

    /// Waits for the keeper's next message.
    fn hear(&mut self) -> Result<Heard, ProtectError> {
        let lost = |error: MigrateError| self.relay.lost(error);
        loop {
            if let Some(decoder) = &mut self.return_path {
                let next = decoder.next_message().map_err(|error| self.relay.lost(error))?;
                match next {
                    Some(ReturnMessage::Shut(0)) => {
                        self.arrived = decoder.rest().to_vec();
                        self.return_path = None;
                        continue;
                    }
                    Some(pong @ ReturnMessage::Pong(_)) => {
                        let mut bytes = Vec::new();
                        pong.encode(&mut bytes).map_err(MigrateError::from)?;
                        self.relay.qemu.write_all(&bytes)?;
                        continue;
                    }
                    Some(other) => return Err(self.out_of_turn(&format!("{other:?}"))),
                    None => {}
                }
            } else if let Some((message, length)) =
                ColoMessage::decode(&self.arrived, self.offset, 0).map_err(|error| lost(error.into()))?
            {
                self.arrived.drain(..length);
                self.offset = self.offset.saturating_add(to_u64(length));
                return Ok(Heard::Colo(message));
            }
            if self.read()? {
                return Ok(Heard::End);
            }
        }
    }

    /// Reads what the keeper says; true if it has ended behind QEMU.
    fn read(&mut self) -> Result<bool, ProtectError> {
        let relay = self.relay;
        let mut bytes = [0; 4096];
        let got = match relay.keeper.read(&mut bytes) {
            Ok(0) if self.left => return Ok(true),
            Ok(0) => {
                return Err(self.reason_of_write().unwrap_or_else(|| relay.lost(closed_early())));
            }
            Ok(got) => bytes.get(..got).ok_or_else(|| broken_invariant("a read fills no more than its buffer")),
            Err(error) if error.is_timeout() => {
                self.look()?;
                return Ok(false);
            }
            Err(error) if self.left && error.is_closed() => return Ok(true),
            Err(error) => return Err(self.reason_of_write().unwrap_or_else(|| relay.lost(error))),
        }
        .map_err(MigrateError::from)?;
        (self.heard, self.heard_at) = (Instant::now(), self.shared.passed.load(Ordering::Acquire));
        match &mut self.return_path {
            Some(decoder) => decoder.push(got),
            None => self.arrived.extend_from_slice(got),
        }
        Ok(false)
    }

    fn reason_of_write(&self) -> Option<ProtectError> {
        self.shared.lost.lock().take().map(|error| self.relay.lost(error))
    }

    /// Looks at what else ends the wait for the keeper.
    fn look(&mut self) -> Result<(), ProtectError> {
        if let Some(lost) = self.reason_of_write() {
            return Err(lost);
        }
        if self.shared.qemu_ended.load(Ordering::Acquire) && !self.left {
            // A checkpoint that is whole there still counts, and the keeper says so before it ends.
            self.heard = Instant::now();
            let reason = self.reason();
            self.say_farewell(reason);
        }
        let passed = self.shared.passed.load(Ordering::Acquire);
        if passed != self.heard_at {
            (self.heard, self.heard_at) = (Instant::now(), passed);
        }
        let owes = match self.due {
            _ if self.left => true,
            Due::Kept(_) => true,
            Due::Reply => passed >= REQUEST,
            // The VM stands still: its guard looks.
            Due::Ready | Due::Received | Due::Loaded => false,
        };
        if owes && self.heard.elapsed() >= self.relay.lost_after {
            return Err(self.relay.lost(timed_out(self.relay.keeper, self.relay.lost_after)));
        }
        Ok(())
    }
}
