//! Servers that are confined.

use std::fs;

use limosa_testkit::qemu_io;

use crate::bed::{Bed, Serving};
use crate::needs_qemu;

/// The values of a line of the status of each thread.
fn of_threads(serving: &Serving, name: &str) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", serving.pid())).unwrap();
    let value = |status: String| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap().trim().to_owned()
    };
    // A thread may end meanwhile; the kernel's own are not those of a ring that the server has begun.
    tasks.flatten().filter_map(|task| fs::read_to_string(task.path().join("status")).ok()).map(value).collect()
}

#[test]
fn every_thread_of_a_server_is_confined() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "64M"]);
    for aio in ["threads", "io_uring"] {
        let words = ["--aio", aio, "--control", "control", "--metrics", "unix:metrics", "disk"];
        let serving = bed.serve("nbd", &words);
        let mut client = serving.client();
        assert_eq!(client.write(0, 0, &[1; 1 << 20]).unwrap(), 0);
        assert_eq!(client.read(0, 1 << 20).unwrap(), vec![1; 1 << 20]);
        let threads = of_threads(&serving, "NoNewPrivs");
        assert!(threads.len() >= 4 && threads.iter().all(|value| value == "1"), "{aio}: {threads:?}");
        let threads = of_threads(&serving, "Seccomp");
        assert!(threads.iter().all(|value| value == "2"), "{aio}: {threads:?}");
        drop(client);
        serving.stop();
    }
}

#[test]
fn files_that_are_read_often_are_opened_again_and_chains_are_read() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@base", "64M"]);
    qemu_io(["-c", "write -P 1 0 32M", bed.path("base").to_str().unwrap()]).unwrap();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "@disk"]);
    let serving = bed.serve("nbd", &["disk"]);
    let before = descriptors(&serving, &bed);
    let mut client = serving.client();
    for number in 0..2000 {
        assert_eq!(client.read(number * 4096, 4096).unwrap(), vec![1; 4096]);
    }
    assert_eq!(client.write(0, 0, &[2; 4096]).unwrap(), 0);
    assert_eq!(descriptors(&serving, &bed), before, "rings keep what they opened themselves");
    drop(client);
    serving.stop();
    bed.qemu_img(&["check", "-q", "@disk"]);
}

/// The number of descriptors of images.
fn descriptors(serving: &Serving, bed: &Bed) -> usize {
    let names = fs::read_dir(format!("/proc/{}/fd", serving.pid())).unwrap();
    let images = ["base", "disk"].map(|name| bed.path(name));
    names.flatten().filter_map(|name| fs::read_link(name.path()).ok()).filter(|name| images.contains(name)).count()
}

#[test]
fn images_outside_of_the_allowed_folders_cannot_be_added() {
    needs_qemu!();
    let bed = Bed::new();
    fs::create_dir(bed.path("images")).unwrap();
    for name in ["@disk", "@outside", "@images/inside"] {
        bed.qemu_img(&["create", "-q", "-f", "qcow2", name, "1M"]);
    }
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "../outside", "-F", "qcow2", "@images/overlay"]);
    let serving = bed.serve("nbd", &["--control", "control", "--allow-dir", "images", "disk"]);
    let add = |name: &str| bed.refused(&["ctl", "control", "add", name]);
    add("images/inside").success();
    for name in ["outside", "images/overlay", "images/../outside"] {
        add(name).one_line(&["outside", "Permission denied", "--allow-dir"]);
    }
    serving.stop();
    // Without a folder none can be added, and without the sandbox all can.
    let serving = bed.serve("nbd", &["--control", "control", "disk"]);
    add("images/inside").one_line(&["inside", "--allow-dir"]);
    serving.stop();
    bed.refused(&["disk", "--nbd", "unix:x", "--allow-dir", "images"]).misused(&["--control"]);
    let words = ["disk", "--nbd", "unix:x", "--control", "c", "--allow-dir", "absent"];
    bed.refused(&words).one_line(&["--allow-dir absent", "No such file"]);
}
