//! `limosa clone`: many VMs of one snapshot. No clone sees another's writes.

use std::path::Path;

use limosa_testkit::{Machine, Qmp, kill9};
use serde_json::{Value, json};

use crate::clone_scene::{Scene, pids, processes_of};
use crate::needs_qemu;
use crate::stage::*;

#[test]
fn eight_clones_share_a_snapshot_and_none_sees_anothers_writes() {
    needs_qemu!();
    let scene = Scene::new();
    let file = std::fs::read(&scene.snapshot).unwrap();
    let report = scene.start(8, &["--json", "--memory", "mapped"], &[]).wait().json();
    let clones = report["clones"].as_array().unwrap();
    assert_eq!((clones.len(), report["failed"].as_array().unwrap().len()), (8, 0), "{report}");
    for (clone, number) in clones.iter().zip(1..) {
        assert_eq!((clone["number"].as_u64(), clone["vm_state"].as_str()), (Some(number), Some("running")));
        assert_eq!(clone["mapped_blocks"], json!(["mem"]));
        assert_eq!(clone["name"], format!("{number:03}"));
        scene.assert_goes_on(clone);
    }
    let listed = scene.list();
    assert_eq!(listed.len(), 8);
    assert!(listed.iter().all(|clone| clone["state"] == "running"));
    let (mut found, mut known) = (scene.processes(), pids(&listed));
    found.sort_unstable();
    known.sort_unstable();
    assert_eq!(found, known);
    // Kill 001 and stop 005; the others keep running. Clones start in parallel, so the lowest pid need not be that of
    // 001: the record has it.
    let first = pids(&listed[..1])[0];
    kill9(first).unwrap();
    wait_gone(first);
    let clones_dir = scene.clones();
    limosa(["clone", "stop", clones_dir.to_str().unwrap(), "005"]).success();
    assert_eq!(scene.list().iter().filter(|clone| clone["state"] == "running").count(), 6);
    // What runs is not removed; the next clones take free numbers.
    limosa(["clone", "rm", clones_dir.to_str().unwrap(), "002"]).one_line(&["002", "runs", "limosa clone stop"]);
    limosa(["clone", "rm", clones_dir.to_str().unwrap(), "005"]).success();
    let more = scene.start(1, &["--json"], &[]).wait().json();
    assert_eq!(more["clones"][0]["name"], "005");
    scene.assert_goes_on(&more["clones"][0]);
    std::fs::write(clones_dir.join("003/notes"), "the user's").unwrap();
    let removed = limosa(["clone", "rm", "--force", clones_dir.to_str().unwrap()]).success();
    assert!(removed.stderr.contains("003/notes does not belong to a clone"), "{}", removed.stderr);
    assert_eq!(scene.processes(), Vec::<u32>::new());
    assert_eq!(
        (names(&clones_dir), names(&clones_dir.join("003"))),
        (vec!["003".to_owned()], vec!["notes".to_owned()])
    );
    assert!(std::fs::read(&scene.snapshot).unwrap() == file, "the snapshot was written to");
}

#[test]
fn a_clone_that_was_saved_is_restored_in_every_way_and_cloned_again() {
    needs_qemu!();
    let mut scene = Scene::new();
    let parent = scene.start(1, &["--json", "--memory", "mapped"], &[]).wait().json()["clones"][0].clone();
    scene.assert_goes_on(&parent);
    let again = scene.folder.path().join("again");
    limosa(["save", "--stop", "--qmp", parent["monitor"].as_str().unwrap(), again.to_str().unwrap()]).success();
    scene.lap = *scene.laps(1, 3).last().unwrap();
    let words = limosa(["inspect", "--qemu-args", "--json", again.to_str().unwrap()]).json()["arguments"].clone();
    let words: Vec<String> = serde_json::from_value(words).unwrap();
    let object = words.windows(2).find(|pair| pair[0] == "-object").map(|pair| pair[1].clone()).unwrap();
    let machine = Machine::heartbeat(scene.guest);
    for memory in ["mapped", "lazy", "eager"] {
        let machine = if memory == "mapped" { machine.clone().memory_object(&object) } else { machine.clone() };
        let vm = machine.start_incoming().unwrap();
        let monitor = vm.qmp_socket();
        let words = ["restore", again.to_str().unwrap(), "--memory", memory, "--qmp", monitor.to_str().unwrap()];
        limosa(words).success();
        vm.wait_heartbeats(2).unwrap();
        vm.check_heartbeat().unwrap();
        assert!(vm.last_pass().unwrap() > scene.lap, "{memory}");
    }
    scene.snapshot = again;
    let report = scene.start(2, &["--json", "--memory", "mapped"], &[]).wait().json();
    report["clones"].as_array().unwrap().iter().for_each(|clone| scene.assert_goes_on(clone));
}

#[test]
fn clones_of_a_packed_snapshot_share_one_copy_of_it_which_goes_with_the_last_of_them() {
    needs_qemu!();
    let mut scene = Scene::new();
    let plain = std::fs::read(&scene.snapshot).unwrap();
    let packed = scene.folder.path().join("packed.qcow2");
    limosa(["pack", scene.snapshot.to_str().unwrap(), packed.to_str().unwrap(), "--no-sync"]).success();
    std::fs::remove_file(&scene.snapshot).unwrap();
    scene.snapshot = packed;
    let clones_dir = scene.clones();
    let dir = clones_dir.to_str().unwrap();
    let copies = || names(&clones_dir).into_iter().filter(|name| name.ends_with(".unpacked")).collect::<Vec<_>>();
    // Eager clones need none.
    scene.start(1, &["--json", "--memory", "eager"], &[]).wait().json();
    assert_eq!(copies(), Vec::<String>::new());
    for (count, options) in [(2, ["--json", "--memory", "mapped"]), (1, ["--json", "--memory", "auto"])] {
        let report = scene.start(count, &options, &[]).wait().json();
        for clone in report["clones"].as_array().unwrap() {
            assert_eq!(clone["mapped_blocks"], json!(["mem"]), "{report}");
            scene.assert_goes_on(clone);
        }
    }
    assert_eq!((scene.list().len(), copies().len()), (4, 1));
    let copy = clones_dir.join(&copies()[0]);
    assert!(std::fs::read(&copy).unwrap() == plain, "the copy is not what was packed");
    limosa(["clone", "rm", "--force", dir, "001", "002", "003"]).success();
    assert_eq!((scene.list().len(), copies().len()), (1, 1), "004 has it as its memory");
    limosa(["clone", "rm", "--force", dir]).success();
    assert_eq!((scene.processes(), names(&clones_dir)), (Vec::new(), Vec::new()));
    // One that is damaged is not taken for it.
    std::fs::write(&copy, &plain[..plain.len() / 2]).unwrap();
    scene.start(1, &[], &[]).wait().one_line(&["remove it, and it is unpacked again"]);
}

#[test]
fn clones_of_an_encrypted_increment_map_what_its_whole_chain_holds() {
    needs_qemu!();
    let mut scene = Scene::saved_by(|source, snapshot| {
        save(source, &snapshot.with_file_name("earlier"), &[]);
        source.wait_heartbeats(1).unwrap();
        save(source, snapshot, &["--stop"]);
    });
    let at = |name: &str| scene.folder.path().join(name).display().to_string();
    std::fs::write(at("key"), "a long and secret sentence").unwrap();
    let object = format!("secret,id=s,file={}", at("key"));
    let key = ["--object", &object, "--key-secret", "s"];
    let encrypted = [&key[..], &["--encrypt", "--iter-time", "1ms", "--no-sync"]].concat();
    limosa([&["pack", &at("earlier"), &at("base.qcow2")], &encrypted[..]].concat()).success();
    let on_base = ["pack", &at("snapshot"), &at("top.qcow2"), "--base", &at("base.qcow2"), "--json"];
    let packed = limosa([&on_base, &encrypted[..]].concat()).json();
    assert!(packed["base_bytes"].as_u64() > Some(0), "{packed}");
    let (plain, top) = (std::fs::read(at("snapshot")).unwrap(), at("top.qcow2"));
    [at("earlier"), at("snapshot")].iter().for_each(|path| std::fs::remove_file(path).unwrap());
    scene.snapshot = top.into();
    let report = scene.start(2, &[&key[..], &["--json", "--memory", "mapped"]].concat(), &[]).wait().json();
    for clone in report["clones"].as_array().unwrap() {
        assert_eq!(clone["mapped_blocks"], json!(["mem"]), "{report}");
        scene.assert_goes_on(clone);
    }
    let copies: Vec<_> = names(&scene.clones()).into_iter().filter(|name| name.ends_with(".unpacked")).collect();
    let [copy] = copies.as_slice() else { panic!("{copies:?}") };
    assert!(std::fs::read(scene.clones().join(copy)).unwrap() == plain, "the copy is not what was packed");
}

#[test]
fn qemus_of_a_pool_are_taken_by_later_clones_and_by_no_others() {
    needs_qemu!();
    let scene = Scene::new();
    let clones_dir = scene.clones();
    let dir = clones_dir.to_str().unwrap();
    let filled = scene.pool(3, &[]);
    assert_eq!((filled["pool"].as_array().unwrap().len(), filled["clones"].as_array().unwrap().len()), (3, 0));
    let waiting = scene.list();
    assert!(waiting.iter().all(|clone| clone["state"] == "waiting"), "{waiting:?}");
    let pids: Vec<_> = waiting.iter().map(|clone| clone["process"]["pid"].as_u64()).collect();
    // It is full already.
    assert_eq!(scene.pool(3, &[])["pool"], json!([]));
    // One of them is killed: it is not taken, and its directory is free again.
    kill9(u32::try_from(pids[1].unwrap()).unwrap()).unwrap();
    wait_gone(u32::try_from(pids[1].unwrap()).unwrap());
    let report = scene.start(3, &["--json", "--memory", "mapped"], &[]).wait().json();
    let clones = report["clones"].as_array().unwrap();
    assert_eq!((clones.len(), report["failed"].as_array().unwrap().len()), (3, 0), "{report}");
    let taken: Vec<_> = clones.iter().filter(|clone| clone["from_pool"] == true).collect();
    assert_eq!(taken.iter().map(|clone| clone["pid"].as_u64()).collect::<Vec<_>>(), [pids[0], pids[2]]);
    clones.iter().for_each(|clone| scene.assert_goes_on(clone));
    // Another command line takes none of what waits.
    assert_eq!(scene.pool(1, &[])["pool"].as_array().unwrap().len(), 1);
    let other = scene.start(1, &["--json", "--paused"], &["-name", "other"]).wait().json();
    assert_eq!(other["clones"][0]["from_pool"], false, "{other}");
    assert_eq!(other["clones"][0]["vm_state"], "paused", "{other}");
    let name = other["clones"][0]["name"].as_str().unwrap();
    let listed = scene.list().into_iter().find(|clone| clone["name"] == name).unwrap();
    assert_eq!(listed["state"], "loaded");
    limosa(["clone", "rm", "--force", dir]).success();
    assert_eq!((scene.processes(), names(&clones_dir)), (Vec::new(), Vec::new()));
}

#[test]
fn memory_that_qemu_writes_before_its_vm_comes_is_the_snapshots_all_the_same() {
    needs_qemu!();
    let scene = Scene::new();
    // Above the guest's walk: a page with contents in the snapshot (the guest's own code), and one of zeros.
    let written = [0x7c00_u64, 0x60_0000];
    let loader = |at: u64| format!("loader,addr={at:#x},data=0xdeadbeef,data-len=4");
    let loaders = written.map(loader);
    let more = ["-device", &loaders[0], "-device", &loaders[1]];
    for more in [&[][..], &more] {
        let report = scene.start(1, &["--json", "--memory", "mapped"], more).wait().json();
        assert_eq!(report["clones"].as_array().unwrap().len(), 1, "{report}");
        scene.assert_goes_on(&report["clones"][0]);
    }
    let contents = [1, 2].map(|number: u64| {
        let mut qmp = Qmp::connect(&scene.clones().join(format!("{number:03}/qmp")), SOON).unwrap();
        written.map(|at| {
            let picture = scene.folder.path().join("word");
            qmp.execute("pmemsave", json!({ "val": at, "size": 4, "filename": picture })).unwrap();
            std::fs::read(&picture).unwrap()
        })
    });
    assert_eq!(contents[0], contents[1]);
    assert_ne!(contents[0][0], [0; 4]);
    assert_eq!(contents[0][1], [0; 4]);
}

#[test]
fn a_program_that_starts_qemu_with_other_memory_gets_no_vm() {
    needs_qemu!();
    let mut scene = Scene::new();
    // Called like QEMU, so that its options are read as QEMU's.
    let wrapper = scene.folder.path().join("qemu-wrapper");
    let size = Machine::heartbeat(scene.guest).memory_bytes();
    let script = format!(
        "#!/bin/bash\nfor word; do case $word in *memory-backend-file*) words+=(memory-backend-ram,id=mem,size={size});; *) words+=(\"$word\");; \
         esac; done\nexec qemu-system-x86_64 \"${{words[@]}}\"\n"
    );
    std::fs::write(&wrapper, script).unwrap();
    std::fs::set_permissions(&wrapper, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    scene.line[0] = wrapper.to_str().unwrap().to_owned();
    let ended = scene.start(1, &[], &[]).wait();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("no memory backend of this QEMU maps a snapshot"), "{}", ended.stderr);
    assert_eq!((names(&scene.clones()), scene.processes()), (Vec::new(), Vec::new()));
}

#[test]
fn a_command_line_whose_memory_has_another_name_gets_the_snapshots() {
    needs_qemu!();
    let mut scene = Scene::new();
    // The block is called mem; this line leaves the machine to make its own memory.
    let at = scene.line.iter().position(|word| word.starts_with("memory-backend-")).unwrap();
    scene.line.drain(at - 1..=at);
    for word in &mut scene.line {
        *word = word.replace(",memory-backend=mem", "");
    }
    for (more, mapped) in [(&[][..], json!(["mem"])), (&["-mem-prealloc"], json!([]))] {
        let report = scene.start(1, &["--json"], more).wait().json();
        assert_eq!(report["clones"][0]["mapped_blocks"], mapped, "{report}");
        scene.assert_goes_on(&report["clones"][0]);
    }
    let ended = scene.start(1, &[], &["-m", "512M"]).wait();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("RAM block mem of the snapshot"), "{}", ended.stderr);
}

#[test]
fn the_help_shows_the_placeholders() {
    let help = limosa(["clone", "--help"]).success();
    for placeholder in ["{n} is the clone's number", "{name}", "{dir}", "vm-{n}"] {
        assert!(help.stdout.contains(placeholder), "{placeholder} is not in {}", help.stdout);
    }
}

#[test]
fn what_cannot_be_cloned_is_named_and_nothing_is_left() {
    needs_qemu!();
    let scene = Scene::new();
    let other = scene.folder.path().join("other.raw");
    std::fs::write(&other, vec![0; 1 << 20]).unwrap();
    let path = other.to_str().unwrap().to_owned();
    let beside = "file={dir}/../other.raw,format=raw,if=none,id=x".to_owned();
    let shared_folder = format!("local,path={},mount_tag=t,security_model=none", scene.folder.path().display());
    let shared = |path: &Path| format!("memory-backend-file,id=s,size=1M,share=on,mem-path={}", path.display());
    let (shared_memory, shared_snapshot) = (shared(&other), shared(&scene.snapshot));
    let other = format!("file={},format=raw,if=none,id=x", other.display());
    for (options, more, said) in [
        (&[][..], &["-device", "no-such-device"][..], "no-such-device"),
        (&[], &["-device", "virtio-rng-pci,id=a", "-device", "virtio-rng-pci,id=a"], "id"),
        (&[], &["-drive", &other], "other.raw"),
        (&[], &["-pflash", &path], "other.raw"),
        (&[], &[&path], "other.raw"),
        (&[], &["-drive", &beside], "/../other.raw"),
        (&[], &["-virtfs", &shared_folder], "-virtfs"),
        (&[], &["-object", &shared_memory], "the guest's memory is"),
        (&[], &["-object", &shared_snapshot], "share=on"),
        (&["--memory", "mapped"], &["-mem-prealloc"], "-mem-prealloc"),
        (&[], &["-incoming", "defer"], "-incoming"),
        (&[], &["-chardev", "file,id=f,path={dir}/out", "-device", "no-such-device"], "no-such-device"),
    ] {
        let ended = scene.start(3, options, more).wait();
        let status = if said == "-incoming" { 2 } else { 1 };
        assert_eq!(ended.status.code(), Some(status), "{more:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(said) && !ended.stderr.contains("panicked"), "{more:?}: {}", ended.stderr);
        let clones = scene.clones();
        assert_eq!(if clones.exists() { names(&clones) } else { Vec::new() }, Vec::<String>::new(), "{more:?}");
        assert_eq!(scene.processes(), Vec::<u32>::new());
    }
    let refused = limosa(["clone", "stop", scene.folder.path().to_str().unwrap(), "../clones"]);
    refused.one_line(&["is no clone"]);
}

#[test]
fn a_directory_that_is_too_long_for_sockets_is_refused_once_and_before_anything_is_made() {
    needs_qemu!();
    let scene = Scene::new();
    let long = scene.folder.path().join("d".repeat(90));
    let words = ["clone", scene.snapshot.to_str().unwrap(), "--count", "3", "--dir", long.to_str().unwrap(), "--"];
    let line: Vec<_> = words.iter().copied().chain(scene.line.iter().map(String::as_str)).collect();
    limosa(line).one_line(&["bytes too long", "at most 107 bytes"]);
    assert!(!long.exists());
}

#[test]
fn a_directory_of_clones_may_be_moved_and_what_belongs_to_a_clone_goes_with_it() {
    needs_qemu!();
    let scene = Scene::new();
    let own = ["-pidfile", "{dir}/pid", "-chardev", "socket,id=c,path={dir}/{name}.sock,server=on,wait=off"];
    scene.start(3, &[], &own).wait().success();
    let moved = scene.folder.path().join("moved");
    std::fs::rename(scene.clones(), &moved).unwrap();
    let directory = moved.to_str().unwrap();
    std::fs::write(moved.join("002/clone.json"), "{").unwrap();
    let list = || limosa(["clone", "list", "--json", directory]).json()["clones"].as_array().unwrap().clone();
    let state = |clone: &Value| clone["state"].as_str().unwrap().to_owned();
    // A damaged record is listed, and does not stop the others.
    let mut states: Vec<_> = list().iter().map(state).collect();
    states.sort();
    assert_eq!(states, ["damaged", "running", "running"]);
    let text = limosa(["clone", "list", directory]).success();
    assert!(
        text.stdout.contains("002  damaged: cannot read") && text.stdout.contains("003  running"),
        "{}",
        text.stdout
    );
    for clone in list().iter().filter(|clone| state(clone) == "running") {
        let mut qmp = Qmp::connect(Path::new(clone["monitor"].as_str().unwrap()), SOON).unwrap();
        qmp.execute("query-status", json!({})).unwrap();
        assert_eq!(clone["phase"], "running");
        assert!(moved.join(clone["name"].as_str().unwrap()).join("pid").exists());
    }
    let stopped = limosa(["clone", "stop", directory]);
    assert_eq!(stopped.status.code(), Some(1));
    assert!(stopped.stderr.contains("2 ended") && stopped.stderr.contains("002 is not ended"), "{}", stopped.stderr);
    assert!(list().iter().all(|clone| state(clone) != "running"));
    // The one whose record is damaged still runs; by its name it is not removed.
    let removed = limosa(["clone", "rm", directory]);
    assert_eq!(removed.status.code(), Some(1));
    assert!(
        removed.stderr.contains("2 removed") && removed.stderr.contains("002 is not removed"),
        "{}",
        removed.stderr
    );
    assert_eq!(names(&moved), ["002"]);
    for pid in processes_of(&scene.clones()) {
        kill9(pid).unwrap();
    }
}

#[test]
fn a_clone_whose_memory_cannot_be_mapped_gets_a_copy_and_says_why() {
    needs_qemu!();
    let scene = Scene::new();
    let ended = scene.start(2, &["--json"], &["-overcommit", "mem-lock=off", "-mem-prealloc"]).wait();
    assert!(ended.stderr.contains("-mem-prealloc"), "{}", ended.stderr);
    let report = ended.json();
    for clone in report["clones"].as_array().unwrap() {
        assert_eq!(clone["mapped_blocks"], json!([]));
        scene.assert_goes_on(clone);
    }
}

#[test]
fn a_qemu_that_is_too_old_to_map_gives_each_clone_a_copy_and_says_so() {
    needs_qemu!();
    let mut scene = Scene::new();
    scene.line[0] = old_qemu(&scene.folder.path().join("qemu-old")).to_str().unwrap().to_owned();
    let refused = scene.start(1, &["--memory", "mapped"], &[]).wait();
    refused.one_line(&["no option rom", "8.2", "--memory auto"]);
    let ended = scene.start(2, &["--json"], &[]).wait();
    let said = ended.stderr.clone();
    assert!(said.contains("each clone gets a copy") && said.contains("no option rom"), "{said}");
    let report = ended.json();
    assert_eq!(report["clones"].as_array().unwrap().len(), 2, "{report}");
    report["clones"].as_array().unwrap().iter().for_each(|clone| scene.assert_goes_on(clone));
    limosa(["clone", "rm", "--force", scene.clones().to_str().unwrap()]).success();
}

#[test]
fn more_clones_than_the_memory_can_hold_are_refused_before_anything_is_made() {
    needs_qemu!();
    let scene = Scene::new();
    scene.start(1_000_000, &[], &[]).wait().one_line(&["1000000 clones need", "--overcommit"]);
    assert_eq!(names(&scene.clones()), Vec::<String>::new());
}

#[test]
fn the_first_clones_working_set_is_recorded_and_read_ahead_for_the_next() {
    needs_qemu!();
    let scene = Scene::new();
    let report = scene.start(2, &["--json", "--record-working-set=500ms"], &[]).wait().json();
    let pages = report["recorded_working_set"]["pages"].as_u64().unwrap();
    assert!(pages > 64, "{report}");
    let report = scene.start(2, &["--json", "--read-ahead", "on"], &[]).wait().json();
    let read = &report["read_ahead"];
    assert!(read["bytes"].as_u64().unwrap() + read["cached_bytes"].as_u64().unwrap() >= pages * 4096, "{report}");
    for clone in report["clones"].as_array().unwrap() {
        scene.assert_goes_on(clone);
    }
    let misused = scene.start(1, &["--memory", "eager", "--record-working-set"], &[]).wait();
    assert_eq!(misused.status.code(), Some(2), "{}", misused.stderr);
}
