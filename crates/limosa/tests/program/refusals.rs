//! VMs that cannot be saved, or not there: one line, exit status 1, no file, and the VM beats on as it was.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::needs_qemu;
use crate::stage::*;
use limosa_testkit::{HeartbeatGuest, Machine, Qmp, Vm, scratch};
use serde_json::json;

/// A VM that beats, as a refused save has to leave it.
struct Bystander {
    vm: Vm,
    found: Found,
}

impl Bystander {
    fn new(machine: &Machine) -> Self {
        let vm = machine.start().unwrap();
        vm.wait_heartbeats(1).unwrap();
        // Settings that differ from QEMU's defaults: a command that leaves the defaults behind is noticed.
        vm.execute("migrate-set-parameters", json!({ "max-bandwidth": 7 << 20, "downtime-limit": 123 })).unwrap();
        let found = Found::of(&vm);
        Self { vm, found }
    }

    /// Tries to save by both routes; expects one line with all of `words`, and in the folder what was there before.
    #[track_caller]
    fn refuses(&self, file: &Path, more: &[&str], words: &[&str]) {
        let before = file.parent().filter(|folder| folder.is_dir()).map(names);
        for via in ["socket", "file"] {
            let more: Vec<&str> = ["--via", via].iter().chain(more).copied().collect();
            limosa(save_arguments(&self.vm, file, &more)).one_line(words);
            assert_eq!(file.parent().filter(|folder| folder.is_dir()).map(names), before);
            self.found.assert_same(&self.vm);
        }
        assert_beats(&self.vm);
    }
}

#[test]
fn a_file_that_exists_is_kept_unless_force_is_given() {
    needs_qemu!();
    let (folder, file) = place();
    let bystander = Bystander::new(&small());
    std::fs::write(&file, "precious").unwrap();
    bystander.refuses(&file, &[], &["vm.snapshot", "exists already", "--force"]);
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    save(&bystander.vm, &file, &["--force"]);
    bystander.found.assert_same(&bystander.vm);
    assert_eq!(names(folder.path()), ["vm.snapshot"]);
    load_in_stock_qemu(&small(), &file, 0);
}

#[test]
fn what_is_no_place_for_a_file_is_refused_before_the_vm_is_touched() {
    needs_qemu!();
    let folder = scratch().unwrap();
    let at = |name: &str| folder.path().join(name);
    let bystander = Bystander::new(&small());
    std::fs::create_dir(at("folder")).unwrap();
    std::fs::write(at("plain"), "").unwrap();
    std::os::unix::fs::symlink(at("plain"), at("link")).unwrap();
    bystander.refuses(&at("missing/vm"), &[], &["missing", "does not exist"]);
    bystander.refuses(&at("plain/vm"), &[], &["plain", "not a directory"]);
    bystander.refuses(&at("folder"), &[], &["is a directory"]);
    bystander.refuses(&at("folder"), &["--force"], &["is a directory"]);
    bystander.refuses(&at("link"), &["--force"], &["symbolic link"]);
    bystander.refuses(Path::new("/dev/null"), &["--force"], &["/dev/null"]);
    bystander.refuses(&at("folder/.."), &[], &["not the name of a file"]);
    assert!(Path::new("/dev/null").exists());
}

#[test]
fn a_file_that_is_being_served_is_not_replaced() {
    needs_qemu!();
    let (folder, file) = place();
    // Memory that the guest does not touch, so that a slow restore lasts.
    let machine = Machine::heartbeat(HeartbeatGuest::over(8 << 20));
    let bystander = Bystander::new(&machine);
    save(&bystander.vm, &file, &[]);
    let destination = machine.start_incoming().unwrap();
    let mut restore = vec!["restore".to_owned(), "--memory".to_owned(), "lazy".to_owned()];
    restore.extend(["--max-bandwidth".to_owned(), "4K".to_owned(), "--qmp".to_owned()]);
    restore.extend([destination.qmp_socket().display().to_string(), file.display().to_string()]);
    let pager = start(restore);
    destination.wait_run_state("running", SOON).unwrap();
    bystander.refuses(&file, &["--force"], &["vm.snapshot", "in use", "another name"]);
    assert!(pager.is_running(), "{}", pager.stderr());
    pager.signal(rustix::process::Signal::INT); // the rest at full speed
    pager.wait().success();
    assert_beats(&destination);
    save(&bystander.vm, &file, &["--force"]);
    assert_eq!(names(folder.path()), ["vm.snapshot"]);
}

#[test]
fn a_folder_without_permission_is_refused() {
    needs_qemu!();
    let bystander = Bystander::new(&small());
    let folder = scratch().unwrap();
    let closed = folder.path().join("closed");
    std::fs::create_dir(&closed).unwrap();
    let root = rustix::process::geteuid().is_root();
    std::fs::set_permissions(&closed, Permissions::from_mode(if root { 0o755 } else { 0o555 })).unwrap();
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    // The monitor is open to the user that limosa runs as.
    std::fs::set_permissions(bystander.vm.folder(), Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(bystander.vm.qmp_socket(), Permissions::from_mode(0o666)).unwrap();
    for via in ["socket", "file"] {
        let mut command = if root {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups", env!("CARGO_BIN_EXE_limosa")]);
            command
        } else {
            Command::new(env!("CARGO_BIN_EXE_limosa"))
        };
        command.args(save_arguments(&bystander.vm, &closed.join("vm"), &["--via", via]));
        start_command(command).wait().one_line(&["closed", "ermission denied"]);
        assert!(names(&closed).is_empty());
        bystander.found.assert_same(&bystander.vm);
    }
    assert_beats(&bystander.vm);
}

#[test]
fn an_unprivileged_user_saves_a_vm_whose_monitor_is_open_to_it() {
    needs_qemu!();
    if !rustix::process::geteuid().is_root() {
        // Every other test has shown it.
        return;
    }
    let bystander = Bystander::new(&small());
    let folder = scratch().unwrap();
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
    std::fs::set_permissions(bystander.vm.folder(), Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(bystander.vm.qmp_socket(), Permissions::from_mode(0o666)).unwrap();
    for via in ["socket", "file"] {
        let file = folder.path().join(via);
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", env!("CARGO_BIN_EXE_limosa")]);
        command.args(save_arguments(&bystander.vm, &file, &["--via", via]));
        start_command(command).wait().success();
        bystander.found.assert_same(&bystander.vm);
        load_in_stock_qemu(&small(), &file, 0);
    }
}

#[test]
fn a_full_disk_costs_the_snapshot_and_nothing_else() {
    needs_qemu!();
    if !rustix::process::geteuid().is_root() {
        return limosa_testkit::note_skip("a full disk needs root, to mount a small one");
    }
    let bystander = Bystander::new(&small());
    // Too small for the first pages, for the last ones, and by a hair or not at all: the beat guest has 8 MiB and more.
    let sizes = ["64k", "4M", "8M"].map(|size| (size, false)).into_iter();
    for (size, may_fit) in sizes.chain(["8576k", "8640k", "8704k", "10M"].map(|size| (size, true))) {
        let disk = Mounted::new(size);
        let file = disk.path().join("vm.snapshot");
        std::fs::write(disk.path().join("other"), "kept").unwrap();
        for via in ["socket", "file"] {
            let ended = limosa(save_arguments(&bystander.vm, &file, &["--via", via]));
            if may_fit && ended.status.success() {
                std::fs::remove_file(&file).unwrap();
                continue;
            }
            // By file it is QEMU that finds the disk full, and gives its own reason.
            let words = if via == "socket" { "no room left" } else { "No space left" };
            ended.one_line(&["vm.snapshot", words, "nothing was kept", "free some space or choose another directory"]);
            assert_eq!(names(disk.path()), ["other"]);
            bystander.found.assert_same(&bystander.vm);
            assert_beats(&bystander.vm);
        }
    }
}

#[test]
fn a_vm_that_cannot_be_migrated_is_refused_with_qemus_own_reason() {
    needs_qemu!();
    let (_folder, file) = place();
    // Shared memory in which this VM is a mere peer: QEMU blocks migration while it is there.
    let machine = small().argument("-object").argument("memory-backend-ram,id=shm,size=1M,share=on");
    let bystander = Bystander::new(&machine.argument("-device").argument("ivshmem-plain,memdev=shm,master=off"));
    bystander.refuses(&file, &[], &["cannot be saved as it is", "ivshmem"]);
    bystander.refuses(&file, &["--stop"], &["cannot be saved as it is", "ivshmem"]);
}

#[test]
fn a_monitor_that_another_client_holds_is_named_within_seconds() {
    needs_qemu!();
    let (folder, file) = place();
    let bystander = Bystander::new(&small());
    let other = Qmp::connect(&bystander.vm.qmp_socket(), Duration::from_secs(20)).unwrap();
    let monitor = bystander.vm.qmp_socket().display().to_string();
    limosa(save_arguments(&bystander.vm, &file, &[])).one_line(&[&monitor, "another client holds this monitor"]);
    assert!(names(folder.path()).is_empty());
    drop(other);
    bystander.found.assert_same(&bystander.vm);
    save(&bystander.vm, &file, &[]);
}

#[test]
fn what_is_no_monitor_is_named() {
    needs_qemu!();
    let (folder, file) = place();
    let at = |name: &str| folder.path().join(name);
    let save_at = |monitor: &Path| {
        limosa([Path::new("save"), Path::new("--qmp"), monitor, &file].map(|word| word.as_os_str().to_owned()))
    };
    save_at(&at("absent")).one_line(&["absent", "No such file"]);
    std::fs::write(at("plain"), "").unwrap();
    save_at(&at("plain")).one_line(&["plain", "cannot connect"]);
    drop(UnixListener::bind(at("dead")).unwrap());
    save_at(&at("dead")).one_line(&["dead", "refused"]);
    // A server that greets with something else.
    let chatty = UnixListener::bind(at("chatty")).unwrap();
    let talker = std::thread::spawn(move || {
        let (stream, _): (UnixStream, _) = chatty.accept().unwrap();
        use std::io::{Read as _, Write as _};
        (&stream).write_all(b"220 mail.example ESMTP\r\n").unwrap();
        let _ = (&stream).read(&mut [0; 100]);
    });
    save_at(&at("chatty")).one_line(&["chatty", "no QMP monitor"]);
    talker.join().unwrap();
    // A server that hangs up.
    let rude = UnixListener::bind(at("rude")).unwrap();
    let hanger = std::thread::spawn(move || drop(rude.accept().unwrap()));
    save_at(&at("rude")).one_line(&["rude"]);
    hanger.join().unwrap();
    // The human monitor of a real QEMU.
    let human = at("human");
    let chardev = format!("socket,id=human,path={},server=on,wait=off", human.display());
    let _vm = ["-chardev", &chardev, "-mon", "chardev=human,mode=readline"]
        .iter()
        .fold(small(), |machine, word| machine.argument(word))
        .start()
        .unwrap();
    save_at(&human).one_line(&["human", "no QMP monitor", "mode=control"]);
    assert!(!file.exists());
}

#[test]
fn a_vm_that_waits_to_be_loaded_is_refused() {
    needs_qemu!();
    let (folder, file) = place();
    let vm = small().start_incoming().unwrap();
    let found = Found::of(&vm);
    limosa(save_arguments(&vm, &file, &[])).one_line(&["waits for an incoming VM"]);
    found.assert_same(&vm);
    assert!(names(folder.path()).is_empty());
}

#[test]
fn a_vm_that_was_migrated_away_is_refused_with_the_way_to_continue_it() {
    needs_qemu!();
    let (folder, file) = place();
    let vm = small().start().unwrap();
    vm.wait_heartbeats(1).unwrap();
    vm.save_file(&folder.path().join("by-qemu"), 0).unwrap();
    vm.wait_run_state("postmigrate", SOON).unwrap();
    let found = Found::of(&vm);
    limosa(save_arguments(&vm, &file, &[])).one_line(&["earlier save or migration", "limosa resume"]);
    found.assert_same(&vm);
    assert_eq!(names(folder.path()), ["by-qemu"]);
}

#[test]
fn a_migration_that_is_under_way_is_not_disturbed() {
    needs_qemu!();
    let (folder, file) = place();
    let pair = small().pair().unwrap();
    pair.source.wait_heartbeats(1).unwrap();
    let uri = format!("unix:{}", folder.path().join("incoming").display());
    pair.destination.execute("migrate-incoming", json!({ "uri": uri })).unwrap();
    pair.source.execute("migrate-set-parameters", json!({ "max-bandwidth": 4096 })).unwrap();
    pair.source.execute("migrate", json!({ "uri": uri })).unwrap();
    let found = Found::of(&pair.source);
    limosa(save_arguments(&pair.source, &file, &[])).one_line(&["another migration", "under way"]);
    found.assert_same(&pair.source);
    pair.source.execute("migrate-set-parameters", json!({ "max-bandwidth": 0 })).unwrap();
    pair.source.wait_migrated().unwrap();
    pair.destination.wait_run_state("running", SOON).unwrap();
    assert_beats(&pair.destination);
    assert!(!file.exists());
}

#[test]
fn a_second_save_of_the_same_vm_is_turned_away_while_the_first_goes_on() {
    needs_qemu!();
    let folder = scratch().unwrap();
    let monitor = |name: &str| folder.path().join(name);
    let second = format!("socket,id=second,path={},server=on,wait=off", monitor("second").display());
    let machine = ["-chardev", &second, "-mon", "chardev=second,mode=control"]
        .iter()
        .fold(small(), |machine, word| machine.argument(word));
    let bystander = Bystander::new(&machine);
    let (first, other) = (place(), place());
    let saving = start(save_arguments(&bystander.vm, &first.1, &["--via", "socket", "--max-bandwidth", "1M"]));
    // It has its watchdog before it has left its record in QEMU.
    wait_moving(&bystander.vm);
    let mut arguments = save_arguments(&bystander.vm, &other.1, &[]);
    arguments[2] = monitor("second").display().to_string();
    limosa(arguments).one_line(&["in the middle of a save", &first.1.display().to_string()]);
    assert!(saving.is_running() && names(other.0.path()).is_empty());
    saving.signal(rustix::process::Signal::TERM);
    saving.wait().one_line(&["cancelled"]);
    bystander.found.assert_same(&bystander.vm);
}

#[test]
fn a_qemu_that_is_killed_in_the_middle_of_a_save_leaves_no_file() {
    needs_qemu!();
    for via in ["socket", "file"] {
        let (folder, file) = place();
        let vm = small().start().unwrap();
        vm.wait_heartbeats(1).unwrap();
        let saving = start(save_arguments(&vm, &file, &["--via", via, "--max-bandwidth", "1M"]));
        wait_moving(&vm);
        let watchdog = watchdog(&saving).unwrap();
        vm.process().kill();
        saving.wait().one_line(&["QEMU closed the monitor"]);
        wait_gone(watchdog);
        assert!(names(folder.path()).is_empty(), "{:?}", names(folder.path()));
    }
}

#[test]
fn bad_usage_is_exit_status_2_and_touches_nothing() {
    let (folder, file) = place();
    let file = file.display().to_string();
    for words in [
        &["save"][..],
        &["save", &file],
        &["save", "--qmp", "/x", "--via", "pigeon", &file],
        &["save", "--qmp", "/x", "--max-bandwidth", "0", &file],
        &["save", "--qmp", "/x", "--max-bandwidth", "fast", &file],
        &["save", "--qmp", "/x", "--timeout", "-1", &file],
        &["save", "--qmp", "/x", "--on-timeout", "pause", &file],
        &["save", "--qmp", "/x", "--listen", "pigeon:x", &file],
        &["save", "--qmp", "", &file],
    ] {
        let ended = limosa(words);
        assert_eq!(ended.status.code(), Some(2), "{words:?}: {}", ended.stderr);
        assert!(ended.stdout.is_empty() && !ended.stderr.is_empty());
    }
    assert!(names(folder.path()).is_empty());
}

#[test]
fn the_xml_of_an_import_does_not_take_the_snapshots_place() {
    let (folder, file) = place();
    let file = file.to_str().unwrap();
    limosa(["import", "stream", file, "--xml", file, "--force"]).misused(&["vm.snapshot", "must be different files"]);
    assert!(names(folder.path()).is_empty());
}

#[test]
fn an_import_does_not_take_the_place_of_what_it_reads() {
    let (folder, file) = place();
    std::fs::write(&file, "precious").unwrap();
    std::fs::hard_link(&file, folder.path().join("link")).unwrap();
    let (file, link) = (file.display().to_string(), folder.path().join("link").display().to_string());
    for stream in [file.clone(), link, format!("file:{file}")] {
        limosa(["import", &stream, &file, "--force"]).one_line(&["vm.snapshot", "must be different files"]);
        assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    }
}
