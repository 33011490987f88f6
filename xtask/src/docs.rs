//! Checks of the documentation's statements about this repository: links, paths, and the drawing of the crates.

#![cfg(test)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::shell;

/// Every page that people read, relative to the workspace.
fn pages() -> Vec<PathBuf> {
    let root = shell::workspace();
    let mut pages: Vec<PathBuf> = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "fuzz/README.md"]
        .into_iter()
        .map(PathBuf::from)
        .collect();
    for folder in ["docs", "docs/benchmarks"] {
        let entries = fs::read_dir(root.join(folder)).unwrap();
        let names = entries.map(|entry| Path::new(folder).join(entry.unwrap().file_name()));
        pages.extend(names.filter(|name| name.extension().is_some_and(|extension| extension == "md")));
    }
    pages
}

fn text(page: &Path) -> String {
    fs::read_to_string(shell::workspace().join(page)).unwrap_or_else(|error| panic!("{}: {error}", page.display()))
}

/// The anchors of a page, as GitHub makes them of its headings.
fn anchors(page: &Path) -> BTreeSet<String> {
    let anchor = |heading: &str| -> String {
        let kept = heading.trim().to_lowercase().replace(' ', "-");
        kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect()
    };
    text(page).lines().filter(|line| line.starts_with('#')).map(|line| anchor(line.trim_start_matches('#'))).collect()
}

/// The text between `open` and `close`, as often as it does on one line.
fn between<'t>(text: &'t str, open: &'t str, close: char) -> impl Iterator<Item = &'t str> {
    text.lines().flat_map(move |line| line.split(open).skip(1).filter_map(move |rest| Some(rest.split_once(close)?.0)))
}

#[test]
fn every_link_of_the_documentation_leads_to_a_file_and_a_heading() {
    let root = shell::workspace();
    let mut broken = Vec::new();
    for page in pages() {
        for link in between(&text(&page), "](", ')').filter(|link| !link.starts_with("http")) {
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() { page.clone() } else { page.parent().unwrap().join(path) };
            let found = root.join(&target).exists()
                && (anchor.is_empty()
                    || target.extension().is_none_or(|e| e != "md")
                    || anchors(&target).contains(anchor));
            if !found {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
}

/// All source files of the crates, relative to the workspace.
fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
}

#[test]
fn every_path_of_the_repository_that_the_documentation_names_exists() {
    let root = shell::workspace();
    let mut files = Vec::new();
    sources(&root.join("crates"), &mut files);
    let mut missing = Vec::new();
    // The changelog and the dated records describe the past.
    let dated = |page: &Path| {
        page.ends_with("CHANGELOG.md") || page.starts_with("docs/benchmarks") && !page.ends_with("README.md")
    };
    for page in pages().into_iter().filter(|page| !dated(page)) {
        for code in text(&page).split('`').skip(1).step_by(2) {
            let path =
                ["crates/", "docs/", "xtask/", "fuzz/", "contrib/"].iter().any(|folder| code.starts_with(folder));
            let source = code.ends_with(".rs");
            if code.contains(|c: char| c.is_whitespace() || c.is_uppercase()) || !(path || source) {
                continue;
            }
            // A full path is followed by names of files of the same crate.
            let found = root.join(code).exists() || !path && files.iter().any(|file| file.ends_with(code));
            if !found {
                missing.push(format!("{}: {code}", page.display()));
            }
        }
    }
    assert!(missing.is_empty(), "paths that do not exist:\n{}", missing.join("\n"));
}

/// The crates each crate is built on, as the manifests say, `limosa-` left out.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
    let output = Command::new(cargo).args(arguments).current_dir(shell::workspace()).output().unwrap();
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let short = |name: &serde_json::Value| name.as_str().unwrap().trim_start_matches("limosa-").to_owned();
    let ours = |package: &serde_json::Value| package["name"].as_str().unwrap().starts_with("limosa");
    let packages = metadata["packages"].as_array().unwrap().iter().filter(|package| ours(package));
    packages
        .map(|package| {
            let dependencies = package["dependencies"].as_array().unwrap().iter();
            let built_on = dependencies.filter(|one| one["kind"].is_null() && ours(one)).map(|one| short(&one["name"]));
            (short(&package["name"]), built_on.collect())
        })
        .collect()
}

/// Everything below a crate.
fn below(name: &str, all: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<String> {
    let direct = all[name].iter();
    direct.flat_map(|one| below(one, all).into_iter().chain([one.clone()])).collect()
}

#[test]
fn the_drawing_of_the_crates_has_the_arrows_of_their_manifests() {
    let all = dependencies();
    let mut wanted = BTreeSet::new();
    for (name, direct) in all.iter().filter(|(name, _)| *name != "testkit") {
        for one in direct.iter().filter(|one| *one != "testkit") {
            // An arrow that follows from others is left out.
            if !direct.iter().any(|other| other != one && below(other, &all).contains(one)) {
                wanted.insert((name.clone(), one.clone()));
            }
        }
    }
    let architecture = text(Path::new("ARCHITECTURE.md"));
    let drawing = architecture.split("graph TD").nth(1).unwrap().split("```").next().unwrap();
    let name = |node: &str| node.trim().split('[').next().unwrap().to_owned();
    let mut drawn = BTreeSet::new();
    for (from, to) in drawing.lines().filter_map(|line| line.split_once(" --> ")) {
        drawn.extend(to.split(" & ").map(|to| (name(from), name(to))));
    }
    assert_eq!(drawn, wanted, "left: ARCHITECTURE.md, right: the manifests");
}
