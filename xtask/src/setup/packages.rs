//! Packages that are unpacked and never installed: downloaded from the machine's own sources, into a cache folder or a
//! system in one.
//!
//! Law: the folder is complete or it is not there: it is filled under another name and renamed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::plan::Machine;
use super::sources;
use crate::shell;

/// Has `fill` fill a folder, which then takes the place of `place`. It is given another one to work in, too.
pub(super) fn fill_folder(place: &Path, fill: impl FnOnce(&Path, &Path) -> Result<()>) -> Result<()> {
    let parent = place.parent().context("the cache folder has no parent")?;
    std::fs::create_dir_all(parent).with_context(|| format!("creating {}", parent.display()))?;
    let mut name = place.file_name().context("the cache folder has no name")?.to_owned();
    name.push(format!(".{}", std::process::id()));
    let work = parent.join(name);
    let filled = work.join("filled");
    let result = std::fs::create_dir_all(&filled)
        .with_context(|| format!("creating {}", filled.display()))
        .and_then(|()| fill(&work, &filled))
        .and_then(|()| {
            if place.exists() {
                std::fs::remove_dir_all(place).with_context(|| format!("removing {}", place.display()))?;
            }
            std::fs::rename(&filled, place).with_context(|| format!("renaming to {}", place.display()))
        });
    let removed = std::fs::remove_dir_all(&work).with_context(|| format!("removing {}", work.display()));
    result.and(removed)
}

/// Downloads packages and unpacks them below `work`. Returns every regular file in them.
pub(super) fn unpacked(names: &BTreeSet<String>, work: &Path) -> Result<Vec<PathBuf>> {
    let (download, tree) = (work.join("download"), work.join("tree"));
    for path in [&download, &tree] {
        std::fs::create_dir_all(path).with_context(|| format!("creating {}", path.display()))?;
    }
    // As root apt would drop to a user that cannot write into our folder, warn, and do it as root after all.
    let user = ["-o", "APT::Sandbox::User=root"];
    shell::run(Command::new("apt-get").current_dir(&download).args(["-q", "download"]).args(user).args(names))?;
    for package in files_below(&download)? {
        shell::run(Command::new("dpkg-deb").arg("-x").arg(&package).arg(&tree))?;
    }
    files_below(&tree)
}

/// Puts those kernel modules that are among the files into a folder, unpacked.
pub(super) fn take_modules(files: &[PathBuf], wanted: &[&str], into: &Path) -> Result<()> {
    std::fs::create_dir_all(into).with_context(|| format!("creating {}", into.display()))?;
    for file in files {
        let Some(name) = file.file_name().and_then(|name| name.to_str()) else { continue };
        let Some((stem, extension)) = name.split_once(".ko") else { continue };
        if !wanted.contains(&stem) {
            continue;
        }
        let target = into.join(format!("{stem}.ko"));
        match extension {
            "" => copy(file, &target)?,
            ".xz" => unpack("xz", file, &target)?,
            ".zst" => unpack("zstd", file, &target)?,
            other => bail!("{}: a module in an unknown form ({other})", file.display()),
        }
    }
    Ok(())
}

fn unpack(program: &str, from: &Path, to: &Path) -> Result<()> {
    if shell::find_program(program).is_none() {
        bail!("{program} is needed to unpack the kernel's modules: install it and run this again");
    }
    let output =
        Command::new(program).arg("-dc").arg(from).output().with_context(|| format!("cannot start {program}"))?;
    if !output.status.success() {
        bail!("{program} cannot unpack {}", from.display());
    }
    std::fs::write(to, output.stdout).with_context(|| format!("writing {}", to.display()))
}

/// Copies a file with its permissions.
pub(super) fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::copy(from, to).with_context(|| format!("copying {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// Has mmdebstrap fill `root` from a suite of the machine's own mirror; `folder` is where its file of sources goes.
pub(crate) fn bootstrap(machine: &Machine, suite: &str, options: &[&str], folder: &Path, root: &Path) -> Result<()> {
    let (file, text) = sources::with_suite(&machine.sources, &machine.codename, suite)?;
    // The system keeps its name: one of ours would look as if a package had left it there.
    let list = folder.join("archive").with_extension(file.extension().context("a file of apt sources")?);
    std::fs::write(&list, text).with_context(|| format!("writing {}", list.display()))?;
    let mut bootstrap = Command::new("mmdebstrap");
    // The archive's list of a suite that has ended is past its date.
    bootstrap.args(["--aptopt=Acquire::Check-Valid-Until \"false\"", "--aptopt=Acquire::Retries \"3\""]);
    shell::run(bootstrap.args(options).arg(suite).arg(root).arg(list))
}

/// Every regular file below `folder`; symbolic links are not followed.
fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut open = vec![folder.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                open.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_could_not_be_filled_is_not_there_and_nothing_is_left_of_it() {
        let parent = std::env::temp_dir().join(format!("limosa-xtask-packages-{}", std::process::id()));
        let place = parent.join("cache");
        assert!(fill_folder(&place, |_, _| bail!("no")).is_err());
        assert_eq!(std::fs::read_dir(&parent).unwrap().count(), 0);
        for content in ["one", "two"] {
            fill_folder(&place, |_, filled| Ok(std::fs::write(filled.join("file"), content)?)).unwrap();
            assert_eq!(std::fs::read_to_string(place.join("file")).unwrap(), content);
        }
        assert_eq!(std::fs::read_dir(&parent).unwrap().count(), 1);
        std::fs::remove_dir_all(&parent).unwrap();
    }
}
