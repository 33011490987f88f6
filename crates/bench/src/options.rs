//! The options of a run, and what follows from them for every bench.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use limosa_image::qcow2::ReflinkMode;

/// The options of a run.
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
    /// Numbers of VMs that `clone` starts together; none for the usual ones.
    pub counts: Vec<u32>,
    /// From where on a disk image shares what it would copy.
    pub clone: ReflinkMode,
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
            counts: Vec::new(),
            clone: ReflinkMode::default(),
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
    pub(crate) fn tell(&self, line: &str) {
        (self.progress)(line);
    }

    /// The message when `only` selects no contestant.
    pub(crate) fn none_selected(&self) -> String {
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
    pub(crate) fn limosa(&self) -> Result<PathBuf> {
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

    pub(crate) fn wants(&self, case: &str, variant: &str) -> bool {
        self.only.as_ref().is_none_or(|only| format!("{case} {variant}").starts_with(only))
    }
}
