//! Background snapshots for a keeper elsewhere, each as a checkpoint in the stream of COLO.
//!
//! Law: **a snapshot that fails is no loss of the VM.** A checkpoint begins at the keeper when the first of its pages
//! is here. If its snapshot fails after that its pages end, and a note says why in the place of its device sections.
//!
//! ```text
//! keeper:   READY        │ KEPT n-1, REPLY                 │ RECEIVED, LOADED, KEPT n
//! here:     REQUEST ──►  │ waits until due, ──► n: pages,  │ REQUEST ──►
//!                        │                      devices    │
//! ```

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, ChannelError, Shutdown};
use limosa_migrate::MigrateError;
use limosa_migrate::stored::{PageError, PageSink, StreamSetup};
use limosa_page::{PageNumber, PageRange, to_u64};
use limosa_stream::colo::ColoMessage;
use limosa_stream::{Command, RecordEncoder, RecordKind, ReturnDecoder, ReturnMessage, ram, section};
use parking_lot::Mutex;

use super::message::{Farewell, KeptNotes, Note, closed_early, timed_out};
use crate::error::ProtectError;
use crate::primary::TELL_EVERY;

/// Bytes of records that are written at once.
const RECORDS_MAX: usize = 64 << 10;
/// How long a read of the keeper takes at a stretch.
const TICK: Duration = Duration::from_millis(50);
/// The byte behind the last section.
const END_OF_SECTIONS: u8 = 0;

/// A keeper elsewhere that gets background snapshots.
pub(crate) struct Forward {
    keeper: Channel,
    /// How long it may owe an answer.
    lost_after: Duration,
    /// The layout of the base, and the encoder of its records.
    layout: Option<(StreamSetup, RecordEncoder)>,
    place: Place,
    /// The base or a checkpoint may be under way: nothing else is written.
    is_busy: Arc<Mutex<bool>>,
    /// The return path of the base, until it ends. Without one the keeper could not be certain of the base's end before
    /// nothing has come for seconds.
    return_path: Option<ReturnDecoder>,
    /// Bytes of the keeper that are not decoded yet, and their offset.
    arrived: Vec<u8>,
    offset: u64,
    /// Its notes since the last checkpoint that counts.
    notes: KeptNotes,
    /// It takes no more bytes.
    lost: Option<MigrateError>,
}

/// The place in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Nothing was sent.
    Begin,
    /// Among the pages of the base.
    Base,
    /// The base was sent.
    BaseSent,
    /// Between two checkpoints.
    Between,
    /// Among the pages of a checkpoint.
    Checkpoint,
    /// It was sent.
    CheckpointSent,
}

impl Forward {
    pub(crate) fn new(keeper: Channel, lost_after: Duration) -> Self {
        Self {
            keeper,
            lost_after,
            layout: None,
            place: Place::Begin,
            is_busy: Arc::new(Mutex::new(true)),
            return_path: Some(ReturnDecoder::new(0)),
            arrived: Vec::new(),
            offset: 0,
            notes: KeptNotes::default(),
            lost: None,
        }
    }

    /// The name of the keeper.
    pub(crate) fn peer(&self) -> &str {
        self.keeper.peer()
    }

    /// Ends a snapshot that has come whole: `tail` is what is behind its pages. The first one is the base.
    pub(crate) fn end_snapshot(&mut self, tail: &[u8], sections: &[u8]) -> Result<(), ProtectError> {
        let Some((StreamSetup { section_id, .. }, _)) = self.layout else { return Err(self.out_of_turn("nothing")) };
        let mut bytes = Vec::new();
        ram::encode_eos(section_id, &mut bytes);
        if self.place == Place::Between {
            // A snapshot without pages is a checkpoint all the same.
            let put = self.put(&[]);
            put.map_err(|error| self.take_lost().unwrap_or_else(|| ProtectError::gave_up(Some(error.to_string()))))?;
        }
        if self.place == Place::Base {
            // An END section tells that there are no more pages.
            section::encode_end(section_id, &mut bytes);
            ram::encode_eos(section_id, &mut bytes);
            bytes.extend_from_slice(tail);
            self.place = Place::BaseSent;
        } else {
            bytes.push(END_OF_SECTIONS);
            ColoMessage::VmstateSize(to_u64(sections.len())).encode(&mut bytes);
            bytes.extend_from_slice(sections);
            self.place = Place::CheckpointSent;
        }
        self.write(&bytes)
    }

    /// Waits until the keeper has all of what was sent, and asks for the next checkpoint.
    pub(crate) fn request(&mut self) -> Result<(), ProtectError> {
        let due: &[ColoMessage] = match self.place {
            Place::BaseSent => &[ColoMessage::CheckpointReady],
            _ => &[ColoMessage::VmstateReceived, ColoMessage::VmstateLoaded],
        };
        for message in due {
            self.await_message(*message)?;
        }
        let mut bytes = Vec::new();
        ColoMessage::CheckpointRequest.encode(&mut bytes);
        self.write(&bytes)?;
        self.place = Place::Between;
        *self.is_busy.lock() = false;
        Ok(())
    }

    /// Does something whose pages may come late, and tells the keeper until then that the VM is there.
    pub(crate) fn while_telling<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> Result<T, ProtectError> {
        let (keeper, is_busy) = (self.keeper.try_clone()?, Arc::clone(&self.is_busy));
        let mut alive = Vec::new();
        Note::Alive(true).encode(&mut alive);
        thread::scope(|scope| {
            let (done, is_done) = mpsc::channel::<()>();
            let telling = move || {
                while is_done.recv_timeout(TELL_EVERY) == Err(RecvTimeoutError::Timeout) {
                    let is_busy = is_busy.lock();
                    // A keeper that is lost is noticed where it is heard.
                    if *is_busy || keeper.write_all(&alive).is_err() {
                        break;
                    }
                }
            };
            let teller = thread::Builder::new().name("snapshot".into());
            teller.spawn_scoped(scope, telling).map_err(ProtectError::Thread)?;
            let result = work(self);
            drop(done);
            Ok(result)
        })
    }

    /// Waits until the keeper says that the checkpoint of this number counts. Returns what it says about it.
    pub(crate) fn wait_kept(&mut self, number: u64) -> Result<KeptNotes, ProtectError> {
        loop {
            match self.hear()? {
                ColoMessage::Note { kind, value } => {
                    match Note::of(kind, value).and_then(|note| self.notes.take(note)) {
                        Some(kept) if kept == number => return Ok(std::mem::take(&mut self.notes)),
                        Some(other) => return Err(self.out_of_turn(&format!("checkpoint {other} counts"))),
                        None => {}
                    }
                }
                other => return Err(self.out_of_turn(&format!("{other:?}"))),
            }
        }
    }

    /// Waits until the keeper is ready for the next checkpoint.
    pub(crate) fn wait_reply(&mut self) -> Result<(), ProtectError> {
        self.await_message(ColoMessage::CheckpointReply)
    }

    /// Tells the keeper that the VM is there, and whether it runs.
    pub(crate) fn tell(&self, runs: bool) -> Result<(), ProtectError> {
        let mut bytes = Vec::new();
        Note::Alive(runs).encode(&mut bytes);
        self.write(&bytes)
    }

    /// Tells the keeper why there will be no more checkpoints. A base that is not whole needs no reason.
    pub(crate) fn leave(self, farewell: Farewell) {
        let mut bytes = Vec::new();
        if let (Place::Checkpoint, Some((StreamSetup { section_id, .. }, _))) = (self.place, &self.layout) {
            ram::encode_eos(*section_id, &mut bytes);
            bytes.push(END_OF_SECTIONS);
        }
        Note::Farewell(farewell).encode(&mut bytes);
        if !matches!(self.place, Place::Begin | Place::Base)
            && let Err(error) = self.write(&bytes)
        {
            tracing::info!("{error}");
        }
        let _ = self.keeper.shutdown(Shutdown::Write);
    }

    /// The failure of the connection behind that of a snapshot, if that was it.
    pub(crate) fn take_lost(&mut self) -> Option<ProtectError> {
        self.lost.take().map(|error| self.line_lost(error))
    }

    fn await_message(&mut self, wanted: ColoMessage) -> Result<(), ProtectError> {
        loop {
            match self.hear()? {
                message if message == wanted => return Ok(()),
                // That the store is at work.
                ColoMessage::Note { .. } => {}
                other => return Err(self.out_of_turn(&format!("{other:?}"))),
            }
        }
    }

    /// Waits for the keeper's next message.
    fn hear(&mut self) -> Result<ColoMessage, ProtectError> {
        let mut heard = Instant::now();
        let timeouts = self.keeper.set_timeouts(Some(TICK), Some(self.lost_after));
        timeouts.map_err(|error| self.line_lost(error))?;
        loop {
            if let Some(decoder) = &mut self.return_path {
                let next = decoder.next_message();
                match next.map_err(|error| self.line_lost(error))? {
                    Some(ReturnMessage::Shut(0)) => {
                        self.arrived = self.return_path.take().map(|path| path.rest().to_vec()).unwrap_or_default();
                        continue;
                    }
                    Some(other) => return Err(self.out_of_turn(&format!("{other:?}"))),
                    None => {}
                }
            } else if let Some((message, length)) =
                ColoMessage::decode(&self.arrived, self.offset, 0).map_err(|error| self.line_lost(error))?
            {
                self.arrived.drain(..length);
                self.offset = self.offset.saturating_add(to_u64(length));
                return Ok(message);
            }
            let mut bytes = [0; 4096];
            match self.keeper.read(&mut bytes) {
                Ok(0) => return Err(self.line_lost(closed_early())),
                Ok(got) => {
                    let got = bytes.get(..got).unwrap_or_default();
                    match &mut self.return_path {
                        Some(decoder) => decoder.push(got),
                        None => self.arrived.extend_from_slice(got),
                    }
                    heard = Instant::now();
                }
                Err(error) if error.is_timeout() && heard.elapsed() < self.lost_after => {}
                Err(error) if error.is_timeout() => {
                    return Err(self.line_lost(timed_out(&self.keeper, self.lost_after)));
                }
                Err(error) => return Err(self.line_lost(error)),
            }
        }
    }

    fn write(&self, bytes: &[u8]) -> Result<(), ProtectError> {
        self.keeper.write_all(bytes).map_err(|error| self.line_lost(error))
    }

    fn line_lost(&self, source: impl Into<MigrateError>) -> ProtectError {
        ProtectError::LineLost { keeper: self.peer().to_owned(), source: Box::new(source.into()) }
    }

    fn out_of_turn(&self, found: &str) -> ProtectError {
        let place = self.place;
        self.line_lost(MigrateError::Protocol(format!("the keeper says {found}, in the place {place:?}")))
    }

    /// Writes records and pages; the first of a checkpoint behind its header.
    fn put(&mut self, slices: &[IoSlice<'_>]) -> Result<(), PageError> {
        if self.place == Place::Between {
            let Some((setup, _)) = &self.layout else { return Err("pages before the layout".into()) };
            let mut head = Vec::new();
            ColoMessage::VmstateSend.encode(&mut head);
            section::encode_end(setup.section_id, &mut head);
            self.place = Place::Checkpoint;
            *self.is_busy.lock() = true;
            self.noting(|keeper| keeper.write_all(&head))?;
        }
        self.noting(|keeper| keeper.write_all_vectored(slices))
    }

    fn noting(&mut self, write: impl FnOnce(&Channel) -> Result<(), ChannelError>) -> Result<(), PageError> {
        write(&self.keeper).map_err(|error| {
            let text = error.to_string();
            self.lost = Some(error.into());
            text.into()
        })
    }
}

impl PageSink for Forward {
    fn begin(&mut self, start: &StreamSetup) -> Result<(), PageError> {
        match &mut self.layout {
            Some((setup, records)) if setup == start => {
                // The first record of a section names its block.
                records.reset();
                return Ok(());
            }
            Some(_) => return Err("the VM's memory has another layout than when its protection began".into()),
            None => {}
        }
        let mut head = Vec::new();
        start.configuration.encode(&mut head)?;
        Command::OpenReturnPath.encode(&mut head)?;
        ram::encode_ram_start(start.section_id, &start.blocks, &mut head)?;
        section::encode_part(start.section_id, &mut head);
        self.layout = Some((start.clone(), RecordEncoder::new(&start.blocks)?));
        self.place = Place::Base;
        self.noting(|keeper| keeper.write_all(&head))
    }

    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<(), PageError> {
        let Some((_, encoder)) = &mut self.layout else { return Err("pages before the layout".into()) };
        let (mut records, mut ends) = (Vec::new(), Vec::new());
        for (page, _) in (first.0..).zip(pages) {
            encoder.append(RecordKind::Page, block, PageNumber(page).offset(), &mut records)?;
            ends.push(records.len());
        }
        let begins = std::iter::once(0).chain(ends.iter().copied());
        let slices = begins.zip(&ends).zip(pages).flat_map(|((begin, end), page)| {
            [IoSlice::new(records.get(begin..*end).unwrap_or_default()), IoSlice::new(page)]
        });
        self.put(&slices.collect::<Vec<_>>())
    }

    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<(), PageError> {
        let mut records = Vec::new();
        for page in pages.iter() {
            let Some((_, encoder)) = &mut self.layout else { return Err("pages before the layout".into()) };
            encoder.append(RecordKind::Zero, block, page.offset(), &mut records)?;
            if records.len() >= RECORDS_MAX {
                self.put(&[IoSlice::new(&records)])?;
                records.clear();
            }
        }
        if records.is_empty() { Ok(()) } else { self.put(&[IoSlice::new(&records)]) }
    }
}
