//! Series of QEMU that tests run VMs in: the machine's own, and an older and a newer one beside it.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::requirement::{require_qemu, skipped};

/// A series of QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Series {
    /// The QEMU in `PATH`.
    #[default]
    Installed,
    /// The oldest one that is kept up: 7.2.
    Oldest,
    /// The newest one of the distribution's archive.
    Newest,
}

impl Series {
    /// All, in their order.
    pub const ALL: [Self; 3] = [Self::Oldest, Self::Installed, Self::Newest];

    /// Returns its `qemu-system-x86_64`: a name in `PATH`, or a path.
    ///
    /// # Errors
    /// It is not there; the message names the command that fetches it.
    pub fn program(self) -> Result<PathBuf> {
        const PROGRAM: &str = "qemu-system-x86_64";
        let name = match self {
            Self::Installed => {
                require_qemu()?;
                return Ok(PROGRAM.into());
            }
            Self::Oldest => "oldest",
            Self::Newest => "newest",
        };
        let program = Self::folder().join(name).join("bin").join(PROGRAM);
        if !program.is_file() {
            bail!("no {}: run `cargo xtask setup` (or skip with LIMOSA_SKIP_SERIES=1)", program.display());
        }
        Ok(program)
    }

    /// The folder that `cargo xtask setup` fills.
    fn folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/qemu")
    }
}

/// Whether `LIMOSA_SKIP_SERIES=1` is set: then a test that needs other series of QEMU than the machine's own returns at
/// once, and is counted as skipped.
pub fn series_skipped() -> bool {
    skipped("LIMOSA_SKIP_SERIES")
}
