//! Image locks, with QEMU at the other end.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use limosa_storage::{FileOptions, FileStorage, LockPolicy, StorageError};
use limosa_testkit::{qemu_img, qemu_io};
use tempfile::TempDir;

macro_rules! needs_qemu {
    () => {
        if limosa_testkit::qemu_skipped() {
            return;
        }
        limosa_testkit::require_qemu().unwrap();
    };
}

/// An image of a format, in a folder that goes with it.
fn image(format: &str) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join(format!("disk.{format}"));
    let words = ["create", "-q", "-f", format].map(OsStr::new);
    qemu_img(words.into_iter().chain([path.as_os_str(), OsStr::new("16M")])).unwrap();
    (folder, path)
}

/// A process of QEMU's that has an image open. It is killed when this is dropped.
struct Holder(Child);

impl Holder {
    /// `qemu-io`, which has opened the image when this returns.
    fn io(arguments: &[&str], path: &Path) -> Self {
        let mut child = Command::new("qemu-io")
            .args(arguments)
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.as_mut().unwrap().write_all(b"read 0 512\n").unwrap();
        let mut line = Vec::new();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        while !String::from_utf8_lossy(&line).contains("512 bytes") {
            line.clear();
            assert!(lines.read_until(b'\n', &mut line).unwrap() > 0, "qemu-io did not open the image");
        }
        // Its later output needs a reader.
        std::thread::spawn(move || io::copy(&mut lines, &mut io::sink()));
        Self(child)
    }

    /// A VM that is paused; its monitor replies when the image is open.
    fn vm(drive: &str) -> Self {
        let mut child = Command::new("qemu-system-x86_64")
            .args(["-S", "-nodefaults", "-display", "none", "-accel", "tcg", "-qmp", "stdio", "-drive", drive])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.as_mut().unwrap().write_all(b"{\"execute\": \"qmp_capabilities\"}\n").unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        // The greeting comes before the disks, the answer behind them.
        while !line.contains("return") {
            line.clear();
            assert!(lines.read_line(&mut line).unwrap() > 0, "QEMU did not open the image");
        }
        std::thread::spawn(move || io::copy(&mut lines, &mut io::sink()));
        Self(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

fn open(path: &Path, read_only: bool, lock: LockPolicy) -> Result<Arc<FileStorage>, StorageError> {
    FileStorage::open(path, &FileOptions { read_only, lock, ..FileOptions::default() })
}

fn is_refused(path: &Path, read_only: bool, holder: &str) {
    let error = open(path, read_only, LockPolicy::Required).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ResourceBusy, "{error}");
    assert!(error.source.to_string().contains(holder), "{error}");
    // A reader without locks is not refused.
    open(path, read_only, LockPolicy::None).unwrap();
}

/// That a tool of QEMU's does not get at the image, because of locks.
fn is_kept_away(result: anyhow::Result<String>) {
    let message = result.unwrap_err().to_string();
    assert!(message.contains("Failed to get"), "{message}");
}

fn info(path: &Path) -> anyhow::Result<String> {
    qemu_img([OsStr::new("info"), path.as_os_str()])
}

fn read(arguments: &[&str], path: &Path) -> anyhow::Result<String> {
    qemu_io(arguments.iter().chain(&["-c", "read 0 512"]).map(OsStr::new).chain([path.as_os_str()]))
}

#[test]
fn what_qemu_writes_is_not_opened() {
    needs_qemu!();
    let (_folder, path) = image("qcow2");
    let holder = Holder::io(&["-f", "qcow2"], &path);
    is_refused(&path, true, "qemu-io");
    is_refused(&path, false, "qemu-io");
    drop(holder);
    open(&path, false, LockPolicy::Required).unwrap();
}

#[test]
fn a_disk_of_a_running_vm_is_not_opened() {
    needs_qemu!();
    for format in ["raw", "qcow2"] {
        let (_folder, path) = image(format);
        let holder = Holder::vm(&format!("file={},format={format},if=virtio", path.display()));
        is_refused(&path, true, "qemu-system");
        is_refused(&path, false, "qemu-system");
        drop(holder);
        open(&path, false, LockPolicy::Required).unwrap();
    }
}

#[test]
fn a_disk_that_a_vm_only_reads_is_read_and_not_written() {
    needs_qemu!();
    for format in ["raw", "qcow2"] {
        let (_folder, path) = image(format);
        let _holder = Holder::vm(&format!("file={},format={format},if=virtio,readonly=on", path.display()));
        open(&path, true, LockPolicy::Required).unwrap();
        is_refused(&path, false, "qemu-system");
    }
}

#[test]
fn qemu_does_not_open_what_we_write() {
    needs_qemu!();
    let (_folder, path) = image("qcow2");
    let storage = open(&path, false, LockPolicy::Required).unwrap();
    is_kept_away(info(&path));
    is_kept_away(read(&["-f", "qcow2"], &path));
    is_kept_away(read(&["-r", "-f", "qcow2"], &path));
    read(&["-r", "-U", "-f", "qcow2"], &path).unwrap();
    drop(storage);
    read(&["-f", "qcow2"], &path).unwrap();
    // Without our locks no process is refused.
    let _storage = open(&path, false, LockPolicy::None).unwrap();
    read(&["-f", "qcow2"], &path).unwrap();
}

#[test]
fn qemu_reads_what_we_read_and_does_not_write_it() {
    needs_qemu!();
    let (_folder, path) = image("qcow2");
    let _storage = open(&path, true, LockPolicy::Required).unwrap();
    info(&path).unwrap();
    read(&["-r", "-f", "qcow2"], &path).unwrap();
    is_kept_away(read(&["-f", "qcow2"], &path));
    // And the other way round.
    let _holder = Holder::io(&["-r", "-f", "qcow2"], &path);
    open(&path, true, LockPolicy::Required).unwrap();
}
