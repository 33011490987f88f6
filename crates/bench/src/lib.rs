//! What limosa-bench runs.
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
//! let options = Options { rounds: 1, size: Some(1 << 20), only: Some("cold, zero is_zero".into()), ..Options::default() };
//! let report = run("zero-page", &options)?;
//! println!("{report}");
//! assert!(report.targets_met(), "no target is missed");
//! assert!(report.to_json()?.starts_with(r#"{"bench":"zero-page","machine":{"#));
//! # anyhow::Ok(())
//! ```

mod caches;
mod content;
mod cow;
pub mod frame;
mod free_page;
mod guest;
mod limosa;
pub mod machine;
pub mod measure;
mod namespaces;
mod process;
mod raw;
pub mod report;
mod restore;
mod save;
pub mod scratch;
mod socket_pair;
pub mod stream;
mod vm;
mod zero_copy;
mod zero_page;

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use limosa_image::qcow2::CloneMode;

pub use report::Report;

/// The benches that [`run`] knows.
pub const NAMES: &[&str] = &["cow", "free-page", "restore", "save", "stream", "zero-copy", "zero-page"];

/// How a bench is to be run.
#[derive(Debug, Clone)]
pub struct Options {
    /// How many times each contestant runs.
    pub rounds: u32,
    /// Bytes of memory to move, or of the disk; none for what the bench is defined with.
    pub size: Option<u64>,
    /// Bytes of clusters that a disk image takes at once, ahead of writes; none for the usual ones.
    pub allocate_ahead: Option<u64>,
    /// How many requests the sequential cases of `cow` make; `None`: 65,536 on 2 GiB.
    pub sequential: Option<u64>,
    /// From where on a disk image shares what it would copy.
    pub clone: CloneMode,
    /// Bytes to take and free before each run; none for as much as the run will need.
    pub touch: Option<u64>,
    /// Directory on the disk to measure; none for the temporary directory.
    pub dir: Option<PathBuf>,
    /// Runs only the contestants whose case and variant, with a space between, start with this.
    pub only: Option<String>,
    /// Whether stock QEMU is also measured in a bench that runs without it by default.
    pub against_qemu: bool,
    /// The QEMU to run.
    pub qemu: String,
    /// The limosa to run; `None`: the one in the directory of the running program.
    pub limosa: Option<PathBuf>,
    /// Called with a line for each run, to show progress.
    pub progress: fn(&str),
}

impl Default for Options {
    fn default() -> Self {
        Self {
            rounds: 5,
            size: None,
            allocate_ahead: None,
            sequential: None,
            clone: CloneMode::default(),
            touch: None,
            dir: None,
            only: None,
            against_qemu: false,
            qemu: "qemu-system-x86_64".into(),
            limosa: None,
            progress: |_| {},
        }
    }
}

impl Options {
    fn tell(&self, line: &str) {
        (self.progress)(line);
    }

    /// The message when `only` selects no contestant.
    fn none_selected(&self) -> String {
        let only = self.only.as_deref().unwrap_or_default();
        format!(
            "--only {only:?}: no contestant's case and variant begin with this; the names of cases have their --size, and cases that \
             need root are left out without it"
        )
    }

    /// The limosa program to measure.
    ///
    /// # Errors
    /// `limosa` is `None`, and the directory of the running program has no limosa.
    fn limosa(&self) -> Result<PathBuf> {
        if let Some(named) = &self.limosa {
            return Ok(named.clone());
        }
        let own = std::env::current_exe().context("the path of limosa-bench itself")?;
        let program = own.with_file_name("limosa");
        ensure!(
            program.is_file(),
            "{}: no such program; build it (cargo build --release -p limosa) or name one with --limosa",
            program.display()
        );
        Ok(program)
    }

    fn wants(&self, case: &str, variant: &str) -> bool {
        self.only.as_ref().is_none_or(|only| format!("{case} {variant}").starts_with(only))
    }
}

/// Runs the bench of this name.
///
/// # Errors
///
/// An unknown name, or a run that could not be done: no space, no permission. What this machine cannot show is not an
/// error but a target without a verdict.
pub fn run(name: &str, options: &Options) -> Result<Report> {
    let mut report = match name {
        "cow" => cow::run(options)?,
        "free-page" => free_page::run(options)?,
        "restore" => restore::run(options)?,
        "save" => save::run(options)?,
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
