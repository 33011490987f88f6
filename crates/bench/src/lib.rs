//! The benches of limosa-bench.
//!
//! A bench is a set of contestants that do the same thing in different ways. They take turns, round after round, and
//! are compared by the runs of the same round, because a shared machine is never equally fast twice. See [`frame`] for
//! how they run, [`measure`] for what is counted and [`report`] for what comes out: one JSON shape for all benches, the
//! same numbers as a table, and targets that are met, missed, or cannot be shown on this machine.
//!
//! # Example
//!
//! ```
//! use limosa_bench::{Options, run};
//!
//! let options = Options { rounds: 1, size: Some(1 << 20), only: Some("cold, zero is_zero".into()),
//! ..Options::default() }; let report = run("zero-page", &options)?; println!("{report}");
//! assert!(report.targets_met(), "no target is missed");
//! assert!(report.to_json()?.starts_with(r#"{"bench":"zero-page","machine":{"#));
//! # anyhow::Ok(())
//! ```

mod caches;
mod clone;
mod content;
mod cow;
pub mod frame;
mod free_page;
mod guest;
mod img;
mod limosa;
pub mod machine;
pub mod measure;
mod namespaces;
mod options;
mod packed;
mod page_cache;
mod process;
mod protect;
mod raw;
mod remote;
pub mod report;
mod restore;
mod save;
pub mod scratch;
mod serve;
mod stored;
pub mod stream;
mod vm;
mod zero_copy;
mod zero_page;

use anyhow::{Result, bail};

pub use options::Options;
pub use report::Report;

/// The benches that [`run`] knows.
pub const NAMES: &[&str] = &[
    "clone",
    "cow",
    "free-page",
    "img",
    "packed",
    "protect",
    "remote",
    "restore",
    "save",
    "serve",
    "stream",
    "zero-copy",
    "zero-page",
];

/// Runs the bench of this name.
///
/// # Errors
///
/// An unknown name, or a run that could not be done: no space, no permission. What this machine cannot show is not an
/// error but a target without a verdict.
pub fn run(name: &str, options: &Options) -> Result<Report> {
    let mut report = match name {
        "clone" => clone::run(options)?,
        "cow" => cow::run(options)?,
        "free-page" => free_page::run(options)?,
        "img" => img::run(options)?,
        "packed" => packed::run(options)?,
        "protect" => protect::run(options)?,
        "remote" => remote::run(options)?,
        "restore" => restore::run(options)?,
        "save" => save::run(options)?,
        "serve" => serve::run(options)?,
        "stream" => stream::run(options)?,
        "zero-copy" => zero_copy::run(options)?,
        "zero-page" => zero_page::run(options)?,
        _ => bail!("{name:?}: unknown bench; must be one of {}", NAMES.join(", ")),
    };
    if let Some(only) = &options.only {
        report.keep_what_ran(only);
    }
    Ok(report)
}
