//! Unit tests on the other processor, by user-mode emulation.

use anyhow::{Context as _, Result, bail};

use super::{folder, target};
use crate::shell;

/// The emulator, and the Debian package that has it.
const EMULATOR: (&str, &str) = ("qemu-aarch64-static", "qemu-user-static");

/// The other processor's libraries, as Debian's cross compilers have them.
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";

/// The crates whose unit tests are run: those that work on bytes. Others ask the kernel for what the emulator does not
/// pass on (`userfaultfd`, `io_uring`, descriptors' lengths).
const CRATES: [&str; 6] =
    ["limosa-console", "limosa-image", "limosa-nbd", "limosa-page", "limosa-snapshot", "limosa-stream"];

/// Builds the unit tests for aarch64, and runs them.
pub(super) fn run() -> Result<()> {
    let (emulator, package) = EMULATOR;
    if shell::find_program(emulator).is_none() {
        bail!("no {emulator}, which runs programs of another processor: run `apt-get install {package}`");
    }
    let other = target::ALL.iter().find(|target| target.processor == "aarch64" && !target.is_static);
    let other = other.context("no target for aarch64")?;
    let mut cargo = other.ready(&folder().join("build"))?;
    cargo.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", format!("{emulator} -L {LIBRARIES}"));
    cargo.args(["test", "--lib", "--locked", "--target", other.triple]);
    for name in CRATES {
        cargo.args(["--package", name]);
    }
    shell::run(&mut cargo)
}
