//! Networks of clones.

use std::process::Command;

use limosa_testkit::{Qmp, skipped};

use super::*;
use crate::needs_qemu;

/// Network namespaces, each with a tap device of the same name; removed when dropped.
struct Namespaces {
    prefix: String,
    count: u32,
}

fn ip(words: &[&str]) {
    let output = Command::new("ip").args(words).output().expect("iproute2, or skip with LIMOSA_SKIP_NETNS=1");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {words:?}: {error}: needs root, or skip with LIMOSA_SKIP_NETNS=1");
}

impl Namespaces {
    /// As in docs/clones.md.
    fn new(count: u32) -> Self {
        let namespaces = Self { prefix: format!("limosa-{}-", std::process::id()), count };
        for name in namespaces.names() {
            ip(&["netns", "add", &name]);
            ip(&["-n", &name, "tuntap", "add", "tap0", "mode", "tap"]);
            ip(&["-n", &name, "address", "add", "10.0.0.1/24", "dev", "tap0"]);
            ip(&["-n", &name, "link", "set", "tap0", "up"]);
        }
        namespaces
    }

    fn names(&self) -> impl Iterator<Item = String> {
        (1..=self.count).map(|number| format!("{}{number}", self.prefix))
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in self.names() {
            // It may not have been made.
            let _ = Command::new("ip").args(["netns", "del", &name]).output();
        }
    }
}

#[test]
fn clones_in_namespaces_of_their_own_keep_one_address_and_are_reached_one_by_one() {
    needs_qemu!();
    if skipped("LIMOSA_SKIP_NETNS") {
        return;
    }
    // The device is what the guest sees; where it leads is each QEMU's own.
    let net = |netdev: &str| {
        let words = ["-netdev", netdev, "-device", "virtio-net-pci,netdev=net0,mac=52:54:00:00:00:02"];
        words.map(str::to_owned).to_vec()
    };
    let saved = |_: &str| net("hubport,id=net0,hubid=0");
    let mut scene = LinuxScene::new(&LinuxGuest::default(), &saved, |source| {
        source.shell("ip address add 10.0.0.2/24 dev eth0; ip link set eth0 up").unwrap();
        source.shell("while :; do nc -l -p 7 -e hostname; done > /dev/null 2>&1 &").unwrap();
    });
    let namespaces = Namespaces::new(2);
    for word in &mut scene.line {
        if word.starts_with("hubport,") {
            *word = "tap,id=net0,ifname=tap0,script=no,downscript=no".to_owned();
        }
    }
    let wrapper = ["ip", "netns", "exec", &format!("{}{{n}}", namespaces.prefix)];
    let clones = scene.start(2, &[], &wrapper);
    for (clone, namespace) in clones.iter().zip(namespaces.names()) {
        let name = format!("vm-{}", clone["name"].as_str().unwrap());
        let console = console(clone);
        assert_eq!(console.shell("cat /sys/class/net/eth0/address").unwrap(), ["52:54:00:00:00:02"]);
        console.shell(&format!("hostname {name}")).unwrap();
        let said = wait_for("the clone's answer", || {
            let script = "exec 3<>/dev/tcp/10.0.0.2/7 && cat <&3";
            let output = Command::new("ip").args(["netns", "exec", &namespace, "bash", "-c", script]).output().unwrap();
            output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
        });
        assert_eq!(said.trim(), name);
    }
}

#[test]
fn a_network_device_that_is_plugged_into_each_clone_has_an_address_of_its_own() {
    needs_qemu!();
    let root_port = |_: &str| ["-device", "pcie-root-port,id=port0"].map(str::to_owned).to_vec();
    let scene = LinuxScene::new(&LinuxGuest::default(), &root_port, |source| {
        assert!(source.shell("ls /sys/class/net").unwrap().iter().all(|name| name != "eth0"));
    });
    for clone in scene.start(2, &[], &[]) {
        let mac = format!("52:54:00:00:01:{:02x}", clone["number"].as_u64().unwrap());
        let mut qmp = Qmp::connect(Path::new(clone["monitor"].as_str().unwrap()), SOON).unwrap();
        qmp.execute("netdev_add", json!({ "type": "user", "id": "net0", "restrict": true })).unwrap();
        let device = json!({ "driver": "virtio-net-pci", "netdev": "net0", "bus": "port0", "mac": mac });
        qmp.execute("device_add", device).unwrap();
        let console = console(&clone);
        let address = wait_for("the network device", || console.shell("cat /sys/class/net/eth0/address").ok());
        assert_eq!(address, [mac]);
    }
}

#[test]
fn the_address_of_a_device_that_was_saved_is_the_saved_one_whatever_the_command_line_says() {
    needs_qemu!();
    let net = |_: &str| {
        let device = "virtio-net-pci,netdev=net0,mac=52:54:00:00:00:02";
        ["-netdev", "user,id=net0,restrict=on", "-device", device].map(str::to_owned).to_vec()
    };
    let mut scene = LinuxScene::new(&LinuxGuest::default(), &net, |_| {});
    for word in &mut scene.line {
        *word = word.replace("mac=52:54:00:00:00:02", "mac=52:54:00:00:00:99");
    }
    let [clone] = scene.start(1, &[], &[]).try_into().unwrap();
    assert_eq!(console(&clone).shell("cat /sys/class/net/eth0/address").unwrap(), ["52:54:00:00:00:02"]);
}
