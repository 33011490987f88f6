//! The crates that are compiled into the program: a bill of materials of them, and the texts of their licences.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::shell;

/// A crate of the program.
#[derive(Debug)]
pub(super) struct Component {
    name: String,
    version: String,
    /// An SPDX expression.
    license: Option<String>,
    /// SHA-256 of its package; none for those of this workspace.
    checksum: Option<String>,
    folder: PathBuf,
    /// Their numbers in the list.
    dependencies: BTreeSet<usize>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    manifest_path: PathBuf,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<Kind>,
}

#[derive(Deserialize)]
struct Kind {
    /// `None`: a normal one, which is neither for building nor for tests.
    kind: Option<String>,
}

/// Returns the crates that `program` has for a target, itself first.
pub(super) fn components(program: &str, target: &str) -> Result<Vec<Component>> {
    let mut command = Command::new("cargo");
    command.current_dir(shell::workspace()).args(["metadata", "--locked", "--format-version", "1"]);
    command.args(["--filter-platform", target]);
    let metadata: Metadata = serde_json::from_str(&shell::output(&mut command)?).context("cargo metadata")?;
    let checksums = checksums(&fs::read_to_string(shell::workspace().join("Cargo.lock")).context("Cargo.lock")?);
    let packages: BTreeMap<&str, &Package> =
        metadata.packages.iter().map(|package| (package.id.as_str(), package)).collect();
    let nodes: BTreeMap<&str, &Node> = metadata.resolve.nodes.iter().map(|node| (node.id.as_str(), node)).collect();
    let first = metadata.packages.iter().find(|package| package.name == program).context("the program's package")?;
    let mut numbers = BTreeMap::from([(first.id.as_str(), 0)]);
    let mut order = vec![first.id.as_str()];
    let mut components = Vec::new();
    while let Some(&id) = order.get(components.len()) {
        let (package, node) = packages.get(id).zip(nodes.get(id)).with_context(|| format!("cargo metadata of {id}"))?;
        let normal = node.deps.iter().filter(|dependency| dependency.dep_kinds.iter().any(|kind| kind.kind.is_none()));
        let mut dependencies = BTreeSet::new();
        for dependency in normal {
            let number = *numbers.entry(&dependency.pkg).or_insert_with(|| {
                order.push(&dependency.pkg);
                order.len() - 1
            });
            dependencies.insert(number);
        }
        components.push(Component {
            name: package.name.clone(),
            version: package.version.clone(),
            license: package.license.clone(),
            checksum: checksums.get(&(package.name.clone(), package.version.clone())).cloned(),
            folder: package.manifest_path.parent().unwrap_or(Path::new("")).to_owned(),
            dependencies,
        });
    }
    Ok(components)
}

/// The checksum of each package of a lock file that has one, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let field = |package: &str, name: &str| {
        let line = package.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \""));
        line.map(|value| value.trim_end_matches('"').to_owned())
    };
    let package = |text: &str| Some(((field(text, "name")?, field(text, "version")?), field(text, "checksum")?));
    lock.split("[[package]]").filter_map(package).collect()
}

/// The bill of materials, in the form `CycloneDX` 1.5.
pub(super) fn bill_of_materials(components: &[Component]) -> Value {
    let url = |component: &Component| format!("pkg:cargo/{}@{}", component.name, component.version);
    let described = |component: &Component| {
        let mut described = json!({
            "type": "library",
            "bom-ref": url(component),
            "name": component.name,
            "version": component.version,
            "purl": url(component),
        });
        if let Some(license) = &component.license {
            // Older manifests have a slash, where SPDX has OR.
            described["licenses"] = json!([{ "expression": license.replace('/', " OR ") }]);
        }
        if let Some(checksum) = &component.checksum {
            described["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
        }
        described
    };
    let mut all = components.iter().map(described);
    let mut program = all.next().unwrap_or_default();
    program["type"] = "application".into();
    let dependencies = components.iter().map(|component| {
        let on: Vec<_> = component.dependencies.iter().filter_map(|&number| components.get(number)).map(url).collect();
        json!({ "ref": url(component), "dependsOn": on })
    });
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": program },
        "components": all.collect::<Vec<_>>(),
        "dependencies": dependencies.collect::<Vec<_>>(),
    })
}

/// The texts of all licences, each once, with the crates that have it.
pub(super) fn licences(components: &[Component]) -> Result<String> {
    let mut texts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut all = String::from("The program has code of these crates:\n\n");
    for component in components {
        let name = format!("{} {}", component.name, component.version);
        // A string takes all that is written.
        let _ = writeln!(all, "  {name}: {}", component.license.as_deref().unwrap_or("see below"));
        for path in licence_files(&component.folder)? {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            texts.entry(text.trim().to_owned()).or_default().insert(name.clone());
        }
    }
    for (text, of) in &texts {
        let line = "-".repeat(80);
        let of = of.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        let _ = write!(all, "\n{line}\n{of}:\n\n{text}\n");
    }
    Ok(all)
}

/// The licence files of a crate, by name.
fn licence_files(folder: &Path) -> Result<Vec<PathBuf>> {
    const NAMES: [&str; 5] = ["license", "licence", "copying", "copyright", "notice"];
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry.with_context(|| folder.display().to_string())?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        if path.is_file() && NAMES.iter().any(|start| name.starts_with(start)) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_crate_of_the_program_is_in_the_bill_with_its_licence_and_its_checksum() {
        let components = components("limosa", &shell::host().unwrap()).unwrap();
        let bill = bill_of_materials(&components);
        assert_eq!(bill["metadata"]["component"]["name"], "limosa");
        let listed = bill["components"].as_array().unwrap();
        let names: Vec<_> = listed.iter().filter_map(|component| component["name"].as_str()).collect();
        assert!(["limosa-image", "rustls", "zstd-sys"].iter().all(|name| names.contains(name)), "{names:?}");
        // What only tests need is not in the program.
        assert!(!["proptest", "limosa-testkit", "cc"].iter().any(|name| names.contains(name)), "{names:?}");
        for component in listed {
            let own = component["name"].as_str().unwrap().starts_with("limosa");
            assert_eq!(component["hashes"][0]["content"].as_str().map(str::len), (!own).then_some(64), "{component}");
            assert!(component["licenses"][0]["expression"].is_string(), "{component}");
        }
        let texts = licences(&components).unwrap();
        assert!(texts.contains("Permission is hereby granted") && texts.contains("\n  limosa "), "{texts}");
    }
}
