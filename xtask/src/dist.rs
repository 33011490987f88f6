//! `cargo xtask dist`: the program as it is shipped, stripped, and its debug information beside it.
//!
//! cargo can strip a program, or split debug information off it, but not both: with `split-debuginfo`, line tables and
//! symbols stay in the program, and `strip`, which the release profile has, deletes them. So this builds without
//! `strip`, and objcopy takes the program apart.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::{program, shell};

/// Makes `target/dist/limosa` and `target/dist/limosa.debug`.
pub(crate) fn run() -> Result<()> {
    let built = program::build_unstripped()?;
    let folder = built.ancestors().nth(2).context("a program in no target folder")?.join("dist");
    let shipped = split(&built, &folder, "objcopy")?;
    for (what, path) in [("built", &built), ("shipped", &shipped.program), ("debug information", &shipped.debug)] {
        let size = fs::metadata(path).with_context(|| path.display().to_string())?.len();
        println!("{what:<18} {:>6.1} MiB  {}", mebibytes(size), path.display());
    }
    println!("dist: {}", folder.display());
    Ok(())
}

/// A stripped program, and what was taken from it.
#[derive(Debug)]
pub(crate) struct Shipped {
    pub(crate) program: PathBuf,
    debug: PathBuf,
}

/// Takes a program apart into `folder`, with the `objcopy` for its processor. The stripped one names the other
/// (`.gnu_debuglink`), which debuggers and Rust's own backtraces look for beside it and under `/usr/lib/debug`.
pub(crate) fn split(built: &Path, folder: &Path, objcopy: &str) -> Result<Shipped> {
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let name = built.file_name().context("a program without a name")?;
    let program = folder.join(name);
    let mut debug = name.to_owned();
    debug.push(".debug");
    let debug = folder.join(debug);
    let objcopy = || Command::new(objcopy);
    let only_debug = ["--only-keep-debug", "--compress-debug-sections=zlib"];
    shell::run(objcopy().args(only_debug).args([built, &debug]))?;
    let mut link = std::ffi::OsString::from("--add-gnu-debuglink=");
    link.push(&debug);
    shell::run(objcopy().arg("--strip-all").arg(link).args([built, &program]))?;
    // Debug information is not a program.
    fs::set_permissions(&debug, std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .with_context(|| debug.display().to_string())?;
    Ok(Shipped { program, debug })
}

#[expect(clippy::cast_precision_loss, reason = "a size for people")]
pub(crate) fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / 1_048_576.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stripped_program_runs_and_its_lines_are_found_in_the_debug_file() {
        let folder = limosa_testkit::scratch().unwrap();
        let own = std::env::current_exe().unwrap();
        let shipped = split(&own, folder.path(), "objcopy").unwrap();
        let size = |path: &Path| fs::metadata(path).unwrap().len();
        assert!(size(&shipped.program) < size(&own) / 2, "{} of {}", size(&shipped.program), size(&own));
        let listed = shell::output(Command::new(&shipped.program).arg("--list")).unwrap();
        assert!(listed.contains("a_stripped_program_runs"), "{listed}");
        let sections = |path: &Path| shell::output(Command::new("readelf").arg("-SW").arg(path)).unwrap();
        let (program, debug) = (sections(&shipped.program), sections(&shipped.debug));
        assert!(!program.contains(".debug_line") && !program.contains(".symtab"), "{program}");
        assert!(program.contains(".gnu_debuglink"), "{program}");
        assert!(debug.contains(".debug_line") && debug.contains(".symtab"), "{debug}");
        // The address of a function of this file, from the program that was not stripped.
        let symbols = shell::output(Command::new("nm").arg(&own)).unwrap();
        let line = symbols.lines().find(|line| line.contains("xtask4dist5split") || line.contains("4dist5split"));
        let address = line.and_then(|line| line.split(' ').next()).expect("a symbol of this file");
        let found = shell::output(Command::new("addr2line").arg("-e").arg(&shipped.program).arg(address)).unwrap();
        assert!(found.contains("dist.rs:"), "{found}");
    }
}
