//! A disk in memory for tests of what works on disks: it knows what each sector is, and writes down what is asked of
//! it.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;

use limosa_storage::{IoVector, Operation, Storage, StorageError};
use parking_lot::{Mutex, MutexGuard};

use crate::disk::{BlockStatus, Disk, MapEntry, Pending};
use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset};

const SECTOR: u64 = 512;

/// Requests that a disk received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Asked {
    Read(Range<u64>),
    Write(Range<u64>),
    Zero(Range<u64>),
    Flush,
}

/// Part of the disk of one kind: what it is, how far down the chain, and the byte that it is full of.
pub(crate) type Part = (u64, BlockStatus, u32, u8);

#[derive(Debug)]
pub(crate) struct TestDisk {
    name: Arc<str>,
    granularity: u64,
    len: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    bytes: Vec<u8>,
    /// Of every sector.
    kinds: Vec<(BlockStatus, u32)>,
    asked: Vec<Asked>,
    /// Sectors that can be neither read nor written.
    broken: Vec<Range<u64>>,
    /// A request for one of these ends all that follow.
    losing: Vec<Range<u64>>,
    is_lost: bool,
    under_way: usize,
    most_under_way: usize,
    /// The kernel copies half of what it is asked to, and then says that it cannot.
    copies_half: bool,
    /// Decides how late a request is carried out.
    chance: u64,
}

fn index(at: u64) -> usize {
    usize::try_from(at).unwrap()
}

impl TestDisk {
    pub(crate) fn new(parts: &[Part]) -> Self {
        let mut state = State::default();
        for &(len, kind, depth, byte) in parts {
            state.bytes.resize(state.bytes.len() + index(len), byte);
            state.kinds.resize(state.bytes.len().div_ceil(512), (kind, depth));
        }
        let len = state.bytes.len() as u64;
        Self { name: "disk".into(), granularity: SECTOR, len, state: Mutex::new(state) }
    }

    /// Full of a byte that was never written.
    pub(crate) fn dirty(len: u64) -> Self {
        Self::new(&[(len, BlockStatus::Data, 0, 0xdd)])
    }

    pub(crate) fn zero(len: u64) -> Self {
        Self::new(&[(len, BlockStatus::Unallocated, 0, 0)])
    }

    pub(crate) fn with_granularity(self, granularity: u64) -> Self {
        Self { granularity, ..self }
    }

    pub(crate) fn breaking(self, broken: Range<u64>) -> Self {
        self.lock().broken.push(broken);
        self
    }

    /// A disk whose connection is lost by a request for these sectors.
    pub(crate) fn losing(self, at: Range<u64>) -> Self {
        self.lock().losing.push(at);
        self
    }

    pub(crate) fn copying_half(self) -> Self {
        self.lock().copies_half = true;
        self
    }

    pub(crate) fn set(&self, at: u64, bytes: &[u8]) {
        self.lock().bytes[index(at)..][..bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.lock().bytes.clone()
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.lock().asked.clone()
    }

    pub(crate) fn most_under_way(&self) -> usize {
        self.lock().most_under_way
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Carries out a request, in any order among those under way.
    fn request(&self, range: Range<u64>, asked: Asked, work: impl FnOnce(&mut State) + Send + 'static) -> Pending<'_> {
        Box::pin(async move {
            let mut waits = {
                let mut state = self.lock();
                state.asked.push(asked.clone());
                state.under_way += 1;
                state.most_under_way = state.most_under_way.max(state.under_way);
                state.chance = state.chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                state.chance >> 61
            };
            poll_fn(|context| {
                if waits == 0 {
                    return Poll::Ready(());
                }
                waits -= 1;
                context.waker().wake_by_ref();
                Poll::Pending
            })
            .await;
            let mut state = self.lock();
            state.under_way -= 1;
            if range.end > self.len {
                return Err(ImageError::PastEnd {
                    image: Arc::clone(&self.name),
                    length: self.len,
                    at: GuestOffset(range.start),
                    wanted: range.end - range.start,
                });
            }
            let operation = if matches!(asked, Asked::Read(_)) { Operation::Read } else { Operation::Write };
            let failed = |why: std::io::Error| {
                StorageError::for_request(operation, &self.name, range.start, range.end - range.start, why).into()
            };
            let meets = |of: &Vec<Range<u64>>| of.iter().any(|at| at.start < range.end && range.start < at.end);
            state.is_lost |= meets(&state.losing);
            if state.is_lost {
                return Err(failed(std::io::Error::other("the connection is lost")));
            }
            if meets(&state.broken) {
                return Err(failed(std::io::Error::from_raw_os_error(5)));
            }
            work(&mut state);
            Ok(())
        })
    }
}

impl State {
    fn write(&mut self, at: u64, bytes: &[u8], kind: BlockStatus) {
        self.bytes[index(at)..][..bytes.len()].copy_from_slice(bytes);
        let sectors = index(at / SECTOR)..index((at + bytes.len() as u64).div_ceil(SECTOR));
        self.kinds[sectors].fill((kind, 0));
    }
}

impl Disk for TestDisk {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn format(&self) -> &'static str {
        "test"
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn allocation_unit(&self) -> u64 {
        self.granularity
    }

    fn read(&self, at: GuestOffset, into: IoVector) -> Pending<'_> {
        let range = at.0..at.0 + into.len() as u64;
        self.request(range.clone(), Asked::Read(range.clone()), move |state| {
            into.copy_from(0, &state.bytes[index(range.start)..index(range.end)]);
        })
    }

    fn write(&self, at: GuestOffset, from: IoVector) -> Pending<'_> {
        let range = at.0..at.0 + from.len() as u64;
        self.request(range.clone(), Asked::Write(range), move |state| {
            state.write(at.0, &from.to_vec(), BlockStatus::Data);
        })
    }

    fn write_zeroes(&self, at: GuestOffset, length: u64, _unmap: bool) -> Pending<'_> {
        let range = at.0..at.0 + length;
        self.request(range.clone(), Asked::Zero(range), move |state| {
            state.write(at.0, &vec![0; index(length)], BlockStatus::Zero);
        })
    }

    fn discard(&self, at: GuestOffset, length: u64) -> Pending<'_> {
        self.write_zeroes(at, length, true)
    }

    fn flush(&self) -> Pending<'_> {
        self.request(0..0, Asked::Flush, |_| {})
    }

    fn map(&self, at: GuestOffset, length: u64) -> Pending<'_, MapEntry> {
        let state = self.lock();
        let first = index(at.0 / SECTOR);
        let (kind, depth) = state.kinds[first];
        let sectors = state.kinds[first..].iter().take_while(|&&other| other == (kind, depth)).count();
        let alike = ((first + sectors) as u64 * SECTOR).min(self.len) - at.0;
        let host = (kind == BlockStatus::Data).then(|| (Arc::clone(&self.name), HostOffset(at.0)));
        Box::pin(std::future::ready(Ok(MapEntry { length: alike.min(length), kind, depth, host })))
    }

    fn copy_from(
        &self,
        at: GuestOffset,
        _from: &Arc<dyn Storage>,
        _from_offset: HostOffset,
        length: u64,
    ) -> Pending<'_, bool> {
        let mut state = self.lock();
        if state.copies_half {
            state.write(at.0, &vec![0xcc; index(length / 2)], BlockStatus::Data);
        }
        Box::pin(std::future::ready(Ok(false)))
    }

    fn close(&self) -> Pending<'_> {
        self.flush()
    }
}
