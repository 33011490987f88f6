//! Images made by the stock tools are read as the stock tools read them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use limosa_image::qcow2::Qcow2Options;
use limosa_image::{Disk, GuestOffset};
use limosa_storage::{Buffer, MemoryStorage, Storage, block_on};
use limosa_testkit::image::TestImage;
use limosa_testkit::{qemu_img, qemu_io};

struct Folder(tempfile::TempDir);

impl Folder {
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn create(&self, name: &str, options: &str, backing: Option<&str>, size: &str) {
        let name = self.text(name);
        let mut line = vec!["create", "-q", "-f", "qcow2"];
        if !options.is_empty() {
            line.extend(["-o", options]);
        }
        let backing = backing.map(|backing| self.text(backing));
        if let Some(backing) = &backing {
            line.extend(["-b", backing, "-F", "qcow2"]);
        }
        line.extend([&*name, size]);
        qemu_img(line).unwrap();
    }

    fn write(&self, name: &str, commands: &[&str]) {
        let name = self.text(name);
        let mut line: Vec<&str> = commands.iter().flat_map(|command| ["-c", command]).collect();
        line.push(&name);
        qemu_io(line).unwrap();
    }

    fn storage(&self, name: &str) -> Arc<dyn Storage> {
        memory(&self.path(name))
    }

    fn open(&self, name: &str, data_file: Option<&str>, backing: Option<Arc<dyn Disk>>) -> Arc<dyn Disk> {
        let data_file = data_file.map(|name| self.storage(name));
        let image = TestImage { file: self.storage(name), data_file, cipher: None };
        image.open_over(backing, Qcow2Options::default().read_only(true).cache_size(0))
    }

    /// Reads all of a disk in requests of many sizes, and compares with what the stock tools make of it.
    fn compare(&self, name: &str, disk: &dyn Disk) {
        qemu_img(["convert", "-O", "raw", &self.text(name), &self.text("out.raw")]).unwrap();
        let expected = std::fs::read(self.path("out.raw")).unwrap();
        assert_eq!(disk.len(), expected.len() as u64);
        for size in [3 << 20, 100_000, 4096] {
            let mut at = 0;
            while at < expected.len() {
                let length = size.min(expected.len() - at);
                let buffer = Buffer::from_slice(&vec![0x5a; length]);
                block_on(disk.read(GuestOffset(at as u64), buffer.clone().into())).unwrap();
                assert!(buffer.to_vec() == expected[at..at + length], "{name}: {size} bytes at {at:#x}");
                // Small requests look at samples.
                at += if size == 4096 { 4096 * 7 } else { length };
            }
        }
        let mut at = 0;
        while at < disk.len() {
            let mapped = block_on(disk.map(GuestOffset(at), disk.len() - at)).unwrap();
            assert!(mapped.length > 0 && at + mapped.length <= disk.len());
            at += mapped.length;
        }
    }
}

fn memory(path: &Path) -> Arc<dyn Storage> {
    let bytes = std::fs::read(path).unwrap();
    Arc::new(MemoryStorage::with_contents(bytes, 1 << 30))
}

const WRITES: &[&str] = &[
    "write -P 1 0 64k",
    "write -P 2 100k 300k",
    "write -P 3 1000000 1234",
    "write -z 200k 64k",
    "write -z -u 3M 200k",
    "write -P 4 3100k 3k",
    "discard 320k 64k",
    "write -P 5 5M 1M",
];

#[test]
fn images_of_all_kinds_are_read_as_the_stock_tools_read_them() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    for options in [
        "",
        "compat=0.10",
        "cluster_size=512",
        "cluster_size=4k,refcount_bits=1",
        "cluster_size=2M",
        "extended_l2=on",
        "extended_l2=on,cluster_size=16k",
        "lazy_refcounts=on",
        "preallocation=metadata",
    ] {
        let folder = Folder(limosa_testkit::scratch().unwrap());
        folder.create("disk", options, None, "7M");
        folder.write("disk", WRITES);
        folder.compare("disk", &*folder.open("disk", None, None));
    }
}

#[test]
fn compressed_clusters_are_read() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    for options in
        ["", "compression_type=zstd", "cluster_size=4k,compression_type=zstd", "cluster_size=2M", "extended_l2=on"]
    {
        let folder = Folder(limosa_testkit::scratch().unwrap());
        folder.create("plain", "", None, "7M");
        folder.write("plain", WRITES);
        let mut line = vec!["convert", "-q", "-c", "-O", "qcow2"];
        if !options.is_empty() {
            line.extend(["-o", options]);
        }
        let [from, to] = ["plain", "disk"].map(|name| folder.text(name));
        line.extend([&*from, &*to]);
        qemu_img(line).unwrap();
        folder.write("disk", &["write -P 9 70k 20k"]);
        folder.compare("disk", &*folder.open("disk", None, None));
    }
}

#[test]
fn chains_are_read_through() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    for options in ["", "extended_l2=on", "cluster_size=1k", "compat=0.10"] {
        let folder = Folder(limosa_testkit::scratch().unwrap());
        folder.create("base", "", None, "4M");
        folder.write("base", &["write -P 11 0 4M", "write -z 1M 100k"]);
        folder.create("middle", options, Some("base"), "6M");
        folder.write("middle", &["write -P 12 600k 700k", "write -P 13 5M 5k"]);
        qemu_img(["snapshot", "-c", "one", &folder.text("middle")]).unwrap();
        folder.write("middle", &["write -P 14 900k 100k"]);
        folder.create("disk", options, Some("middle"), "7M");
        folder.write("disk", &["write -P 15 1000k 33k", "write -P 16 6500k 2k"]);
        let base = folder.open("base", None, None);
        let middle = folder.open("middle", None, Some(base));
        let disk = folder.open("disk", None, Some(middle));
        folder.compare("disk", &*disk);
    }
}

#[test]
fn contents_in_a_file_of_their_own_are_read() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    for raw in ["", ",data_file_raw=on"] {
        let folder = Folder(limosa_testkit::scratch().unwrap());
        folder.create("disk", &format!("data_file={}{raw}", folder.text("data")), None, "7M");
        folder.write("disk", WRITES);
        folder.compare("disk", &*folder.open("disk", Some("data"), None));
    }
}
