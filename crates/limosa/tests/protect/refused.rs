//! A failover that is refused leaves the VM as it was: it may be healthy.

use limosa_testkit::{DiskFormat, kill9};
use rustix::process::Signal;

use crate::disks::{Bed, Transport};
use crate::gate::{count, networked};
use crate::needs_newest_qemu;
use crate::outside::Outside;
use crate::overlays::{start_writer, wait_writes};
use crate::scene::{Scene, text};
use crate::stage::limosa;

#[test]
fn a_failover_to_an_old_checkpoint_is_refused_and_neither_fences_the_vm_nor_cuts_it_off() {
    needs_newest_qemu!();
    let bed = Bed::over(Transport::Nbd, DiskFormat::Qcow2, networked);
    let outside = Outside::listen(&bed.path("world.net"));
    let gate = bed.scene.gate(&[]);
    let _server = bed.serve(&[]);
    let vm = start_writer(&bed.scene.machine);
    count(&vm);
    let (gate_socket, control) = (bed.path("gate").display().to_string(), bed.control());
    let fences = ["--gate", &gate_socket, "--disk-server", &control];
    let keeper = bed.scene.protect(&vm, &[&fences[..], &["--every", "50ms"]].concat());
    bed.scene.wait_checkpoint(5, &keeper);
    keeper.signal(Signal::INT);
    keeper.wait().success();
    let ran = bed.path("ran");
    let command = format!("touch {}", ran.display());
    for more in [&[][..], &["--fence", &command]] {
        let refused = bed.scene.failover(&[&fences[..], more].concat()).limosa.wait();
        refused.one_line(&["its protection has ended, and it has what the VM wrote since"]);
    }
    assert!(!ran.exists(), "the fence command was run");
    outside.wait_counts(10);
    wait_writes(vm.serial(), 10);
    assert!(!gate.stderr().contains("failed over"), "{}", gate.stderr());
    // It can be protected again.
    bed.scene.forget();
    let keeper = bed.scene.protect(&vm, &[&fences[..], &["--every", "50ms"]].concat());
    bed.scene.wait_checkpoint(2, &keeper);
}

#[test]
fn a_failover_whose_vm_could_not_run_here_fences_nothing() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let keeper = scene.protect(&vm, &["--every", "100ms"]);
    scene.wait_checkpoint(2, &keeper);
    keeper.signal(Signal::INT);
    keeper.wait().success();
    let (ran, kept, line) = (scene.path("ran"), scene.kept(), scene.survivor_line());
    let command = format!("touch {}", ran.display());
    let fenced = ["protect", "failover", "--fence", &command, text(&kept)].into_iter();
    limosa(fenced.clone().chain(["--", "no-such-qemu"])).one_line(&["no-such-qemu"]);
    let mapped = fenced.chain(["--memory", "mapped", "--channels", "2", "--"]);
    limosa(mapped.chain(line.iter().map(String::as_str))).one_line(&["--channels is for memory that is sent"]);
    assert!(!ran.exists(), "the fence command was run");
}

#[test]
fn a_fence_command_does_not_run_while_checkpoints_are_made() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let keeper = scene.protect(&vm, &["--every", "100ms"]);
    scene.wait_checkpoint(2, &keeper);
    let ran = scene.path("ran");
    let refused = scene.failover(&["--fence", &format!("touch {}", ran.display())]).limosa.wait();
    refused.one_line(&[text(&scene.kept()), "still keeps checkpoints here", "end its protection first"]);
    assert!(!ran.exists(), "the fence command was run");
    let newest = scene.newest().unwrap();
    scene.wait_checkpoint(newest + 3, &keeper);
    kill9(vm.pid()).unwrap();
    keeper.wait();
    let failed = scene.failover(&["--fence", "exit 3"]).limosa.wait();
    failed.one_line(&["limosa: `exit 3`, the fence command, failed (exit status: 3)"]);
}
