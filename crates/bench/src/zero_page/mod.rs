//! The cost of finding zero pages, and what it saves.
//!
//! Law: everything is compared with its plain twin in one run: zero detection with a read of the same memory at the
//! same vector width, the compiler's own loop and a loop of 16 bytes at a time; a migration with one that looks at
//! pages with that loop, and one that does not look.

mod contents;
mod guest;
mod holes;
mod loops;
mod migrations;
mod pages;

use anyhow::{Result, ensure};

pub(crate) use self::guest::{Guest, Spent};

use crate::frame::Series;
use crate::machine::Machine;
use crate::options::Options;
use crate::report::Report;

/// Runs the bench.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let pages = pages::rounds(options)?;
    let holes = holes::rounds(options)?;
    let migrations = migrations::rounds(options)?;
    let all: Vec<Series> = pages.all.iter().cloned().chain(holes).chain(migrations).collect();
    ensure!(!all.is_empty(), "{}", options.none_selected());
    let mut report = Report::new("zero-page", Machine::this(&options.qemu), options.rounds, &all);
    pages::judge(&mut report, &pages);
    holes::judge(&mut report, &all);
    migrations::judge(&mut report, &all);
    Ok(report)
}
