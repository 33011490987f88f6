//! Numbers that may only go down: how often the sources break a rule that they do not keep everywhere yet.
//!
//! Law: `xtask/ratchet.txt` has a line for each rule that is broken, with its number. More is a failure, and so is less
//! as long as the number has not been lowered, so that what was mended stays so. A rule without a line is kept
//! everywhere. There are no exceptions by file.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

use crate::shell;

/// Places of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Count {
    /// The rule that is broken: a line of `xtask/ratchet.txt` begins with it.
    pub(crate) kind: String,
    /// Where, one line each.
    pub(crate) places: Vec<String>,
}

/// Most places of a kind that are shown: among more, the new ones would not be seen.
const SHOWN: usize = 30;

fn file() -> PathBuf {
    shell::workspace().join("xtask/ratchet.txt")
}

/// Compares the counts with the recorded numbers.
///
/// # Errors
/// The kinds with more places, or fewer.
pub(crate) fn check(counts: &[Count]) -> Result<()> {
    let recorded = read()?;
    for count in counts.iter().filter(|count| count.places.len() > allowed(&recorded, count)) {
        println!("{}: {}, {} are recorded", count.kind, count.places.len(), allowed(&recorded, count));
        if count.places.len() > SHOWN {
            println!("  `cargo xtask style \"{}\"` lists all", count.kind);
        } else {
            count.places.iter().for_each(|place| println!("  {place}"));
        }
    }
    let wrong = differences(&recorded, counts);
    if !wrong.is_empty() {
        bail!("{}", wrong.join("; "));
    }
    Ok(())
}

/// Records the counts, if none of them is above its number.
///
/// # Errors
/// There is more of a kind than is recorded.
pub(crate) fn lower(counts: &[Count]) -> Result<()> {
    let recorded = read()?;
    let above: Vec<&str> = counts
        .iter()
        .filter(|count| count.places.len() > allowed(&recorded, count))
        .map(|count| count.kind.as_str())
        .collect();
    if !above.is_empty() {
        bail!("not recorded, because numbers only go down: {}", above.join(", "));
    }
    let mut lines: Vec<String> = counts
        .iter()
        .filter(|count| !count.places.is_empty())
        .map(|count| format!("{}: {}\n", count.kind, count.places.len()))
        .collect();
    lines.sort();
    fs::write(file(), lines.concat()).with_context(|| file().display().to_string())
}

fn read() -> Result<BTreeMap<String, usize>> {
    let text = fs::read_to_string(file()).with_context(|| file().display().to_string())?;
    parse(&text).with_context(|| file().display().to_string())
}

fn parse(text: &str) -> Result<BTreeMap<String, usize>> {
    text.lines()
        .map(|line| {
            let (kind, number) = line.split_once(": ").with_context(|| format!("no number in `{line}`"))?;
            Ok((kind.to_owned(), number.parse().with_context(|| format!("no number in `{line}`"))?))
        })
        .collect()
}

fn allowed(recorded: &BTreeMap<String, usize>, count: &Count) -> usize {
    recorded.get(&count.kind).copied().unwrap_or(0)
}

/// A sentence about each kind whose number is not the recorded one.
fn differences(recorded: &BTreeMap<String, usize>, counts: &[Count]) -> Vec<String> {
    let mut wrong = Vec::new();
    for count in counts {
        let (found, allowed) = (count.places.len(), allowed(recorded, count));
        if found > allowed {
            wrong.push(format!("{}: {found} is more than {allowed}", count.kind));
        } else if found < allowed {
            wrong.push(format!("{}: only {found} of {allowed} are left, run `cargo xtask style --lower`", count.kind));
        }
    }
    for kind in recorded.keys().filter(|kind| !counts.iter().any(|count| count.kind == **kind)) {
        wrong.push(format!("{kind}: nothing counts this"));
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(kind: &str, places: usize) -> Count {
        Count { kind: kind.to_owned(), places: vec![String::new(); places] }
    }

    #[test]
    fn more_and_less_than_recorded_are_differences() {
        let recorded = parse("words: 3\ncircle qemu: 5\n").unwrap();
        assert_eq!(differences(&recorded, &[count("words", 3), count("circle qemu", 5)]), [""; 0]);
        let said = differences(&recorded, &[count("words", 4), count("circle qemu", 4)]);
        assert!(said[0].contains("4 is more than 3") && said[1].contains("--lower"), "{said:?}");
    }

    #[test]
    fn a_rule_without_a_line_allows_nothing_and_a_line_without_a_rule_is_found() {
        let recorded = parse("gone: 2\n").unwrap();
        let said = differences(&recorded, &[count("new", 1)]);
        assert!(said[0].contains("new: 1 is more than 0") && said[1].contains("gone"), "{said:?}");
        assert_eq!(differences(&recorded, &[count("new", 0), count("gone", 2)]), [""; 0]);
    }

    #[test]
    fn a_line_without_a_number_is_an_error() {
        assert!(parse("words\n").is_err());
        assert!(parse("words: many\n").is_err());
    }
}
