//! Repairs of images with encrypted contents.

use std::fs;

use limosa_image::luks::Passphrase;
use limosa_image::qcow2::{self, CheckOptions, Header, Repair, repair, repair_encrypted};
use limosa_storage::{MemoryStorage, block_on};
use limosa_testkit::image::{number, put};
use limosa_testkit::{qemu_img, qemu_io, qemu_skipped, scratch};

const SECRET: [&str; 2] = ["--object", "secret,id=s,data=correct horse"];

#[test]
fn a_cluster_that_is_copied_is_encrypted_for_its_new_place() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let path = folder.path().join("image");
    let name = path.to_str().unwrap();
    let options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10,refcount_bits=1";
    let image = format!("driver=qcow2,encrypt.key-secret=s,file.filename={name}");
    qemu_img([&["create", "-q", "-f", "qcow2", "-o", options], &SECRET[..], &[name, "1M"]].concat()).unwrap();
    qemu_io([&SECRET[..], &["-c", "write -P 7 0 64k", "--image-opts", &image]].concat()).unwrap();
    let storage = MemoryStorage::with_contents(fs::read(&path).unwrap(), 256 << 20);
    // A second entry leads to the cluster, which its refcount of one bit cannot say.
    let header = block_on(Header::read(&storage)).unwrap();
    let table = number(&storage, header.l1.0.0) & 0x00ff_ffff_ffff_fe00;
    put(&storage, table + 8, &number(&storage, table).to_be_bytes());
    let before = storage.contents();
    let error = block_on(repair(&storage, Repair::All, CheckOptions::default())).unwrap_err().to_string();
    assert!(error.contains("which needs the passphrase"), "{error}");
    let storage = MemoryStorage::with_contents(before, 256 << 20);
    let report = block_on(async {
        let cipher = qcow2::cipher(&storage, &header, &Passphrase::new(b"correct horse".to_vec())).await?;
        repair_encrypted(&storage, &cipher, Repair::All, CheckOptions::default()).await
    });
    let report = report.unwrap();
    assert!(report.is_clean() && report.corruptions_fixed > 0, "{report:?}");
    fs::write(&path, storage.contents()).unwrap();
    qemu_img([&["check"], &SECRET[..], &["--image-opts", &image]].concat()).unwrap();
    let read = ["-c", "read -P 7 0 128k", "--image-opts", &image];
    let said = qemu_io([&SECRET[..], &read].concat()).unwrap();
    assert!(!said.contains("failed"), "{said}");
}
