//! A VM with disks of both kinds: one in a file that QEMU opens itself, one that is served. After a failover memory and
//! both disks are of one instant.

use limosa_testkit::{Disk, DiskFormat, Series, kill9, listens, wait_gone};
use rustix::process::Signal;

use crate::disks::assert_goes_on;
use crate::needs_newest_qemu;
use crate::overlays::{assert_never_torn, linux_on, wait_writes};
use crate::scene::{Scene, text};
use crate::stage::{Program, names, start, wait_for};

/// Writes as `overlays` does, to both disks.
const WRITER: &str = "( n=0; at() { dd if=$1 bs=512 skip=$2 count=1 2>/dev/null | head -n 1; }; \
    while :; do n=$((n+1)); say=disk; for d in /dev/vda /dev/vdb; do \
    echo $n | dd of=$d bs=512 seek=$n conv=sync,notrunc,fsync 2>/dev/null; done; for d in /dev/vda /dev/vdb; do \
    if [ \"$(at $d $n)\" != $n -o -n \"$(at $d $((n+1)) | tr -d '\\000')\" ]; then say=torn; fi; done; \
    echo $say $n; sleep 0.02; done ) > /dev/ttyS0 2>/dev/null &";

fn scene() -> Scene {
    Scene::of(|folder| {
        for name in ["own", "served"] {
            Disk::create(&folder.join(name), DiskFormat::Qcow2, 16 << 20).unwrap();
        }
        let server = format!("server.type=unix,server.path={}", folder.join("disk.socket").display());
        let node = format!("driver=nbd,node-name=served,{server},export=vm,reconnect-delay=10");
        let words = ["-blockdev", &node, "-device", "virtio-blk-pci,id=served0,drive=served"];
        let machine = linux_on(&folder.join("own"), DiskFormat::Qcow2).series(Series::Newest);
        words.iter().fold(machine, |machine, word| machine.argument(word))
    })
}

fn serve(scene: &Scene) -> Program {
    let (disk, control) = (scene.path("served"), scene.path("control"));
    let at = format!("unix:{}", scene.path("disk.socket").display());
    let words = ["serve", "-f", "qcow2", text(&disk), "--name", "vm", "--nbd", &at, "--control", text(&control)];
    let server = start(words.iter().chain(&["--allow-dir", text(disk.parent().unwrap())]));
    wait_for("the disk server", || {
        assert!(server.is_running(), "limosa ended: {}", server.stderr());
        listens(server.pid(), &control).then_some(())
    });
    server
}

#[test]
fn disks_of_files_and_of_servers_go_back_together() {
    needs_newest_qemu!();
    let scene = scene();
    let _server = serve(&scene);
    let control = scene.path("control");
    let vm = scene.machine.start().unwrap();
    vm.wait_counts(1).unwrap();
    vm.shell(WRITER).unwrap();
    wait_writes(vm.serial(), 3);
    let beside = || {
        let mut names = names(scene.path("own").parent().unwrap());
        names.retain(|name| name.starts_with("own.") || name.starts_with("served."));
        names
    };
    let both = ["--disks", "overlays", "--disk-server", text(&control)];
    // Each kind alone is refused by name.
    let server = ["--disk-server", text(&control)];
    scene.protect(&vm, &server).wait().one_line(&["disk0", "is a file of QEMU's", "--disks overlays"]);
    scene.protect(&vm, &both[..2]).wait().one_line(&["served0", "is no image", "--disk-server"]);
    // A protection that ends leaves both as they were.
    let keeper = scene.protected(&vm, &both, &[]);
    assert!(beside().contains(&"served.epochs".to_owned()), "{:?}", beside());
    keeper.signal(Signal::INT);
    keeper.wait().success();
    assert_eq!(beside(), Vec::<String>::new());
    wait_writes(vm.serial(), 3);
    scene.forget();
    let keeper = scene.protected(&vm, &both, &[]);
    wait_writes(vm.serial(), 3);
    kill9(vm.pid()).unwrap();
    keeper.wait();
    wait_gone(vm.pid());
    assert_never_torn(&vm);
    drop(vm);
    assert_goes_on(scene.failover(&["--fenced", "--disk-server", text(&control)]));
    assert!(!beside().contains(&"served.epochs".to_owned()));
}
