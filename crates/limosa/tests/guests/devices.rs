//! VMs with many devices: limosa understands none of them, and brings all of them back.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::needs_qemu;
use crate::stage::*;
use limosa_testkit::{Disk, DiskFormat, HeartbeatGuest, Machine, MemoryBackend, Vm};
use serde_json::json;

/// A beat guest among all kinds of devices; the images are made in `folder`.
fn rich(folder: &Path) -> Machine {
    let image = |name: &str, format| Disk::create(&folder.join(name), format, 16 << 20).unwrap();
    let mut machine = Machine::heartbeat(HeartbeatGuest { rest: 2, ..HeartbeatGuest::over(4 << 20) })
        .kind("pc-q35-10.0")
        .disk(image("blk.qcow2", DiskFormat::Qcow2))
        .balloon();
    let scsi = image("scsi.raw", DiskFormat::Raw).path;
    let sata = image("sata.raw", DiskFormat::Raw).path;
    let size = machine.memory_bytes() >> 20;
    let more = [
        format!("-m {size}M,slots=2,maxmem=1G"),
        "-object memory-backend-ram,id=plug0,size=256M".to_owned(),
        "-device virtio-mem-pci,id=mem0,memdev=plug0,requested-size=64M".to_owned(),
        "-device virtio-scsi-pci,id=scsi0".to_owned(),
        format!("-blockdev driver=file,node-name=scsi-file,filename={}", scsi.display()),
        "-blockdev driver=raw,node-name=scsi-raw,file=scsi-file".to_owned(),
        "-device scsi-hd,bus=scsi0.0,drive=scsi-raw".to_owned(),
        "-device ahci,id=ahci1".to_owned(),
        format!("-blockdev driver=file,node-name=sata-file,filename={}", sata.display()),
        "-blockdev driver=raw,node-name=sata-raw,file=sata-file".to_owned(),
        "-device ide-hd,bus=ahci1.0,drive=sata-raw".to_owned(),
        "-netdev hubport,id=net0,hubid=0 -device virtio-net-pci,netdev=net0,mac=52:54:00:00:00:01".to_owned(),
        "-netdev hubport,id=net1,hubid=0 -device e1000e,netdev=net1,mac=52:54:00:00:00:02".to_owned(),
        "-device virtio-gpu-pci -device virtio-rng-pci".to_owned(),
        "-device virtio-serial-pci,id=serial1 -chardev null,id=null0".to_owned(),
        "-device virtserialport,bus=serial1.0,chardev=null0".to_owned(),
        "-device qemu-xhci,id=usb1 -device usb-kbd,bus=usb1.0 -device usb-tablet,bus=usb1.0".to_owned(),
        "-device pcie-root-port,id=port0,slot=7".to_owned(),
    ];
    for word in more.iter().flat_map(|words| words.split(' ')) {
        machine = machine.argument(word);
    }
    machine
}

/// Restores by `how` into a fresh destination.
fn restore(machine: &Machine, snapshot: &Path, how: &[&str]) -> Vm {
    let destination = machine.start_incoming().unwrap();
    let (socket, file) = (destination.qmp_socket(), snapshot.to_str().unwrap());
    limosa([&["restore", file, "--qmp", socket.to_str().unwrap()], how].concat()).success();
    destination
}

#[test]
fn a_guest_among_all_kinds_of_devices_comes_back() {
    needs_qemu!();
    let (folder, file) = place();
    let machine = rich(folder.path());
    for save in [&["--via", "file"][..], &["--via", "socket", "--checksum"], &["--via", "socket", "--channels", "2"]] {
        let source = machine.start().unwrap();
        source.wait_heartbeats(2).unwrap();
        // So that the device has something to say about its memory; a guest without a driver takes none of it.
        let plug = json!({ "path": "/machine/peripheral/mem0", "property": "requested-size", "value": 128 << 20 });
        source.execute("qom-set", plug).unwrap();
        limosa(save_arguments(&source, &file, &[save, &["--stop", "--force"]].concat())).success();
        drop(source);
        for how in [
            &["--memory", "lazy"][..],
            &["--memory", "lazy", "--preempt", "on"],
            &["--memory", "eager", "--via", "file"],
            &["--memory", "eager", "--via", "socket"],
            &["--memory", "eager", "--via", "socket", "--channels", "2"],
        ] {
            println!("saved {save:?}, restored {how:?}");
            let destination = restore(&machine, &file, how);
            destination.check_heartbeat().unwrap();
            assert_beats(&destination);
            let plugged = json!({ "path": "/machine/peripheral/mem0", "property": "requested-size" });
            assert_eq!(destination.execute("qom-get", plugged).unwrap(), json!(128 << 20));
        }
    }
    // Stock QEMU reads what limosa wrote with the state of that memory in it.
    drop(load_in_stock_qemu(&machine, &file, 0));
    drop(load_in_stock_qemu(&machine, &file, 2));
    let inspected = limosa(["inspect", file.to_str().unwrap(), "--json"]).json();
    assert!(inspected.to_string().contains("virtio-mem"), "{inspected}");
}

/// The firmware and a fresh variable store of it in `folder`.
pub(crate) fn firmware(folder: &Path) -> (PathBuf, PathBuf) {
    let find = |names: [&str; 2]| {
        let places = names.map(|name| Path::new("/usr/share/OVMF").join(name));
        places.into_iter().find(|path| path.exists()).expect("no OVMF firmware: run `cargo xtask setup`")
    };
    let store = folder.join("variables.fd");
    std::fs::copy(find(["OVMF_VARS_4M.fd", "OVMF_VARS.fd"]), &store).unwrap();
    (find(["OVMF_CODE_4M.fd", "OVMF_CODE.fd"]), store)
}

#[test]
fn a_vm_with_uefi_firmware_and_its_variable_store_comes_back() {
    needs_qemu!();
    let (folder, file) = place();
    let (code, store) = firmware(folder.path());
    let mut machine = Machine::paused(256 << 20).backend(MemoryBackend::Memfd).kind("pc-q35-10.0");
    for words in [
        format!("-blockdev driver=file,node-name=code,read-only=on,filename={}", code.display()),
        format!("-blockdev driver=file,node-name=store,filename={}", store.display()),
        "-machine pflash0=code,pflash1=store".to_owned(),
    ] {
        for word in words.split(' ') {
            machine = machine.argument(word);
        }
    }
    let source = machine.start_stopped().unwrap();
    source.cont().unwrap();
    // The firmware works for a moment: what it is at does not matter.
    wait_for("the firmware to work", || {
        let used = source.memory_file().unwrap().metadata().unwrap().blocks() * 512;
        (used > 16 << 20).then_some(())
    });
    limosa(save_arguments(&source, &file, &["--stop"])).success();
    let memory = source.read_memory(0..128 << 20).unwrap();
    assert!(memory.iter().any(|byte| *byte != 0), "the firmware did nothing");
    drop(source);
    for how in [
        &["--memory", "lazy"][..],
        &["--memory", "eager", "--via", "file"],
        &["--memory", "eager", "--via", "socket"],
        &["--memory", "eager", "--via", "socket", "--channels", "2"],
    ] {
        let destination = restore(&machine, &file, &[how, &["--paused"]].concat());
        assert!(destination.read_memory(0..128 << 20).unwrap() == memory, "other memory after {how:?}");
    }
    let destination = restore(&machine, &file, &["--memory", "lazy"]);
    assert_eq!(destination.run_state().unwrap(), "running");
}
