//! The channel of requested pages, which the source connects when it likes.
//!
//! The law: **a connection is accepted before it is needed.** A stock QEMU connects this channel before it sends the
//! package of its devices, or agrees to a recovery, and over TLS says nothing on the main one until that channel has
//! shaken hands. So it is looked for by its own thread, from the beginning.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use limosa_channel::{Channel, ChannelError};

use crate::control::Control;
use crate::error::MigrateError;

/// Waits so long at most for the source's next connection, and drives the handshakes of those that have come: the
/// channel, once there is one. Called again and again, on its own thread, until there is one, it fails, or the VM needs
/// none any more.
///
/// [`Acceptor::poll`](limosa_channel::Acceptor::poll) does this on a listener.
pub type AcceptPreempt<'a> = Box<dyn FnMut(Duration) -> Result<Option<Channel>, ChannelError> + Send + 'a>;

/// How long a connection is waited for before it is checked whether one is still needed: the thread ends that much
/// later.
const TICK: Duration = Duration::from_millis(20);

/// Waits for the channel, until it is dropped.
pub(in crate::live::destination) struct PreemptListener {
    over: Arc<AtomicBool>,
    came: Receiver<Result<Channel, ChannelError>>,
}

impl PreemptListener {
    /// Opens it: `accept` is asked until there is a channel.
    pub(in crate::live::destination) fn open<'scope, 'a: 'scope>(
        scope: &'scope Scope<'scope, '_>,
        mut accept: AcceptPreempt<'a>,
    ) -> Result<Self, MigrateError> {
        let over = Arc::new(AtomicBool::new(false));
        let (tell, came) = sync_channel(1);
        let closed = Arc::clone(&over);
        let keep = move || {
            while !closed.load(Ordering::Relaxed) {
                if let Some(came) = accept(TICK).transpose() {
                    // The other end is gone if the listener has been closed meanwhile.
                    let _ = tell.send(came);
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("accept preempt".into()).spawn_scoped(scope, keep);
        thread.map(|_| Self { over, came }).map_err(MigrateError::Thread)
    }

    /// Waits until the channel is there; not for ever, if the source has a limit.
    pub(super) fn take(
        self,
        control: &Control,
        answer_timeout: Option<Duration>,
    ) -> Result<Arc<Channel>, MigrateError> {
        let begun = Instant::now();
        let channel = loop {
            control.check()?;
            match self.came.recv_timeout(TICK) {
                Ok(came) => break Arc::new(came?),
                Err(RecvTimeoutError::Timeout)
                    if answer_timeout.is_none_or(|answer_timeout| begun.elapsed() < answer_timeout) => {}
                Err(RecvTimeoutError::Timeout) => {
                    let why = "the source has not connected its channel for requested pages (postcopy-preempt)";
                    return Err(MigrateError::Protocol(why.into()));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(MigrateError::Protocol("who waits for the channel of requested pages panicked".into()));
                }
            }
        };
        control.watch(&channel);
        Ok(channel)
    }
}

impl Drop for PreemptListener {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}
