//! Several threads on one disk: each on sectors of its own in clusters that all share, or all of them anywhere.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use limosa_image::{Disk, GuestOffset};
use limosa_storage::testing::SeededRandom;
use limosa_storage::{Buffer, block_on};

use crate::Verdict;
use crate::bed::differs;
use crate::drive::{Done, Stamp};
use crate::guest::{Guest, RequestKind, content};
use crate::history::{History, Value};
use crate::model::{Plan, read_all, whole};

const SECTOR: u64 = 512;

/// Has `threads` threads write and read, each its own sectors: thread `n` every `threads`th, from the `n`th on. What
/// the guest has to see in the end.
pub(crate) fn run(disk: &Arc<dyn Disk>, first: &[u8], threads: u64, steps: u64, seed: u64) -> Verdict<Vec<u8>> {
    let sectors = disk.len() / SECTOR;
    let each = |number: u64| {
        let (disk, mut own) = (Arc::clone(disk), first.to_vec());
        move || -> Verdict<Vec<u8>> {
            let mut chance = SeededRandom::new(seed ^ (number << 32));
            for step in 0..steps {
                let sector = chance.below(sectors / threads) * threads + number;
                let range = sector * SECTOR..(sector + 1) * SECTOR;
                let place = usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
                let at = GuestOffset(range.start);
                let failed = |error| format!("thread {number}, step {step}, at {at}: {error}");
                match chance.below(8) {
                    0..=3 => {
                        let bytes = content(number << 24 | step, &range);
                        own[place].copy_from_slice(&bytes);
                        block_on(disk.write(at, Buffer::from_slice(&bytes).into())).map_err(failed)?;
                    }
                    4 => {
                        own[place].fill(0);
                        block_on(disk.write_zeroes(at, SECTOR, true)).map_err(failed)?;
                    }
                    5 if chance.one_in(8) => block_on(disk.flush()).map_err(failed)?,
                    _ => {
                        let found = Buffer::zeroed(512);
                        block_on(disk.read(at, found.clone().into())).map_err(failed)?;
                        if let Some(inside) = differs(&found.to_vec(), &own[place]) {
                            return Err(format!(
                                "thread {number}, step {step}: read something else at {at} + {inside}"
                            ));
                        }
                    }
                }
            }
            Ok(own)
        }
    };
    let running: Vec<_> = (0..threads).map(|number| thread::spawn(each(number))).collect();
    let mut expected = first.to_vec();
    for (number, thread) in (0..threads).zip(running) {
        let own = thread.join().map_err(|_| format!("thread {number} panicked"))??;
        for sector in (number..sectors).step_by(usize::try_from(threads).unwrap()) {
            let place = usize::try_from(sector * SECTOR).unwrap()..usize::try_from((sector + 1) * SECTOR).unwrap();
            expected[place.clone()].copy_from_slice(&own[place]);
        }
    }
    let found = read_all(&**disk)?;
    differs(&found, &expected).map_or(Ok(expected), |at| Err(format!("the disk is wrong at {at:#x}")))
}

/// Lets threads send any requests of guests, also for the same bytes at the same time, and looks whether some order of
/// the requests explains what each of them read. What the guest has to see in the end.
pub(crate) fn overlapping(disk: &Arc<dyn Disk>, first: &[u8], threads: u64, plan: Plan) -> Verdict<Vec<u8>> {
    // Every tick is seen by all threads, and orders what has ended before what begins later: what the sanitizer can say
    // about requests that do not meet, `run` has it say.
    let clock = Arc::new(AtomicU64::new(1));
    let each = |number: u64| {
        let (disk, clock) = (Arc::clone(disk), Arc::clone(&clock));
        move || {
            let mut guest = Guest::new(plan.seed ^ (number << 32), disk.len(), plan.cluster.max(SECTOR), SECTOR);
            guest.written = (number + 1) << 18;
            guest.compresses = plan.compresses;
            let tick = || Stamp { clock: clock.fetch_add(1, Ordering::SeqCst), moment: 0 };
            let steps = 0..plan.steps;
            steps.map(|_| ask(&*disk, guest.asks(), &tick)).collect::<Vec<_>>()
        }
    };
    let running: Vec<_> = (0..threads).map(|number| thread::spawn(each(number))).collect();
    let mut all = Vec::new();
    for (number, thread) in running.into_iter().enumerate() {
        all.extend(thread.join().map_err(|_| format!("thread {number} panicked"))?);
    }
    let mut history = History::new(first.to_vec(), SECTOR);
    replay(&all, &mut history, plan, first.len() as u64)?;
    let (found, end) = (read_all(&**disk)?, u64::MAX - 1);
    let [began, ended] = [end - 1, end].map(|clock| Stamp { clock, moment: 0 });
    history.saw(&(0..first.len() as u64), &found, began, ended)?;
    Ok(found)
}

/// Does one request.
fn ask(disk: &dyn Disk, (asked, range): (RequestKind, Range<u64>), tick: &dyn Fn() -> Stamp) -> Done {
    let (at, length) = (GuestOffset(range.start), range.end - range.start);
    let buffer = match asked {
        RequestKind::Write(number) | RequestKind::WriteCompressed(number) => {
            Buffer::from_slice(&content(number, &range))
        }
        _ => Buffer::zeroed(usize::try_from(length).unwrap()),
    };
    let began = tick();
    let result = match asked {
        RequestKind::Read => block_on(disk.read(at, buffer.clone().into())),
        RequestKind::Write(_) => block_on(disk.write(at, buffer.clone().into())),
        RequestKind::WriteCompressed(_) => block_on(async {
            let clusters = disk.compressor(None)?.compress(&buffer.clone().into());
            disk.write_compressed(at, clusters).await
        }),
        RequestKind::Zeroes { unmap } => block_on(disk.write_zeroes(at, length, unmap)),
        RequestKind::Discard => block_on(disk.discard(at, length)),
        RequestKind::Flush => block_on(disk.flush()),
    };
    let ended = tick();
    let read = if asked == RequestKind::Read { buffer.to_vec() } else { Vec::new() };
    Done { asked, range, began, ended, read, result }
}

/// Tells a history of all requests, in the order in which they began and ended.
fn replay(all: &[Done], history: &mut History, plan: Plan, size: u64) -> Verdict {
    let mut moments: Vec<_> =
        all.iter().flat_map(|done| [(done.began.clock, done), (done.ended.clock, done)]).collect();
    moments.sort_by_key(|(clock, _)| *clock);
    let mut requests = HashMap::new();
    for (clock, done) in moments {
        let Done { asked, range, began, ended, read, result } = done;
        result.as_ref().map_err(|error| format!("{asked:?} {range:x?}: {error}"))?;
        let discarded = *asked == RequestKind::Discard;
        let inside = if discarded { whole(range, plan.cluster) } else { range.clone() };
        let value = match asked {
            RequestKind::Write(number) | RequestKind::WriteCompressed(number) => Value::Written(*number),
            _ => Value::Zeros,
        };
        match asked {
            RequestKind::Flush => {}
            RequestKind::Read if clock == ended.clock => history.saw(range, read, *began, *ended)?,
            RequestKind::Read => {}
            _ if clock == began.clock => {
                requests.insert(clock, history.begins(&inside, value, *began));
                let tail = size / plan.cluster * plan.cluster;
                if discarded && range.end == size && range.start <= tail {
                    // A last cluster that is not whole may be discarded or not.
                    history.begins(&(tail.max(range.start)..size), value, *began);
                }
            }
            // What is discarded need not read as zeros where nothing can say so.
            RequestKind::Discard if plan.discards_may_stay => {}
            _ => history.ends(&inside, requests[&began.clock], *ended),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use limosa_storage::testing::{Delayed, SparseMemory};

    use super::*;
    use crate::plain::{Defect, Plain};

    #[test]
    fn threads_find_out_what_runs_into_their_sectors() {
        let first = vec![3; 64 << 10];
        let found = |defect| {
            let memory = SparseMemory::file_with("disk", first.clone(), 1 << 20);
            let storage = Delayed::new(1, Duration::from_micros(50)).wrap(Arc::new(memory));
            run(&Plain::disk(storage, first.len() as u64, defect), &first, 4, 200, 1)
        };
        found(None).unwrap();
        found(Some(Defect::RunsOver)).unwrap_err();
    }

    #[test]
    fn threads_on_the_same_bytes_find_out_what_no_order_explains() {
        let first = vec![3; 64 << 10];
        let found = |defect, seed| {
            let memory = SparseMemory::file_with("disk", first.clone(), 1 << 20);
            let storage = Delayed::new(seed, Duration::from_micros(50)).wrap(Arc::new(memory));
            let plan = Plan {
                seed,
                cluster: SECTOR,
                steps: 200,
                depth: 1,
                drops: false,
                discards_may_stay: false,
                compresses: false,
            };
            overlapping(&Plain::disk(storage, first.len() as u64, defect), &first, 4, plan)
        };
        found(None, 1).unwrap();
        for defect in [Defect::LosesWrites, Defect::RunsOver, Defect::SpeaksTooEarly] {
            // It shows only where requests meet: on a busy machine threads may take turns, and do so for a whole run.
            assert!((1..=50).any(|seed| found(Some(defect), seed).is_err()), "{defect:?} is not found out");
        }
    }
}
