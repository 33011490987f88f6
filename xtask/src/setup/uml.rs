//! User-mode Linux: the distribution's kernel that runs as a process, and the modules of the devices that it is given
//! over vhost-user, unpacked (never installed) into a cache folder. Its busybox is the other Linux guest's.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};

use super::packages::{copy, fill_folder, take_modules, unpacked};
use crate::{program, shell};

const PACKAGE: &str = "user-mode-linux";

/// The modules a guest may load, by file name without the extension; `virtio_uml` itself is built in.
const MODULES: [&str; 2] = ["virtio_balloon", "virtio_blk"];

/// The library that is preloaded.
const LIBRARY: &str = "libxstate.so";

/// The directory in which limosa-testkit expects `linux.uml`, [`LIBRARY`] and `modules/NAME.ko`.
fn folder() -> PathBuf {
    shell::workspace().join("target/guest/uml")
}

/// Whether it is wanted, and not there.
pub(crate) fn is_missing() -> bool {
    let is_complete = || ["linux.uml", LIBRARY].iter().all(|name| folder().join(name).is_file());
    !super::is_skipped("LIMOSA_SKIP_UML") && !is_complete()
}

/// Builds the library that the guest needs on processors with many registers, and puts it beside the kernel.
pub(crate) fn build_library() -> Result<()> {
    let built = program::build_library("limosa-uml-xstate")?;
    copy(&built, &folder().join(LIBRARY))
}

/// Whether apt has a list that names it.
pub(crate) fn package_is_known() -> bool {
    shell::output(Command::new("apt-cache").args(["show", PACKAGE])).is_ok_and(|text| !text.is_empty())
}

/// Downloads the package and unpacks what the guest needs.
pub(crate) fn fetch() -> Result<()> {
    fill_folder(&folder(), |work, guest| {
        let files = unpacked(&BTreeSet::from([PACKAGE.to_owned()]), work)?;
        take_modules(&files, &MODULES, &guest.join("modules"))?;
        let kernel = files.iter().find(|file| file.ends_with("bin/linux.uml"));
        copy(kernel.with_context(|| format!("{PACKAGE} has no linux.uml"))?, &guest.join("linux.uml"))
    })
}
