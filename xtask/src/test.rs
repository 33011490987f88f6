//! `cargo xtask test`: everything that a change has to pass, and one closing line with the sums.
//!
//! Law: every step runs even if one before it failed, so that one run shows everything to fix. Format, style,
//! lints, fuzz targets, documentation, public API and packages count as one check each.
//!
//! # Compile time
//!
//! Cargo compiles a dependency once for each set of features, and once more to check it only. All steps share these two
//! sets of compiled dependencies:
//!
//! | step | compiles of dependencies |
//! |---|---|
//! | `cargo xtask` itself | those of xtask, without what only tests of crates need (`certificates` of limosa-testkit) |
//! | clippy | all of them, checked |
//! | clippy of the program without `remote` | two, checked; and crates of this workspace with fewer features |
//! | fuzz targets | those of the fuzzers' own workspace, checked: half a minute |
//! | documentation, packages | none: `--examples` gives dependencies the features that they have for clippy |
//! | tests | the rest of them, for programs that run |
//! | documentation examples | none |
//! | model checks | none: xtask's own dependencies for tests have the features that the others use |
//!
//! `cargo COMMAND --unit-graph -Z unstable-options` (with `RUSTC_BOOTSTRAP=1`) prints what a step compiles, to compare.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::api::{self, Compared};
use crate::{published, setup, shell, style};

/// Passed, failed, skipped.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TestCounts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl TestCounts {
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    fn check(passed: bool) -> Self {
        Self { passed: u64::from(passed), failed: u64::from(!passed), skipped: 0 }
    }
}

/// Runs all of it.
pub(crate) fn run() -> Result<()> {
    let without_qemu = setup::is_skipped("LIMOSA_SKIP_QEMU");
    if without_qemu {
        println!("LIMOSA_SKIP_QEMU=1: tests that need QEMU are skipped");
    } else {
        setup::run()?;
    }
    let mut sum = TestCounts::default();
    let mut failures = Vec::new();
    let mut note = |name: &str, totals: TestCounts| {
        sum.add(totals);
        if totals.failed > 0 {
            failures.push(name.to_owned());
        }
    };

    note("format", check(cargo(&["fmt", "--all", "--check"])));
    note("style", checked(style::check()));
    // Both workspaces locked: what is built is what the committed lock files say.
    let clippy = ["clippy", "--locked", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"];
    note("clippy", check(cargo(&clippy)));
    // Code that is there only without object stores, and code that only they use: no other step compiles it so.
    let without = ["clippy", "--locked", "-p", "limosa", "--no-default-features", "--", "-D", "warnings"];
    note("clippy of the program without `remote`", check(cargo(&without)));
    // A workspace of its own, which the line above does not see.
    note(
        "fuzz targets",
        check(cargo(&[
            "check",
            "--locked",
            "--manifest-path",
            "fuzz/Cargo.toml",
            "--target-dir",
            "target/fuzz",
            "--bins",
            "--examples",
        ])),
    );
    note("documentation", check(api::document()));
    note("public API", compared(api::compare()));
    note("packages", checked(published::package()));

    let skips = SkipLog::new()?;
    if has_nextest() {
        note("tests", counted(skips.pass_to(nextest()), nextest_summary)?);
    } else {
        let tests = cargo(&["test", "--workspace", "--all-targets", "--all-features", "--no-fail-fast"]);
        note("tests", counted(skips.pass_to(tests), libtest_summary)?);
    }
    let examples = cargo(&["test", "--workspace", "--doc", "--all-features", "--no-fail-fast"]);
    note("documentation examples", counted(skips.pass_to(examples), libtest_summary)?);

    note("model checks", counted(models(), libtest_summary)?);

    // A test that skips itself has returned, which its runner takes for passed.
    let skipped = skips.lines()?;
    for line in &skipped {
        println!("{line}");
    }
    let count = skipped.len() as u64;
    sum.passed = sum.passed.saturating_sub(count);
    sum.skipped += count;

    if !failures.is_empty() {
        println!("failed: {}", failures.join(", "));
    }
    println!("{} passed, {} failed, {} skipped", sum.passed, sum.failed, sum.skipped);
    if failures.is_empty() { Ok(()) } else { bail!("{}", failures.join(", ")) }
}

/// All tests of the workspace by cargo-nextest.
pub(crate) fn nextest() -> Command {
    let mut tests = cargo(&["nextest", "run", "--workspace", "--all-features", "--no-fail-fast", "--config-file"]);
    tests.arg(shell::workspace().join("xtask/nextest.toml"));
    // Most tests wait for guests, disks and time limits more than they compute.
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    tests.arg("--test-threads").arg((2 * processors).to_string());
    tests
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(shell::workspace()).args(arguments);
    command
}

/// The model checks: operations of several threads on a bitmap, a dirty log, a file's blocks or a disk image, in every
/// possible order.
///
/// The crates are compiled with the model checker's atomics and locks, and run only the tests called `models`. Of what
/// the other tests have built, only crates of this workspace are compiled again.
fn models() -> Command {
    let crates = ["-p", "limosa-page", "-p", "limosa-memory", "-p", "limosa-storage", "-p", "limosa-image"];
    let mut command = cargo(&["test", "--lib", "--all-features", "--no-fail-fast", "models::"]);
    // These have no library, so nothing of them is built. But cargo chooses the features of dependencies by the
    // packages that are named: without them, forty dependencies would be compiled again with fewer features.
    command.args(["-p", "limosa", "-p", "xtask"]);
    command.args(crates).env("RUSTC_WORKSPACE_WRAPPER", shell::workspace().join("xtask/loom-rustc"));
    command
}

pub(crate) fn has_nextest() -> bool {
    shell::output(Command::new("cargo").args(["nextest", "--version"])).is_ok()
}

fn check(mut command: Command) -> TestCounts {
    checked(shell::run(&mut command))
}

fn checked(result: Result<()>) -> TestCounts {
    if let Err(error) = &result {
        eprintln!("{error:#}");
    }
    TestCounts::check(result.is_ok())
}

fn compared(result: Result<Compared>) -> TestCounts {
    match result {
        Ok(Compared::Skipped(why)) => {
            println!("{why}");
            TestCounts { skipped: 1, ..TestCounts::default() }
        }
        result => checked(result.map(drop)),
    }
}

/// Runs the command, shows what it writes, and sums the lines in which it counts tests. A command that fails without
/// having counted a failure counts as one.
pub(crate) fn counted(mut command: Command, summary: fn(&str) -> Option<TestCounts>) -> Result<TestCounts> {
    let line = shell::line(&command);
    println!("+ {line}");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot start `{line}`"))?;
    let out = child.stdout.take().context("no standard output")?;
    let err = child.stderr.take().context("no standard error")?;
    let (a, b) = std::thread::scope(|scope| {
        let err = scope.spawn(move || show_and_sum(err, summary));
        (show_and_sum(out, summary), err.join().unwrap_or_default())
    });
    let status = child.wait().with_context(|| format!("waiting for `{line}`"))?;
    let mut totals = a;
    totals.add(b);
    if !status.success() && totals.failed == 0 {
        println!("`{line}` failed: {status}");
        totals.failed = 1;
    }
    Ok(totals)
}

fn show_and_sum(stream: impl Read, summary: fn(&str) -> Option<TestCounts>) -> TestCounts {
    let mut sum = TestCounts::default();
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    // A test may write anything, also what is no UTF-8.
    while stream.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
        // Nothing can be done about a closed standard output.
        let _ = std::io::stdout().lock().write_all(&line);
        if let Some(totals) = summary(&String::from_utf8_lossy(&line)) {
            sum.add(totals);
        }
        line.clear();
    }
    sum
}

/// `     Summary [   4.463s] 28 tests run: 27 passed (1 slow), 1 failed, 0 skipped`
fn nextest_summary(line: &str) -> Option<TestCounts> {
    let (_, counts) = line.trim_start().strip_prefix("Summary [")?.split_once("run:")?;
    let mut totals = TestCounts::default();
    // The text in parentheses, as in `5 passed (1 slow, 1 flaky)`, is counted outside of them already.
    let plain: String = counts.split('(').map(|piece| piece.split_once(')').map_or(piece, |(_, rest)| rest)).collect();
    for part in plain.split(", ") {
        let mut words = part.split_whitespace();
        let (Some(Ok(count)), Some(kind)) = (words.next().map(str::parse::<u64>), words.next()) else { continue };
        match kind {
            "passed" => totals.passed += count,
            "skipped" => totals.skipped += count,
            // "failed", "timed out", "exec failed"
            _ => totals.failed += count,
        }
    }
    Some(totals)
}

/// `test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s`
pub(crate) fn libtest_summary(line: &str) -> Option<TestCounts> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let mut totals = TestCounts::default();
    for part in counts.split("; ") {
        let mut words = part.split_whitespace();
        let (Some(Ok(count)), Some(kind)) = (words.next().map(str::parse::<u64>), words.next()) else { continue };
        match kind {
            "passed" => totals.passed += count,
            "failed" => totals.failed += count,
            "ignored" => totals.skipped += count,
            _ => {}
        }
    }
    Some(totals)
}

/// The file in which tests that skip themselves leave a line (`LIMOSA_SKIP_LOG`, see limosa-testkit).
struct SkipLog {
    path: std::path::PathBuf,
}

impl SkipLog {
    fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("limosa-skips-{}", std::process::id()));
        std::fs::write(&path, "").with_context(|| path.display().to_string())?;
        Ok(Self { path })
    }

    fn pass_to(&self, mut command: Command) -> Command {
        command.env("LIMOSA_SKIP_LOG", &self.path);
        command
    }

    fn lines(&self) -> Result<Vec<String>> {
        let text = std::fs::read_to_string(&self.path).with_context(|| self.path.display().to_string())?;
        Ok(text.lines().map(str::to_owned).collect())
    }
}

impl Drop for SkipLog {
    fn drop(&mut self) {
        // A file that is left in the temporary folder is harmless.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(passed: u64, failed: u64, skipped: u64) -> TestCounts {
        TestCounts { passed, failed, skipped }
    }

    #[test]
    fn the_summary_of_nextest_is_read_in_all_its_forms() {
        let read = |text| nextest_summary(text).unwrap();
        assert_eq!(read("     Summary [   4.463s] 28 tests run: 28 passed, 0 skipped\n"), totals(28, 0, 0));
        assert_eq!(
            read(
                "     Summary [ 120.5s] 24/28 tests run: 20 passed (2 slow, 1 flaky), 2 failed, 2 timed out, 3 skipped"
            ),
            totals(20, 4, 3)
        );
        assert_eq!(read("Summary [ 0.1s] 1 test run: 0 passed, 1 exec failed, 0 skipped"), totals(0, 1, 0));
        assert_eq!(nextest_summary("        PASS [   0.009s] ( 1/28) limosa-page Summary"), None);
    }

    #[test]
    fn the_summary_of_libtest_is_read() {
        let line =
            "test result: FAILED. 12 passed; 1 failed; 2 ignored; 0 measured; 5 filtered out; finished in 0.00s\n";
        assert_eq!(libtest_summary(line), Some(totals(12, 1, 2)));
        assert_eq!(libtest_summary("running 5 tests"), None);
    }

    #[test]
    fn a_command_that_fails_without_a_summary_counts_as_one_failure() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo 'test result: ok. 3 passed; 0 failed; 1 ignored'; exit 1"]);
        assert_eq!(counted(command, libtest_summary).unwrap(), totals(3, 1, 1));
    }
}
