//! Stock tools undo what is packed, and what they pack is read.

use std::path::Path;
use std::process::Command;

use limosa_pack::{Access, open_snapshot};
use limosa_snapshot::Snapshot;
use limosa_testkit::{Process, listens, qemu_img, wait_for};

use crate::fixture::{CHECKED, small};
use crate::{access, assert_same, encrypted, options, pack_file, passphrase, snapshot};

/// The bytes of a file without the zeros that fill up its last sector.
fn assert_padded(raw: &Path, plain: &Path) {
    let (raw, plain) = (std::fs::read(raw).unwrap(), std::fs::read(plain).unwrap());
    assert_eq!(raw.len(), plain.len().next_multiple_of(512));
    assert!(raw[..plain.len()] == plain && raw[plain.len()..].iter().all(|byte| *byte == 0));
}

#[test]
fn stock_qemu_img_finds_no_fault_and_makes_a_snapshot_of_it_again() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let source = small(directory.path(), "vm", CHECKED);
    pack_file(&source, &at("vm.qcow2"), None, &options());
    let path = at("vm.qcow2").to_str().unwrap().to_owned();
    qemu_img(["check", "-f", "qcow2", &path]).unwrap();
    let raw = at("raw").to_str().unwrap().to_owned();
    qemu_img(["convert", "-f", "qcow2", "-O", "raw", &path, &raw]).unwrap();
    assert_padded(&at("raw"), &source);
    assert_same(&Snapshot::open(&source).unwrap(), &Snapshot::open(&at("raw")).unwrap());

    // The other way round.
    let stock = at("stock.qcow2").to_str().unwrap().to_owned();
    qemu_img(["convert", "-c", "-f", "raw", "-O", "qcow2", source.to_str().unwrap(), &stock]).unwrap();
    assert_same(&Snapshot::open(&source).unwrap(), &open_snapshot(&at("stock.qcow2"), &Access::default()).unwrap());
}

#[test]
fn stock_qemu_img_reads_an_encrypted_chain() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let one = snapshot(&at("one"), 600, &[(1, 1), (300, 2)]);
    let two = snapshot(&at("two"), 600, &[(1, 9), (300, 2)]);
    pack_file(&one, &at("1.qcow2"), None, &encrypted());
    pack_file(&two, &at("2.qcow2"), Some(&at("1.qcow2")), &encrypted());
    std::fs::write(at("key"), passphrase().bytes()).unwrap();
    let object = format!("secret,id=s,file={}", at("key").display());
    let raw = at("raw").to_str().unwrap().to_owned();
    let image =
        format!("driver=qcow2,file.driver=luks,file.key-secret=s,file.file.filename={}", at("1.qcow2").display());
    qemu_img(["check", "--object", &object, "--image-opts", &image]).unwrap();
    qemu_img(["convert", "--object", &object, "--image-opts", &image, "-O", "raw", &raw]).unwrap();
    assert_padded(&at("raw"), &one);

    // qemu-img has no way to name the encrypted base of an encrypted image; the storage daemon has.
    let node = |name: &str, backing: &str| {
        let file = format!(
            "file.driver=luks,file.key-secret=s,file.file.driver=file,file.file.filename={}",
            at(name).display()
        );
        format!("driver=qcow2,read-only=on,node-name=n{},{file}{backing}", name.trim_end_matches(".qcow2"))
    };
    let socket = at("nbd");
    let mut daemon = Command::new("qemu-storage-daemon");
    daemon.args(["--object", &object, "--blockdev", &node("1.qcow2", "")]);
    daemon.args(["--blockdev", &node("2.qcow2", ",backing=n1")]);
    daemon.args(["--nbd-server", &format!("addr.type=unix,addr.path={}", socket.display())]);
    daemon.args(["--export", "type=nbd,id=e,node-name=n2,name=vm"]);
    let daemon = Process::spawn("qemu-storage-daemon", daemon).unwrap();
    wait_for("the daemon listens", || listens(daemon.pid(), &socket).then_some(()));
    let export = format!("nbd+unix:///vm?socket={}", socket.display());
    qemu_img(["convert", "-f", "raw", "-O", "raw", &export, &raw]).unwrap();
    assert_padded(&at("raw"), &two);
    assert_eq!(
        open_snapshot(&at("2.qcow2"), &access(Some(&passphrase()))).unwrap().id(),
        Snapshot::open(&two).unwrap().id()
    );
}
