//! Object stores of two makes for the tests: s3s-fs, built with cargo, and moto, in a Python environment of its own.
//!
//! Law: both are installed below target/, from the indexes that this machine's cargo and pip use. No crate of the
//! workspace depends on them.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::is_skipped;
use super::packages::fill_folder;
use crate::shell;

/// The last version that Rust 1.92 builds; newer ones want a newer Rust than 1.95.
const S3S: &str = "0.14.1";

/// Its stores of objects, and what its server needs. `moto[server]` brings twice as much, for its other services.
const MOTO: [&str; 4] = ["moto[s3]==5.2.5", "flask==3.1.3", "flask-cors==6.0.5", "werkzeug==3.1.9"];

/// The system's Python: one that comes first in PATH may be another user's, or gone tomorrow.
const PYTHON: &str = "/usr/bin/python3";

/// The file that says that moto is whole, with what is installed.
const WHOLE: &str = "whole";

fn s3s() -> PathBuf {
    shell::workspace().join("target/s3s")
}

fn moto() -> PathBuf {
    shell::workspace().join("target/moto")
}

/// Whether moto was installed to the end, in these versions.
fn has_moto() -> bool {
    std::fs::read_to_string(moto().join(WHOLE)).is_ok_and(|text| text == MOTO.join("\n"))
}

/// Whether one of them has to be installed.
pub(super) fn are_missing() -> bool {
    let are_there = s3s().join("bin/s3s-fs").is_file() && has_moto();
    !are_there && !is_skipped("LIMOSA_SKIP_STORES")
}

/// The package that makes environments of Python, if it is missing.
pub(super) fn missing_package() -> Option<&'static str> {
    let has_venv = || Command::new(PYTHON).args(["-c", "import ensurepip"]).output();
    (are_missing() && !has_venv().is_ok_and(|output| output.status.success())).then_some("python3-venv")
}

/// Installs what is missing.
pub(super) fn fetch() -> Result<()> {
    if !s3s().join("bin/s3s-fs").is_file() {
        println!("building an object store for the tests (s3s-fs {S3S}): a few minutes");
        fill_folder(&s3s(), |work, filled| {
            let mut install = Command::new("cargo");
            install.args(["install", "--quiet", "--locked", "s3s-fs", "--version", S3S, "--features", "binary"]);
            shell::run(install.arg("--root").arg(filled).arg("--target-dir").arg(work))
        })?;
    }
    if !has_moto() {
        // Programs of an environment name its folder: it is made where it stays, and is whole when a file says so.
        remove(&moto())?;
        let made = shell::run(Command::new(PYTHON).args(["-m", "venv"]).arg(moto()))
            .and_then(|()| {
                let mut install = Command::new(moto().join("bin/pip"));
                shell::run(install.args(["install", "--quiet", "--disable-pip-version-check"]).args(MOTO))
            })
            .and_then(|()| shell::run(Command::new(moto().join("bin/python")).args(["-c", "import moto.server"])))
            .and_then(|()| std::fs::write(moto().join(WHOLE), MOTO.join("\n")).context("a file of moto"));
        if made.is_err() {
            remove(&moto())?;
        }
        made?;
    }
    Ok(())
}

fn remove(folder: &Path) -> Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", folder.display()))
        }
        _ => Ok(()),
    }
}
