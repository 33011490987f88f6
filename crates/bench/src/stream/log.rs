//! A round's dirty log of a very large guest: taken over from vhost back ends, merged and counted, on one thread.
//!
//! The guest's memory is mapped and never touched; what is measured is bits.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use limosa_memory::dirty::{DirtyLog, DirtyPages, VhostLog};
use limosa_memory::{BlockOptions, GuestMemory};
use limosa_page::{PAGE_SIZE, PageRange};
use parking_lot::Mutex;

use crate::frame::{Contestant, Frame, Series, interleave};
use crate::measure::{Measured, thread_cpu};
use crate::options::Options;
use crate::report::{Bound, NOT_RUN, Report, Target, figure};

const GUEST: u64 = 1 << 40;
const CASE: &str = "dirty log of 1 TiB, 1% set";

/// Seconds.
const LIMIT: f64 = 0.025;

/// Set bits next to each other.
const RUNS: [(&str, u64); 2] = [("single pages", 1), ("runs of 64", 64)];

/// The log that a back end has shared.
type SharedLog = Arc<Mutex<Option<OwnedFd>>>;

/// A log that is on, and what is written to it by hand.
struct Stage {
    log: VhostLog,
    back_end: File,
    /// The rest of earlier rounds: nothing.
    rest: DirtyPages,
}

impl Stage {
    fn new() -> Result<Self> {
        let memory = Arc::new(GuestMemory::new(vec![BlockOptions::memfd("ram", GUEST).map()?])?);
        let shared = SharedLog::default();
        let given = Arc::clone(&shared);
        let mut log = VhostLog::new(Arc::clone(&memory), move |base| {
            let fd = base.map(|base| base.fd.try_clone_to_owned()).transpose()?;
            *given.lock() = fd;
            Ok(())
        })?;
        log.start()?;
        let fd = shared.lock().take();
        let rest = DirtyPages::new(&memory);
        Ok(Self { log, back_end: File::from(fd.context("the log was not shared")?), rest })
    }

    /// Import, merge and count of one round.
    fn run(&mut self, image: &[u8], set: u64) -> Result<Measured> {
        self.back_end.write_all_at(image, 0).context("setting the bits of a log")?;
        // Also has its memory there, as that of a set that is used round after round.
        if let Some(rest) = self.rest.block_mut(0) {
            rest.set_range(PageRange::whole_block(rest.len()));
            rest.clear_range(PageRange::whole_block(rest.len()));
        }
        let (begun, cpu) = (Instant::now(), thread_cpu());
        self.log.fetch(&mut self.rest)?;
        let count = self.rest.count();
        let measured = Measured { wall: begun.elapsed(), cpu: thread_cpu().saturating_sub(cpu), ..Measured::default() };
        ensure!(count == set, "the log contains {count} pages, expected {set}");
        Ok(measured.with("pages", count))
    }
}

/// A log in which one bit of a hundred is set, in runs of `run` anywhere; and how many are.
fn image(run: u64) -> Result<(Vec<u8>, u64)> {
    let bits = GUEST / PAGE_SIZE;
    let mut image = vec![0_u8; usize::try_from(bits / 8)?];
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    for _ in 0..bits / 100 / run {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let first = random % (bits - run);
        for bit in first..first + run {
            if let Some(byte) = image.get_mut(usize::try_from(bit / 8)?) {
                *byte |= 1 << (bit % 8);
            }
        }
    }
    let set = image.iter().map(|byte| u64::from(byte.count_ones())).sum();
    Ok((image, set))
}

pub(super) fn rounds(options: &Options) -> Result<Vec<Series>> {
    let mut contestants = Vec::new();
    for (variant, run) in RUNS.into_iter().filter(|(variant, _)| options.wants(CASE, variant)) {
        let (mut stage, (image, set)) = (Stage::new()?, image(run)?);
        contestants.push(Contestant {
            case: CASE.into(),
            variant: variant.into(),
            run: Box::new(move |_: &Frame| stage.run(&image, set)),
        });
    }
    if contestants.is_empty() {
        return Ok(Vec::new());
    }
    interleave(&mut contestants, options.rounds, &Frame { touch: 0 }, &mut |line| options.tell(line))
}

pub(super) fn judge(report: &mut Report, all: &[Series]) {
    for (variant, _) in RUNS {
        let got = figure(all, CASE, variant, "wall").map(|spread| spread.median);
        let name = format!("{CASE}, {variant}: seconds to import, merge and count");
        report.targets.push(Target::new(name, Bound::AtMost(LIMIT), got, NOT_RUN));
    }
}
