//! Many requests at once on one thread, in an order that a seed decides.
//!
//! Every request to a storage is held; whenever no request of the guest can go on, one of those is released by chance.
//! A run is thus one of all the orders that disks and schedulers may come up with, and can be repeated.

use std::ops::Range;
use std::task::{Context, Poll, Waker};

use std::sync::Arc;

use limosa_image::{Disk, GuestOffset, ImageError, Pending};
use limosa_storage::Buffer;
use limosa_storage::testing::{PowerCut, RequestHolder, SeededRandom};

use crate::guest::{RequestKind, content};

/// When something was: by the clock of the run, and by the moments of the power.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) clock: u64,
    pub(crate) moment: usize,
}

/// A request under way.
pub(crate) struct InFlight {
    pub(crate) asked: RequestKind,
    pub(crate) range: Range<u64>,
    pub(crate) began: Stamp,
    buffer: Buffer,
    future: Pending<'static>,
}

/// A request that is over.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) asked: RequestKind,
    pub(crate) range: Range<u64>,
    pub(crate) began: Stamp,
    pub(crate) ended: Stamp,
    /// The bytes read.
    pub(crate) read: Vec<u8>,
    pub(crate) result: Result<(), ImageError>,
}

pub(crate) struct Driver {
    disk: Arc<dyn Disk>,
    held: RequestHolder,
    power: PowerCut,
    chance: SeededRandom,
    clock: u64,
    pub(crate) in_flight: Vec<InFlight>,
}

impl Driver {
    pub(crate) fn new(disk: Arc<dyn Disk>, held: RequestHolder, power: PowerCut, seed: u64) -> Self {
        Self { disk, held, power, chance: SeededRandom::new(seed), clock: 0, in_flight: Vec::new() }
    }

    pub(crate) fn disk(&self) -> Arc<dyn Disk> {
        Arc::clone(&self.disk)
    }

    fn stamp(&mut self) -> Stamp {
        self.clock += 1;
        Stamp { clock: self.clock, moment: self.power.moments() }
    }

    /// Begins a request.
    pub(crate) fn begin(&mut self, asked: RequestKind, range: Range<u64>) -> Stamp {
        let began = self.stamp();
        let bytes = range.end - range.start;
        let buffer = match asked {
            RequestKind::Read => Buffer::from_slice(&vec![0xa5; usize::try_from(bytes).unwrap()]),
            RequestKind::Write(number) | RequestKind::WriteCompressed(number) => {
                Buffer::from_slice(&content(number, &range))
            }
            _ => Buffer::zeroed(0),
        };
        let (disk, at, vector) = (Arc::clone(&self.disk), GuestOffset(range.start), self.scattered(&buffer));
        let what = asked.clone();
        let future: Pending<'static> = Box::pin(async move {
            match what {
                RequestKind::Read => disk.read(at, vector).await,
                RequestKind::Write(_) => disk.write(at, vector).await,
                RequestKind::WriteCompressed(_) => {
                    let clusters = disk.compressor(None)?.compress(&vector);
                    disk.write_compressed(at, clusters).await
                }
                RequestKind::Zeroes { unmap } => disk.write_zeroes(at, bytes, unmap).await,
                RequestKind::Discard => disk.discard(at, bytes).await,
                RequestKind::Flush => disk.flush().await,
            }
        });
        self.in_flight.push(InFlight { asked, range, began, buffer, future });
        began
    }

    /// The same memory in pieces, as guests have it.
    fn scattered(&mut self, buffer: &Buffer) -> limosa_storage::IoVector {
        let cut = usize::try_from(self.chance.below(buffer.len() as u64 + 1)).unwrap();
        let cut = if self.chance.one_in(2) { 0 } else { cut };
        [buffer.slice(0..cut), buffer.slice(cut..buffer.len())].into_iter().collect()
    }

    /// Continues until a request is over, or none is in flight.
    ///
    /// # Panics
    /// Requests are in flight, nothing is held, and none of them advances.
    pub(crate) fn next(&mut self) -> Option<Done> {
        let mut idle = 0;
        while !self.in_flight.is_empty() {
            // Any of them may be looked at first.
            let first = self.chance.below(self.in_flight.len() as u64);
            for number in 0..self.in_flight.len() {
                let number = (number + usize::try_from(first).unwrap()) % self.in_flight.len();
                let mut context = Context::from_waker(Waker::noop());
                if let Poll::Ready(result) = self.in_flight[number].future.as_mut().poll(&mut context) {
                    let request = self.in_flight.remove(number);
                    return Some(self.over(request, result));
                }
            }
            let waiting = self.held.waiting();
            if waiting.is_empty() {
                idle += 1;
                let stuck: Vec<_> = self.in_flight.iter().map(|request| (&request.asked, &request.range)).collect();
                assert!(idle < 100, "nothing is held, and these do not go on: {stuck:x?}");
                continue;
            }
            idle = 0;
            let number = self.chance.choose(&waiting).number;
            self.held.release(number);
        }
        None
    }

    fn over(&mut self, request: InFlight, result: Result<(), ImageError>) -> Done {
        let InFlight { asked, range, began, buffer, .. } = request;
        let read = if asked == RequestKind::Read { buffer.to_vec() } else { Vec::new() };
        Done { asked, range, began, ended: self.stamp(), read, result }
    }

    /// Drops a request half-way: what it was, if there is one.
    pub(crate) fn drop_one(&mut self) -> Option<(RequestKind, Range<u64>)> {
        if self.in_flight.is_empty() {
            return None;
        }
        let number = self.chance.below(self.in_flight.len() as u64);
        let request = self.in_flight.remove(usize::try_from(number).unwrap());
        Some((request.asked, request.range))
    }

    /// Releases what is held although no request waits for it.
    pub(crate) fn release_held(&mut self) {
        assert!(self.in_flight.is_empty(), "requests are under way");
        while let Some(first) = self.held.waiting().first() {
            self.held.release(first.number);
        }
    }

    /// Waits for something else than a request, such as the end of a disk.
    pub(crate) fn wait(&mut self, what: impl FnOnce(Arc<dyn Disk>) -> Pending<'static>) -> Result<(), ImageError> {
        assert!(self.in_flight.is_empty(), "requests are under way");
        let began = self.stamp();
        let future = what(Arc::clone(&self.disk));
        self.in_flight.push(InFlight {
            asked: RequestKind::Flush,
            range: 0..0,
            began,
            buffer: Buffer::zeroed(0),
            future,
        });
        self.next().map_or(Ok(()), |done| done.result)
    }

    /// Closes the disk.
    pub(crate) fn close(&mut self) -> Result<(), ImageError> {
        self.wait(|disk| Box::pin(async move { disk.close().await }))
    }
}
