//! Sending pages on channels beside the main one, a thread each.
//!
//! The laws of this module: **every stored page goes out once, on whichever channel is free next**, and **the main channel
//! passes a join point only when the pages before it are on their way**: each channel begins with a SYNC packet, paired
//! with the join point in START, and ends with one for each join point behind its last page. The first channel that fails
//! ends all of them.
//!
//! A zero page in a packet is believed by QEMU without looking: it takes memory that no page has come for yet for fresh.
//! So only pages of blocks that are known to be fresh go out that way; every other zero page is a record on the main
//! channel, which is looked at and cleared if need be.

mod compressor;
mod sender;
mod windows;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use limosa_channel::{Channel, How};
use limosa_page::PageRange;
use limosa_stream::configuration::MultifdRules;
use limosa_stream::multifd::Compression;

use super::records::RecordWriter;
use crate::control::Control;
use crate::error::MigrateError;
use crate::pages::PageSource;
use crate::progress::{Moved, Progress};
use sender::ChannelSender;
use windows::Windows;

/// Most channels beside the main one: more only wait for each other.
pub const CHANNELS_MAX: usize = 16;

/// How pages go out on the channels beside the main one.
#[derive(Debug, Clone)]
pub struct MultifdSourceOptions {
    /// How their contents are compressed; the destination has to expect the same.
    pub compression: Compression,
    /// How hard it is tried: 0 to 9 for zlib, 1 to 20 for zstd. QEMU's default, for either, is 1.
    pub level: u8,
    /// The destination VM's UUID, which each channel states and the destination compares. `None`: the one that the stream's
    /// configuration has, or zeros.
    pub uuid: Option<[u8; 16]>,
    /// Whether to look if stored pages are zero. Then every page is read and looked at; otherwise stored pages of a source
    /// that knows their [place](PageSource::place) are passed on without that.
    pub detect_zero: bool,
}

impl Default for MultifdSourceOptions {
    fn default() -> Self {
        Self { compression: Compression::None, level: 1, uuid: None, detect_zero: true }
    }
}

/// What the channels share.
#[derive(Debug)]
pub(super) struct Multifd<'a, S: PageSource + ?Sized> {
    pub(super) source: &'a S,
    pub(super) control: &'a Control,
    pub(super) progress: &'a Progress,
    pub(super) options: &'a MultifdSourceOptions,
    /// The main channel and those beside it: what a failure shuts down.
    pub(super) main: &'a Arc<Channel>,
    pub(super) channels: &'a [Arc<Channel>],
    /// For each block whether its memory is zero at the destination.
    pub(super) fresh: Vec<bool>,
    /// Whether contents may go out of their file, unread: their receipt will be confirmed.
    pub(super) in_place: bool,
    rules: MultifdRules,
    windows: Windows<'a>,
    packets: AtomicU64,
    normal: AtomicU64,
    zero: AtomicU64,
    failing: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Channels that still have pages to send.
    busy: usize,
    /// Zero pages that the main channel is to tell of.
    zeros: Vec<(usize, PageRange)>,
    failed: Option<MigrateError>,
    /// All pages are sent: what fails now is no affair of the channels.
    over: bool,
}

/// What a [`Multifd`] is made for.
pub(super) struct Parts<'a, S: PageSource + ?Sized> {
    pub(super) source: &'a S,
    pub(super) control: &'a Control,
    pub(super) progress: &'a Progress,
    pub(super) options: &'a MultifdSourceOptions,
    pub(super) main: &'a Arc<Channel>,
    pub(super) channels: &'a [Arc<Channel>],
    pub(super) fresh: &'a [String],
    pub(super) return_path: bool,
}

impl<'a, S: PageSource + ?Sized> Multifd<'a, S> {
    pub(super) fn new(parts: Parts<'a, S>) -> Self {
        let Parts { source, control, progress, options, main, channels, fresh, return_path } = parts;
        let start = source.start();
        Self {
            source,
            control,
            progress,
            options,
            main,
            channels,
            fresh: start.blocks.iter().map(|block| fresh.contains(&block.name)).collect(),
            in_place: return_path && !options.detect_zero && options.compression == Compression::None,
            rules: start.configuration.multifd_rules(),
            windows: Windows::new(source),
            packets: AtomicU64::new(0),
            normal: AtomicU64::new(0),
            zero: AtomicU64::new(0),
            failing: AtomicBool::new(false),
            state: Mutex::new(State { busy: channels.len(), ..State::default() }),
            changed: Condvar::new(),
        }
    }

    /// Sends all pages: those with contents on the channels, zero pages that have to be told of as records on the main
    /// channel, in the PART section that is open there. When it returns, every channel's next packets are its last SYNCs.
    ///
    /// `answered` waits until the destination has been heard of, which is not before every channel has begun.
    pub(super) fn send_pages(
        &self,
        answered: impl FnOnce() -> Result<(), MigrateError>,
    ) -> Result<Moved, MigrateError> {
        thread::scope(|scope| {
            for (id, channel) in (0_u8..).zip(self.channels) {
                let started = thread::Builder::new().name(format!("multifd {id}")).spawn_scoped(scope, move || {
                    let working = Working(self);
                    if let Err(error) = ChannelSender::new(self, channel, id).and_then(ChannelSender::run) {
                        working.0.fail(error);
                    }
                });
                if let Err(error) = started {
                    let working = Working(self);
                    working.0.fail(MigrateError::Thread(error));
                }
            }
            if let Err(error) = answered().and_then(|()| self.tell_zeros()) {
                self.fail(error);
            }
        });
        let mut state = self.lock();
        if let Some(error) = state.failed.take() {
            return Err(error);
        }
        state.over = true;
        Ok(Moved { normal: self.normal.load(Relaxed), zero: self.zero.load(Relaxed), resent: 0 })
    }

    /// Makes sure, once the destination has said that it has taken all pages, that it has taken those of every channel, and
    /// that they were those of the file. A destination that expects fewer channels turns the others away, together with what
    /// their sockets still hold, and means to have everything.
    pub(super) fn check_taken(&self) -> Result<(), MigrateError> {
        for (id, channel) in (0_u8..).zip(self.channels) {
            if !matches!(channel.peek(&mut [0]), Ok(None)) {
                let why = format!("the destination has closed it; it expects fewer than {}", self.channels.len());
                return Err(MigrateError::Multifd { id, source: Box::new(MigrateError::Protocol(why)) });
            }
        }
        if self.in_place { self.source.still_whole().map_err(MigrateError::Source) } else { Ok(()) }
    }

    /// Whether the main channel says where its join points are.
    pub(super) fn joins_by_word(&self) -> bool {
        !self.rules.sync_at_every_section
    }

    /// SYNC packets that each channel owes behind its last page: the join points of the main channel from there on.
    fn last_syncs(&self) -> usize {
        // With the old rule PART and END have one each, else there is the one in END.
        if self.rules.sync_at_every_section { 2 } else { 1 }
    }

    /// The main channel's part: ZERO records, first of what is known to be zero, then of what the channels find.
    fn tell_zeros(&self) -> Result<(), MigrateError> {
        let mut records = RecordWriter::new(self.main, &self.source.start().blocks)?;
        for (block, fresh) in self.fresh.iter().enumerate() {
            if *fresh {
                continue;
            }
            for run in self.source.stored(block).gaps() {
                self.check()?;
                self.source.confirm_zero(block, run).map_err(MigrateError::Source)?;
                records.send_zero(block, run)?;
                self.count(0, run.len());
            }
        }
        while let Some(found) = self.next_zeros() {
            for (block, run) in found {
                records.send_zero(block, run)?;
                self.count(0, run.len());
            }
        }
        Ok(())
    }

    /// Zero pages that channels have found; waits for some. `None` when no more will be found.
    fn next_zeros(&self) -> Option<Vec<(usize, PageRange)>> {
        let mut state = self.lock();
        loop {
            if state.failed.is_some() {
                return None;
            }
            if !state.zeros.is_empty() {
                return Some(std::mem::take(&mut state.zeros));
            }
            if state.busy == 0 {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Leaves it to the main channel to tell of these zero pages.
    fn leave_zero(&self, block: usize, found: &[PageRange]) {
        if found.is_empty() {
            return;
        }
        self.lock().zeros.extend(found.iter().map(|run| (block, *run)));
        self.changed.notify_all();
    }

    /// The first failure counts; it ends all that is under way on any channel.
    fn fail(&self, error: MigrateError) {
        self.fail_for(|| error);
    }

    /// As [`fail`](Self::fail), for a reason that is taken from where it stands only if it is one.
    pub(super) fn fail_for(&self, reason: impl FnOnce() -> MigrateError) {
        let mut state = self.lock();
        if state.over {
            return;
        }
        state.failed.get_or_insert_with(reason);
        drop(state);
        self.failing.store(true, Ordering::Release);
        self.changed.notify_all();
        for channel in self.channels.iter().chain([self.main]) {
            // It may be closed already, which is what we want of it.
            let _ = channel.shutdown(How::Both);
        }
    }

    /// Fails if the job was stopped, or another channel has failed.
    fn check(&self) -> Result<(), MigrateError> {
        self.control.check()?;
        if self.failing.load(Ordering::Acquire) {
            return Err(MigrateError::Protocol("another channel has failed".into()));
        }
        Ok(())
    }

    /// The next packet's number: they are counted over all channels.
    fn next_packet(&self) -> u64 {
        self.packets.fetch_add(1, Relaxed)
    }

    fn count(&self, normal: u64, zero: u64) {
        self.normal.fetch_add(normal, Relaxed);
        self.zero.fetch_add(zero, Relaxed);
        self.progress.moved(Moved { normal, zero, resent: 0 });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A channel's thread at work. When it is gone, however it ended, nobody waits for it any more.
struct Working<'m, 'a, S: PageSource + ?Sized>(&'m Multifd<'a, S>);

impl<S: PageSource + ?Sized> Drop for Working<'_, '_, S> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.fail(MigrateError::Protocol("a sending thread panicked".into()));
        }
        self.0.lock().busy -= 1;
        self.0.changed.notify_all();
    }
}
