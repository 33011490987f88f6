//! Many requests at once on one thread, in an order that a seed decides.
//!
//! Every request to a storage is held; whenever no request of the guest can go on, one of those is let go by chance. A run is thus
//! one of all the orders that disks and schedulers may come up with, and can be repeated.

use std::ops::Range;
use std::task::{Context, Poll, Waker};

use std::sync::Arc;

use limosa_image::{Disk, GuestOffset, ImageError, Pending};
use limosa_storage::Buffer;
use limosa_storage::testing::{Chance, Held, PowerCut};

use crate::guest::{Asked, content};

/// When something was: by the clock of the run, and by the moments of the power.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) clock: u64,
    pub(crate) moment: usize,
}

/// A request under way.
pub(crate) struct Flight {
    pub(crate) asked: Asked,
    pub(crate) range: Range<u64>,
    pub(crate) began: Stamp,
    buffer: Buffer,
    future: Pending<'static>,
}

/// A request that is over.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) asked: Asked,
    pub(crate) range: Range<u64>,
    pub(crate) began: Stamp,
    pub(crate) ended: Stamp,
    /// What was read.
    pub(crate) read: Vec<u8>,
    pub(crate) result: Result<(), ImageError>,
}

pub(crate) struct Driver {
    disk: Arc<dyn Disk>,
    held: Held,
    power: PowerCut,
    chance: Chance,
    clock: u64,
    pub(crate) flights: Vec<Flight>,
}

impl Driver {
    pub(crate) fn new(disk: Arc<dyn Disk>, held: Held, power: PowerCut, seed: u64) -> Self {
        Self { disk, held, power, chance: Chance::new(seed), clock: 0, flights: Vec::new() }
    }

    pub(crate) fn disk(&self) -> Arc<dyn Disk> {
        Arc::clone(&self.disk)
    }

    fn stamp(&mut self) -> Stamp {
        self.clock += 1;
        Stamp { clock: self.clock, moment: self.power.moments() }
    }

    /// Begins a request.
    pub(crate) fn begin(&mut self, asked: Asked, range: Range<u64>) -> Stamp {
        let began = self.stamp();
        let bytes = range.end - range.start;
        let buffer = match asked {
            Asked::Read => Buffer::copied(&vec![0xa5; usize::try_from(bytes).unwrap()]),
            Asked::Write(number) => Buffer::copied(&content(number, &range)),
            _ => Buffer::zeroed(0),
        };
        let (disk, at, vector) = (Arc::clone(&self.disk), GuestOffset(range.start), self.scattered(&buffer));
        let what = asked.clone();
        let future: Pending<'static> = Box::pin(async move {
            match what {
                Asked::Read => disk.read(at, vector).await,
                Asked::Write(_) => disk.write(at, vector).await,
                Asked::Zeroes { unmap } => disk.write_zeroes(at, bytes, unmap).await,
                Asked::Discard => disk.discard(at, bytes).await,
                Asked::Flush => disk.flush().await,
            }
        });
        self.flights.push(Flight { asked, range, began, buffer, future });
        began
    }

    /// The same memory in pieces, as guests have it.
    fn scattered(&mut self, buffer: &Buffer) -> limosa_storage::IoVector {
        let cut = usize::try_from(self.chance.below(buffer.len() as u64 + 1)).unwrap();
        let cut = if self.chance.one_in(2) { 0 } else { cut };
        [buffer.slice(0..cut), buffer.slice(cut..buffer.len())].into_iter().collect()
    }

    /// Goes on until a request is over, or none is under way.
    ///
    /// # Panics
    /// Requests are under way, nothing is held, and none of them goes on.
    pub(crate) fn next(&mut self) -> Option<Done> {
        let mut idle = 0;
        while !self.flights.is_empty() {
            // Any of them may be looked at first.
            let first = self.chance.below(self.flights.len() as u64);
            for number in 0..self.flights.len() {
                let number = (number + usize::try_from(first).unwrap()) % self.flights.len();
                let mut context = Context::from_waker(Waker::noop());
                if let Poll::Ready(result) = self.flights[number].future.as_mut().poll(&mut context) {
                    let flight = self.flights.remove(number);
                    return Some(self.over(flight, result));
                }
            }
            let waiting = self.held.waiting();
            if waiting.is_empty() {
                idle += 1;
                let stuck: Vec<_> = self.flights.iter().map(|flight| (&flight.asked, &flight.range)).collect();
                assert!(idle < 100, "nothing is held, and these do not go on: {stuck:x?}");
                continue;
            }
            idle = 0;
            let number = self.chance.of(&waiting).number;
            self.held.let_go(number);
        }
        None
    }

    fn over(&mut self, flight: Flight, result: Result<(), ImageError>) -> Done {
        let Flight { asked, range, began, buffer, .. } = flight;
        let read = if asked == Asked::Read { buffer.to_vec() } else { Vec::new() };
        Done { asked, range, began, ended: self.stamp(), read, result }
    }

    /// Drops a request half-way: what it was, if there is one.
    pub(crate) fn drop_one(&mut self) -> Option<(Asked, Range<u64>)> {
        if self.flights.is_empty() {
            return None;
        }
        let number = self.chance.below(self.flights.len() as u64);
        let flight = self.flights.remove(usize::try_from(number).unwrap());
        Some((flight.asked, flight.range))
    }

    /// Releases what is held although no request waits for it.
    pub(crate) fn settle(&mut self) {
        assert!(self.flights.is_empty(), "requests are under way");
        while let Some(first) = self.held.waiting().first() {
            self.held.let_go(first.number);
        }
    }

    /// Waits for something else than a request, such as the end of a disk.
    pub(crate) fn wait(&mut self, what: impl FnOnce(Arc<dyn Disk>) -> Pending<'static>) -> Result<(), ImageError> {
        assert!(self.flights.is_empty(), "requests are under way");
        let began = self.stamp();
        let future = what(Arc::clone(&self.disk));
        self.flights.push(Flight { asked: Asked::Flush, range: 0..0, began, buffer: Buffer::zeroed(0), future });
        self.next().map_or(Ok(()), |done| done.result)
    }

    /// Closes the disk.
    pub(crate) fn close(&mut self) -> Result<(), ImageError> {
        self.wait(|disk| Box::pin(async move { disk.close().await }))
    }
}
