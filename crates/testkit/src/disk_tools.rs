//! The stock tools for disk images.

use std::ffi::OsStr;
use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, Result, ensure};

/// Runs `qemu-img`, and returns how it ended, also if it failed.
///
/// # Errors
/// It is not there; the message names the command that installs it.
pub fn qemu_img_output<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Result<Output> {
    output("qemu-img", arguments)
}

/// Runs `qemu-img` and returns what it prints.
///
/// # Errors
/// It is not there (the message names the command that installs it), or it fails: with what it says.
pub fn qemu_img<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Result<String> {
    printed("qemu-img", arguments)
}

/// Runs `qemu-io` and returns what it prints.
///
/// # Errors
/// As of [`qemu_img`]. A command that fails makes `qemu-io` fail.
pub fn qemu_io<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Result<String> {
    printed("qemu-io", arguments)
}

/// Runs a client of NBD of libnbd's (`nbdinfo`, `nbdcopy`, a script), and returns what it prints.
///
/// # Errors
/// As of [`qemu_img`].
pub fn nbd_tool<S: AsRef<OsStr>>(tool: &str, arguments: impl IntoIterator<Item = S>) -> Result<String> {
    printed(tool, arguments)
}

/// Runs `cryptsetup` and returns what it prints.
///
/// # Errors
/// As of [`qemu_img`].
pub fn cryptsetup<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Result<String> {
    printed("cryptsetup", arguments)
}

fn printed<S: AsRef<OsStr>>(tool: &str, arguments: impl IntoIterator<Item = S>) -> Result<String> {
    let arguments: Vec<S> = arguments.into_iter().collect();
    let output = output(tool, &arguments)?;
    let [said, printed] = [output.stderr, output.stdout].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let line = || arguments.iter().map(|word| word.as_ref().to_string_lossy()).collect::<Vec<_>>().join(" ");
    ensure!(output.status.success(), "{tool} {}: {}: {said}{printed}", line(), output.status);
    Ok(printed)
}

fn output<S: AsRef<OsStr>>(tool: &str, arguments: impl IntoIterator<Item = S>) -> Result<Output> {
    let mut command = Command::new(tool);
    command.args(arguments).stdin(Stdio::null());
    command
        .output()
        .with_context(|| format!("{tool} is missing: run `cargo xtask setup` (or skip with LIMOSA_SKIP_QEMU=1)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_made_and_looked_at_by_the_stock_tools() {
        if crate::qemu_skipped() {
            return;
        }
        let folder = crate::scratch().unwrap();
        let image = folder.path().join("disk.qcow2");
        let image = image.to_str().unwrap();
        qemu_img(["create", "-q", "-f", "qcow2", image, "1M"]).unwrap();
        qemu_io(["-c", "write -P 7 0 64k", image]).unwrap();
        assert!(qemu_img(["map", "--output", "json", image]).unwrap().contains(r#""length": 65536"#));
        let error = qemu_img(["info", "absent.qcow2"]).unwrap_err().to_string();
        assert!(error.starts_with("qemu-img info absent.qcow2: exit status: 1: "), "{error}");
    }
}
