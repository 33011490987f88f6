//! `cargo xtask tsan [FILTER]`: the tests in which several threads work on one storage or one image, under the thread
//! sanitizer.
//!
//! No nightly compiler is needed, and no source of the standard library: the sanitizer's runtime comes with the
//! compiler. Where the compiled library waits, `xtask/tsan/annotations.rs` says so to the sanitizer; suppressions for
//! code that is not ours are in `suppressions.txt` next to it, with reasons. Not seen: what the kernel does to memory
//! (`io_uring`, reads and writes), and what is ordered by a fence alone; the latter is what the model checks of `cargo
//! xtask test` are for.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::{shell, test};

/// Crates, and which of their tests: those with threads in them. What runs in one thread has nothing to be seen here.
const RUNS: [(&str, &[&str], &[&str]); 4] = [
    ("limosa-storage", &["--lib", "--test", "contract", "--test", "without_ring"], &[]),
    ("limosa-storage", &["--test", "storages"], &["files::", "registered::"]),
    ("limosa-image", &["--lib"], &[]),
    ("limosa-image", &["--test", "proof"], &["threads"]),
];

/// Functions of the compiled standard library, as `annotations.rs` names them, and how their symbols end.
const ANNOTATED: [(&str, &str); 7] = [
    ("MUTEX_LOCK_CONTENDED", "3std3sys4sync5mutex5futexNtB2_5Mutex14lock_contended"),
    ("RWLOCK_READ_CONTENDED", "3std3sys4sync6rwlock5futexNtB2_6RwLock14read_contended"),
    ("RWLOCK_WRITE_CONTENDED", "3std3sys4sync6rwlock5futexNtB2_6RwLock15write_contended"),
    ("CONDVAR_WAIT", "3std3sys4sync7condvar5futexNtB2_7Condvar4wait"),
    ("CONDVAR_WAIT_TIMEOUT", "3std3sys4sync7condvar5futexNtB2_7Condvar12wait_timeout"),
    ("ONCE_CALL", "3std3sys4sync4once5futexNtB5_4Once4call"),
    ("SCOPE_DECREMENT", "3std6thread6scopedNtB2_9ScopeData29decrement_num_running_threads"),
];

/// Runs them all, or those whose names contain what is given.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    if let Some(unknown) = arguments.iter().find(|word| word.starts_with('-')) {
        bail!("unknown option {unknown}");
    }
    let workspace = shell::workspace();
    let (here, built) = (workspace.join("xtask/tsan"), workspace.join("target/tsan"));
    std::fs::create_dir_all(&built).with_context(|| built.display().to_string())?;
    let flags = flags(&here, &built)?;
    let host = shell::host()?;
    let mut sum = test::TestCounts::default();
    let mut failed = false;
    for (name, which, filter) in RUNS {
        let mut tests = Command::new("cargo");
        tests.current_dir(&workspace).args(["test", "--no-fail-fast", "-p", name]).args(which);
        // With a target named, the flags do not reach build scripts and procedural macros.
        tests.args(["--target", &host, "--all-features", "--", "--skip", "qemu"]);
        tests.args(if arguments.is_empty() {
            filter.iter().map(|word| (*word).to_owned()).collect()
        } else {
            arguments.to_vec()
        });
        tests.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", &flags).env("CARGO_TARGET_DIR", &built);
        let suppressions = here.join("suppressions.txt");
        tests.env("TSAN_OPTIONS", format!("suppressions={} exitcode=66 history_size=4", suppressions.display()));
        let totals = test::counted(tests, test::libtest_summary)?;
        failed |= totals.failed > 0;
        sum.add(totals);
    }
    println!("under the thread sanitizer: {} passed, {} failed, {} skipped", sum.passed, sum.failed, sum.skipped);
    if failed { bail!("see the warnings of the sanitizer, and the tests, above") } else { Ok(()) }
}

/// Compiles the sanitizer's annotations of the standard library; the compiler's flags for everything else.
fn flags(here: &Path, built: &Path) -> Result<String> {
    let library = library()?;
    let symbols = shell::output(Command::new("nm").args(["-D", "--defined-only"]).arg(&library))?;
    let annotations = built.join("annotations.o");
    let mut compile = Command::new("rustc");
    compile.args(["--edition", "2024", "--emit=obj", "-Copt-level=2", "-Cpanic=abort", "-o"]).arg(&annotations);
    compile.arg(here.join("annotations.rs"));
    let mut flags = "-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer".to_owned();
    let mut link = |argument: &str| flags += &format!(" -Clink-arg={argument}");
    link(&annotations.display().to_string());
    link("-Wl,--wrap=__tsan_atomic64_fetch_sub");
    link("-Wl,--wrap=__tsan_atomic64_compare_exchange_val");
    for (name, end) in ANNOTATED {
        let symbol = found(&symbols, end).with_context(|| {
            format!("{} has no function ...{end}: this compiler's library is another, see ANNOTATED", library.display())
        })?;
        compile.env(format!("REAL_{name}"), format!("__real_{symbol}"));
        compile.env(format!("WRAP_{name}"), format!("__wrap_{symbol}"));
        link(&format!("-Wl,--wrap={symbol}"));
    }
    shell::run(&mut compile)?;
    Ok(flags)
}

/// The one symbol that ends so, of what `nm` prints.
fn found<'a>(symbols: &'a str, end: &str) -> Option<&'a str> {
    let mut all = symbols.lines().filter_map(|line| line.split_whitespace().last()).filter(|name| name.ends_with(end));
    all.next().filter(|_| all.next().is_none())
}

/// The standard library as a shared object, whose symbols are those of the one that is linked in.
fn library() -> Result<PathBuf> {
    let folder = PathBuf::from(shell::output(Command::new("rustc").args(["--print", "target-libdir"]))?.trim());
    for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("libstd-") && name.ends_with(".so") {
            return Ok(path);
        }
    }
    bail!("no libstd-*.so in {}", folder.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_symbol_is_found_by_its_end_if_there_is_one_only() {
        let symbols = "0000000000001000 T _R1a5Mutex4lock\n0000000000002000 T _R1a5Mutex6unlock\n0000000000003000 W _R1b6unlock\n";
        assert_eq!(found(symbols, "5Mutex4lock"), Some("_R1a5Mutex4lock"));
        assert_eq!((found(symbols, "6unlock"), found(symbols, "7Condvar4wait")), (None, None));
    }
}
