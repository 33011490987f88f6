//! Random requests, many in flight, against bytes in memory.
//!
//! Requests that overlap are not under way together here (`linear` has those), so that every byte is known exactly.
//! Requests may begin and end anywhere, are dropped half-way, and the disk is closed and opened again in between.

use std::ops::Range;
use std::sync::Arc;

use limosa_image::{Disk, GuestOffset};
use limosa_storage::testing::{PowerCut, RequestHolder, SeededRandom};
use limosa_storage::{Buffer, block_on};

use crate::Verdict;
use crate::bed::differs;
use crate::drive::{Done, Driver};
use crate::guest::{Guest, RequestKind, content};

/// How to go about it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    /// The unit of discards.
    pub(crate) cluster: u64,
    pub(crate) steps: u64,
    /// Requests under way at once.
    pub(crate) depth: usize,
    /// Whether requests are dropped half-way.
    pub(crate) drops: bool,
    /// Whether discarded clusters may keep what was there: in version 2 nothing can be said to hide what lies below.
    pub(crate) discards_may_stay: bool,
    /// Whether some writes are compressed.
    pub(crate) compresses: bool,
}

/// Bytes that are unknown while requests are in flight.
#[derive(Debug)]
enum Loose {
    /// A request was dropped: anything.
    Undefined(Range<u64>),
    /// The former contents, or zeros.
    MayBeZero(Range<u64>),
}

impl Loose {
    fn range(&self) -> &Range<u64> {
        match self {
            Self::Undefined(range) | Self::MayBeZero(range) => range,
        }
    }
}

/// Resizes a closed disk.
pub(crate) type Resize<'a> = dyn Fn(u64) -> Verdict + 'a;

pub(crate) struct Model<'a> {
    plan: Plan,
    bytes: Vec<u8>,
    loose: Vec<Loose>,
    resize: Option<&'a Resize<'a>>,
}

fn index(range: &Range<u64>) -> Range<usize> {
    usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()
}

fn meet(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// The whole clusters in a range; the last one of the disk need not be whole.
pub(crate) fn whole(range: &Range<u64>, cluster: u64) -> Range<u64> {
    let begin = range.start.next_multiple_of(cluster).min(range.end);
    begin..(range.end / cluster * cluster).max(begin)
}

impl<'a> Model<'a> {
    pub(crate) fn new(first: Vec<u8>, plan: Plan) -> Self {
        Self { plan, bytes: first, loose: Vec::new(), resize: None }
    }

    /// Becomes longer and shorter whenever it is closed.
    pub(crate) fn resized(self, resize: &'a Resize<'a>) -> Self {
        Self { resize: Some(resize), ..self }
    }

    /// Makes the closed disk longer or shorter: by little or by much, at most to twice its first length.
    fn resize(&mut self, most: u64, chance: &mut SeededRandom) -> Verdict {
        let Some(resize) = self.resize else { return Ok(()) };
        let now = self.bytes.len() as u64;
        let size = match chance.below(4) {
            0 => now + 512,
            1 => now.saturating_sub(chance.below(2 * self.plan.cluster.max(512)) / 512 * 512),
            _ => chance.below(most) / 512 * 512,
        };
        let whole = if chance.one_in(2) { self.plan.cluster } else { 512 };
        let size = (size / whole * whole).clamp(4096, most);
        resize(size).map_err(|error| format!("from {now:#x} to {size:#x} bytes: {error}"))?;
        self.bytes.resize(usize::try_from(size).unwrap(), 0);
        Ok(())
    }

    /// Does it. What the guest has to see in the end.
    ///
    /// `open` opens the disk again, on the storages as they are, and holds nothing back meanwhile.
    pub(crate) fn run(mut self, held: &RequestHolder, open: &dyn Fn() -> Verdict<Arc<dyn Disk>>) -> Verdict<Vec<u8>> {
        let plan = self.plan;
        let mut chance = SeededRandom::new(plan.seed ^ 0x5eed);
        let most = 2 * self.bytes.len() as u64 / 512 * 512;
        let mut guest = Guest::new(plan.seed, self.bytes.len() as u64, plan.cluster.max(512), 1);
        guest.compresses = plan.compresses;
        let begin = |seed| {
            held.release_all();
            let disk = open()?;
            held.hold_again();
            Ok::<_, String>(Driver::new(disk, held.clone(), PowerCut::new(), seed))
        };
        let mut driver = begin(plan.seed)?;
        for step in 0..plan.steps {
            while driver.in_flight.len() < plan.depth {
                let (asked, range) = guest.asks();
                let in_the_way = driver.in_flight.iter().any(|request| {
                    meet(&request.range, &range) && !(request.asked == RequestKind::Read && asked == RequestKind::Read)
                });
                if in_the_way || self.loose.iter().any(|loose| meet(loose.range(), &range)) {
                    break;
                }
                driver.begin(asked, range);
            }
            if plan.drops && chance.one_in(25) {
                match driver.drop_one() {
                    Some((RequestKind::Read | RequestKind::Flush, _)) | None => {}
                    Some((_, range)) => self.loose.push(Loose::Undefined(range)),
                }
            }
            if let Some(done) = driver.next() {
                self.over(&done).map_err(|error| format!("step {step}: {error}"))?;
            }
            if chance.one_in(40) || step + 1 == plan.steps {
                self.quiet(&mut driver, held).map_err(|error| format!("step {step}: {error}"))?;
                if chance.one_in(2) || step + 1 == plan.steps {
                    driver.close().map_err(|error| format!("step {step}: close: {error}"))?;
                    drop(driver);
                    held.release_all();
                    self.resize(most, &mut chance).map_err(|error| format!("step {step}: resize: {error}"))?;
                    guest.size = self.bytes.len() as u64;
                    driver = begin(chance.bits()).map_err(|error| format!("step {step}: open: {error}"))?;
                    self.quiet(&mut driver, held).map_err(|error| format!("step {step}, opened again: {error}"))?;
                }
            }
        }
        driver.close().map_err(|error| format!("close: {error}"))?;
        Ok(self.bytes)
    }

    fn over(&mut self, done: &Done) -> Verdict {
        let Done { asked, range, result, read, .. } = done;
        result.as_ref().map_err(|error| format!("{asked:?} {range:x?}: {error}"))?;
        let bytes = &mut self.bytes[index(range)];
        match asked {
            RequestKind::Read => {
                if let Some(at) = differs(read, bytes) {
                    let at = range.start + at as u64;
                    return Err(format!("the read of {range:x?} is wrong at {at:#x}"));
                }
            }
            RequestKind::Write(number) | RequestKind::WriteCompressed(number) => {
                bytes.copy_from_slice(&content(*number, range));
            }
            RequestKind::Zeroes { .. } => bytes.fill(0),
            RequestKind::Discard => {
                let inside = whole(range, self.plan.cluster);
                let end = self.bytes.len() as u64;
                if self.plan.discards_may_stay {
                    self.loose.push(Loose::MayBeZero(range.clone()));
                } else {
                    self.bytes[index(&inside)].fill(0);
                    // The last cluster of the disk, which is not whole, may be taken for one.
                    if range.end == end && inside.end < end {
                        self.loose.push(Loose::MayBeZero(inside.end..end));
                    }
                }
            }
            RequestKind::Flush => {}
        }
        Ok(())
    }

    /// Waits until nothing is under way, and looks at every byte.
    fn quiet(&mut self, driver: &mut Driver, held: &RequestHolder) -> Verdict {
        while let Some(done) = driver.next() {
            self.over(&done)?;
        }
        driver.release_held();
        let disk = driver.disk();
        held.release_all();
        let found = read_all(&*disk);
        held.hold_again();
        let found = found?;
        for loose in std::mem::take(&mut self.loose) {
            let range = index(loose.range());
            let (was, is) = (&mut self.bytes[range.clone()], &found[range]);
            if matches!(loose, Loose::MayBeZero(_)) {
                let wrong = was.iter().zip(is).position(|(was, is)| was != is && *is != 0);
                wrong.map_or(Ok(()), |at| Err(format!("{loose:x?}: neither old nor zero, {at:#x} bytes into it")))?;
            }
            was.copy_from_slice(is);
        }
        differs(&found, &self.bytes).map_or(Ok(()), |at| Err(format!("the disk is wrong at {at:#x}")))
    }
}

/// All bytes of a disk.
pub(crate) fn read_all(disk: &dyn Disk) -> Verdict<Vec<u8>> {
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < disk.len() {
        let at = bytes.len() as u64;
        let part = Buffer::from_slice(&vec![0xa5; usize::try_from((disk.len() - at).min(1 << 20)).unwrap()]);
        block_on(disk.read(GuestOffset(at), part.clone().into()))
            .map_err(|error| format!("reading at {at:#x}: {error}"))?;
        bytes.extend(part.to_vec());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use limosa_storage::Operation;
    use limosa_storage::testing::SparseMemory;

    use super::*;
    use crate::plain::{Defect, Plain};

    fn found(defect: Option<Defect>, seed: u64) -> Verdict<Vec<u8>> {
        let first = SeededRandom::new(9).bytes((300 << 10) + 512);
        let len = first.len() as u64;
        let memory = SparseMemory::file_with("disk", first.clone(), 1 << 20);
        let held = RequestHolder::only(&[Operation::Read, Operation::Write, Operation::WriteZeroes]);
        let storage = held.wrap(Arc::new(memory));
        let plan =
            Plan { seed, cluster: 1, steps: 400, depth: 6, drops: true, discards_may_stay: false, compresses: false };
        Model::new(first, plan).run(&held, &|| Ok(Plain::disk(Arc::clone(&storage), len, defect)))
    }

    #[test]
    fn a_disk_without_a_defect_is_found_right() {
        for seed in 0..5 {
            found(None, seed).unwrap();
        }
    }

    #[test]
    fn a_disk_that_loses_writes_or_runs_over_or_speaks_too_early_is_found_out() {
        for defect in [Defect::LosesWrites, Defect::RunsOver, Defect::SpeaksTooEarly] {
            found(Some(defect), 1).expect_err(&format!("{defect:?}"));
        }
    }
}
