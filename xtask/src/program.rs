//! The limosa program in its release build.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::{setup, shell};

/// Builds it; returns where it is.
pub(crate) fn build() -> Result<PathBuf> {
    build_one("limosa", "limosa", cargo())
}

/// Builds it with its symbols and line tables, which the release profile strips; returns where it is.
pub(crate) fn build_unstripped() -> Result<PathBuf> {
    let mut cargo = cargo();
    cargo.env("CARGO_PROFILE_RELEASE_STRIP", "none");
    build_one("limosa", "limosa", cargo)
}

/// Builds a package whose library other programs load; returns where it is.
pub(crate) fn build_library(package: &str) -> Result<PathBuf> {
    shell::run(cargo().current_dir(shell::workspace()).args(["build", "--release", "--package", package]))?;
    built(&format!("lib{}.so", package.replace('-', "_")))
}

fn cargo() -> Command {
    Command::new("cargo")
}

fn build_one(package: &str, name: &str, mut cargo: Command) -> Result<PathBuf> {
    let arguments = ["build", "--release", "--package", package, "--bin", name];
    shell::run(cargo.current_dir(shell::workspace()).args(arguments))?;
    built(name)
}

/// Returns where a file of a release build is.
fn built(name: &str) -> Result<PathBuf> {
    // We are TARGET/debug/xtask ourselves, wherever TARGET is.
    let own = std::env::current_exe().context("the path of xtask itself")?;
    let target = own.parent().and_then(|folder| folder.parent()).context("xtask is in no target folder")?;
    let program = target.join("release").join(name);
    if !program.is_file() {
        bail!("cargo has built no {}", program.display());
    }
    Ok(program)
}

/// `cargo xtask bench ...`: set-up, release builds, `limosa-bench ...`.
pub(crate) fn bench(arguments: &[String]) -> Result<()> {
    if arguments.is_empty() {
        bail!("which one? `cargo xtask bench save`, or restore; the rest of the line goes to `limosa-bench`");
    }
    setup::run()?;
    // The program that is measured is in the directory of the one that measures.
    build()?;
    let mut bench = Command::new(build_one("limosa-bench", "limosa-bench", cargo())?);
    if arguments.iter().any(|word| word == "free-page") {
        // A separate program, so that limosa needs nothing of what the tests need.
        bench.env("LIMOSA_GUEST", build_one("limosa-testkit", "limosa-guest", cargo())?);
    }
    shell::run(bench.args(arguments))
}
