//! `limosa serve --vhost-user-blk`: its lines, its signals, its options.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;

use limosa_testkit::{BlkClient, BlkCommand, BlkSettings, wait_for};
use serde_json::{Value, json};

use crate::bed::{Bed, asked};
use crate::needs_qemu;

const ONE: BlkSettings = BlkSettings { queues: 1, without: 0 };

#[test]
fn a_disk_is_served_to_a_driver_and_to_clients_of_nbd_at_once() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "1M"]);
    let blk = bed.path("blk");
    let words = ["--json", "disk", "--vhost-user-blk", blk.to_str().unwrap(), "--queues", "3", "--control", "control"];
    let serving = bed.serve("nbd", &words);
    let lines = |text: &str| text.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>();
    let ready = &lines(&serving.printed())[0];
    assert_eq!(ready["vhost-user-blk"], json!([{ "socket": blk.to_str().unwrap(), "export": "" }]));
    let said = serving.said();
    assert!(said.contains(&format!("and {} (--vhost-user-blk)", blk.display())), "{said}");
    let clients = || asked(&bed, &["list"])["exports"][0]["clients"].as_u64().unwrap();
    assert_eq!(clients(), 0);
    let mut driver = BlkClient::connect(&blk, ONE).unwrap();
    assert_eq!(driver.config(34, 2).unwrap(), 3_u16.to_le_bytes());
    // Without a name the export has that of its file.
    assert_eq!(&driver.run(0, &BlkCommand::GetId).unwrap().data[..5], b"disk\0");
    let mut client = serving.client();
    assert_eq!(driver.run(0, &BlkCommand::Write(8, vec![5; 4096])).unwrap().status, 0);
    assert_eq!(client.read(4096, 4096).unwrap(), vec![5; 4096]);
    assert_eq!(client.write(0, 0, &[6; 512]).unwrap(), 0);
    assert_eq!(driver.run(0, &BlkCommand::Read(0, 512)).unwrap().data, vec![6; 512]);
    assert_eq!(clients(), 2);
    // Another front end gets no answer, and does not know why.
    assert!(!serving.said().contains("waits"));
    let others = [(); 2].map(|()| UnixStream::connect(&blk).unwrap());
    wait_for("the notice", || serving.said().contains("another front end waits until").then_some(()));
    assert_eq!(clients(), 2);
    drop(others);
    client.disconnect().unwrap();
    let ended = serving.stop();
    assert!(!blk.exists(), "the socket is gone");
    let ended = &lines(&ended.stdout)[1];
    assert_eq!((&ended["counters"]["front-ends"], &ended["counters"]["connections"]), (&json!(1), &json!(1)));
    assert_eq!(ended["exports"][0]["written-bytes"], 4096 + 512);
    bed.qemu_img(&["check", "-q", "@disk"]);
}

#[test]
fn a_signal_ends_it_after_the_requests_in_flight_and_the_image_is_closed() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-o", "lazy_refcounts=on", "@disk", "64M"]);
    let serving = bed.serve_blk("blk", &["disk"]);
    let mut driver = BlkClient::connect(&bed.path("blk"), ONE).unwrap();
    let mut number = 0;
    while driver.has_room(0) {
        driver.submit(0, &BlkCommand::Write(number * 128, vec![7; 4096]), 0, false).unwrap();
        number += 1;
    }
    driver.kick(0).unwrap();
    assert_eq!(driver.reply(0).unwrap().status, 0);
    serving.stop();
    while driver.in_flight(0) > 0 {
        assert_eq!(driver.reply(0).unwrap().status, 0);
    }
    // No repair is needed, although refcounts were written late.
    let check: Value = serde_json::from_str(&bed.qemu_img(&["check", "--output=json", "@disk"])).unwrap();
    assert_eq!(check["allocated-clusters"], number);
}

#[test]
fn each_image_has_its_socket() {
    needs_qemu!();
    let bed = Bed::new();
    for (name, size) in [("a", "1M"), ("b", "2M")] {
        bed.qemu_img(&["create", "-q", "-f", "qcow2", &format!("@{name}"), size]);
    }
    let other = bed.path("blk-b");
    let words = ["a", "b", "--name", "system", "--name", "data", "--read-only"];
    // The sockets are in the order of the images: `serve_blk` adds its own at the end.
    let first = bed.path("blk-a");
    let words = [&words[..], &["--vhost-user-blk", first.to_str().unwrap()]].concat();
    let words = [&words[..], &["--socket-mode", "660", "--socket-group", "0"]].concat();
    let serving = bed.serve_blk("blk-b", &words);
    assert_eq!(fs::metadata(&first).unwrap().permissions().mode() & 0o777, 0o660);
    let said = serving.said();
    assert!(said.contains("export \"system\" is a (1 MiB)\nlimosa: export \"data\" is b (2 MiB)\n"), "{said}");
    for (path, sectors, name) in [(first, 2048_u64, "system"), (other, 4096, "data")] {
        let mut driver = BlkClient::connect(&path, ONE).unwrap();
        assert_eq!(driver.config(0, 8).unwrap(), sectors.to_le_bytes());
        let id = driver.run(0, &BlkCommand::GetId).unwrap().data;
        assert!(id.starts_with(name.as_bytes()), "{id:?}");
        assert_eq!(driver.run(0, &BlkCommand::Write(0, vec![1; 512])).unwrap().status, 1);
    }
    serving.stop();
}

#[test]
fn mistakes_are_refused_in_one_line() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "1M"]);
    bed.refused(&["disk", "--nbd", "unix:x", "--queues", "2"]).misused(&["--vhost-user-blk"]);
    bed.refused(&["disk", "--vhost-user-blk", "x", "--queues", "65"]).misused(&["--queues"]);
    bed.refused(&["disk", "--vhost-user-blk", "x", "--threads", "0"]).misused(&["--threads"]);
    bed.refused(&["disk", "--vhost-user-blk", "x", "--vhost-user-blk", "y"]).misused(&["2 times for 1 images"]);
    bed.refused(&["disk", "--nbd", "unix:x", "--socket-mode", "680"]).misused(&["--socket-mode"]);
    bed.refused(&["disk", "--vhost-user-blk", "x", "--nbd", "-"]).misused(&["--nbd -"]);
    bed.refused(&["disk", "--vhost-user-blk", "no/such/folder"]).one_line(&["--vhost-user-blk", "no/such/folder"]);
    let serving = bed.serve_blk("blk", &["disk"]);
    // As many queues as the documented command line of QEMU has, on every host.
    let driver = BlkClient::connect(&bed.path("blk"), ONE).unwrap();
    assert!(u16::from_le_bytes(driver.config(34, 2).unwrap().try_into().unwrap()) >= 4);
    drop(driver);
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@other", "1M"]);
    let path = format!("unix:{}", bed.path("blk").display());
    bed.refused(&["other", "--vhost-user-blk", &path]).one_line(&["--vhost-user-blk"]);
    serving.stop();
}
