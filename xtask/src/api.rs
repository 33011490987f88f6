//! The public API of the published libraries, as `docs/api` records it: a change of it is seen in a change's diff, and
//! is never an accident.
//!
//! Law: the record is what rustdoc finds to be public, one item a line, sorted; impls that the compiler derives or adds
//! to every type are left out. rustdoc's JSON changes with Rust; where this Rust writes another form of it than
//! `public-api` reads, the comparison is skipped, with a line that says so.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::published::{self, Published};
use crate::shell;

/// The form of rustdoc's JSON that the pinned `public-api` reads: that of Rust 1.93 to 1.95.
const FORMAT: u64 = 57;

/// The result of a comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Compared {
    /// Everything is as recorded.
    Same,
    /// It was not compared, for this reason.
    Skipped(String),
}

/// `cargo xtask api [--update]`.
pub(crate) fn run(update: bool) -> Result<()> {
    shell::run(&mut document())?;
    if update {
        return record();
    }
    match compare()? {
        Compared::Same => println!("the public API is as docs/api records it"),
        Compared::Skipped(why) => println!("{why}"),
    }
    Ok(())
}

/// The documentation of all crates, as JSON: the same lints as for pages, and the source of the public API.
pub(crate) fn document() -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(shell::workspace()).args(["doc", "--workspace", "--no-deps", "--all-features"]);
    // With the examples, dependencies have the features that they have for clippy: none is checked again. The other
    // programs have libraries of their names, which are documented.
    command.args(["--lib", "--examples", "--bin", "limosa", "--bin", "limosa-guest", "--bin", "xtask"]);
    command.env("RUSTDOC", shell::workspace().join("xtask/rustdoc-json"));
    command.env("RUSTDOCFLAGS", "-D warnings -Z unstable-options --output-format json");
    command
}

/// Compares the public API with the record, and prints what differs.
///
/// # Errors
/// Something differs: the line to run.
pub(crate) fn compare() -> Result<Compared> {
    let mut differs = Vec::new();
    for library in libraries()? {
        let json = json_of(&library);
        if let Some(why) = unreadable(&json)? {
            return Ok(Compared::Skipped(why));
        }
        let (found, recorded) = (api(&json)?, fs::read_to_string(record_of(&library)).unwrap_or_default());
        if found != recorded {
            print_difference(&library.name, &recorded, &found);
            differs.push(library.name);
        }
    }
    if !differs.is_empty() {
        bail!(
            "the public API of {} is not what docs/api records: if it is meant to be, run `cargo xtask api --update`",
            differs.join(", ")
        );
    }
    Ok(Compared::Same)
}

fn record() -> Result<()> {
    let mut records = Vec::new();
    for library in libraries()? {
        let json = json_of(&library);
        if let Some(why) = unreadable(&json)? {
            bail!("{why}");
        }
        records.push((record_of(&library), api(&json)?));
    }
    // Only now: the old records stay if the new ones cannot be made.
    let folder = shell::workspace().join("docs/api");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
    }
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    for (path, text) in records {
        fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    println!("recorded in docs/api");
    Ok(())
}

fn libraries() -> Result<Vec<Published>> {
    Ok(published::crates()?.into_iter().filter(|published| published.library).collect())
}

fn json_of(library: &Published) -> PathBuf {
    let built = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    shell::workspace().join(built).join(format!("doc/{}.json", library.name.replace('-', "_")))
}

fn record_of(library: &Published) -> PathBuf {
    shell::workspace().join(format!("docs/api/{}.txt", library.name))
}

/// Why rustdoc's JSON cannot be read, if it has another form.
fn unreadable(json: &Path) -> Result<Option<String>> {
    #[derive(serde::Deserialize)]
    struct Form {
        format_version: u64,
    }
    let text = fs::read_to_string(json).with_context(|| format!("{}: `cargo xtask api` makes it", json.display()))?;
    let Form { format_version: found } = serde_json::from_str(&text).with_context(|| json.display().to_string())?;
    let why =
        || format!("SKIPPED (this Rust writes form {found} of rustdoc's JSON, form {FORMAT} is read): the public API");
    Ok((found != FORMAT).then(why))
}

/// The public items of a crate, a line each.
fn api(json: &Path) -> Result<String> {
    let mut builder = public_api::Builder::from_rustdoc_json(json);
    builder = builder.omit_blanket_impls(true).omit_auto_trait_impls(true).omit_auto_derived_impls(true);
    Ok(builder.build().with_context(|| json.display().to_string())?.to_string())
}

fn print_difference(name: &str, recorded: &str, found: &str) {
    println!("{name}:");
    let (before, after): (Vec<&str>, Vec<&str>) = (recorded.lines().collect(), found.lines().collect());
    before.iter().filter(|line| !after.contains(line)).for_each(|line| println!("  - {line}"));
    after.iter().filter(|line| !before.contains(line)).for_each(|line| println!("  + {line}"));
}
