//! `cargo xtask setup`: QEMU, an older and a newer one beside it, cryptsetup, libnbd's and libvirt's clients, XFS's
//! tools, object stores, and the parts of two Linux guests, on Debian and Ubuntu.
//!
//! Law: what exists already is not touched, only checked. What needs root is planned first ([`plan`]); root executes
//! the plan, any other user gets it as one line to run. The guests' kernels and busybox are never installed: they are
//! unpacked into cache folders ([`packages`]).

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::shell;

mod guest;
pub(crate) mod packages;
mod plan;
pub(crate) mod qemus;
mod sources;
mod stores;
mod uml;

pub(crate) use plan::Machine;
use plan::Plan;
use qemus::Series;

/// The oldest QEMU that writes mapped-ram files (QEMU docs: migration/mapped-ram).
const QEMU_AT_LEAST: (u32, u32) = (9, 0);

/// The programs that libvirt's save images are packed by, and their packages.
const PACKERS: [(&str, &str); 5] =
    [("gzip", "gzip"), ("bzip2", "bzip2"), ("xz", "xz-utils"), ("lzop", "lzop"), ("zstd", "zstd")];

/// Installs what is missing, or says which line to run.
pub(crate) fn run() -> Result<()> {
    run_with(qemus::wanted())
}

/// Installs what is missing, with these series of QEMU.
pub(crate) fn run_with(series: &[Series]) -> Result<()> {
    let mut missing = missing_packages();
    let (uml_missing, series_missing) = (uml::is_missing(), qemus::are_missing(series));
    if series_missing && shell::find_program("mmdebstrap").is_none() {
        missing.push("mmdebstrap");
    }
    missing.extend(stores::missing_package());
    let stores_missing = stores::are_missing();
    if missing.is_empty() && guest::is_complete() && !uml_missing && !series_missing && !stores_missing {
        return Ok(());
    }
    if std::env::consts::ARCH != "x86_64" || std::env::consts::OS != "linux" {
        bail!("the guests of the tests are x86-64 and are set up on x86-64 Linux only");
    }
    let machine = Machine::this()?;
    if let Some((program, package)) = guest::module_unpacker(&machine)
        && (!guest::is_complete() || uml_missing)
        && shell::find_program(program).is_none()
    {
        missing.push(package);
    }
    if !missing.is_empty() {
        let plan = plan::install(&machine, &missing)?;
        as_root(&plan)?;
        let still = missing_packages();
        if !still.is_empty() {
            let found = qemu_version().map_or_else(|| "none".to_owned(), |(major, minor)| format!("{major}.{minor}"));
            bail!(
                "still missing after the installation: {} (QEMU found: {found}; wanted: {}.{} or newer)",
                still.join(" "),
                QEMU_AT_LEAST.0,
                QEMU_AT_LEAST.1
            );
        }
    }
    if !guest::is_complete() {
        if !guest::packages_are_known(&machine) {
            as_root(&Plan::update_lists())?;
        }
        guest::fetch(&machine).context("fetching the Linux guest")?;
    }
    if uml_missing {
        if !uml::package_is_known() {
            as_root(&Plan::update_lists())?;
        }
        uml::fetch().context("fetching user-mode Linux (LIMOSA_SKIP_UML=1 does without)")?;
        uml::build_library()?;
    }
    if stores_missing {
        stores::fetch().context("installing object stores (LIMOSA_SKIP_STORES=1 does without)")?;
    }
    if series_missing {
        qemus::fetch(&machine, series)
            .context("fetching an older and a newer QEMU (LIMOSA_SKIP_SERIES=1 does without)")?;
    }
    Ok(())
}

/// Whether the user does without what this variable names: it is 1.
pub(crate) fn is_skipped(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| value == "1")
}

/// Runs the plan if we are root; otherwise prints it as one line and fails.
fn as_root(plan: &Plan) -> Result<()> {
    if is_root()? {
        plan.execute()
    } else {
        println!("{}", plan.line());
        bail!("root is needed: run the line above, then this again");
    }
}

pub(crate) fn is_root() -> Result<bool> {
    // The owner of our own /proc entry is the effective user.
    use std::os::unix::fs::MetadataExt as _;
    Ok(std::fs::metadata("/proc/self").context("/proc/self")?.uid() == 0)
}

/// The packages whose programs are missing or too old.
fn missing_packages() -> Vec<&'static str> {
    let mut missing = Vec::new();
    if qemu_version().is_none_or(|version| version < QEMU_AT_LEAST) {
        missing.push("qemu-system-x86");
    }
    if shell::find_program("qemu-img").is_none() {
        missing.push("qemu-utils");
    }
    if shell::find_program("cryptsetup").is_none() {
        missing.push("cryptsetup-bin");
    }
    // Clients of NBD that have nothing of QEMU's, and their library for Python.
    if ["nbdinfo", "nbdcopy"].iter().any(|tool| shell::find_program(tool).is_none()) {
        missing.push("libnbd-bin");
    }
    if !Path::new("/usr/lib/python3/dist-packages/nbd.py").exists() {
        missing.push("python3-libnbd");
    }
    // A server that is not QEMU's either.
    if shell::find_program("nbdkit").is_none() {
        missing.push("nbdkit");
    }
    // UEFI firmware, in either of the sizes that distributions build it in.
    if !["OVMF_CODE_4M.fd", "OVMF_CODE.fd"].iter().any(|name| Path::new("/usr/share/OVMF").join(name).exists()) {
        missing.push("ovmf");
    }
    // Another implementation of TLS than limosa's and QEMU's.
    if shell::find_program("openssl").is_none() {
        missing.push("openssl");
    }
    // A guest makes its host keys with it.
    if shell::find_program("ssh-keygen").is_none() {
        missing.push("openssh-client");
    }
    // The filesystem of a guest's disk, which it makes itself.
    if !["/usr/sbin/mke2fs", "/sbin/mke2fs"].iter().any(|path| Path::new(path).is_file()) {
        missing.push("e2fsprogs");
    }
    // A guest's database, which knows when it is not whole.
    if shell::find_program("sqlite3").is_none() {
        missing.push("sqlite3");
    }
    // Another program's network behind a gate of output.
    if shell::find_program("passt").is_none() {
        missing.push("passt");
    }
    for (program, package) in PACKERS {
        if shell::find_program(program).is_none() {
            missing.push(package);
        }
    }
    if !is_skipped("LIMOSA_SKIP_LIBVIRT") {
        missing.extend(missing_libvirt());
    }
    // Not needed where the user has a filesystem that shares space, or wants to do without.
    let own = std::env::var_os("LIMOSA_REFLINK_DIR").is_none();
    if own && !is_skipped("LIMOSA_SKIP_REFLINK") && !has_xfs_tools() {
        missing.push("xfsprogs");
    }
    missing
}

/// Whether filesystems can be made whose files share space. The tools may be where only root looks for programs.
fn has_xfs_tools() -> bool {
    let for_root = |name: &str| ["/usr/sbin", "/sbin"].iter().any(|folder| Path::new(folder).join(name).is_file());
    ["mkfs.xfs", "xfs_io"].iter().all(|name| for_root(name) || shell::find_program(name).is_some())
}

/// The parts of libvirt that are missing: the client, the driver that it loads, and what writes its files. Nothing of
/// it runs by itself.
fn missing_libvirt() -> Vec<&'static str> {
    let mut missing = Vec::new();
    if shell::find_program("virsh").is_none() {
        missing.push("libvirt-clients");
    }
    let drivers = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"].map(Path::new);
    if !drivers.iter().any(|folder| folder.join("libvirt/connection-driver/libvirt_driver_qemu.so").exists()) {
        missing.push("libvirt-daemon-driver-qemu");
    }
    if !["/usr/lib/libvirt", "/usr/libexec"].iter().any(|folder| Path::new(folder).join("libvirt_iohelper").exists()) {
        missing.push("libvirt-daemon");
    }
    missing
}

/// Major and minor version of the `qemu-system-x86_64` in `PATH`.
fn qemu_version() -> Option<(u32, u32)> {
    shell::find_program("qemu-system-x86_64")?;
    parse_qemu_version(&shell::output(Command::new("qemu-system-x86_64").arg("--version")).ok()?)
}

/// `QEMU emulator version 10.0.2 (Debian ...)` begins every version text.
fn parse_qemu_version(text: &str) -> Option<(u32, u32)> {
    let number = text.split_whitespace().skip_while(|word| *word != "version").nth(1)?;
    let mut parts = number.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_qemu_is_read_from_its_first_line() {
        let text = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright (c) 2003-2025\n";
        assert_eq!(parse_qemu_version(text), Some((10, 0)));
        assert_eq!(parse_qemu_version("QEMU emulator version 9.2.1"), Some((9, 2)));
        assert_eq!(parse_qemu_version("something else"), None);
        assert!((10, 0) >= QEMU_AT_LEAST && (8, 2) < QEMU_AT_LEAST);
    }
}
