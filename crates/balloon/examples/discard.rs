//! Costs of giving memory back, by method, the kind of memory and the length of a run:
//!
//!     cargo run --release -p limosa-balloon --example discard
//!
//! Each round fills 256 MiB, gives all of it back by one method in runs of one length, and touches it again. Methods
//! take turns. `docs/balloon.md` has what came of it.

use std::time::{Duration, Instant};

use limosa_memory::{BlockOptions, MemoryBlock, MemoryError, ReleaseMethod};
use limosa_page::{PAGE_SIZE, PageRange};

const LENGTH: u64 = 256 << 20;
const ROUNDS: usize = 5;
/// Runs of a balloon's pages one by one, of an array of Linux's, and of a hinted block.
const RUNS: [(u64, &str); 3] = [(4 << 10, "4 KiB"), (1 << 20, "1 MiB"), (4 << 20, "4 MiB")];
const METHODS: [ReleaseMethod; 4] =
    [ReleaseMethod::PunchHole, ReleaseMethod::Remove, ReleaseMethod::DontNeed, ReleaseMethod::Free];

fn main() -> Result<(), MemoryError> {
    let kinds = [
        ("memfd", BlockOptions::memfd("memory", LENGTH).map()?),
        ("private", BlockOptions::anonymous("memory", LENGTH).map()?),
    ];
    println!("{LENGTH} bytes a round, {ROUNDS} rounds; milliseconds, least / median / most");
    println!("| memory | method | runs of | giving back | touching again |\n|---|---|---|---|---|");
    for (kind, block) in &kinds {
        for (length, name) in RUNS {
            let methods: Vec<_> = METHODS.into_iter().filter(|method| block.supports_release(*method)).collect();
            let mut times = vec![(Vec::new(), Vec::new()); methods.len()];
            for _ in 0..ROUNDS {
                for (method, (given_back, touched)) in methods.iter().zip(&mut times) {
                    let (one, other) = round(block, *method, length)?;
                    given_back.push(one);
                    touched.push(other);
                }
            }
            for (method, (given_back, touched)) in methods.iter().zip(times) {
                println!("| {kind} | {} | {name} | {} | {} |", method.name(), spread(given_back), spread(touched));
            }
        }
    }
    Ok(())
}

fn round(block: &MemoryBlock, method: ReleaseMethod, length: u64) -> Result<(Duration, Duration), MemoryError> {
    touch(block)?;
    let begun = Instant::now();
    for run in block.pages().chunks(length / PAGE_SIZE) {
        block.release(run, method)?;
    }
    let given_back = begun.elapsed();
    let begun = Instant::now();
    touch(block)?;
    Ok((given_back, begun.elapsed()))
}

fn touch(block: &MemoryBlock) -> Result<(), MemoryError> {
    PageRange::whole_block(LENGTH / PAGE_SIZE).iter().try_for_each(|page| block.write(page.offset(), &[1]))
}

fn spread(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let millis = |at: usize| times.get(at).map_or(0.0, |time| time.as_secs_f64() * 1e3);
    format!("{:.1} / {:.1} / {:.1}", millis(0), millis(times.len() / 2), millis(times.len().saturating_sub(1)))
}
