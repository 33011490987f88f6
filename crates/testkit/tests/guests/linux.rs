//! The Linux guest under plain QEMU.

use limosa_testkit::{Disk, DiskFormat, LinuxGuest, Machine, qemu_skipped, scratch, wait_for};

#[test]
fn linux_counts_takes_commands_and_goes_on_counting_after_a_migration() {
    if qemu_skipped() {
        return;
    }
    let pair = Machine::linux(LinuxGuest::default()).pair().unwrap();
    let before = pair.source.wait_counts(3).unwrap();
    assert_eq!(pair.source.shell("echo $((6*7)) > /tmp/kept; cat /tmp/kept").unwrap(), ["42"]);
    assert!(pair.source.shell("false").is_err());
    pair.source.migrate_to(&pair.destination).unwrap();
    let after = pair.destination.wait_counts(3).unwrap();
    assert!(after > before && after < before + 1000, "{before} then {after}");
    assert_eq!(pair.destination.shell("cat /tmp/kept").unwrap(), ["42"]);
}

#[test]
fn linux_sees_its_disks_and_its_balloon() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let raw = Disk::create(&folder.path().join("raw, with a comma"), DiskFormat::Raw, 8 << 20).unwrap();
    let qcow2 = Disk::create(&folder.path().join("qcow2"), DiskFormat::Qcow2, 8 << 20).unwrap();
    let read_only =
        Disk { writable: false, ..Disk::create(&folder.path().join("ro"), DiskFormat::Raw, 1 << 20).unwrap() };
    let machine = Machine::linux(LinuxGuest::default()).disk(raw).disk(qcow2).disk(read_only).balloon();
    let vm = machine.start().unwrap();
    vm.wait_counts(1).unwrap();
    vm.shell("echo hello > /dev/vda && echo world > /dev/vdb && sync").unwrap();
    assert_eq!(vm.shell("head -c 5 /dev/vda; head -c 6 /dev/vdb").unwrap(), ["helloworld"]);
    assert_eq!(vm.shell("cat /sys/block/vd?/ro").unwrap(), ["0", "0", "1"]);
    assert_eq!(vm.shell("ls -d /sys/bus/virtio/drivers/virtio_balloon/virtio* | wc -l").unwrap(), ["1"]);
    let nodes = vm.execute("query-named-block-nodes", serde_json::json!({ "flat": true })).unwrap();
    let names: Vec<&str> = nodes.as_array().unwrap().iter().filter_map(|node| node["node-name"].as_str()).collect();
    for wanted in ["disk0-format", "disk1-format", "disk2-format"] {
        assert!(names.contains(&wanted), "{names:?}");
    }
}

#[test]
fn linux_has_an_agent_that_opens_its_port() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let chardev = format!("socket,id=qga,path={}/qga,server=on,wait=off", folder.path().display());
    let port = "virtserialport,chardev=qga,name=org.qemu.guest_agent.0";
    let machine = Machine::linux(LinuxGuest { agent: true, ..LinuxGuest::default() });
    let words = ["-device", "virtio-serial-pci", "-chardev", &chardev, "-device", port];
    let vm = words.into_iter().fold(machine, Machine::argument).start().unwrap();
    wait_for("the guest agent", || {
        let chardevs = vm.execute("query-chardev", serde_json::json!({})).unwrap();
        let is_open = |chardev: &serde_json::Value| chardev["label"] == "qga" && chardev["frontend-open"] == true;
        chardevs.as_array().unwrap().iter().any(is_open).then_some(())
    });
    vm.shell("kill -0 $(cat /tmp/qemu-ga.pid)").unwrap();
}
