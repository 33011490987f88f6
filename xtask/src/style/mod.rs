//! `cargo xtask style`: the rules of CONTRIBUTING.md that a program can check.
//!
//! Law: each rule holds for every file, without exceptions. One place that breaks one is a failure.

mod rules;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::{imports, messages, shell};
use rules::{Found, Page, Rule, Source};

/// Crates whose texts are a program's, so that they may name its options: all others are libraries.
const PROGRAMS: [&str; 5] = ["bench", "console", "demo", "limosa", "testkit"];

/// Most places of a rule that a check prints.
const SHOWN: usize = 30;

/// `cargo xtask style [RULE...]`: checks every rule, or lists the places that break these.
///
/// # Errors
/// A rule is broken, or there is no rule of this name.
pub(crate) fn run(wanted: &[String]) -> Result<()> {
    let rules = rules()?;
    if wanted.is_empty() {
        checked(&rules)?;
        println!("style: {} rules are kept", rules.len());
        return Ok(());
    }
    for name in wanted {
        let Some(Rule { name, places }) = rules.iter().find(|rule| rule.name == name) else {
            let known: Vec<&str> = rules.iter().map(|rule| rule.name).collect();
            bail!("no rule `{name}`; the rules are: {}", known.join("; "));
        };
        places.iter().for_each(|place| println!("{place}"));
        println!("{name}: {}", places.len());
    }
    Ok(())
}

/// Checks every rule, for `cargo xtask test`.
///
/// # Errors
/// A rule is broken.
pub(crate) fn check() -> Result<()> {
    checked(&rules()?)
}

/// Prints the places that break a rule.
///
/// # Errors
/// There is one.
fn checked(rules: &[Rule]) -> Result<()> {
    let broken: Vec<&Rule> = rules.iter().filter(|rule| !rule.places.is_empty()).collect();
    broken.iter().flat_map(|rule| report(rule)).for_each(|line| println!("{line}"));
    if !broken.is_empty() {
        let numbers: Vec<String> = broken.iter().map(|rule| format!("{}: {}", rule.name, rule.places.len())).collect();
        bail!("broken rules: {}", numbers.join("; "));
    }
    Ok(())
}

/// The lines about a broken rule: its first places, and the command that lists all if there are more.
fn report(rule: &Rule) -> Vec<String> {
    let Rule { name, places } = rule;
    let mut lines = vec![format!("{name}: {}", places.len())];
    lines.extend(places.iter().take(SHOWN).map(|place| format!("  {place}")));
    if places.len() > SHOWN {
        lines.push(format!("  ...; `cargo xtask style \"{name}\"` lists all"));
    }
    lines
}

/// Every rule, with the places that break it.
fn rules() -> Result<Vec<Rule>> {
    let root = shell::workspace();
    let mut found = Found::default();
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
    let mut rules = found.by_rule();
    rules.push(Rule { name: "circles of more than three files", places: imports::large_circles()? });
    Ok(rules)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(name: &'static str, places: usize) -> Rule {
        Rule { name, places: (1..=places).map(|line| format!("a.rs:{line}")).collect() }
    }

    #[test]
    fn one_place_that_breaks_a_rule_fails() {
        assert!(checked(&[rule("words", 0), rule("circles", 0)]).is_ok());
        let error = checked(&[rule("words", 0), rule("circles", 1)]).unwrap_err().to_string();
        assert!(error.contains("circles: 1") && !error.contains("words"), "{error}");
    }

    #[test]
    fn a_report_has_the_first_places_and_says_how_to_list_all() {
        assert_eq!(report(&rule("words", 2)), ["words: 2", "  a.rs:1", "  a.rs:2"]);
        assert_eq!(report(&rule("words", SHOWN)).len(), 1 + SHOWN);
        let long = report(&rule("words", SHOWN + 1));
        assert_eq!(long.len(), 1 + SHOWN + 1);
        assert!(long.last().unwrap().contains("cargo xtask style \"words\""), "{long:?}");
    }

    #[test]
    fn a_rule_that_does_not_exist_is_an_error() {
        assert!(run(&["no such rule".to_owned()]).is_err());
    }
}
