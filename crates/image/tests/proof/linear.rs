//! Requests that overlap, in every order that storages may carry them out: what is read is what some order of the
//! requests explains.

use std::sync::Arc;

use limosa_image::Disk;
use limosa_storage::testing::{PowerCut, RequestHolder};

use crate::Verdict;
use crate::drive::{Done, Driver, Stamp};
use crate::guest::{Guest, RequestKind};
use crate::history::{History, Value};
use crate::model::{Plan, read_all, whole};

/// The unit of a history: no write is torn inside one.
pub(crate) const UNIT: u64 = 512;

/// Requests and what they did to a disk.
pub(crate) struct Watched {
    pub(crate) driver: Driver,
    pub(crate) history: History,
    plan: Plan,
    guest: Guest,
    /// Whether a request may fail: what it was to do may then be done or not, by sectors.
    pub(crate) may_fail: bool,
    /// Numbers of writes in the history, by when they began.
    numbers: std::collections::HashMap<u64, u64>,
}

impl Watched {
    pub(crate) fn new(disk: Arc<dyn Disk>, first: Vec<u8>, plan: Plan, held: &RequestHolder, power: PowerCut) -> Self {
        let mut guest = Guest::new(plan.seed, first.len() as u64, plan.cluster.max(UNIT), UNIT);
        guest.compresses = plan.compresses;
        let driver = Driver::new(disk, held.clone(), power, plan.seed);
        Self { driver, history: History::new(first, UNIT), plan, guest, may_fail: false, numbers: Default::default() }
    }

    /// Sends the requests, and waits for all.
    pub(crate) fn run(&mut self) -> Verdict {
        for step in 0..self.plan.steps {
            while self.driver.in_flight.len() < self.plan.depth {
                let (asked, range) = self.guest.asks();
                self.begin(asked, range);
            }
            if let Some(done) = self.driver.next() {
                self.over(&done).map_err(|error| format!("step {step}: {error}"))?;
            }
        }
        self.quiet()
    }

    pub(crate) fn quiet(&mut self) -> Verdict {
        while let Some(done) = self.driver.next() {
            self.over(&done)?;
        }
        Ok(())
    }

    fn begin(&mut self, asked: RequestKind, range: std::ops::Range<u64>) {
        let (value, inside) = match asked {
            RequestKind::Write(number) | RequestKind::WriteCompressed(number) => {
                (Value::Written(number), range.clone())
            }
            RequestKind::Zeroes { .. } => (Value::Zeros, range.clone()),
            RequestKind::Discard => (Value::Zeros, whole(&range, self.plan.cluster)),
            RequestKind::Read | RequestKind::Flush => {
                self.driver.begin(asked, range);
                return;
            }
        };
        let tail = self.guest.size / self.plan.cluster * self.plan.cluster;
        let discarded = asked == RequestKind::Discard;
        let began = self.driver.begin(asked, range.clone());
        let number = self.history.begins(&inside, value, began);
        if !(discarded && self.plan.discards_may_stay) {
            self.numbers.insert(began.clock, number);
        }
        if discarded && range.end == self.guest.size && range.start <= tail {
            // A last cluster that is not whole may be discarded or not: zeros that never have to be there.
            self.history.begins(&(tail.max(range.start)..range.end), value, began);
        }
    }

    fn over(&mut self, done: &Done) -> Verdict {
        let Done { asked, range, began, ended, read, result } = done;
        if self.may_fail && result.is_err() {
            return Ok(());
        }
        result.as_ref().map_err(|error| format!("{asked:?} {range:x?}: {error}"))?;
        match asked {
            RequestKind::Read => self.history.saw(range, read, *began, *ended)?,
            RequestKind::Flush => self.history.flushed(*began, *ended),
            _ => {
                let inside =
                    if *asked == RequestKind::Discard { whole(range, self.plan.cluster) } else { range.clone() };
                if let Some(number) = self.numbers.remove(&began.clock) {
                    self.history.ends(&inside, number, *ended);
                }
            }
        }
        Ok(())
    }

    /// Looks at the whole disk; nothing is under way.
    pub(crate) fn look(&mut self, held: &RequestHolder) -> Verdict<Vec<u8>> {
        held.release_all();
        let found = read_all(&*self.driver.disk());
        held.hold_again();
        let (found, end) = (found?, Stamp { clock: u64::MAX - 1, moment: usize::MAX });
        self.history.saw(&(0..self.guest.size), &found, Stamp { clock: u64::MAX - 2, moment: 0 }, end)?;
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use limosa_storage::testing::SparseMemory;

    use super::*;
    use crate::plain::{Defect, Plain};

    fn found(defect: Option<Defect>, seed: u64) -> Verdict {
        let first = vec![3; 300 << 10];
        let len = first.len() as u64;
        let held = RequestHolder::new().lazily();
        let storage = held.wrap(Arc::new(SparseMemory::file_with("disk", first.clone(), 1 << 20)));
        let plan = Plan {
            seed,
            cluster: UNIT,
            steps: 600,
            depth: 8,
            drops: false,
            discards_may_stay: false,
            compresses: false,
        };
        let disk = Plain::disk(storage, len, defect);
        let mut watched = Watched::new(disk, first, plan, &held, PowerCut::new());
        watched.run()?;
        watched.look(&held).map(drop)
    }

    #[test]
    fn a_disk_without_a_defect_is_linearizable() {
        for seed in 0..5 {
            found(None, seed).unwrap();
        }
    }

    #[test]
    fn a_disk_that_tears_or_loses_or_answers_too_early_is_not() {
        for defect in [Defect::Tears, Defect::LosesWrites, Defect::RunsOver, Defect::SpeaksTooEarly] {
            found(Some(defect), 1).expect_err(&format!("{defect:?}"));
        }
    }
}
