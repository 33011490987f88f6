//! `cargo xtask style`: the rules of CONTRIBUTING.md that a program can check.
//!
//! Law: each rule holds for every file. What breaks one is counted; the numbers are in `xtask/ratchet.txt` and only go
//! down ([`ratchet`]).

mod rules;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::ratchet::{self, Count};
use crate::{imports, messages, shell};
use rules::{Page, Source};

/// Crates whose texts are a program's, so that they may name its options: all others are libraries.
const PROGRAMS: [&str; 5] = ["bench", "console", "demo", "limosa", "testkit"];

/// `cargo xtask style [--lower|KIND...]`: compares the numbers, lowers them, or lists what is counted.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let counts = counts()?;
    match arguments {
        [] => {
            ratchet::check(&counts)?;
            println!("style: {} places break a rule, as recorded", total(&counts));
        }
        [lower] if lower == "--lower" => {
            ratchet::lower(&counts)?;
            println!("style: {} places break a rule; recorded", total(&counts));
        }
        kinds => {
            for count in counts.iter().filter(|count| kinds.contains(&count.kind)) {
                count.places.iter().for_each(|place| println!("{place}"));
                println!("{}: {}", count.kind, count.places.len());
            }
        }
    }
    Ok(())
}

/// Compares the numbers, for `cargo xtask test`.
pub(crate) fn check() -> Result<()> {
    ratchet::check(&counts()?)
}

fn total(counts: &[Count]) -> usize {
    counts.iter().map(|count| count.places.len()).sum()
}

/// Every rule, with the places that break it.
fn counts() -> Result<Vec<Count>> {
    let root = shell::workspace();
    let mut counts = imports::counts()?;
    let mut found = rules::Found::default();
    for folder in ["crates", "xtask", "fuzz"] {
        for path in files(&root.join(folder), "rs")? {
            let source = Source { path: &shown(&path), text: &text(&path)?, program: is_program(&root, &path) };
            found.source(&source).with_context(|| format!("cannot parse {}", path.display()))?;
        }
    }
    for path in pages(&root)? {
        found.page(&Page { path: &shown(&path), text: &text(&path)? });
    }
    for path in files(&root.join("docs/api"), "txt")? {
        found.api(&Page { path: &shown(&path), text: &text(&path)? });
    }
    counts.extend(found.counts());
    Ok(counts)
}

/// The pages that are kept up to date: not the changelog and the dated records of benchmarks, which describe the past.
fn pages(root: &Path) -> Result<Vec<PathBuf>> {
    let mut pages: Vec<PathBuf> =
        ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(|name| root.join(name)).into();
    for folder in ["docs", "crates", "fuzz"] {
        pages.extend(files(&root.join(folder), "md")?);
    }
    let records = root.join("docs/benchmarks");
    pages.retain(|page| !page.starts_with(&records) || page.ends_with("README.md"));
    Ok(pages)
}

/// The files with this extension below `folder`, in order.
fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            // What cargo builds for the fuzz targets.
            if !path.ends_with("target") {
                found.extend(files(&path, extension)?);
            }
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn text(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| path.display().to_string())
}

fn shown(path: &Path) -> String {
    path.strip_prefix(shell::workspace()).unwrap_or(path).display().to_string()
}

/// Whether a source file is a program's, a test's or an example's: only sources of libraries are left.
fn is_program(root: &Path, path: &Path) -> bool {
    let inside = path.strip_prefix(root.join("crates")).unwrap_or(Path::new(""));
    let mut parts = inside.iter().filter_map(|part| part.to_str());
    let (name, folder) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    folder != "src" || PROGRAMS.contains(&name) || messages::is_test_file(path)
}
