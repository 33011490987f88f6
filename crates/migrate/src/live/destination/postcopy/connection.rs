//! One connection of a VM whose memory comes while it runs.

use std::sync::Arc;
use std::thread;

use limosa_channel::{Channel, Shutdown};
use limosa_memory::FaultEvent;
use limosa_stream::{Command, Decoder, Event, ReturnMessage};
use parking_lot::Mutex;

use super::placer::Placer;
use super::records::Records;
use super::vm::PostcopyVm;
use crate::error::MigrateError;

/// A stage of a connection. A later one never goes back.
///
/// ```text
/// open ──► ended ──► over
///   │                 ▲
///   └─────────────────┘
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Pages come on all channels.
    Open,
    /// The main channel has come to the end of the stream; requested pages may still come on the other one.
    Ended,
    /// Nothing more comes: all has come, or the connection is broken.
    Over,
}

/// The channels of one connection, and what stops its threads.
pub(super) struct Connection<'l, 'a> {
    live: &'l PostcopyVm<'a>,
    main: Arc<Channel>,
    preempt: Option<Arc<Channel>>,
    stage: Mutex<Stage>,
    failure: Mutex<Option<MigrateError>>,
}

impl<'l, 'a> Connection<'l, 'a> {
    pub(super) fn new(live: &'l PostcopyVm<'a>, main: Arc<Channel>, preempt: Option<Arc<Channel>>) -> Self {
        Self { live, main, preempt, stage: Mutex::new(Stage::Open), failure: Mutex::default() }
    }

    /// Something went wrong: every thread of the connection ends. The first failure counts.
    pub(super) fn fail(&self, error: MigrateError) {
        self.failure.lock().get_or_insert(error);
        self.close();
    }

    pub(super) fn failure(&self) -> Option<MigrateError> {
        self.failure.lock().take()
    }

    fn close(&self) {
        for channel in std::iter::once(&self.main).chain(&self.preempt) {
            let _ = channel.shutdown(Shutdown::Both);
        }
    }

    /// Reads to the end of the stream, with faults answered and the other channel read meanwhile.
    pub(super) fn follow(&self, records: Records) -> Result<(), MigrateError> {
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
            *self.stage.lock() = Stage::Over;
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
                    // Reported once: it is put on the list even where no source can be asked any more.
                    self.live.fault(*fault)?;
                }
            }
            if *self.stage.lock() == Stage::Over {
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
                    *self.stage.lock() = Stage::Ended;
                    return Ok(());
                }
                Event::EndOfStream => return Err(MigrateError::Protocol("the stream ends inside a huge page".into())),
                Event::SectionPart { .. } | Event::SectionEnd { .. } | Event::SectionFooter { .. } | Event::RamEos => {}
                event => records.place(&event, &mut placer, &still)?,
            }
        }
    }

    fn read_preempt(&self, channel: &Arc<Channel>) -> Result<(), MigrateError> {
        let mut placer = Placer::new(self.live);
        let mut records =
            Records::new(Arc::clone(channel), Decoder::for_preempt_channel(&self.live.start.blocks)?, &[]);
        let done = || *self.stage.lock() != Stage::Open;
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

    /// Waits, behind the end of the main channel, for pages that were requested on the other one.
    fn wait_for_requested(&self) -> Result<(), MigrateError> {
        let over = || self.failure.lock().is_some();
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
