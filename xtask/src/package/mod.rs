//! `cargo xtask package`: packages for machines without Rust. For Debian, for systems with RPM, and a static program.
//!
//! Law: the same commit gives the same bytes, wherever and whenever it is built: paths, times, users and orders of
//! files are those of the commit.

pub(crate) mod check;
mod dependencies;
mod emulated;
mod target;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::{dist, shell};
use target::Target;

/// The version of glibc that packages ask for (`crates/limosa/Cargo.toml`): that of the oldest systems that are kept
/// up.
const GLIBC: (u32, u32) = (2, 34);

/// The programs that make packages, and their versions.
const DEBIAN_PACKAGER: (&str, &str) = ("cargo-deb", "3.8.0");
const RPM_PACKAGER: (&str, &str) = ("cargo-generate-rpm", "0.21.1");

/// Makes the packages of the processors that are named; of this machine's own, if none is.
pub(crate) fn run(processors: &[String]) -> Result<()> {
    let folder = folder();
    let mut packages = make(processors, &folder)?;
    packages.push(release_notes(&folder)?);
    for path in &packages {
        let size = fs::metadata(path).with_context(|| path.display().to_string())?.len();
        println!("{:>6.1} MiB  {}", dist::mebibytes(size), path.display());
    }
    println!("package: {} files in {}", packages.len(), folder.display());
    Ok(())
}

fn folder() -> PathBuf {
    shell::workspace().join("target/packages")
}

/// Makes them into a folder, and returns their paths.
fn make(processors: &[String], folder: &Path) -> Result<Vec<PathBuf>> {
    let own = target::ALL.first().context("no target")?;
    for processor in processors {
        if !target::ALL.iter().any(|target| target.processor == processor) {
            bail!("no packages for {processor}: x86_64 and aarch64 have some");
        }
    }
    let wanted = |target: &&Target| {
        if processors.is_empty() {
            target.processor == own.processor
        } else {
            processors.iter().any(|processor| target.processor == processor)
        }
    };
    let builds = folder.join("build");
    // It prints the pages of all.
    let printer = own.build(&builds)?;
    let mut packages = Vec::new();
    for target in target::ALL.iter().filter(wanted) {
        let built = if target == own { printer.clone() } else { target.build(&builds)? };
        let shipped = dist::split(&built, &builds.join(target.triple).join("dist"), target.objcopy)?;
        let components = dependencies::components("limosa", target.triple)?;
        let usr = folder.join("tree/usr");
        tree::fill(&usr, &shipped.program, &printer, &components)?;
        if target.is_static {
            check_static(&shipped.program)?;
            packages.push(tarball(*target, folder)?);
        } else {
            check_glibc(&shipped.program)?;
            packages.push(debian(*target, folder)?);
            packages.push(rpm(*target, folder)?);
        }
    }
    fs::remove_dir_all(folder.join("tree")).context("removing the tree")?;
    Ok(packages)
}

fn debian(target: Target, folder: &Path) -> Result<PathBuf> {
    let path = folder.join(format!("limosa_{}-1_{}.deb", version(), target.debian));
    let mut packager = packager(DEBIAN_PACKAGER, folder)?;
    // It warns that it builds nothing.
    packager.args(["--quiet", "--package", "limosa", "--no-build", "--no-strip", "--target", target.triple]);
    shell::run(packager.arg("--output").arg(&path))?;
    Ok(path)
}

fn rpm(target: Target, folder: &Path) -> Result<PathBuf> {
    let path = folder.join(format!("limosa-{}-1.{}.rpm", version(), target.processor));
    let mut packager = packager(RPM_PACKAGER, folder)?;
    packager.args(["--package", "crates/limosa", "--arch", target.processor, "--auto-req", "disabled", "--output"]);
    shell::run(packager.arg(&path))?;
    Ok(path)
}

/// The tree below `/usr`, in a folder with the package's name.
fn tarball(target: Target, folder: &Path) -> Result<PathBuf> {
    let name = format!("limosa-{}-{}", version(), target.triple);
    let path = folder.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.args(["--create", "--gzip", "--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--format=gnu"]);
    // gzip would write the time.
    tar.env("GZIP", "-9n").arg(format!("--mtime=@{}", source_date()?)).arg(format!("--transform=s,^usr,{name},S"));
    shell::run(tar.arg("--file").arg(&path).arg("--directory").arg(folder.join("tree")).arg("usr"))?;
    Ok(path)
}

/// Writes down what CHANGELOG.md says of this version.
fn release_notes(folder: &Path) -> Result<PathBuf> {
    let changelog = fs::read_to_string(shell::workspace().join("CHANGELOG.md")).context("CHANGELOG.md")?;
    let section = changes(&changelog, version()).with_context(|| format!("CHANGELOG.md has no {}", version()))?;
    let path = folder.join(format!("limosa-{}-release-notes.md", version()));
    fs::write(&path, format!("# limosa {}\n\n{section}\n", version())).with_context(|| path.display().to_string())?;
    Ok(path)
}

/// The section of a version; of what is not released, until it is the section of a version.
fn changes<'a>(changelog: &'a str, version: &str) -> Option<&'a str> {
    let section = |wanted: &str| {
        let sections = changelog.split("\n## ").skip(1);
        sections.filter_map(|section| section.split_once('\n')).find(|(title, _)| {
            // A date may follow.
            title.split_whitespace().next() == Some(wanted)
        })
    };
    section(version).or_else(|| section("Unreleased")).map(|(_, text)| text.trim())
}

/// The version of all crates.
const fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// The second of the commit, since 1970.
fn source_date() -> Result<String> {
    let mut git = Command::new("git");
    git.current_dir(shell::workspace()).args(["log", "-1", "--format=%ct"]);
    Ok(shell::output(&mut git).context("the time of the commit")?.trim().to_owned())
}

/// A program that makes packages, installed beside them on first use.
fn packager((name, version): (&str, &str), folder: &Path) -> Result<Command> {
    let tools = folder.join("tools");
    let program = tools.join("bin").join(name);
    let is_there = || shell::output(Command::new(&program).arg("--version")).is_ok_and(|said| said.contains(version));
    if !is_there() {
        let mut install = Command::new("cargo");
        install.args(["install", "--locked", name, "--version", version, "--root"]).arg(&tools);
        shell::run(install.arg("--target-dir").arg(folder.join("build")))?;
    }
    let mut packager = Command::new(program);
    packager.current_dir(shell::workspace()).env("SOURCE_DATE_EPOCH", source_date()?);
    Ok(packager)
}

/// Fails if a program needs a loader or a library.
fn check_static(program: &Path) -> Result<()> {
    let parts = shell::output(Command::new("readelf").args(["--program-headers", "--dynamic", "--wide"]).arg(program))?;
    if ["INTERP", "(NEEDED)"].iter().any(|part| parts.contains(part)) {
        bail!("{} is not static:\n{parts}", program.display());
    }
    Ok(())
}

/// Fails if a program needs a newer glibc than its package says.
fn check_glibc(program: &Path) -> Result<()> {
    let symbols = shell::output(Command::new("readelf").args(["--dyn-syms", "--wide"]).arg(program))?;
    let newest = newest_glibc(&symbols).with_context(|| format!("{} needs no glibc", program.display()))?;
    if newest > GLIBC {
        let ((major, minor), (most_major, most_minor)) = (newest, GLIBC);
        bail!(
            "the program needs glibc {major}.{minor}, and its packages are for {most_major}.{most_minor} and newer: \
             build them on an older system"
        );
    }
    Ok(())
}

/// The newest version of glibc that a symbol has, in what readelf prints.
fn newest_glibc(symbols: &str) -> Option<(u32, u32)> {
    let version = |text: &str| {
        let mut numbers = text.split(|c: char| c != '.' && !c.is_ascii_digit()).next()?.split('.');
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    };
    // A program does without a weak symbol.
    let needed = symbols.lines().filter(|line| !line.contains(" WEAK "));
    needed.filter_map(|line| version(line.split_once("@GLIBC_")?.1)).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_glibc_that_a_program_cannot_do_without_is_found() {
        let symbols = "\
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND memcpy@GLIBC_2.14 (2)
     2: 0000000000000000     0 FUNC    WEAK   DEFAULT  UND gnu_get_libc_version@GLIBC_2.39 (3)
     3: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND __libc_start_main@GLIBC_2.34 (4)
     4: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND getrandom@GLIBC_2.2.5 (5)
     5: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND _Unwind_Resume@GCC_3.0 (6)";
        assert_eq!(newest_glibc(symbols), Some((2, 34)));
        assert_eq!(newest_glibc("  Num:    Value  Size Type"), None);
    }

    #[test]
    fn release_notes_are_the_section_of_the_version_or_of_what_is_not_released() {
        let log = "# Changelog\n\n## Unreleased\n\n- new\n\n## 0.2.0 (2027-01-01)\n\n### A\n\n- second\n\n## 0.1.0\n\n- first\n";
        assert_eq!(changes(log, "0.2.0"), Some("### A\n\n- second"));
        assert_eq!(changes(log, "0.1.0"), Some("- first"));
        assert_eq!(changes(log, "0.3.0"), Some("- new"));
        assert_eq!(changes("# Changelog\n", "0.3.0"), None);
    }

    #[test]
    fn the_packages_ask_for_the_glibc_that_is_checked() {
        let manifest = fs::read_to_string(shell::workspace().join("crates/limosa/Cargo.toml")).unwrap();
        let (major, minor) = GLIBC;
        assert!(manifest.contains(&format!("libc6 (>= {major}.{minor})")), "{manifest}");
        assert!(manifest.contains(&format!("glibc = \">= {major}.{minor}\"")), "{manifest}");
    }
}
