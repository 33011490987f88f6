//! Requests for the guest's free pages.

use std::sync::Arc;
use std::time::Instant;

use limosa_memory::{FreePageHinting, FreePageSink, FreePagesError};

use super::Balloon;
use super::hint_list::{HintList, Hinting};
use crate::layout::{Features, QueueRole};

impl FreePageHinting for Balloon {
    fn request_list(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError> {
        let not_offered = |why: &str| Err(FreePagesError::NotOffered { why: why.into() });
        if !self.has_driver() {
            return not_offered("no balloon driver is active in it; load virtio_balloon there");
        }
        if !self.acked_features().has(Features::FREE_PAGE_HINT) {
            return not_offered("its driver did not take the feature free-page-hint");
        }
        if self.keeps_free_pages() {
            return not_offered(match self.config.poison() {
                Some(_) => "it fills free pages with a value that they have to keep (page_poison)",
                None => {
                    "whether it fills free pages with a value (page_poison) it has not said here, but to the process that had \
                     the balloon before; load virtio_balloon again there"
                }
            });
        }
        if self.is_idle(QueueRole::Hint) {
            return not_offered(
                "the queue for them does not run: it is stopped, or virtio_balloon was unloaded or is broken",
            );
        }
        let before = self.change_hint(|hinting| {
            let id = hinting.handshake.request();
            hinting.list = HintList { id, requested_at: Some(Instant::now()), ..HintList::default() };
            hinting.sink.replace(to)
        });
        // Dropping a sink may run any code, so not under the lock.
        drop(before);
        self.counters.hint_requests.add(1);
        // The driver is notified when the buffers on the queue have been taken.
        self.kick(QueueRole::Hint);
        Ok(())
    }

    fn stop_list(&self) {
        let (news, sink) = self.change_hint(|hinting| (hinting.handshake.stop(), hinting.sink.take()));
        drop(sink);
        if news {
            self.config_changed();
        }
    }

    fn return_pages(&self) {
        self.end_hinting();
    }
}

impl Balloon {
    /// Ends the list, and notifies the guest that it may use its pages again, unless it knows that already.
    pub(super) fn end_hinting(&self) {
        let (news, sink) = self.change_hint(|hinting| (hinting.handshake.done(), hinting.sink.take()));
        drop(sink);
        if news {
            self.config_changed();
        }
    }

    /// Changes the handshake and shows its new command in the configuration, atomically for other threads.
    pub(super) fn change_hint<T>(&self, change: impl FnOnce(&mut Hinting) -> T) -> T {
        let mut hinting = self.hinting.lock();
        let changed = change(&mut hinting);
        self.config.set_hint_command(hinting.handshake.command());
        changed
    }
}
