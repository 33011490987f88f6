//! The proof that images are right: models, histories, power cuts, faults and threads, with stock `qemu-img` as the
//! judge.
//!
//! `LIMOSA_PROOF_RUNS` multiplies how long the random tests run; every failure names the seed that repeats it.

/// Leaves a test whose judge is not wanted: `LIMOSA_SKIP_QEMU=1`.
macro_rules! needs_qemu {
    () => {
        if limosa_testkit::qemu_skipped() {
            return;
        }
    };
}

mod bed;
mod drive;
mod engine;
mod faults;
mod guest;
mod history;
mod kill;
mod linear;
mod model;
mod plain;
mod power;
mod recipe;
mod reflink;
mod threads;

/// The result of a run: an error says what was wrong, where.
type Verdict<T = ()> = Result<T, String>;

/// How many times what is usual.
fn runs(usual: u64) -> u64 {
    let times = std::env::var("LIMOSA_PROOF_RUNS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    usual * times
}
