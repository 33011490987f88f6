//! Stock tools undo what is packed, and what they pack is read.

use std::path::{Path, PathBuf};
use std::process::Command;

use limosa_pack::{Access, open_snapshot};
use limosa_snapshot::Snapshot;
use limosa_testkit::{Process, listens, qemu_img, wait_for};

use crate::fixture::{CHECKED, small};
use crate::{access, assert_same, chain_of, encrypted, options, pack_file, passphrase, snapshot};

/// The bytes of a file without the zeros that fill up its last sector.
fn assert_padded(raw: &Path, plain: &Path) {
    let (raw, plain) = (std::fs::read(raw).unwrap(), std::fs::read(plain).unwrap());
    assert_eq!(raw.len(), plain.len().next_multiple_of(512));
    assert!(raw[..plain.len()] == plain && raw[plain.len()..].iter().all(|byte| *byte == 0));
}

/// Puts the key into a file. Returns the option that gives it to stock tools.
fn secret(directory: &Path) -> String {
    let key = directory.join("key");
    std::fs::write(&key, passphrase().bytes()).unwrap();
    format!("secret,id=s,file={}", key.display())
}

/// Reads the last image of this chain, whose base is first, through the storage daemon: qemu-img has no way to name the
/// encrypted base of an encrypted image.
fn read_through_daemon(images: &[PathBuf], is_encrypted: bool, raw: &Path) {
    let directory = raw.parent().unwrap();
    let socket = directory.join("nbd");
    let mut daemon = Command::new("qemu-storage-daemon");
    daemon.args(["--object", &secret(directory)]);
    for (index, image) in images.iter().enumerate() {
        let file = if is_encrypted { "file.driver=luks,file.key-secret=s,file.file" } else { "file" };
        let backing = if index == 0 { String::new() } else { format!(",backing=n{}", index - 1) };
        let node = format!("driver=qcow2,read-only=on,node-name=n{index}{backing},{file}.driver=file");
        daemon.args(["--blockdev", &format!("{node},{file}.filename={}", image.display())]);
    }
    daemon.args(["--nbd-server", &format!("addr.type=unix,addr.path={}", socket.display())]);
    daemon.args(["--export", &format!("type=nbd,id=e,node-name=n{},name=vm", images.len() - 1)]);
    let daemon = Process::spawn("qemu-storage-daemon", daemon).unwrap();
    wait_for("the daemon listens", || listens(daemon.pid(), &socket).then_some(()));
    let export = format!("nbd+unix:///vm?socket={}", socket.display());
    qemu_img(["convert", "-f", "raw", "-O", "raw", &export, raw.to_str().unwrap()]).unwrap();
}

#[test]
fn stock_tools_read_chains_of_up_to_eight_images_plain_and_encrypted() {
    for is_encrypted in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        chain_of(directory.path(), 8, |_| if is_encrypted { encrypted() } else { options() });
        let images: Vec<_> = (0..8).map(|number| at(&format!("{number}.qcow2"))).collect();
        for depth in [1, 4, 8] {
            let (image, plain) = (&images[depth - 1], at(&(depth - 1).to_string()));
            read_through_daemon(&images[..depth], is_encrypted, &at("served"));
            assert_padded(&at("served"), &plain);
            std::fs::remove_file(at("nbd")).unwrap();
            if !is_encrypted {
                let (image, raw) = (image.to_str().unwrap(), at("raw"));
                qemu_img(["check", "-f", "qcow2", image]).unwrap();
                qemu_img(["convert", "-f", "qcow2", "-O", "raw", image, raw.to_str().unwrap()]).unwrap();
                assert_padded(&raw, &plain);
            }
        }
    }
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
    let object = secret(directory.path());
    let raw = at("raw").to_str().unwrap().to_owned();
    let image =
        format!("driver=qcow2,file.driver=luks,file.key-secret=s,file.file.filename={}", at("1.qcow2").display());
    qemu_img(["check", "--object", &object, "--image-opts", &image]).unwrap();
    qemu_img(["convert", "--object", &object, "--image-opts", &image, "-O", "raw", &raw]).unwrap();
    assert_padded(&at("raw"), &one);

    read_through_daemon(&[at("1.qcow2"), at("2.qcow2")], true, &at("raw"));
    assert_padded(&at("raw"), &two);
    assert_eq!(
        open_snapshot(&at("2.qcow2"), &access(Some(&passphrase()))).unwrap().id(),
        Snapshot::open(&two).unwrap().id()
    );
}
