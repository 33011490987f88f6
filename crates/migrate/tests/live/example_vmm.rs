//! The example VMM does what it is there to show.

use std::path::PathBuf;
use std::process::Command;

use limosa_testkit::skipped;

#[test]
fn the_example_moves_its_guest_and_finds_its_memory_whole() {
    if skipped("LIMOSA_SKIP_KVM") {
        return;
    }
    let own = std::env::current_exe().unwrap();
    let example: PathBuf = own.ancestors().nth(2).unwrap().join("examples/vmm");
    let output = Command::new(&example).output().unwrap_or_else(|error| {
        panic!("{}: {error} (`cargo test` builds it; else `cargo build --examples`)", example.display())
    });
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {err} (without /dev/kvm, set LIMOSA_SKIP_KVM=1)", output.status);
    assert!(out.contains("source: the guest left"), "{out}");
    assert!(out.contains("its memory is whole"), "{out}");
}
