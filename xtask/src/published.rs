//! The crates that are published: which ones they are, and that their packages build.
//!
//! Law: what is built is what `cargo package` has put into a package, and nothing of the workspace. The packages become
//! members of a workspace of their own, so that they depend on each other and find dependencies checked already; `cargo
//! package` itself would build each of them from nothing, for three minutes.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde::Deserialize;

use crate::shell;

/// A crate that is published.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) name: String,
    pub(crate) version: String,
    /// It has a library.
    pub(crate) library: bool,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    /// Registries that take it; `None`: any.
    publish: Option<Vec<String>>,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
}

/// All of them, by name.
pub(crate) fn crates() -> Result<Vec<Published>> {
    let mut command = Command::new("cargo");
    command.current_dir(shell::workspace()).args(["metadata", "--no-deps", "--format-version", "1"]);
    let metadata: Metadata = serde_json::from_str(&shell::output(&mut command)?).context("cargo metadata")?;
    let published = metadata.packages.into_iter().filter(|package| package.publish.is_none());
    let mut crates: Vec<Published> = published
        .map(|package| Published {
            name: package.name,
            version: package.version,
            library: package.targets.iter().any(|target| target.kind.iter().any(|kind| kind == "lib")),
        })
        .collect();
    crates.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(crates)
}

/// Packages all of them, and checks what is in the packages.
pub(crate) fn package() -> Result<()> {
    let (root, crates) = (shell::workspace(), crates()?);
    let mut command = Command::new("cargo");
    // What is not committed is packaged, too: a change is tested before it is.
    command.current_dir(&root).args(["package", "--no-verify", "--allow-dirty"]);
    command.args(crates.iter().flat_map(|published| ["-p", &published.name]));
    shell::run(&mut command)?;
    let folder = unpack(&crates)?;
    let mut command = Command::new("cargo");
    command.current_dir(&folder).args(["check", "--workspace", "--all-features", "--lib", "--bins", "--examples"]);
    shell::run(command.arg("--target-dir").arg(root.join("target")))
}

/// Makes a workspace of the packages.
fn unpack(crates: &[Published]) -> Result<PathBuf> {
    let root = shell::workspace();
    let (packages, folder) = (root.join("target/package"), root.join("target/published"));
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
    }
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let mut manifest = String::from("[workspace]\nresolver = \"3\"\nmembers = [\"limosa*\"]\n\n[patch.crates-io]\n");
    for Published { name, version, .. } in crates {
        let file = packages.join(format!("{name}-{version}.crate"));
        // With the time of now (m): packages have a fixed one, by which cargo would take what it has checked before.
        shell::output(Command::new("tar").arg("-xzmf").arg(file).arg("-C").arg(&folder))?;
        writeln!(manifest, "{name} = {{ path = \"{name}-{version}\" }}")?;
    }
    // Dependencies that were checked for the workspace are good here, too, if they are checked alike.
    let workspace = fs::read_to_string(root.join("Cargo.toml")).context("Cargo.toml")?;
    let profiles = workspace.find("\n[profile.").and_then(|at| workspace.get(at..)).unwrap_or_default();
    fs::write(folder.join("Cargo.toml"), manifest + profiles).context("the packages' workspace")?;
    fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock")).context("Cargo.lock")?;
    Ok(folder)
}
