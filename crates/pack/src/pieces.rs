//! Work on a file in pieces, by as many threads as there are processors.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

/// Bytes that a thread works on at once, at least.
pub(crate) const PIECE: u64 = 1 << 20;

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
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
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
    fn wanted_clusters_next_to_each_other_are_one_run() {
        let wanted = |range: &Range<u64>| range.start != 8 && range.start != 12;
        assert_eq!(runs(&(0..22), 4, wanted), [0..8, 16..22]);
        assert!(runs(&(0..22), 4, |_| false).is_empty());
    }
}
