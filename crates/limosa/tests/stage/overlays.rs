//! A Linux guest that writes to its disk all the time and knows in memory what must be there: the proof that memory and
//! disk are of one instant.
//!
//! Law: the guest writes the number n into sector n, flushes, and continues only if sector n then holds n and sector
//! n+1 nothing. A disk that is older than the guest's memory breaks the first, one that is newer the second, and either
//! is `torn` on the serial port from the first turn on.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::Command;

use limosa_testkit::{Disk, DiskFormat, LinuxGuest, Machine, Serial, Vm};
use serde_json::json;

use crate::stage::*;

const SECTOR: usize = 512;

/// One turn a line; the numbers on the serial port are those that are durable.
const WRITER: &str = "( n=0; at() { dd if=/dev/vda bs=512 skip=$1 count=1 2>/dev/null | head -n 1; }; \
    while :; do n=$((n+1)); echo $n | dd of=/dev/vda bs=512 seek=$n conv=sync,notrunc,fsync 2>/dev/null; \
    if [ \"$(at $n)\" = $n -a -z \"$(at $((n+1)) | tr -d '\\000')\" ]; then echo disk $n; else echo torn $n; fi; \
    sleep 0.02; done ) > /dev/ttyS0 2>/dev/null &";

/// A Linux VM on this image as its first disk.
pub(crate) fn linux_on(path: &Path, format: DiskFormat) -> Machine {
    // On a busy host the kernel's own test of the timer fails, and the guest does not boot.
    let guest = LinuxGuest { kernel_words: "no_timer_check".to_owned(), ..LinuxGuest::default() };
    Machine::linux(guest).disk(Disk { path: path.to_owned(), format, writable: true })
}

/// Starts the VM and the writer in it.
pub(crate) fn start_writer(machine: &Machine) -> Vm {
    let vm = machine.start().unwrap();
    vm.wait_counts(1).unwrap();
    vm.shell(WRITER).unwrap();
    wait_writes(vm.serial(), 3);
    vm
}

fn written(text: &str) -> Option<u64> {
    text.strip_prefix("disk ")?.parse().ok()
}

/// Waits until the guest has written `times` more; the last number.
#[track_caller]
pub(crate) fn wait_writes(serial: &Serial, times: usize) -> u64 {
    let mut from = serial.mark();
    let mut last = 0;
    for _ in 0..times {
        let (at, line) =
            serial.wait_from(from, SOON, |text| written(text).is_some() || text.starts_with("torn")).unwrap();
        last =
            written(&line.text).unwrap_or_else(|| panic!("memory and disk are of different instants: {}", line.text));
        from = at + 1;
    }
    last
}

/// Expects that the guest never found its disk to be another than it knew.
#[track_caller]
pub(crate) fn assert_never_torn(vm: &Vm) {
    let torn = vm.serial().lines().into_iter().find(|line| line.text.starts_with("torn"));
    assert!(torn.is_none(), "{torn:?}");
}

/// The last number that the guest has announced as durable.
pub(crate) fn last_written(vm: &Vm) -> u64 {
    vm.serial().lines().iter().rev().find_map(|line| written(&line.text)).unwrap_or(0)
}

/// The first number that was announced here.
pub(crate) fn first_written(vm: &Vm) -> u64 {
    vm.serial().lines().iter().find_map(|line| written(&line.text)).unwrap_or(0)
}

/// Runs qemu-img; what it prints.
#[track_caller]
pub(crate) fn qemu_img(arguments: &[&str]) -> String {
    let done = Command::new("qemu-img").args(arguments).output().unwrap();
    assert!(done.status.success(), "qemu-img {arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).into_owned()
}

/// How many sectors from the second on hold their own number; nothing else may be written. The image's VM must be
/// paused, if it has one.
#[track_caller]
pub(crate) fn sectors_written(image: &Path, format: &str) -> u64 {
    let folder = limosa_testkit::scratch().unwrap();
    let raw = folder.path().join("raw");
    qemu_img(&["convert", "-U", "-f", format, "-O", "raw", image.to_str().unwrap(), raw.to_str().unwrap()]);
    let bytes = std::fs::read(raw).unwrap();
    let number = |sector: &[u8]| {
        let end = sector.iter().position(|&byte| byte == b'\n')?;
        std::str::from_utf8(&sector[..end]).ok()?.parse::<u64>().ok()
    };
    let sectors = || (1..).zip(bytes.chunks(SECTOR).skip(1));
    let count = sectors().take_while(|(n, sector)| number(sector) == Some(*n)).count() as u64;
    let behind =
        sectors().skip(usize::try_from(count).unwrap()).find(|(_, sector)| sector.iter().any(|&byte| byte != 0));
    assert!(
        behind.is_none(),
        "{}: {count} writes in a row, then one is missing before {}",
        image.display(),
        behind.unwrap().0
    );
    count
}

/// A fresh overlay over an image, as the message of limosa tells to make one.
#[track_caller]
pub(crate) fn fresh_overlay(folder: &Path, name: &str, below: &Path, format: &str) -> PathBuf {
    let path = folder.join(name);
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", format, "-b", below.to_str().unwrap(), path.to_str().unwrap()]);
    path
}

/// The file that this device writes to.
#[track_caller]
pub(crate) fn top_file(vm: &Vm, device: &str) -> PathBuf {
    let blocks = vm.execute("query-block", json!({})).unwrap();
    let ours = |block: &&serde_json::Value| {
        block["device"] == device
            || block["qdev"].as_str().is_some_and(|path| format!("{path}/").contains(&format!("/{device}/")))
    };
    let block = blocks.as_array().unwrap().iter().find(ours).unwrap_or_else(|| panic!("no {device} in {blocks}"));
    let name = block["inserted"]["file"].as_str().unwrap();
    match name.strip_prefix("json:") {
        None => name.into(),
        Some(json) => {
            let node: serde_json::Value = serde_json::from_str(json).unwrap();
            node["file"]["filename"].as_str().unwrap().into()
        }
    }
}
