//! Requirements of tests on the machine. Law: a test that cannot run fails and names the line to run; it is skipped
//! only if the user asked for that.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Result, bail};

/// Whether the user has this variable (`LIMOSA_SKIP_...`) set to 1: then a test that needs what it names returns at
/// once, and is counted as skipped.
pub fn skipped(variable: &str) -> bool {
    let skipped = std::env::var_os(variable).is_some_and(|value| value == "1");
    if skipped {
        note_skip(&format!("{variable}=1"));
    }
    skipped
}

/// Whether `LIMOSA_SKIP_QEMU=1` is set: then a test that needs QEMU returns at once, and is counted as skipped.
pub fn qemu_skipped() -> bool {
    skipped("LIMOSA_SKIP_QEMU")
}

/// Says that the running test skips itself and why. `cargo xtask test` names a file in `LIMOSA_SKIP_LOG` and counts the
/// lines there, because a test runner takes a test that returns for one that passed.
pub fn note_skip(reason: &str) {
    let thread = std::thread::current();
    let line = format!("SKIPPED ({reason}): {}\n", thread.name().unwrap_or("a test"));
    eprint!("{line}");
    if let Some(path) = std::env::var_os("LIMOSA_SKIP_LOG") {
        let log = std::fs::File::options().append(true).create(true).open(&path);
        // One write, so that tests that run in parallel do not mix their lines.
        log.and_then(|mut log| log.write_all(line.as_bytes())).unwrap_or_else(|error| {
            panic!("LIMOSA_SKIP_LOG names {}, which cannot be written: {error}", path.display());
        });
    }
}

/// Checks once per process that QEMU can be started.
///
/// # Errors
/// QEMU is not there; the message names the command that installs it.
pub fn require_qemu() -> Result<()> {
    static FOUND: OnceLock<bool> = OnceLock::new();
    let found = *FOUND.get_or_init(|| {
        let mut command = Command::new("qemu-system-x86_64");
        command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    });
    if !found {
        bail!("qemu-system-x86_64 is missing: run `cargo xtask setup` (or skip with LIMOSA_SKIP_QEMU=1)");
    }
    Ok(())
}

/// The folder with the Linux guest's parts, filled by `cargo xtask setup`; `LIMOSA_GUEST_DIR` names another.
///
/// # Errors
/// It is not there; the message names the command that fills it.
pub(crate) fn guest_folder() -> Result<PathBuf> {
    let folder = match std::env::var_os("LIMOSA_GUEST_DIR") {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest/linux"),
    };
    if !folder.join("vmlinuz").is_file() || !folder.join("busybox").is_file() {
        bail!("no Linux guest in {}: run `cargo xtask setup`", folder.display());
    }
    Ok(folder)
}

/// Whether `LIMOSA_SKIP_UML=1` is set: then a test whose guest is user-mode Linux returns at once, and is counted as
/// skipped.
pub fn uml_skipped() -> bool {
    skipped("LIMOSA_SKIP_UML")
}

/// The library that is preloaded into user-mode Linux (`crates/uml-xstate`).
pub(crate) const UML_LIBRARY: &str = "libxstate.so";

/// The folder with user-mode Linux and its modules, filled by `cargo xtask setup`; `LIMOSA_UML_DIR` names another.
///
/// # Errors
/// It is not there; the message names the command that fills it.
pub fn uml_folder() -> Result<PathBuf> {
    let folder = match std::env::var_os("LIMOSA_UML_DIR") {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest/uml"),
    };
    if !folder.join("linux.uml").is_file() || !folder.join(UML_LIBRARY).is_file() {
        bail!("no user-mode Linux in {}: run `cargo xtask setup` (or skip with LIMOSA_SKIP_UML=1)", folder.display());
    }
    Ok(folder)
}
