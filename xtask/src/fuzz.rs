//! `cargo xtask fuzz [--seconds N] [TARGET...]`: every target of `fuzz/fuzz_targets` for N seconds each.
//!
//! No nightly compiler is needed: coverage comes from LLVM's own pass, the fuzzer from libfuzzer-sys (whose C++ part
//! wants a C++ compiler). Without a sanitizer a memory error in safe Rust shows as a panic, and debug assertions and
//! overflow checks are on.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::shell;

/// The flags of cargo-fuzz without the address sanitizer.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Cdebug-assertions -Coverflow-checks";

/// A filesystem in memory: on a disk, each flush of a target's files would take its time.
const MEMORY: &str = "/dev/shm";

/// Runs the named targets, or all.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let (seconds, wanted) = parse(arguments)?;
    let workspace = shell::workspace();
    let fuzz = workspace.join("fuzz");
    let all = targets(&fuzz.join("fuzz_targets"))?;
    if let Some(unknown) = wanted.iter().find(|name| !all.contains(name)) {
        bail!("no fuzz target `{unknown}`: there are {}", all.join(", "));
    }
    let chosen = if wanted.is_empty() { all } else { wanted };
    let built = workspace.join("target/fuzz");
    let host = shell::host()?;
    // The seeds are written by a plain program: it has no fuzzer in it that the coverage could report to.
    shell::run(cargo("run", &fuzz, &built).args(["--example", "seeds"]))?;
    let mut build = cargo("build", &fuzz, &built);
    // With a target named, the flags do not reach build scripts and procedural macros.
    build.args(["--target", &host]).env("RUSTFLAGS", FLAGS);
    for name in &chosen {
        build.args(["--bin", name]);
    }
    shell::run(&mut build)?;

    let mut failed = Vec::new();
    for name in &chosen {
        let (corpus, artifacts) = (fuzz.join("corpus").join(name), fuzz.join("artifacts").join(name));
        for folder in [&corpus, &artifacts] {
            std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        let mut target = Command::new(built.join(&host).join("release").join(name));
        target.arg(format!("-max_total_time={seconds}"));
        target.args(["-rss_limit_mb=2048", "-timeout=10", "-print_final_stats=1"]);
        target.arg(format!("-artifact_prefix={}/", artifacts.display())).arg(&corpus);
        if Path::new(MEMORY).is_dir() {
            target.env("TMPDIR", MEMORY);
        }
        if let Err(error) = shell::run(&mut target) {
            eprintln!("{error:#}");
            failed.push(name.as_str());
        }
    }
    println!("{} targets ran {seconds} s each, {} failed", chosen.len(), failed.len());
    if failed.is_empty() {
        return Ok(());
    }
    bail!(
        "{}: the inputs are in fuzz/artifacts; run a target with one as its argument to see it again",
        failed.join(", ")
    )
}

fn parse(arguments: &[String]) -> Result<(u64, Vec<String>)> {
    let (mut seconds, mut wanted) = (60, Vec::new());
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        if word == "--seconds" {
            let value = words.next().context("--seconds needs a number")?;
            seconds = value.parse().with_context(|| format!("--seconds {value}"))?;
        } else if word.starts_with('-') {
            bail!("unknown option {word}");
        } else {
            wanted.push(word.clone());
        }
    }
    Ok((seconds, wanted))
}

fn cargo(verb: &str, fuzz: &Path, built: &Path) -> Command {
    let mut command = Command::new("cargo");
    command.args([verb, "--release", "--manifest-path"]).arg(fuzz.join("Cargo.toml")).arg("--target-dir").arg(built);
    command
}

/// The names of the source files, sorted.
fn targets(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if let Some(stem) = name.strip_suffix(".rs") {
            names.push(stem.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_and_targets_are_distinguished() {
        let parsed = |words: &[&str]| parse(&words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>());
        assert_eq!(parsed(&[]).unwrap(), (60, Vec::new()));
        assert_eq!(parsed(&["a", "--seconds", "5", "b"]).unwrap(), (5, vec!["a".to_owned(), "b".to_owned()]));
        assert!(parsed(&["--seconds"]).is_err() && parsed(&["--seconds", "x"]).is_err() && parsed(&["-x"]).is_err());
    }
}
