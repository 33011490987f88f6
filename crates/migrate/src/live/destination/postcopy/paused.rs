//! A VM that runs here on a part of its memory, without a source to ask for the rest.

use std::sync::Arc;
use std::thread;

use limosa_channel::Channel;
use limosa_stream::{Command, Decoder, Event, ReturnMessage};

use super::connection::Connection;
use super::preempt::{AcceptPreempt, PreemptListener};
use super::records::Records;
use super::vm::PostcopyVm;
use crate::control::{Control, Handle, Phase};
use crate::error::MigrateError;
use crate::live::IncomingVm;
use crate::live::destination::outcome::{IncomingOutcome, IncomingStats};

/// A VM that runs here without all of its pages, and whose connection to the source broke. An access to a page that
/// has not arrived waits. [`recover`](Self::recover) continues the transfer; only the source has the missing pages.
///
/// Dropping it changes nothing for the VM: what is missing stays missing, and an access to it waits for ever. Only
/// [`discard`](Self::discard) says that there is no guest any more.
pub struct PostcopyPaused<'a, V: IncomingVm + ?Sized> {
    vm: &'a V,
    live: Box<PostcopyVm<'a>>,
    why: MigrateError,
}

impl<V: IncomingVm + ?Sized> std::fmt::Debug for PostcopyPaused<'_, V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostcopyPaused").field("why", &self.why).finish_non_exhaustive()
    }
}

impl<'a, V: IncomingVm + ?Sized> PostcopyPaused<'a, V> {
    pub(super) fn new(vm: &'a V, live: Box<PostcopyVm<'a>>, why: MigrateError) -> Self {
        Self { vm, live, why }
    }

    /// The failure.
    pub fn why(&self) -> &MigrateError {
        &self.why
    }

    /// Pages that have not come, of all blocks together.
    pub fn missing_pages(&self) -> u64 {
        self.live.ram.blocks().iter().map(|block| block.received.len() - block.received.count()).sum()
    }

    /// Continues over a new connection, on which the source asks for the pages that have come. `accept`: as in
    /// [`preempt`](crate::LiveDestination::preempt). The control of `handle` must be a new one if the one before was
    /// used to stop; its progress may be the one before, or new: then it counts the pages of the recovery.
    pub fn recover(
        self,
        channel: Channel,
        accept: Option<AcceptPreempt<'_>>,
        handle: &Handle,
    ) -> IncomingOutcome<'a, V> {
        let missing = self.missing_pages();
        let Self { vm, mut live, .. } = self;
        let Handle { control, progress } = handle.clone();
        // A handle that is new has seen nothing of the phases before.
        progress.set_phase(Phase::PostcopyActive);
        if progress.read().total_pages == 0 {
            progress.expect_pages(missing);
        }
        live.recoveries += 1;
        live.progress = progress;
        let channel = Arc::new(channel);
        control.watch(&channel);
        let resumed = thread::scope(|scope| {
            let listener = accept.map(|accept| PreemptListener::open(scope, accept)).transpose()?;
            negotiate(&live, &channel, &control, listener)
        });
        let followed = resumed.and_then(|(records, preempt)| {
            let followed = Connection::new(&live, Arc::clone(&channel), preempt).follow(records);
            followed.and_then(|()| live.release())
        });
        if followed.is_err() {
            let _ = channel.shutdown(limosa_channel::Shutdown::Both);
        }
        control.unwatch();
        conclude(vm, live, &control, followed)
    }

    /// The guest is gone, and its memory will not be accessed again.
    pub fn discard(self) {
        self.live.faults.abandon();
    }
}

/// Returns the outcome of a connection whose VM was started.
pub(super) fn conclude<'a, V: IncomingVm + ?Sized>(
    vm: &'a V,
    live: Box<PostcopyVm<'a>>,
    control: &Control,
    followed: Result<(), MigrateError>,
) -> IncomingOutcome<'a, V> {
    match followed {
        Ok(()) => {
            let unheard = live.requests.say(&ReturnMessage::Shut(0)).err();
            live.progress.set_phase(Phase::Completed);
            IncomingOutcome::Running(IncomingStats {
                received: live.received,
                postcopy: Some(Box::new(live.stats())),
                acknowledge_error: unheard,
            })
        }
        Err(error) => {
            live.requests.disconnect();
            IncomingOutcome::PostcopyPaused(PostcopyPaused::new(vm, live, control.explain(error)))
        }
    }
}

/// Tells the source which pages have come, and agrees to continue.
fn negotiate(
    live: &PostcopyVm<'_>,
    channel: &Arc<Channel>,
    control: &Control,
    listener: Option<PreemptListener>,
) -> Result<(Records, Option<Arc<Channel>>), MigrateError> {
    channel.set_timeouts(live.answer_timeout, live.answer_timeout)?;
    let decoder = Decoder::for_recovery(&live.start.blocks, live.start.section_id)?;
    let mut records = Records::new(Arc::clone(channel), decoder, &[]);
    let say = |message: ReturnMessage| -> Result<(), MigrateError> {
        let mut bytes = Vec::new();
        message.encode(&mut bytes)?;
        Ok(channel.write_all(&bytes)?)
    };
    loop {
        match records.next(&|| false)? {
            Event::Command(Command::ReceiveBitmap { block }) => {
                let known = live.ram.blocks().iter().find(|known| known.memory.name() == block);
                let known =
                    known.ok_or_else(|| MigrateError::Protocol(format!("RAM block {block:?} does not exist")))?;
                say(ReturnMessage::ReceivedBitmap { block, bitmap: known.received.to_bitmap().to_le_bytes() })?;
            }
            Event::Command(Command::Ping(token)) => say(ReturnMessage::Pong(token))?,
            Event::Command(Command::PostcopyResume) => {
                let preempt = listener.map(|listener| listener.take(control, live.answer_timeout)).transpose()?;
                live.requests.reconnect(Arc::clone(channel), &ReturnMessage::ResumeAck(1))?;
                return Ok((records, preempt));
            }
            other => {
                return Err(MigrateError::Protocol(format!("{other:?} in a recovery, before it was agreed to go on")));
            }
        }
    }
}
