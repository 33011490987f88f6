//! VMs and directories that are refused, before anything is changed.

use limosa_testkit::{Disk, DiskFormat, Machine};
use rustix::process::Signal;

use crate::scene::{Scene, machine, text};
use crate::stage::{Found, assert_beats, limosa, names, small};
use crate::{needs_newest_qemu, needs_qemu};

#[test]
fn a_qemu_whose_colo_does_not_work_is_refused_by_its_version() {
    needs_qemu!();
    let scene = Scene::new();
    let vm = small().start().unwrap();
    let found = Found::of(&vm);
    scene.protect(&vm, &[]).wait().one_line(&[
        "cannot make checkpoints under TCG",
        "11.1 or newer is needed",
        "--via background",
    ]);
    found.assert_same(&vm);
    assert!(!scene.kept().exists());
}

#[test]
fn a_vm_with_writable_disks_or_one_that_is_stopped_is_refused() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let image = scene.path("disk.raw");
    let machine: Machine = scene.machine.clone().disk(Disk::create(&image, DiskFormat::Raw, 1 << 20).unwrap());
    let vm = machine.start().unwrap();
    scene.protect(&vm, &[]).wait().one_line(&["writable disks (", "disk0", "--disks overlays", "--disk-server SOCK"]);
    vm.stop().unwrap();
    let ended = scene.protect(&vm, &["--disks", "ignore"]).wait();
    ended.one_line(&["the VM does not run (paused)"]);
}

#[test]
fn two_keepers_of_one_vm_or_one_directory_are_refused() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let keeper = scene.protect(&vm, &["--every", "50ms"]);
    scene.wait_checkpoint(1, &keeper);
    scene.failover(&["--fenced"]).limosa.wait().one_line(&["still keeps checkpoints here"]);
    let other = scene.guest();
    let ended = scene.protect(&other, &[]).wait();
    ended.one_line(&[text(&scene.kept())]);
    keeper.signal(Signal::INT);
    keeper.wait().success();
}

#[test]
fn a_checkpoint_of_another_vm_is_not_replaced() {
    needs_newest_qemu!();
    let named = |name: &str| Scene::of(|_| machine().argument("-name").argument(name));
    let (one, other) = (named("one"), named("other"));
    let vm = one.guest();
    let keeper = one.protect(&vm, &[]);
    one.wait_checkpoint(1, &keeper);
    keeper.signal(Signal::INT);
    keeper.wait().success();
    let kept = one.kept();
    let (newest, another) = (one.newest(), other.guest());
    let socket = another.qmp_socket();
    let refused = limosa(["protect", "--qmp", text(&socket), text(&kept)]);
    refused.one_line(&["checkpoint.limosa is of another VM (one)"]);
    let (far, at) = one.keep("tcp:127.0.0.1:0", &[]);
    limosa(["protect", "--qmp", text(&socket), "--to", &at]).one_line(&["refuses", "is of another VM (one)"]);
    assert_eq!(one.newest(), newest);
    assert_beats(&another);
    far.signal(Signal::INT);
    far.wait().success();
}

#[test]
fn a_failover_without_fencing_or_without_a_checkpoint_is_refused() {
    let scene = Scene::new();
    let kept = scene.kept();
    let kept = text(&kept);
    for fenced in [&["--fenced"][..], &[]] {
        let words = [&["protect", "failover", kept], fenced, &["--", "qemu-system-x86_64"]].concat();
        limosa(words).one_line(&["no checkpoint is in this directory"]);
    }
    std::fs::create_dir(kept).unwrap();
    std::fs::write(scene.checkpoint(), "").unwrap();
    let ran = scene.path("ran");
    let command = format!("touch {}", ran.display());
    let fence = limosa(["protect", "failover", "--fence", &command, kept, "--", "qemu-system-x86_64"]);
    fence.one_line(&[text(&scene.checkpoint())]);
    assert!(!ran.exists(), "the VM was fenced, and cannot be continued");
    assert_eq!(names(&scene.kept()), ["checkpoint.limosa"]);
}
