//! Asking a guest for its free pages, compared with taking its memory by inflating a balloon.
//!
//! Two guests. One is real: Linux in user-mode Linux, with its own driver, its memory idle, or resident and free
//! (`--size`, 8 GiB). The other is a model of that driver, which can do what Linux's cannot: send arrays of 16,384 page
//! numbers. Law: what is compared begins with as much resident memory, and ends when the host has it back, or the list
//! is complete.

mod discards;
mod migrations;
mod model;
mod uml;

use anyhow::{Result, ensure};

use crate::machine::Machine;
use crate::options::Options;
use crate::report::Report;

/// Runs the bench.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let memory = options.size.unwrap_or(8 << 30).next_multiple_of(64 << 20);
    ensure!(memory >= 256 << 20, "--size: must be at least 256M: a smaller guest has too little free memory");
    let real = uml::rounds(options, memory)?;
    let mut all = real.as_ref().map_or_else(|_| Vec::new(), Clone::clone);
    all.extend(model::rounds(options, memory)?);
    all.extend(migrations::rounds(options, memory)?);
    ensure!(!all.is_empty(), "{}", options.none_selected());
    let mut report = Report::new("free-page", Machine::this(&options.qemu), options.rounds, &all);
    uml::judge(&mut report, &all, memory, real.as_ref().err().map(String::as_str));
    model::judge(&mut report, &all, memory);
    migrations::judge(&mut report, &all, real.as_ref().err().map(String::as_str));
    Ok(report)
}
