//! Work on a file in pieces, by as many threads as there are processors.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use parking_lot::{Condvar, Mutex};

/// Bytes that a thread works on at once, at least.
pub(crate) const PIECE: u64 = 1 << 20;

/// Has each piece of `length` bytes worked on once, in about their order, and each result put in exactly their order.
/// Each thread makes a worker for itself, and has one result at a time.
///
/// # Errors
/// As [`for_each_piece`]; the first failure to put one.
pub(crate) fn for_each_piece_in_order<W, T, E: Send>(
    length: u64,
    piece: u64,
    make: impl Fn() -> Result<W, E> + Sync,
    work: impl Fn(&mut W, Range<u64>) -> Result<T, E> + Sync,
    put: impl Fn(T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    in_order_on(processors(), (length, piece), make, work, put)
}

fn processors() -> usize {
    thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

fn in_order_on<W, T, E: Send>(
    threads: usize,
    (length, piece): (u64, u64),
    make: impl Fn() -> Result<W, E> + Sync,
    work: impl Fn(&mut W, Range<u64>) -> Result<T, E> + Sync,
    put: impl Fn(T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    // The start of the piece that is put next; `None` after a failure, which leaves a gap.
    let (turn, has_moved) = (Mutex::new(Some(0)), Condvar::new());
    let give_up = || {
        *turn.lock() = None;
        has_moved.notify_all();
    };
    let work_in_turn = |worker: &mut W, range: Range<u64>| {
        let done = work(worker, range.clone())?;
        let mut now = turn.lock();
        while now.is_some_and(|start| start < range.start) {
            has_moved.wait(&mut now);
        }
        if now.is_none() {
            // Another thread returns the failure.
            return Ok(());
        }
        drop(now);
        put(done)?;
        // A failure meanwhile stays.
        if let Some(start) = turn.lock().as_mut() {
            *start = range.end;
        }
        has_moved.notify_all();
        Ok(())
    };
    let make = || make().inspect_err(|_| give_up());
    on_threads(threads, (length, piece), make, |worker: &mut W, range| {
        let _panic = OnPanic(&give_up);
        work_in_turn(worker, range).inspect_err(|_| give_up())
    })
}

/// Calls a function if it is dropped by a panic.
struct OnPanic<'a, F: Fn()>(&'a F);

impl<F: Fn()> Drop for OnPanic<'_, F> {
    fn drop(&mut self) {
        if thread::panicking() {
            (self.0)();
        }
    }
}

/// Has each piece of `length` bytes worked on once, in about their order. Each thread makes a worker for itself.
///
/// # Errors
/// The first failure of a worker or of its making; pieces that were not begun are left out then.
pub(crate) fn for_each_piece<W, E: Send>(
    length: u64,
    piece: u64,
    make: impl Fn() -> Result<W, E> + Sync,
    work: impl Fn(&mut W, Range<u64>) -> Result<(), E> + Sync,
) -> Result<(), E> {
    on_threads(processors(), (length, piece), make, work)
}

fn on_threads<W, E: Send>(
    threads: usize,
    (length, piece): (u64, u64),
    make: impl Fn() -> Result<W, E> + Sync,
    work: impl Fn(&mut W, Range<u64>) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let (next, has_failed) = (AtomicU64::new(0), AtomicBool::new(false));
    let run = || -> Result<(), E> {
        let mut worker = make()?;
        loop {
            let start = next.fetch_add(1, Ordering::Relaxed).saturating_mul(piece);
            if start >= length || has_failed.load(Ordering::Relaxed) {
                return Ok(());
            }
            work(&mut worker, start..start.saturating_add(piece).min(length))?;
        }
    };
    let run = || run().inspect_err(|_| has_failed.store(true, Ordering::Relaxed));
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(run)).collect();
        let mine = run();
        let join = |other: thread::ScopedJoinHandle<'_, _>| other.join().unwrap_or_else(|panic| resume_unwind(panic));
        others.into_iter().map(join).fold(mine, Result::and)
    })
}

/// Runs of clusters of a piece that `is_wanted`.
pub(crate) fn runs(piece: &Range<u64>, cluster: u64, is_wanted: impl Fn(&Range<u64>) -> bool) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    let mut at = piece.start;
    while at < piece.end {
        let range = at..at.saturating_add(cluster).min(piece.end);
        at = range.end;
        if !is_wanted(&range) {
            continue;
        }
        match runs.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => runs.push(range),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn each_piece_is_worked_on_once_and_a_failure_ends_it() {
        let seen = Mutex::new(Vec::new());
        let work = |_: &mut (), range: Range<u64>| -> Result<(), ()> {
            seen.lock().push((range.start, range.end));
            Ok(())
        };
        for_each_piece(10, 4, || Ok(()), work).unwrap();
        let mut seen = seen.into_inner();
        seen.sort_unstable();
        assert_eq!(seen, [(0, 4), (4, 8), (8, 10)]);
        let failing = |_: &mut (), range: Range<u64>| if range.start >= 100 { Err(range.start) } else { Ok(()) };
        assert!(for_each_piece(1 << 40, 4, || Ok(()), failing).unwrap_err() >= 100);
        assert_eq!(for_each_piece(10, 4, || Err::<(), _>(7), |_, _| Ok(())), Err(7));
    }

    #[test]
    fn results_are_put_in_order_and_a_failure_leaves_nobody_waiting() {
        let put = Mutex::new(Vec::new());
        let work = |_: &mut (), range: Range<u64>| -> Result<u64, u64> {
            thread::sleep(std::time::Duration::from_micros(range.start % 7 * 100));
            Ok(range.start)
        };
        let keep = |start| -> Result<(), u64> {
            put.lock().push(start);
            Ok(())
        };
        for_each_piece_in_order(99, 1, || Ok(()), work, keep).unwrap();
        assert_eq!(put.into_inner(), (0..99).collect::<Vec<_>>());
        let nothing = |_| Ok(());
        let failing = |_: &mut (), range: Range<u64>| if range.start == 5 { Err(5) } else { work(&mut (), range) };
        assert_eq!(for_each_piece_in_order(1 << 40, 1, || Ok(()), failing, nothing), Err(5));
        // It fails while the piece before it is put, and others wait behind it.
        let slow = |_| {
            thread::sleep(std::time::Duration::from_millis(1));
            Ok(())
        };
        for _ in 0..50 {
            assert_eq!(in_order_on(6, (1 << 40, 1), || Ok(()), failing, slow), Err(5));
        }
        let full = |start| if start == 9 { Err(9) } else { Ok(()) };
        assert_eq!(for_each_piece_in_order(1 << 40, 1, || Ok(()), work, full), Err(9));
        assert_eq!(for_each_piece_in_order(9, 1, || Err::<(), _>(7), |_, _| Ok(0), nothing), Err(7));
    }

    #[test]
    fn wanted_clusters_next_to_each_other_are_one_run() {
        let wanted = |range: &Range<u64>| range.start != 8 && range.start != 12;
        assert_eq!(runs(&(0..22), 4, wanted), [0..8, 16..22]);
        assert!(runs(&(0..22), 4, |_| false).is_empty());
    }
}
