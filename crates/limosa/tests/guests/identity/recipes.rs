//! A fresh VM for each job, and a network of nodes: the recipes at the end of docs/clones.md.

use limosa_testkit::{Qmp, skipped};

use super::*;
use crate::needs_qemu;

#[test]
fn each_job_has_a_fresh_vm_from_a_pool() {
    needs_qemu!();
    let scene = LinuxScene::new(&LinuxGuest::default(), &|_| Vec::new(), |source| {
        source.shell("mkdir /jobs && echo built > /jobs/tool").unwrap();
    });
    assert!(scene.clone_with(&["--pool", "1"], &[]).wait().status.success());
    let clones = scene.clones();
    let mut waiting = "001".to_owned();
    for job in ["first", "second"] {
        let [clone] = scene.start(1, &["--pool", "1"], &[]).try_into().unwrap();
        let name = clone["name"].as_str().unwrap();
        assert_eq!(name, waiting, "the job's VM is the one that waited");
        let console = console(&clone);
        assert_eq!(console.shell(&format!("cat /jobs/*; echo {job} > /jobs/result")).unwrap(), ["built"]);
        assert_eq!(console.shell("cat /jobs/result").unwrap(), [job]);
        limosa(["clone", "rm", "--force", clones.to_str().unwrap(), name]).success();
        let left = limosa(["clone", "list", "--json", clones.to_str().unwrap()]).json();
        let left = left["clones"].as_array().unwrap();
        assert_eq!((left.len(), &left[0]["state"]), (1, &json!("waiting")), "{left:?}");
        waiting = left[0]["name"].as_str().unwrap().to_owned();
    }
}

/// Plugs a network device into a port of a node: a cable between two unix sockets.
fn plug(node: &Value, port: &str, mac: &str, cable: (&Path, &Path)) {
    let mut qmp = Qmp::connect(Path::new(node["monitor"].as_str().unwrap()), SOON).unwrap();
    let (near, far) = cable;
    let (near, far) = (json!({ "type": "unix", "path": near }), json!({ "type": "unix", "path": far }));
    let network = json!({ "type": "dgram", "id": port, "local": near, "remote": far });
    qmp.execute("netdev_add", network).unwrap();
    let device = json!({ "driver": "virtio-net-pci", "netdev": port, "bus": port, "mac": mac });
    qmp.execute("device_add", device).unwrap();
}

#[test]
fn three_clones_of_a_router_route_between_each_other_in_mount_namespaces_of_their_own() {
    needs_qemu!();
    if skipped("LIMOSA_SKIP_NETNS") {
        return;
    }
    let ports = |_: &str| {
        let port = |number| ["-device".to_owned(), format!("pcie-root-port,id=port{number},chassis={number}")];
        [port(1), port(2)].concat()
    };
    let scene = LinuxScene::new(&LinuxGuest::default(), &ports, |_| {});
    // A container in small: the snapshot is a read-only volume, and no other process sees that.
    let script = "mount --bind \"$0\" \"$0\" && mount -o remount,bind,ro \"$0\" && exec \"$@\"";
    let snapshot = scene.snapshot.to_str().unwrap().to_owned();
    let nodes = scene.start(3, &[], &["unshare", "--mount", "--net", "sh", "-c", script, &snapshot]);
    let [left, middle, right] = [&nodes[0], &nodes[1], &nodes[2]];
    let cables = [
        (left, "port1", "52:54:00:00:01:01", "1-east", "2-west", "10.1.0.1/24"),
        (middle, "port1", "52:54:00:00:02:01", "2-west", "1-east", "10.1.0.2/24"),
        (middle, "port2", "52:54:00:00:02:02", "2-east", "3-west", "10.2.0.2/24"),
        (right, "port1", "52:54:00:00:03:01", "3-west", "2-east", "10.2.0.3/24"),
    ];
    let end = |name: &str| scene.folder.path().join(name);
    for (node, port, mac, near, far, address) in cables {
        plug(node, port, mac, (&end(near), &end(far)));
        let find = format!("grep -l {mac} /sys/class/net/*/address | cut -d/ -f5");
        let console = console(node);
        let device = wait_for("the network device", || console.shell(&find).ok()?.into_iter().next());
        console.shell(&format!("ip address add {address} dev {device}; ip link set {device} up")).unwrap();
    }
    console(middle).shell("echo 1 > /proc/sys/net/ipv4/ip_forward").unwrap();
    console(left).shell("ip route add 10.2.0.0/24 via 10.1.0.2").unwrap();
    console(right).shell("ip route add 10.1.0.0/24 via 10.2.0.2").unwrap();
    let heard = wait_for("a way through the router", || console(left).shell("ping -c 1 -W 1 10.2.0.3").ok());
    // The router in between took one hop off.
    assert!(heard.iter().any(|line| line.contains("from 10.2.0.3") && line.contains("ttl=63")), "{heard:?}");
}
