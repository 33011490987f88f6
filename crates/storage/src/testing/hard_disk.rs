//! A disk with one head.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::scheduler::Scheduler;
use super::{Behaviour, Call, Through};
use crate::storage::{Request, Storage};

/// Simulates a hard disk: one request after the other, each with the same duration, regardless of offset and length.
/// All storages on one disk share its head.
#[derive(Debug, Clone)]
pub struct HardDisk(Arc<Disk>);

#[derive(Debug)]
struct Disk {
    scheduler: Scheduler,
    each: Duration,
    busy_until: Mutex<Instant>,
}

impl HardDisk {
    /// Duration of a request on a disk with 7,200 rotations per minute: half a rotation and a short seek.
    pub const TYPICAL_LATENCY: Duration = Duration::from_millis(8);

    /// With so much time for each request.
    #[must_use]
    pub fn new(each: Duration) -> Self {
        Self(Arc::new(Disk { scheduler: Scheduler::new(), each, busy_until: Mutex::new(Instant::now()) }))
    }

    /// The same storage, on this disk.
    #[must_use]
    pub fn wrap(&self, storage: Arc<dyn Storage>) -> Arc<dyn Storage> {
        Through::wrap(storage, &self.0)
    }
}

impl Behaviour for Disk {
    fn request(self: Arc<Self>, storage: &Arc<dyn Storage>, call: Call) -> Request {
        let mut busy_until = self.busy_until.lock();
        *busy_until = Instant::now().max(*busy_until) + self.each;
        self.scheduler.at(*busy_until, storage, call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::SparseMemory;
    use crate::{Buffer, block_on};

    #[test]
    fn requests_wait_for_each_other_and_none_is_faster_than_the_disk() {
        let disk = HardDisk::new(Duration::from_millis(3));
        let [one, other] = ["one", "other"].map(|name| disk.wrap(Arc::new(SparseMemory::file(name, 1 << 20))));
        let start = Instant::now();
        let requests = [one.write(0, Buffer::from_slice(b"a").into()), other.write(0, Buffer::from_slice(b"b").into())];
        requests.into_iter().for_each(|request| block_on(request).unwrap());
        assert!(start.elapsed() >= Duration::from_millis(6));
    }
}
