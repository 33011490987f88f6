//! Other series of QEMU than the machine's own: the oldest one that is kept up and the newest, from other suites of the
//! distribution's archive.
//!
//! Law: they are unpacked (never installed) into a cache folder, libraries and firmware included, and run through their
//! own loader, so the machine's own packages do not change. Mirror and keys are those of the machine.

use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::packages::{bootstrap, fill_folder};
use super::plan::Machine;
use crate::shell;

/// A series of QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Series {
    /// Its name: that of the folder below `target/qemu`, and what `--qemu` calls it.
    pub(crate) name: &'static str,
    /// The suites that have it.
    debian: &'static str,
    ubuntu: &'static str,
}

/// Those that tests name. What the newest one is depends on the day. Packages of testing can be installed, those of
/// unstable not always.
pub(crate) const ALL: [Series; 2] = [
    Series { name: "oldest", debian: "bookworm", ubuntu: "noble" },
    Series { name: "newest", debian: "testing", ubuntu: "devel" },
];

/// Programs that tests start by name.
const PROGRAMS: [&str; 4] = ["qemu-system-x86_64", "qemu-img", "qemu-io", "qemu-nbd"];

const PACKAGES: &str = "qemu-system-x86,qemu-utils";
const LIBRARIES: [&str; 2] = ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];
const FIRMWARE: [&str; 3] = ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"];

impl Series {
    fn folder(self) -> PathBuf {
        shell::workspace().join("target/qemu").join(self.name)
    }

    fn is_complete(self) -> bool {
        PROGRAMS.iter().all(|program| self.folder().join("bin").join(program).is_file())
    }

    fn fetch(self, machine: &Machine) -> Result<()> {
        let suite = if machine.is_ubuntu() { self.ubuntu } else { self.debian };
        let root = self.folder().join("root");
        fill_folder(&self.folder(), |work, filled| {
            let options = ["--variant=extract", &format!("--include={PACKAGES}")];
            bootstrap(machine, suite, &options, work, &filled.join("root"))?;
            let programs = filled.join("bin");
            std::fs::create_dir_all(&programs).with_context(|| format!("creating {}", programs.display()))?;
            let loader = loader(&filled.join("root"))?;
            for program in PROGRAMS {
                let path = programs.join(program);
                std::fs::write(&path, starter(&root, &loader, program))
                    .and_then(|()| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)))
                    .with_context(|| format!("writing {}", path.display()))?;
            }
            Ok(())
        })
    }
}

/// The place of the loader in a root.
fn loader(root: &Path) -> Result<PathBuf> {
    let mut places = LIBRARIES.iter().map(|folder| Path::new(folder).join("ld-linux-x86-64.so.2"));
    places.find(|place| root.join(place).is_file()).context("the packages have no loader")
}

/// A script that becomes a program of a root.
fn starter(root: &Path, loader: &Path, program: &str) -> String {
    let at = |path: &Path| shell::quoted(&root.join(path).to_string_lossy());
    let libraries = LIBRARIES.map(|folder| root.join(folder).to_string_lossy().into_owned()).join(":");
    let mut script = format!(
        "#!/bin/sh\nexport QEMU_MODULE_DIR={}\nexec {} --library-path {} --argv0 {program} {}",
        at(Path::new("usr/lib/x86_64-linux-gnu/qemu")),
        at(loader),
        shell::quoted(&libraries),
        at(&Path::new("usr/bin").join(program))
    );
    if program == "qemu-system-x86_64" {
        for folder in FIRMWARE {
            // A string takes all that is written.
            let _ = write!(script, " -L {}", at(Path::new(folder)));
        }
    }
    script + " \"$@\"\n"
}

/// Those that a user has not said to do without.
pub(crate) fn wanted() -> &'static [Series] {
    if super::is_skipped("LIMOSA_SKIP_SERIES") { &[] } else { &ALL }
}

/// Whether some of these are missing.
pub(crate) fn are_missing(wanted: &[Series]) -> bool {
    !wanted.iter().all(|series| series.is_complete())
}

/// Fetches those of these that are missing.
pub(crate) fn fetch(machine: &Machine, wanted: &[Series]) -> Result<()> {
    wanted.iter().filter(|series| !series.is_complete()).try_for_each(|series| series.fetch(machine))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_started_by_its_own_loader() {
        let script = starter(Path::new("/a b"), Path::new("lib/ld.so"), "qemu-system-x86_64");
        assert!(script.contains("\nexec '/a b/lib/ld.so' --library-path '/a b/lib/x86_64-linux-gnu:/a b/usr/lib"));
        assert!(script.contains(" -L '/a b/usr/share/qemu' ") && script.ends_with(" \"$@\"\n"), "{script}");
        assert!(!starter(Path::new("/a"), Path::new("ld.so"), "qemu-img").contains(" -L "));
    }
}
