//! The end of the server.
//!
//! **Law: the guest is notified before its device is gone.** It reads the notification itself, over the very connection
//! that ends: a message says only that the configuration has changed. So the server continues serving until the driver
//! has read that it may have its hinted pages (DONE), and until a balloon that is larger than wanted, as after a
//! squeeze that was broken off, is as small as it should be: each array of that needs the device's answer.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use limosa_balloon::Balloon;
use limosa_vhost::Stopper;
use parking_lot::{Condvar, Mutex};

use super::job::Jobs;

/// How long a guest may not answer before the server ends all the same: it may be paused.
const SILENCE: Duration = Duration::from_millis(500);
/// How long the end may take in all.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the guest is checked.
const LOOK: Duration = Duration::from_millis(2);

/// The reason for the server's end, and the threads that wait for it.
#[derive(Default)]
pub(super) struct Ending {
    over: Mutex<bool>,
    changed: Condvar,
}

impl Ending {
    /// Ends it.
    pub(super) fn end(&self) {
        *self.over.lock() = true;
        self.changed.notify_all();
    }

    /// Waits for the end, at most for `time`.
    pub(super) fn wait(&self, time: Duration) -> bool {
        let mut over = self.over.lock();
        self.changed.wait_while_for(&mut over, |over| !*over, time);
        *over
    }
}

/// Ends the server when it is dropped.
pub(super) struct EndOnDrop {
    pub(super) stopper: Stopper,
    pub(super) jobs: Arc<Jobs>,
    pub(super) balloon: Arc<Balloon>,
}

impl EndOnDrop {
    /// Continues serving until the guest has its pages back, or does not take them.
    fn wait(&self) {
        let begun = Instant::now();
        let mut progress = (begun, None);
        loop {
            let size = self.balloon.size();
            let deflates = self.balloon.is_driver_up_to_date();
            if !self.balloon.has_driver() || (deflates && size.actual >= size.target) {
                return;
            }
            if progress.1 != Some((deflates, size.actual)) {
                progress = (Instant::now(), Some((deflates, size.actual)));
            }
            if progress.0.elapsed() >= SILENCE || begun.elapsed() >= END_TIMEOUT {
                return;
            }
            thread::sleep(LOOK);
        }
    }
}

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.jobs.give_up(&self.balloon);
        self.wait();
        self.stopper.stop();
    }
}
