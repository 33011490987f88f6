//! Recording of the requests to a storage.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Behaviour, Call, Through};
use crate::error::Operation;
use crate::storage::{Request, Storage};

/// A recorded request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenRequest {
    /// The storage, by its name.
    pub storage: Arc<str>,
    /// The operation.
    pub operation: Operation,
    /// Its range of bytes: empty for a flush; for a new length, from that length to it.
    pub range: Range<u64>,
    /// Buffers of a read or a write.
    pub buffers: usize,
}

/// Requests of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// How many.
    pub requests: u64,
    /// Bytes in all of them.
    pub bytes: u64,
}

/// Records requests, in order, and passes them on unchanged.
#[derive(Debug, Clone, Default)]
pub struct RequestRecorder(Arc<RequestLog>);

#[derive(Debug, Default)]
struct RequestLog(Mutex<Vec<SeenRequest>>);

impl RequestRecorder {
    /// An empty record.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same storage, watched.
    #[must_use]
    pub fn wrap(&self, storage: Arc<dyn Storage>) -> Arc<dyn Storage> {
        Through::wrap(storage, &self.0)
    }

    /// The requests since the last call.
    pub fn take(&self) -> Vec<SeenRequest> {
        std::mem::take(&mut *self.0.0.lock())
    }

    /// Counts by storage and kind, both by name; the record is kept.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<(Arc<str>, String), Counts> {
        let mut all = BTreeMap::<_, Counts>::new();
        for seen in &*self.0.0.lock() {
            let counts = all.entry((Arc::clone(&seen.storage), seen.operation.to_string())).or_default();
            counts.requests += 1;
            counts.bytes += seen.range.end - seen.range.start;
        }
        all
    }
}

impl RequestLog {
    fn note(&self, storage: &Arc<dyn Storage>, operation: Operation, range: Range<u64>, buffers: usize) {
        self.0.lock().push(SeenRequest { storage: Arc::clone(storage.name()), operation, range, buffers });
    }
}

impl Behaviour for RequestLog {
    fn request(self: Arc<Self>, storage: &Arc<dyn Storage>, call: Call) -> Request {
        let buffers = match &call {
            Call::Read { into: vector, .. } | Call::Write { from: vector, .. } => vector.buffers().len(),
            _ => 0,
        };
        self.note(storage, call.operation(), call.range(), buffers);
        call.begin(&**storage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::SparseMemory;
    use crate::{Buffer, block_on};

    #[test]
    fn requests_are_kept_in_order_and_counted_by_storage_and_kind() {
        let counting = RequestRecorder::new();
        let [one, other] = ["one", "other"].map(|name| counting.wrap(Arc::new(SparseMemory::file(name, 1 << 20))));
        block_on(one.write(4096, Buffer::from_slice(b"abc").into())).unwrap();
        block_on(other.flush()).unwrap();
        block_on(one.write(9, Buffer::from_slice(b"d").into())).unwrap();
        let counts = counting.counts();
        assert_eq!(counts[&("one".into(), "write".into())], Counts { requests: 2, bytes: 4 });
        assert_eq!(counts[&("other".into(), "flush".into())], Counts { requests: 1, bytes: 0 });
        let seen: Vec<_> = counting.take().into_iter().map(|seen| (seen.operation, seen.range)).collect();
        assert_eq!(seen, [(Operation::Write, 4096..4099), (Operation::Flush, 0..0), (Operation::Write, 9..10)]);
        assert!(counting.take().is_empty());
    }
}
