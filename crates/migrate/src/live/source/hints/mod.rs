//! Free pages need not move: the guest is asked for them, and what it names is taken out of the round that is being
//! sent.
//!
//! **Law: a hint takes a page out only if the dirty log was not read since the guest was asked.** The log is on before
//! the guest is asked, so a page that the guest writes behind a hint is reported by the next reading. What an earlier
//! reading has told may have been written behind a hint that is still on its way: a guest that needs memory takes back
//! what it called free without a message (Linux's balloon does, when its memory is short). So [`close`](Hints::close)
//! comes before every reading, and a list that was closed says nothing any more, however late ([`DirtyPageQueue`]).
//!
//! No thread waits: neither the guest's for the engine nor a channel's for the list. What comes when a page has been
//! handed out already comes too late for this page, which is sent: a hint saves work and promises nothing.
//!
//! **Law: the guest always gets its pages back.** It holds back what it has named until it is told that this
//! is over, so [`end`](Hints::end) is called on every way out, a panic's too: when the VM has been stopped, *before*
//! its devices are asked for their state, so that the device says so at the destination as well, or when it is let go
//! on here.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use limosa_memory::{FreePageHinting, FreePageSink, GuestLayout};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::stats::HintStats;
use crate::control::Progress;
use crate::source::dirty_page_queue::DirtyPageQueue;

/// The device that is asked for free pages, and what it has said so far.
pub(super) struct Hints {
    from: Arc<dyn FreePageHinting>,
    state: Arc<HintState>,
    /// Whether the guest holds pages back.
    asked: bool,
}

/// The receiver of a list.
struct HintState {
    queue: Arc<DirtyPageQueue>,
    layout: GuestLayout,
    progress: Progress,
    ranges: AtomicU64,
    late: AtomicU64,
    outside: AtomicU64,
    lists: Mutex<Lists>,
    changed: Condvar,
}

#[derive(Default)]
struct Lists {
    /// The last one, and when it was asked for.
    number: u64,
    asked: Option<Instant>,
    /// Whether it is complete, or nothing more of it counts.
    over: bool,
    stats: HintStats,
}

/// One list.
struct List {
    number: u64,
    state: Arc<HintState>,
}

impl Hints {
    pub(super) fn new(
        from: Arc<dyn FreePageHinting>,
        queue: Arc<DirtyPageQueue>,
        layout: GuestLayout,
        progress: Progress,
    ) -> Self {
        let state = HintState {
            queue,
            layout,
            progress,
            ranges: AtomicU64::new(0),
            late: AtomicU64::new(0),
            outside: AtomicU64::new(0),
            lists: Mutex::default(),
            changed: Condvar::new(),
        };
        Self { from, state: Arc::new(state), asked: false }
    }

    /// Asks the guest. The log is on, and the pages of the round are in the queue. A guest that cannot be asked is left
    /// alone: hints are only hints.
    pub(super) fn ask(&mut self) {
        let number = self.state.queue.open_list();
        let mut lists = self.state.lock();
        (lists.number, lists.asked, lists.over) = (number, Some(Instant::now()), false);
        lists.stats.lists = lists.stats.lists.saturating_add(1);
        drop(lists);
        self.asked = true;
        let list = List { number, state: Arc::clone(&self.state) };
        if let Err(error) = self.from.request_list(Arc::new(list)) {
            self.close();
            self.state.lock().stats.refused.get_or_insert_with(|| error.to_string());
        }
    }

    /// Waits until the list is complete, but not after `until`, if that is a time, nor longer than `tick`; whether that
    /// is worth another look.
    pub(super) fn wait(&self, until: Option<Instant>, tick: Duration) -> bool {
        let mut lists = self.state.lock();
        let left = until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()));
        if lists.over || left.is_zero() {
            return false;
        }
        self.state.changed.wait_while_for(&mut lists, |lists| !lists.over, left.min(tick));
        !lists.over
    }

    /// The dirty log is about to be read: what was not reported until now is ignored.
    pub(super) fn close(&self) {
        self.state.queue.close_lists();
        self.state.lock().over = true;
        if self.asked {
            self.from.stop_list();
        }
    }

    /// The guest gets its pages back.
    pub(super) fn end(&mut self) {
        if self.asked {
            self.close();
            self.asked = false;
            self.from.return_pages();
        }
    }

    /// Counters so far.
    pub(super) fn stats(&self) -> HintStats {
        HintStats {
            ranges: self.state.ranges.load(Relaxed),
            late: self.state.late.load(Relaxed),
            outside: self.state.outside.load(Relaxed),
            ..self.state.lock().stats.clone()
        }
    }
}

impl Drop for Hints {
    fn drop(&mut self) {
        self.end();
    }
}

impl HintState {
    fn lock(&self) -> MutexGuard<'_, Lists> {
        self.lists.lock()
    }
}

impl FreePageSink for List {
    fn add_range(&self, range: Range<u64>) {
        let state = &*self.state;
        let (mut found, mut taken) = (false, 0);
        for (block, pages) in state.layout.pages_within(range) {
            let Some(count) = state.queue.take_out(self.number, block, pages) else {
                state.late.fetch_add(1, Relaxed);
                return;
            };
            found = true;
            taken += count;
        }
        let counter = if found { &state.ranges } else { &state.outside };
        counter.fetch_add(1, Relaxed);
        state.progress.add_hinted(taken);
    }

    fn complete(&self) {
        let mut lists = self.state.lock();
        if lists.number != self.number || lists.over {
            return;
        }
        lists.over = true;
        lists.stats.complete = lists.stats.complete.saturating_add(1);
        let took = lists.asked.map(|asked| asked.elapsed());
        lists.stats.list_took = lists.stats.list_took.or(took);
        drop(lists);
        self.state.changed.notify_all();
    }
}

/// A list that is dropped unfinished has nothing more to say: the driver has gone, or its queue broke.
impl Drop for List {
    fn drop(&mut self) {
        let mut lists = self.state.lock();
        if lists.number == self.number {
            lists.over = true;
            drop(lists);
            self.state.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests;
