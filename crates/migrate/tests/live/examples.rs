//! The examples do what they are there to show.

use std::path::PathBuf;
use std::process::{Command, Output};

use limosa_testkit::skipped;

fn run(name: &str) -> Output {
    let own = std::env::current_exe().unwrap();
    let example: PathBuf = own.ancestors().nth(2).unwrap().join("examples").join(name);
    Command::new(&example).output().unwrap_or_else(|error| {
        panic!("{}: {error} (`cargo test` builds it; else `cargo build --examples`)", example.display())
    })
}

#[test]
fn the_example_moves_its_guest_and_finds_its_memory_whole() {
    if skipped("LIMOSA_SKIP_KVM") {
        return;
    }
    let output = run("vmm");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {err} (without /dev/kvm, set LIMOSA_SKIP_KVM=1)", output.status);
    assert!(out.contains("source: the guest left"), "{out}");
    assert!(out.contains("its memory is whole"), "{out}");
}

#[test]
fn the_toy_moves_between_two_threads() {
    let output = run("toy");
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout.starts_with(b"moved in "), "{}", String::from_utf8_lossy(&output.stdout));
}
