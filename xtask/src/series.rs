//! `cargo xtask setup --qemu NAME` and `cargo xtask test --qemu NAME`: the whole table of series of QEMU; a part of it
//! belongs to `cargo xtask test`.

use anyhow::{Result, bail};

use crate::setup::{self, qemus};
use crate::{shell, test};

/// The QEMU that other tests use.
const INSTALLED: &str = "installed";

const EVERY: &str = "all";

/// The series beside the installed one that this name asks for.
fn named(name: &str) -> Result<Vec<qemus::Series>> {
    let series: Vec<_> = qemus::ALL.into_iter().filter(|series| [series.name, EVERY].contains(&name)).collect();
    if series.is_empty() {
        let known: Vec<&str> = qemus::ALL.iter().map(|series| series.name).collect();
        bail!("no series of QEMU is called {name}: use {} or {EVERY}", known.join(", "));
    }
    Ok(series)
}

/// Sets up what the tests need, with these series.
pub(crate) fn set_up(name: &str) -> Result<()> {
    setup::run_with(&named(name)?)
}

/// Runs the tests of all pairs in which this series is.
pub(crate) fn run(name: &str) -> Result<()> {
    if name != INSTALLED {
        named(name)?;
    }
    if !test::has_nextest() {
        bail!("cargo-nextest is needed to choose tests by name: run `cargo install --locked cargo-nextest`");
    }
    // Each is one side of pairs with all.
    setup::run_with(&qemus::ALL)?;
    let mut tests = test::nextest();
    let filter = if name == EVERY { "binary(series)".to_owned() } else { format!("binary(series) & test({name})") };
    // All cells but those of every run have an `#[ignore]`.
    tests.args(["--run-ignored", "all", "-E", &filter]);
    // A cell that tries all machine types takes minutes. None is skipped.
    tests.args(["--profile", "series"]).env_remove("LIMOSA_SKIP_SERIES").env_remove("LIMOSA_SKIP_QEMU");
    shell::run(&mut tests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_known_by_their_names() {
        let names = |name| named(name).unwrap().iter().map(|series| series.name).collect::<Vec<_>>();
        assert_eq!(
            (names("oldest"), names("newest"), names("all")),
            (vec!["oldest"], vec!["newest"], vec!["oldest", "newest"])
        );
        assert!(named("9.9").unwrap_err().to_string().contains("oldest, newest or all"));
    }
}
