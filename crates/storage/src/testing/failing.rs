//! Requests that fail.

use std::io;
use std::sync::Arc;

use limosa_page::to_usize;
use parking_lot::Mutex;

use super::{Behaviour, Call, Through};
use crate::error::Operation;
use crate::storage::{Request, Storage};

/// How a request fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// `EIO`; nothing of it was done.
    Broken,
    /// `ENOSPC`; nothing of it was done.
    NoSpace,
    /// `EIO` after half of it: of a read or a write the first half of its sectors; of others nothing.
    HalfWay,
    /// `EIO`, although all of it was done.
    AfterCompletion,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Broken, Self::NoSpace, Self::HalfWay, Self::AfterCompletion];

    fn error(self) -> io::Error {
        io::Error::from_raw_os_error(if self == Self::NoSpace { libc::ENOSPC } else { libc::EIO })
    }
}

#[derive(Debug, Default)]
struct State {
    seen: u64,
    /// From which request on, how many of them, and how.
    fault: Option<(u64, u64, Fault)>,
    failed: u64,
    /// Operations that count and can fail; empty: all.
    only: Vec<Operation>,
}

/// Lets chosen requests fail, and passes the others on.
#[derive(Debug, Clone, Default)]
pub struct Failing(Arc<FaultPlan>);

#[derive(Debug, Default)]
struct FaultPlan(Mutex<State>);

impl Failing {
    /// Nothing fails yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Only requests of these kinds count and can fail.
    #[must_use]
    pub fn only(kinds: &[Operation]) -> Self {
        let this = Self::default();
        this.0.0.lock().only = kinds.to_vec();
        this
    }

    /// Wraps a storage so that its requests fail as planned.
    #[must_use]
    pub fn wrap(&self, storage: Arc<dyn Storage>) -> Arc<dyn Storage> {
        Through::wrap(storage, &self.0)
    }

    /// Lets `times` requests fail, after the next `after` that do not.
    pub fn fail(&self, after: u64, times: u64, fault: Fault) {
        let mut state = self.0.0.lock();
        state.fault = Some((state.seen.saturating_add(after), times, fault));
    }

    /// Nothing fails any more.
    pub fn mend(&self) {
        self.0.0.lock().fault = None;
    }

    /// How many requests that count came, and how many of them failed.
    #[must_use]
    pub fn seen(&self) -> (u64, u64) {
        let state = self.0.0.lock();
        (state.seen, state.failed)
    }
}

impl FaultPlan {
    fn fault(&self, operation: Operation) -> Option<Fault> {
        let mut state = self.0.lock();
        if !state.only.is_empty() && !state.only.contains(&operation) {
            return None;
        }
        let number = state.seen;
        state.seen += 1;
        let (first, times, fault) = state.fault?;
        if number < first || number - first >= times {
            return None;
        }
        state.failed += 1;
        Some(fault)
    }
}

/// Sectors are written whole or not at all.
fn half(offset: u64, len: usize) -> usize {
    let half = len / 2;
    half.saturating_sub(to_usize((offset + half as u64) % 512))
}

impl Behaviour for FaultPlan {
    fn request(self: Arc<Self>, storage: &Arc<dyn Storage>, call: Call) -> Request {
        let Some(fault) = self.fault(call.operation()) else {
            return call.begin(&**storage);
        };
        let error = call.failed(storage.name(), fault.error());
        let done = match (fault, call) {
            (Fault::AfterCompletion, call) => call.begin(&**storage),
            (Fault::HalfWay, Call::Read { offset, into }) => {
                let half = half(offset, into.len());
                storage.read(offset, into.slice(0..half))
            }
            (Fault::HalfWay, Call::Write { offset, from }) => {
                let half = half(offset, from.len());
                storage.write(offset, from.slice(0..half))
            }
            _ => Box::pin(std::future::ready(Ok(()))),
        };
        Box::pin(async move { done.await.and(Err(error)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::SparseMemory;
    use crate::{Buffer, block_on};

    #[test]
    fn the_chosen_requests_fail_and_the_others_do_not() {
        let failing = Failing::only(&[Operation::Write]);
        let memory = Arc::new(SparseMemory::file("disk", 1 << 20));
        let storage = failing.wrap(memory.clone());
        let write = |bytes: &[u8]| block_on(storage.write(0, Buffer::from_slice(bytes).into()));
        failing.fail(1, 2, Fault::NoSpace);
        write(b"good").unwrap();
        block_on(storage.flush()).unwrap();
        for _ in 0..2 {
            let error = write(b"evil").unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            assert_eq!(error.to_string(), "cannot write disk at 0x0 (4 bytes)");
        }
        write(b"GOOD").unwrap();
        assert_eq!((memory.contents(), failing.seen()), (b"GOOD".to_vec(), (4, 2)));
        failing.fail(0, 1, Fault::HalfWay);
        write(&[b'x'; 1025]).unwrap_err();
        assert_eq!(memory.contents(), [b'x'; 512]);
        failing.fail(0, 1, Fault::AfterCompletion);
        write(b"late").unwrap_err();
        assert_eq!(memory.contents()[..5], *b"latex");
    }
}
