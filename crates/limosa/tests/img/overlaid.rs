//! Images whose protected VM's last writes are in overlays beside them.

use std::fs;

use serde_json::json;

use crate::bed::{Answer, Bed, assert_one_line};
use crate::needs_qemu;

/// Writes the ledger of an image.
fn note(bed: &Bed, image: &str, state: &serde_json::Value) {
    let ledger = json!({ "version": 1, "overlays": "00000000-0000-0000-0000-000000000007", "image": state });
    fs::write(bed.path(&format!("{image}.overlays")), ledger.to_string()).unwrap();
}

#[test]
fn an_image_whose_last_writes_are_in_overlays_is_neither_read_nor_written() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "disk", "1M"]);
    bed.create(&["-f", "qcow2", "other", "1M"]);
    bed.create(&["-f", "qcow2", "-b", "disk", "-F", "qcow2", "top", "1M"]);
    bed.create(&["-f", "qcow2", "-b", "top", "-F", "qcow2", "higher", "1M"]);
    bed.qemu_io("top", &["write -q -P 3 0 64k"]);
    let before = fs::read(bed.path("disk")).unwrap();
    for state in [json!({ "state": "merging", "epoch": 3 }), json!({ "state": "bringing", "epoch": 3 })] {
        note(&bed, "disk", &state);
        for words in [
            &["info", "disk"][..],
            &["info", "--image-opts", "driver=qcow2,file.filename=disk"],
            &["check", "disk"],
            &["check", "-r", "all", "disk"],
            &["map", "disk"],
            &["measure", "-O", "raw", "disk"],
            &["compare", "disk", "other"],
            &["convert", "-O", "raw", "disk", "new"],
            &["convert", "-n", "-f", "qcow2", "-O", "qcow2", "other", "disk"],
            &["dd", "if=disk", "of=new"],
            &["resize", "disk", "2M"],
            &["amend", "-o", "lazy_refcounts=on", "disk"],
            &["rebase", "-u", "-b", "", "disk"],
            &["snapshot", "-c", "now", "disk"],
            &["bitmap", "--add", "disk", "now"],
            &["bench", "-w", "-c", "1", "disk"],
            &["commit", "top"],
            &["commit", "-b", "disk", "higher"],
        ] {
            let refused = Answer::from(bed.limosa(words));
            assert_ne!(refused.status, Some(0), "{words:?}");
            for part in ["disk: ", "are in overlays beside it", "disk.overlays", "`limosa protect failover`"] {
                assert_one_line(&refused, words, part);
            }
        }
    }
    assert_eq!(fs::read(bed.path("disk")).unwrap(), before);
    // The overlays and the image together are all of the disk.
    for words in [&["info", "top"][..], &["convert", "-O", "raw", "top", "new"], &["commit", "higher"]] {
        bed.limosa(words).success();
    }
    fs::write(bed.path("disk.overlays"), "no ledger").unwrap();
    bed.limosa(&["info", "disk"]).one_line(&["disk.overlays: "]);
    // A failover has brought it to its checkpoint.
    note(&bed, "disk", &json!({ "state": "brought", "epoch": 3, "stamp": { "size": 1, "modified": [1, 2] } }));
    bed.limosa(&["commit", "top"]).success();
}
