//! Clones started side by side, each under a free number.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use limosa_page::{to_u64, to_usize};
use parking_lot::Mutex;

use crate::command_line::Claims;
use crate::error::CloneError;
use crate::fleet::{FailedClone, Fleet, FleetReport, PooledClone, StartedClone};
use crate::pool::{Pool, wait_in_pool};
use crate::start::start;

impl Fleet<'_> {
    /// Starts `count` clones: with QEMUs that wait in a pool, then each under the first free number.
    ///
    /// One that fails leaves nothing behind and ends no other. If the first ones all fail, as many as are started at a
    /// time, the rest are not tried.
    pub fn start(&self, count: u64) -> FleetReport<StartedClone> {
        if count == 0 {
            return FleetReport::default();
        }
        let pool = Pool::of(self);
        let starting = Starting::new(self);
        let one = || pool.take(self).unwrap_or_else(|| starting.under_free_number(start));
        side_by_side(count, self.jobs(), &one, &|started| started.record.number)
    }

    /// Starts QEMUs until `wanted` of them wait in the directory for clones of this fleet, as [`start`](Self::start)
    /// starts clones.
    pub fn fill_pool(&self, wanted: u64) -> FleetReport<PooledClone> {
        if wanted == 0 {
            return FleetReport::default();
        }
        let missing = wanted.saturating_sub(to_u64(Pool::of(self).len()));
        let starting = Starting::new(self);
        let one = || starting.under_free_number(wait_in_pool);
        side_by_side(missing, self.jobs(), &one, &|waiting| waiting.record.number)
    }
}

/// The numbers and the file names that clones of a fleet may still take.
#[derive(Debug)]
struct Starting<'a> {
    fleet: &'a Fleet<'a>,
    numbers: Mutex<FreeNumbers>,
    claims: Mutex<Claims<'a>>,
}

impl<'a> Starting<'a> {
    fn new(fleet: &'a Fleet<'a>) -> Self {
        let numbers = FreeNumbers::in_folder(&fleet.folder);
        let mut claims = Claims::new(&fleet.own_names, &fleet.folder);
        for number in &numbers.taken {
            // Clones that are there keep their files, also if they were made to share some.
            let _ = claims.claim(*number);
        }
        Self { fleet, numbers: Mutex::new(numbers), claims: Mutex::new(claims) }
    }

    /// Starts something under the first free number.
    fn under_free_number<T>(&self, start: fn(&Fleet<'_>, u64) -> Result<T, FailedClone>) -> Result<T, FailedClone> {
        loop {
            let number = self.numbers.lock().next();
            let claimed = self.claims.lock().claim(number);
            let claimed = claimed.map_err(|why| FailedClone::new(number, CloneError::CommandLine { why }));
            match claimed.and_then(|()| start(self.fleet, number)) {
                // Another limosa has taken it meanwhile, with its files.
                Err(failure) if matches!(*failure.error, CloneError::Exists { .. }) => {}
                Err(failure) => {
                    self.claims.lock().release(number);
                    return Err(failure);
                }
                Ok(started) => return Ok(started),
            }
        }
    }
}

/// Calls `one` `count` times, `jobs` at a time. If the first `jobs` all fail, the rest are not tried.
fn side_by_side<T: Send>(
    count: u64,
    jobs: usize,
    one: &(dyn Fn() -> Result<T, FailedClone> + Sync),
    number: &dyn Fn(&T) -> u64,
) -> FleetReport<T> {
    let outcomes = Mutex::new((Vec::new(), Vec::new()));
    let (left, not_tried) = (AtomicU64::new(count), AtomicU64::new(0));
    let (good, bad) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        let take = || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        while take().is_ok() {
            if good.load(Ordering::Relaxed) == 0 && bad.load(Ordering::Relaxed) >= jobs {
                not_tried.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            match one() {
                Ok(started) => {
                    good.fetch_add(1, Ordering::Relaxed);
                    outcomes.lock().0.push(started);
                }
                Err(failure) => {
                    bad.fetch_add(1, Ordering::Relaxed);
                    outcomes.lock().1.push(failure);
                }
            }
        }
    };
    let threads = jobs.min(to_usize(count));
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    let (started, failed) = outcomes.into_inner();
    let mut report = FleetReport { started, failed, not_tried: not_tried.into_inner() };
    report.started.sort_by_key(number);
    report.failed.sort_by_key(|failure| failure.number);
    report
}

/// Numbers that no clone has.
#[derive(Debug)]
struct FreeNumbers {
    taken: BTreeSet<u64>,
    last: u64,
}

impl FreeNumbers {
    fn in_folder(folder: &Path) -> Self {
        let names =
            fs::read_dir(folder).into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        Self { taken: names.filter_map(|name| name.parse().ok()).collect(), last: 0 }
    }

    fn next(&mut self) -> u64 {
        loop {
            self.last += 1;
            if !self.taken.contains(&self.last) {
                return self.last;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_free_numbers_are_taken() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["001", "003", "x"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        let mut numbers = FreeNumbers::in_folder(folder.path());
        assert_eq!([numbers.next(), numbers.next(), numbers.next()], [2, 4, 5]);
    }
}
