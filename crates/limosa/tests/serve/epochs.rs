//! Disks of protected VMs: the writes of an epoch are the image's when it is kept, and never before, after any kill.
//!
//! `LIMOSA_EPOCH_KILLS=200` kills servers that often; `LIMOSA_EPOCH_SEED=N` begins with that seed.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use limosa_storage::testing::SeededRandom;
use limosa_testkit::{BlkClient, BlkCommand, BlkSettings, NbdClient, kill9, wait_for};
use serde_json::{Value, json};

use crate::bed::{Bed, Serving, asked, ctl, io};
use crate::needs_qemu;
use crate::versions::{BLOCK, contents, setting};

const BLOCKS: usize = 256;

/// The control socket, as a keeper uses it.
struct Keeper(BufReader<UnixStream>);

impl Keeper {
    fn new(bed: &Bed) -> Self {
        let mut keeper = Self(BufReader::new(UnixStream::connect(bed.path("control")).unwrap()));
        keeper.line().unwrap();
        keeper.say("qmp_capabilities", json!({})).unwrap();
        keeper
    }

    fn line(&mut self) -> std::io::Result<Value> {
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    }

    /// Has a command carried out. A server that was killed is an error of the socket.
    fn say(&mut self, command: &str, arguments: Value) -> std::io::Result<Value> {
        let command = json!({ "execute": command, "arguments": arguments });
        self.0.get_mut().write_all(format!("{command}\n").as_bytes())?;
        let answer = self.line()?;
        assert!(answer.get("return").is_some(), "{answer}");
        Ok(answer["return"].clone())
    }

    fn order(&mut self, command: &str, epoch: u64, durable: Option<bool>) -> std::io::Result<Value> {
        let mut arguments = json!({ "name": "", "keeper": "test", "epoch": epoch });
        if let Some(durable) = durable {
            arguments["durable"] = durable.into();
        }
        self.say(command, arguments)
    }
}

/// A VM's way to its disk.
enum Vm {
    Nbd(NbdClient),
    Blk(Box<BlkClient>),
}

impl Vm {
    fn write(&mut self, block: usize, version: u64) -> anyhow::Result<()> {
        let (number, data) = (block as u64, contents(block as u64, version));
        let error = match self {
            Self::Nbd(client) => client.write(0, number * BLOCK, &data)?,
            Self::Blk(client) => client.run(0, &BlkCommand::Write(number * BLOCK / 512, data))?.status.into(),
        };
        anyhow::ensure!(error == 0, "error {error}");
        Ok(())
    }

    fn read(&mut self, block: usize) -> Vec<u8> {
        let number = block as u64;
        match self {
            Self::Nbd(client) => client.read(number * BLOCK, 4096).unwrap(),
            Self::Blk(client) => client.run(0, &BlkCommand::Read(number * BLOCK / 512, 4096)).unwrap().data,
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Case {
    format: &'static str,
    blk: bool,
}

impl Case {
    fn create(self, bed: &Bed) {
        let size = (BLOCKS as u64 * BLOCK).to_string();
        bed.qemu_img(&["create", "-q", "-f", self.format, "@disk", &size]);
    }

    fn serve(self, bed: &Bed, words: &[&str]) -> (Serving, Vm) {
        let common = ["-f", self.format, "disk", "--control", "control", "--allow-dir", "."];
        let words = [&common[..], words].concat();
        if self.blk {
            let serving = bed.serve_blk("socket", &[&words[..], &["--queues", "1"]].concat());
            let settings = BlkSettings { queues: 1, without: 0 };
            let client = BlkClient::connect(&bed.path("socket"), settings).unwrap();
            return (serving, Vm::Blk(Box::new(client)));
        }
        let serving = bed.serve("socket", &words);
        let client = serving.client();
        (serving, Vm::Nbd(client))
    }

    /// Ends a server, and expects the next one to have both blocks as they were written in the first epoch.
    #[track_caller]
    fn assert_first_epoch_is_kept(self, bed: &Bed, serving: Serving, vm: Vm) {
        drop(vm);
        serving.stop();
        let (serving, mut vm) = self.serve(bed, &[]);
        assert_eq!((vm.read(0), vm.read(1)), (contents(0, 2), contents(1, 2)));
        drop(vm);
        serving.stop();
    }
}

/// The blocks' versions in the image of a server that was killed.
fn found(bed: &Bed, case: Case) -> (u64, Vec<Vec<u8>>) {
    bed.wait_unlocked("disk");
    let (serving, mut vm) = Case { blk: false, ..case }.serve(bed, &["--fenced"]);
    let said = serving.said();
    let epoch = said.split_once("it is as of epoch ").unwrap_or_else(|| panic!("{said}")).1;
    let epoch = epoch.split_once(' ').unwrap().0.parse().unwrap();
    let blocks = (0..BLOCKS).map(|block| vm.read(block)).collect();
    drop(vm);
    serving.stop();
    assert!(!bed.path("disk.epochs").exists());
    if case.format == "qcow2" {
        bed.assert_sound("disk");
    }
    (epoch, blocks)
}

/// Writes, seals and keeps until the server is killed.
fn kill_one(case: Case, seed: u64) {
    let bed = Bed::new();
    case.create(&bed);
    let (serving, mut vm) = case.serve(&bed, &[]);
    let mut chance = SeededRandom::new(seed);
    let mut now = vec![0; BLOCKS];
    for block in (0..BLOCKS).step_by(3) {
        vm.write(block, 1).unwrap();
        now[block] = 1;
    }
    let mut keeper = Keeper::new(&bed);
    keeper.say("export-protect", json!({ "name": "", "keeper": "test" })).unwrap();
    // The state of each epoch, the first one that of the image.
    let (mut sealed, mut asked, mut kept) = (vec![now.clone()], 0, 0);
    let (pid, delay) = (serving.pid(), Duration::from_micros(chance.below(120_000)));
    let killing = thread::spawn(move || {
        // Not a measure: any moment will do.
        thread::sleep(delay);
        kill9(pid).unwrap();
    });
    let mut version = 2;
    let mut step = || -> anyhow::Result<()> {
        for _ in 0..1 + chance.below(12) {
            let block = usize::try_from(chance.below(BLOCKS as u64)).unwrap();
            vm.write(block, version)?;
            now[block] = version;
            version += 1;
        }
        let epoch = sealed.len() as u64;
        // Whether it is carried out or not, later ones are not.
        sealed.push(now.clone());
        keeper.order("export-seal", epoch, None)?;
        if !chance.one_in(3) {
            asked = epoch;
            keeper.order("export-keep", epoch, Some(chance.one_in(4)))?;
            kept = epoch;
        }
        Ok(())
    };
    while step().is_ok() {}
    killing.join().unwrap();
    drop((serving, vm));
    bed.wait_unlocked("disk");
    let refused = bed.refused(&["-f", case.format, "disk", "--nbd", "unix:other"]);
    // A qcow2 image that was not closed says so before.
    let last = refused.stderr.lines().last().unwrap_or_default();
    assert_eq!(refused.status.code(), Some(1), "{last}");
    assert!(last.contains("disk: it is as of epoch") && last.contains("--fenced"), "{last}");
    let (epoch, blocks) = found(&bed, case);
    assert!((kept..=asked).contains(&epoch), "epoch {epoch} of {kept} to {asked}");
    let versions = &sealed[usize::try_from(epoch).unwrap()];
    for (block, (found, version)) in blocks.iter().zip(versions).enumerate() {
        assert!(*found == contents(block as u64, *version), "seed {seed}, {case:?}, epoch {epoch}, block {block}");
    }
}

#[test]
fn a_server_that_is_killed_leaves_the_image_as_of_a_kept_epoch() {
    needs_qemu!();
    let (first, kills) = (setting("LIMOSA_EPOCH_SEED", 1), setting("LIMOSA_EPOCH_KILLS", 8));
    for seed in first..first + kills {
        let format = if seed % 2 == 0 { "raw" } else { "qcow2" };
        kill_one(Case { format, blk: seed / 2 % 2 == 0 }, seed);
    }
}

/// Protects a disk with version 1 of block 0, seals and keeps an epoch with version 2, and writes version 3.
fn protected(case: Case) -> (Bed, Serving, Vm) {
    let bed = Bed::new();
    case.create(&bed);
    let (serving, mut vm) = case.serve(&bed, &[]);
    vm.write(0, 1).unwrap();
    ctl(&bed, &["protect", ""]).success();
    vm.write(0, 2).unwrap();
    vm.write(1, 2).unwrap();
    ctl(&bed, &["seal", "", "1"]).success();
    vm.write(0, 3).unwrap();
    assert_eq!((vm.read(0), vm.read(1)), (contents(0, 3), contents(1, 2)));
    ctl(&bed, &["keep", "", "1", "--durable"]).success();
    (bed, serving, vm)
}

#[test]
fn what_was_written_after_a_kept_epoch_is_dropped_and_its_client_is_cut_off() {
    needs_qemu!();
    for case in [Case { format: "qcow2", blk: false }, Case { format: "raw", blk: true }] {
        let (bed, serving, mut vm) = protected(case);
        assert_eq!(asked(&bed, &["list"])["exports"][0]["protection"]["kept"], 1);
        let listed = ctl(&bed, &["list"]).success().stdout;
        assert!(listed.contains("protected by \"ctl\": epoch 2 is open, 1 kept"), "{listed}");
        ctl(&bed, &["drop", "", "2"]).one_line(&["disk: epoch 2 is not sealed: epoch 1 is kept, and epoch 2 is open"]);
        ctl(&bed, &["drop", "", "1", "--keeper", "other"]).one_line(&["another keeper", "\"ctl\""]);
        vm.write(0, 4).unwrap();
        ctl(&bed, &["drop", "", "1"]).success();
        // What the VM still sends does not arrive.
        assert!(vm.write(0, 5).is_err());
        if case.blk {
            assert!(!bed.path("socket").exists(), "a VM that comes back finds no server");
        } else {
            assert!(NbdClient::open(&bed.path("socket"), "", &[]).is_err());
            ctl(&bed, &["add", "disk", "--name", "", "--fenced"]).one_line(&["know the name \"\""]);
            ctl(&bed, &["add", "disk", "--name", "next"]).one_line(&["epoch 1", "--fenced"]);
        }
        // Another server takes the image, while the one that had it still runs.
        let (epoch, blocks) = {
            bed.wait_unlocked("disk");
            let words = ["-f", case.format, "disk", "--fenced"];
            let next = bed.serve("next", &words);
            assert!(next.said().contains("it is as of epoch 1 of"), "{}", next.said());
            let mut client = next.client();
            let blocks = [client.read(0, 4096).unwrap(), client.read(BLOCK, 4096).unwrap()];
            drop(client);
            next.stop();
            (1, blocks)
        };
        assert_eq!(blocks, [contents(0, 2), contents(1, 2)], "epoch {epoch}");
        if !case.blk {
            ctl(&bed, &["add", "disk", "--name", "next", "--fenced"]).success();
            let mut client = NbdClient::open(&bed.path("socket"), "next", &[]).unwrap();
            assert_eq!(client.read(0, 4096).unwrap(), contents(0, 2));
        }
        ctl(&bed, &["quit"]).success();
        drop(vm);
        serving.wait();
    }
}

#[test]
fn a_vm_that_was_dropped_is_refused_at_its_socket_and_other_processes_are_not() {
    needs_qemu!();
    let case = Case { format: "qcow2", blk: false };
    let (bed, serving, mut vm) = protected(case);
    let own = std::process::id();
    let protection = &asked(&bed, &["list"])["exports"][0]["protection"];
    assert_eq!(protection["vm"]["processes"], json!([own]), "{protection}");
    assert_eq!(protection["vm"]["recognized"], true, "{protection}");
    let dropped = asked(&bed, &["drop", "", "1", "--serve-again", "--fence"]);
    assert_eq!(dropped["vm"]["processes"], json!([own]), "{dropped}");
    assert!(vm.write(0, 5).is_err());
    let back = || NbdClient::open(&bed.path("socket"), "", &[]);
    assert!(back().is_err(), "the VM is back");
    io(&serving.uri(""), "raw", &["read 0 4k", "write -P 9 128k 4k", "flush"]);
    // Also if the export changes, the process does not get its name.
    ctl(&bed, &["remove", ""]).success();
    ctl(&bed, &["add", "disk", "-f", "qcow2", "--name", ""]).success();
    assert!(back().is_err(), "the VM is back");
    ctl(&bed, &["add", "disk", "-f", "qcow2", "--name", "same"]).one_line(&["this server serves it"]);
    io(&serving.uri(""), "raw", &["read -P 9 128k 4k"]);
    case.assert_first_epoch_is_kept(&bed, serving, vm);
}

#[test]
fn a_server_that_is_started_again_after_a_drop_knows_the_epoch_until_the_disk_is_written() {
    needs_qemu!();
    for (format, is_killed) in [("raw", true), ("qcow2", false), ("qcow2", true)] {
        let case = Case { format, blk: false };
        let (bed, mut serving, mut vm) = protected(case);
        let log = asked(&bed, &["list"])["exports"][0]["protection"]["log"].clone();
        let recovered = || Keeper::new(&bed).say("query-export", json!({ "name": "" })).unwrap()["recovered"].clone();
        ctl(&bed, &["drop", "", "1", "--serve-again", "--fence"]).success();
        for (is_written, is_refused) in [(false, true), (false, false), (true, false)] {
            // A server that was started since knows nobody.
            let expected = json!({ "log": log, "epoch": 1, "written": is_written, "vm-refused": is_refused });
            if is_written {
                vm.write(0, 9).unwrap();
            }
            // A request is counted after its reply.
            wait_for("the epoch of the image", || (recovered() == expected).then_some(()));
            if is_killed {
                kill9(serving.pid()).unwrap();
                drop((serving, vm));
                bed.wait_unlocked("disk");
            } else {
                drop(vm);
                serving.stop();
            }
            (serving, vm) = case.serve(&bed, &[]);
        }
        assert_eq!(recovered(), Value::Null, "{case:?}, killed: {is_killed}");
        assert!(!bed.path("disk.dropped").exists());
        drop(vm);
        serving.stop();
    }
}

#[test]
fn a_front_end_that_was_dropped_is_refused_and_its_socket_serves_the_disk_again() {
    needs_qemu!();
    let case = Case { format: "qcow2", blk: true };
    let (bed, serving, mut vm) = protected(case);
    let protection = &asked(&bed, &["list"])["exports"][0]["protection"];
    assert_eq!(protection["vm"]["processes"], json!([std::process::id()]), "{protection}");
    ctl(&bed, &["drop", "", "1", "--serve-again", "--fence"]).success();
    assert!(vm.write(0, 5).is_err());
    // It comes back, and is closed.
    let settings = BlkSettings { queues: 1, without: 0 };
    assert!(BlkClient::connect(&bed.path("socket"), settings).is_err());
    let exports = &asked(&bed, &["list"])["exports"];
    assert_eq!((&exports[0]["clients"], exports[0]["size"].as_u64()), (&json!(0), Some(BLOCKS as u64 * BLOCK)));
    case.assert_first_epoch_is_kept(&bed, serving, vm);
}

#[test]
fn a_vm_over_tcp_of_this_host_is_not_dropped_as_if_it_could_be_told_from_others() {
    needs_qemu!();
    let case = Case { format: "raw", blk: false };
    let bed = Bed::new();
    case.create(&bed);
    let words = ["-f", "raw", "disk", "--control", "control", "--allow-dir", ".", "--nbd", "tcp:127.0.0.1:0"];
    let serving = bed.serve("socket", &words);
    let connect = || {
        let mut client = NbdClient::tcp(serving.port()).unwrap();
        client.go("").map(|()| client)
    };
    let mut vm = Vm::Nbd(connect().unwrap());
    vm.write(0, 1).unwrap();
    ctl(&bed, &["protect", ""]).success();
    vm.write(0, 2).unwrap();
    ctl(&bed, &["seal", "", "1"]).success();
    let fenced = ["drop", "", "1", "--serve-again", "--fence"];
    ctl(&bed, &fenced).one_line(&["the VM of the export \"\" could come back"]);
    // Nothing has changed.
    vm.write(0, 3).unwrap();
    ctl(&bed, &["drop", "", "1", "--serve-again"]).success();
    assert!(vm.write(0, 4).is_err());
    let mut vm = Vm::Nbd(connect().unwrap());
    assert_eq!(vm.read(0), contents(0, 2));
    // Nobody was connected when this protection began.
    drop(vm);
    wait_for("the end of the client", || (asked(&bed, &["list"])["exports"][0]["clients"] == 0).then_some(()));
    ctl(&bed, &["protect", ""]).success();
    ctl(&bed, &["drop", "", "0", "--serve-again", "--fence"]).one_line(&["could come back"]);
    ctl(&bed, &["unprotect", ""]).success();
    serving.stop();
}

#[test]
fn the_end_of_protection_keeps_all_and_leaves_nothing_behind() {
    needs_qemu!();
    for case in [Case { format: "raw", blk: false }, Case { format: "qcow2", blk: true }] {
        let (bed, serving, mut vm) = protected(case);
        ctl(&bed, &["unprotect", ""]).success();
        vm.write(1, 4).unwrap();
        drop(vm);
        serving.stop();
        assert!(!bed.path("disk.epochs").exists());
        let (serving, mut vm) = case.serve(&bed, &[]);
        assert_eq!((vm.read(0), vm.read(1)), (contents(0, 3), contents(1, 4)));
        drop(vm);
        serving.stop();
    }
}

#[test]
fn commands_that_contradict_protection_are_refused_in_one_line() {
    needs_qemu!();
    let case = Case { format: "qcow2", blk: false };
    let (bed, serving, mut vm) = protected(case);
    ctl(&bed, &["protect", "", "--keeper", "other"]).one_line(&["is protected by \"ctl\""]);
    ctl(&bed, &["seal", "", "1"]).one_line(&["epoch 1 cannot be sealed: epoch 2 is open"]);
    ctl(&bed, &["seal", "", "2", "--keeper", "other"]).one_line(&["another keeper"]);
    ctl(&bed, &["keep", "", "2"]).one_line(&["epoch 2 is not sealed"]);
    ctl(&bed, &["unprotect", "", "--keeper", "other"]).one_line(&["another keeper"]);
    for words in [
        &["quiesce", ""][..],
        &["flush", ""],
        &["remove", ""],
        &["resize", "", "+1M"],
        &["snapshot", "", "over.qcow2"],
        &["bitmap", "", "--add", "b"],
    ] {
        ctl(&bed, words).one_line(&["is protected by \"ctl\""]);
    }
    assert!(!bed.path("over.qcow2").exists());
    vm.write(2, 4).unwrap();
    assert_eq!(vm.read(0), contents(0, 3));
    ctl(&bed, &["unprotect", ""]).success();
    ctl(&bed, &["seal", "", "2"]).one_line(&["is not protected"]);
    bed.qemu_img(&["create", "-q", "-f", "raw", "@plain", "1M"]);
    ctl(&bed, &["add", "plain", "--name", "plain"]).success();
    ctl(&bed, &["protect", "plain"]).one_line(&["probed as raw", "-f raw"]);
    drop(vm);
    serving.stop();
}

#[test]
fn stock_clients_use_a_protected_disk_and_sealing_is_quick() {
    needs_qemu!();
    let case = Case { format: "qcow2", blk: false };
    let bed = Bed::new();
    case.create(&bed);
    let (serving, vm) = case.serve(&bed, &[]);
    drop(vm);
    let mut keeper = Keeper::new(&bed);
    keeper.say("export-protect", json!({ "name": "", "keeper": "test", "first": 7 })).unwrap();
    io(&serving.uri(""), "raw", &["write -P 5 0 64k", "write -z 64k 64k", "discard 128k 64k", "flush"]);
    let mut times = Vec::new();
    for epoch in 7..107 {
        let begun = Instant::now();
        keeper.order("export-seal", epoch, None).unwrap();
        times.push(begun.elapsed());
        keeper.order("export-keep", epoch, Some(false)).unwrap();
        if epoch % 20 == 0 {
            io(
                &serving.uri(""),
                "raw",
                &["read -P 5 0 64k", "write -P 6 4k 8k", "read -P 6 4k 8k", "write -P 5 4k 8k"],
            );
        }
    }
    times.sort();
    println!("sealed in {:?} in the middle, {:?} at most", times[50], times[99]);
    io(&serving.uri(""), "raw", &["read -P 5 0 64k", "read -P 0 64k 128k"]);
    let state = keeper.say("query-exports", json!({})).unwrap();
    assert_eq!((&state[0]["protection"]["kept"], &state[0]["protection"]["open"]), (&json!(106), &json!(107)));
    kill9(serving.pid()).unwrap();
    drop(serving);
    assert_eq!(found(&bed, case).0, 106);
}
