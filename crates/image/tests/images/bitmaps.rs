//! Bitmaps of the stock tool, after limosa has written to the disk.

use std::path::Path;

use limosa_image::GuestOffset;
use limosa_image::chain::{OpenOptions, open};
use limosa_image::reference::Reference;
use limosa_storage::{Buffer, block_on};
use limosa_testkit::{qemu_img, qemu_skipped, scratch};

/// Flags of the bitmaps of an image, by name, as the stock tool tells them.
fn flags(path: &Path) -> Vec<(String, Vec<String>)> {
    let said = qemu_img(["info", "--output", "json", path.to_str().unwrap()]).unwrap();
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    let bitmaps = said["format-specific"]["data"]["bitmaps"].as_array().cloned().unwrap_or_default();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let flags = |bitmap: &serde_json::Value| bitmap["flags"].as_array().unwrap().iter().map(text).collect();
    bitmaps.iter().map(|bitmap| (text(&bitmap["name"]), flags(bitmap))).collect()
}

#[test]
fn bitmaps_are_stored_when_the_disk_is_closed_and_in_use_if_it_is_not() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let path = folder.path().join("image.qcow2");
    let image = path.to_str().unwrap();
    qemu_img(["create", "-q", "-f", "qcow2", image, "4M"]).unwrap();
    qemu_img(["bitmap", "--add", image, "follows"]).unwrap();
    qemu_img(["bitmap", "--add", "--disable", image, "stands still"]).unwrap();
    let named = |follows: &[&str]| {
        let follows = follows.iter().map(|flag| (*flag).to_owned()).collect();
        vec![("follows".to_owned(), follows), ("stands still".to_owned(), Vec::new())]
    };
    assert_eq!(flags(&path), named(&["auto"]));
    let write = |at| {
        let disk = block_on(open(&Reference::file(&path), &OpenOptions::default())).unwrap();
        block_on(disk.write(GuestOffset(at), Buffer::from_slice(&[7; 512]).into())).unwrap();
        block_on(disk.flush()).unwrap();
        disk
    };
    block_on(write(1 << 20).close()).unwrap();
    assert_eq!(flags(&path), named(&["auto"]));
    qemu_img(["check", "-q", image]).unwrap();
    // The stock tool takes it for one that can be relied on.
    qemu_img(["bitmap", "--merge", "follows", image, "stands still"]).unwrap();
    drop(write(2 << 20));
    assert_eq!(flags(&path), named(&["in-use", "auto"]));
    // What was taken ahead is still counted: nothing was given back.
    qemu_img(["check", "-q", "-r", "leaks", image]).unwrap();
    // What is in use cannot be relied on, and what is not can.
    qemu_img(["bitmap", "--clear", image, "follows"]).unwrap_err();
    qemu_img(["bitmap", "--clear", image, "stands still"]).unwrap();
}
