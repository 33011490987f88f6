//! The Linux guest's parts: the distribution's cloud kernel, the virtio modules it does not have built in, a static
//! busybox, QEMU's guest agent, and a kernel that knows vmgenid, unpacked (never installed) into a cache folder.
//! It says which modules were looked for, so that one of a shorter list is made again; a kernel may have some of them
//! built in.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::packages::{copy, fill_folder, take_modules, unpacked};
use super::plan::Machine;
use crate::shell;

/// The modules a guest may load, by file name without the extension.
const MODULES: [&str; 11] = [
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
    "virtio_balloon",
    "failover",
    "net_failover",
    "virtio_net",
    "virtio_console",
];

/// The file that lists them.
const CONTENTS: &str = "contents";

/// The other files.
const FILES: [&str; 4] = ["vmlinuz", "vmlinuz-vmgenid", "busybox", "qemu-ga"];

/// The package of the guest agent, whose libraries QEMU needs as well.
const AGENT: &str = "qemu-guest-agent";

/// The directory in which limosa-testkit expects [`FILES`] and `modules/NAME.ko`.
pub(crate) fn folder() -> PathBuf {
    shell::workspace().join("target/guest/linux")
}

/// Whether all is there.
pub(crate) fn is_complete() -> bool {
    let contents = std::fs::read_to_string(folder().join(CONTENTS));
    FILES.iter().all(|name| folder().join(name).is_file())
        && contents.is_ok_and(|contents| MODULES.iter().all(|name| contents.lines().any(|line| line == *name)))
}

/// The package that depends on the smallest kernel of the distribution.
fn kernel_package(machine: &Machine) -> &'static str {
    if machine.is_ubuntu() { "linux-image-virtual" } else { "linux-image-cloud-amd64" }
}

/// The package that depends on another kernel, where that one has no driver of vmgenid: Debian 12's cloud kernel.
fn vmgenid_kernel_package(machine: &Machine) -> Option<&'static str> {
    (machine.id == "debian" && machine.version == "12").then_some("linux-image-amd64")
}

/// The program, and its package, that unpacks the modules of this distribution's kernel; Debian 12 packs none.
pub(crate) fn module_unpacker(machine: &Machine) -> Option<(&'static str, &'static str)> {
    if machine.is_ubuntu() {
        Some(("zstd", "zstd"))
    } else if machine.version == "12" {
        None
    } else {
        Some(("xz", "xz-utils"))
    }
}

/// Whether apt has lists that name what we need.
pub(crate) fn packages_are_known(machine: &Machine) -> bool {
    let is_known = |package: &str| {
        shell::output(Command::new("apt-cache").args(["show", package])).is_ok_and(|text| !text.is_empty())
    };
    [Some(kernel_package(machine)), vmgenid_kernel_package(machine)]
        .into_iter()
        .flatten()
        .all(|package| kernel_closure(package).is_ok_and(|names| names.len() > 1))
        && ["busybox-static", AGENT].into_iter().all(is_known)
}

/// The kernel package and those of its dependencies that carry kernel or modules.
fn kernel_closure(root: &str) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::from([root.to_owned()]);
    let mut open = vec![root.to_owned()];
    while let Some(name) = open.pop() {
        for dependency in kernel_dependencies(&shell::output(Command::new("apt-cache").args(["depends", &name]))?) {
            if names.insert(dependency.clone()) {
                open.push(dependency);
            }
        }
    }
    Ok(names)
}

/// `  Depends: linux-image-6.1.0-1-cloud-amd64` lines of `apt-cache depends`; the first of alternatives (`|Depends:`).
fn kernel_dependencies(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut skip = false;
    for line in text.lines() {
        let line = line.trim();
        let (alternative, line) = (line.starts_with('|'), line.trim_start_matches('|'));
        let Some(name) = line.strip_prefix("Depends:") else { continue };
        let name = name.trim();
        let wanted = ["linux-image-", "linux-modules-", "linux-binary-"].iter().any(|start| name.starts_with(start));
        if wanted && !skip {
            names.push(name.to_owned());
        }
        skip = alternative;
    }
    names
}

/// Downloads the packages and unpacks what the guest needs.
pub(crate) fn fetch(machine: &Machine) -> Result<()> {
    fill_folder(&folder(), |work, guest| fill(machine, work, guest))
}

fn fill(machine: &Machine, work: &Path, guest: &Path) -> Result<()> {
    let mut names = kernel_closure(kernel_package(machine))?;
    names.extend(["busybox-static".to_owned(), AGENT.to_owned()]);
    let files = unpacked(&names, work)?;
    let kernel = kernel_in(&files)?;
    copy(kernel, &guest.join("vmlinuz"))?;
    let program =
        |end: &str| files.iter().find(|file| file.ends_with(end)).with_context(|| format!("no {end} in the packages"));
    copy(program("bin/busybox")?, &guest.join("busybox"))?;
    copy(program("sbin/qemu-ga")?, &guest.join("qemu-ga"))?;
    take_modules(&files, &MODULES, &guest.join("modules"))?;
    let with_vmgenid = guest.join("vmlinuz-vmgenid");
    match vmgenid_kernel_package(machine) {
        Some(package) => copy(kernel_in(&unpacked(&kernel_closure(package)?, &work.join("vmgenid"))?)?, &with_vmgenid)?,
        None => copy(kernel, &with_vmgenid)?,
    }
    let contents = guest.join(CONTENTS);
    std::fs::write(&contents, MODULES.join("\n")).with_context(|| format!("writing {}", contents.display()))
}

/// The kernel among the files of its packages.
fn kernel_in(files: &[PathBuf]) -> Result<&PathBuf> {
    let is_kernel =
        |file: &Path| file.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("vmlinuz-"));
    files.iter().find(|file| is_kernel(file)).context("the kernel package has no vmlinuz")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_dependencies_that_carry_a_kernel_are_followed() {
        let text = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-1-cloud-amd64\n  Depends: kmod\n \
                    |Depends: linux-image-a\n  Depends: linux-image-b\n  Suggests: linux-image-c\n";
        assert_eq!(kernel_dependencies(text), ["linux-image-6.1.0-1-cloud-amd64", "linux-image-a"]);
    }
}
