//! libvirt's save images: a domain that `virsh save` has saved is imported and restored; a running domain is saved by
//! limosa over its own monitor, beside libvirt's.

use std::path::Path;
use std::process::Command;

use crate::needs_qemu;
use crate::stage::*;
use limosa_testkit::{HeartbeatGuest, Libvirt, Process, Qmp, check_heartbeat, libvirt_skipped, require_qemu};
use serde_json::json;

const NAME: &str = "beat";

fn guest() -> HeartbeatGuest {
    HeartbeatGuest { rest: 2, ..HeartbeatGuest::over(4 << 20) }
}

/// The beats in the domain's serial file.
fn beats(libvirt: &Libvirt, file: &str) -> usize {
    let text = std::fs::read(libvirt.path(file)).unwrap_or_default();
    text.split(|byte| *byte == b'\n').filter(|line| line.len() == 8).count()
}

/// Starts the domain, and waits until its guest beats.
fn started() -> Libvirt {
    require_qemu().unwrap();
    let mut libvirt = Libvirt::start().unwrap();
    let xml = libvirt.heartbeat_domain(NAME, &guest()).unwrap();
    libvirt.create(NAME, &xml).unwrap();
    wait_for("the guest to beat", || (beats(&libvirt, "serial") >= 2).then_some(()));
    libvirt
}

/// A QEMU like the domain's, without libvirt, that waits for it.
struct Destination {
    _process: Process,
    qmp: Qmp,
    monitor: String,
}

impl Destination {
    /// Starts it with the domain's own words, but for what libvirt passes by descriptor.
    fn start(libvirt: &Libvirt, words: &[String], name: &str) -> Self {
        let at = |part: &str| libvirt.path(&format!("{name}-{part}")).display().to_string();
        let mut command = Command::new(&words[0]);
        let mut pairs = words[1..].iter().peekable();
        while let Some(word) = pairs.next() {
            let value = pairs.next_if(|value| !value.starts_with('-')).cloned().unwrap_or_default();
            match (word.as_str(), value.as_str()) {
                ("-S" | "-add-fd" | "-sandbox" | "-name" | "-qmp" | "-msg", _) => continue,
                ("-object", value) if value.contains("secret") => continue,
                ("-chardev", value) if value.contains("charmonitor") => {
                    command.args(["-chardev", &format!("socket,id=charmonitor,path={},server=on,wait=off", at("own"))]);
                }
                ("-chardev", value) if value.contains("charserial0") => {
                    command.args(["-chardev", &format!("file,id=charserial0,path={}", at("serial"))]);
                }
                (word, "") => {
                    command.arg(word);
                }
                (word, value) => {
                    command.args([word, value]);
                }
            }
        }
        command.args(["-incoming", "defer", "-qmp", &format!("unix:{},server=on,wait=off", at("limosa"))]);
        let process = Process::spawn("QEMU", command).unwrap();
        wait_for("QEMU's monitors", || {
            assert!(process.try_wait().unwrap().is_none(), "QEMU has ended");
            (Path::new(&at("own")).exists() && Path::new(&at("limosa")).exists()).then_some(())
        });
        let qmp = Qmp::connect(Path::new(&at("own")), SOON).unwrap();
        Self { _process: process, qmp, monitor: at("limosa") }
    }

    /// Expects the guest to run, to beat, and its memory to be of one instant.
    fn assert_beats(&mut self, libvirt: &Libvirt, name: &str) {
        let file = format!("{name}-serial");
        let begun = beats(libvirt, &file);
        wait_for("the guest to beat", || (beats(libvirt, &file) >= begun + 2).then_some(()));
        self.qmp.execute("stop", json!({})).unwrap();
        let (picture, span) = (libvirt.path("picture"), guest().span());
        let arguments = json!({ "val": span.start, "size": span.end - span.start, "filename": picture });
        self.qmp.execute("pmemsave", arguments).unwrap();
        check_heartbeat(&std::fs::read(picture).unwrap(), guest().start).unwrap();
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

#[test]
fn domains_that_virsh_has_saved_come_back_however_they_are_packed() {
    needs_qemu!();
    if libvirt_skipped() {
        return;
    }
    let libvirt = started();
    let words = libvirt.command_line(NAME).unwrap();
    let image = libvirt.path("image");
    libvirt.virsh(&["save", NAME, &text(&image)]).unwrap();

    let answer = limosa(["inspect", &text(&image), "--json"]).json();
    let found = &answer["libvirt"];
    assert_eq!((&found["name"], &found["format"], &found["was_running"]), (&json!(NAME), &json!("raw"), &json!(true)));
    assert_eq!(answer["run_state"], "running");
    assert!(answer["devices"].as_array().unwrap().iter().any(|device| device["name"] == "globalstate"));
    assert!(limosa(["inspect", &text(&image)]).success().stdout.contains("domain        beat"));

    // Imported and lazy.
    let (snapshot, xml) = (libvirt.path("snapshot"), libvirt.path("saved.xml"));
    let imported =
        limosa(["import", &text(&image), &text(&snapshot), "--xml", &text(&xml), "--checksum", "--json"]).json();
    assert_eq!((&imported["vm_name"], &imported["vm_uuid"]), (&json!(NAME), &found["uuid"]));
    let saved = std::fs::read_to_string(&xml).unwrap();
    assert!(saved.starts_with("<domain") && saved.trim_end().ends_with("</domain>"), "{saved}");
    let mut vm = Destination::start(&libvirt, &words, "lazy");
    let restore = |file: &Path, vm: &Destination, mode: &str| {
        limosa(["restore", &text(file), "--qmp", &vm.monitor, "--memory", mode, "--json"]).json()
    };
    let report = restore(&snapshot, &vm, "lazy");
    assert_eq!((report["mode"].as_str(), report["vm_state"].as_str()), (Some("lazy"), Some("running")), "{report}");
    vm.assert_beats(&libvirt, "lazy");
    drop(vm);

    // As it is: eager.
    let mut vm = Destination::start(&libvirt, &words, "eager");
    let report = restore(&image, &vm, "auto");
    assert_eq!((report["mode"].as_str(), report["vm_state"].as_str()), (Some("eager"), Some("running")), "{report}");
    vm.assert_beats(&libvirt, "eager");
    drop(vm);
    let mut vm = Destination::start(&libvirt, &words, "sent");
    let uri = format!("unix:{}", text(&libvirt.path("incoming")));
    vm.qmp.execute("migrate-incoming", json!({ "uri": uri, "exit-on-error": false })).unwrap();
    assert_eq!(limosa(["send", &text(&image), &uri, "--json"]).json()["answered"], true);
    // In the stream it is paused, as libvirt stopped it first.
    vm.qmp.execute("cont", json!({})).unwrap();
    vm.assert_beats(&libvirt, "sent");
    drop(vm);

    // As libvirt packs it: the same header with another number, and the stream through a program.
    let bytes = std::fs::read(&image).unwrap();
    let begin = usize::try_from(found["payload_offset"].as_u64().unwrap()).unwrap();
    let stream = libvirt.path("stream");
    std::fs::write(&stream, &bytes[begin..]).unwrap();
    for (number, program) in (1_u8..).zip(["gzip", "bzip2", "xz", "lzop", "zstd"]) {
        let input = std::fs::File::open(&stream).unwrap();
        let packed = Command::new(program).arg("-c").stdin(input).output();
        let packed = packed.unwrap_or_else(|error| panic!("{program}: {error}: run `cargo xtask setup`")).stdout;
        let mut header = bytes[..begin].to_vec();
        header[28] = number;
        let file = libvirt.path(program);
        std::fs::write(&file, [header.as_slice(), &packed].concat()).unwrap();
        let target = libvirt.path(&format!("{program}.snapshot"));
        let answer = limosa(["import", &text(&file), &text(&target), "--json", "--no-sync"]).json();
        assert_eq!((&answer["packer"], &answer["pages"]), (&json!(program), &imported["pages"]));
        assert_eq!(limosa(["inspect", &text(&file), "--json"]).json()["libvirt"]["format"], program);
        std::fs::write(&file, [header.as_slice(), &packed, b"something"].concat()).unwrap();
        let none = libvirt.path("none");
        limosa(["import", &text(&file), &text(&none)]).one_line(&[program]);
        // A path in which there is no such program.
        let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
        command.args(["import", &text(&file), &text(&none)]).env("PATH", libvirt.path("nothing"));
        start_command(command).wait().one_line(&[program, "install the package"]);
        assert!(!none.exists());
    }
}

#[test]
fn a_domain_is_saved_over_a_second_monitor_while_libvirt_keeps_its_own() {
    needs_qemu!();
    if libvirt_skipped() {
        return;
    }
    let libvirt = started();
    let words = libvirt.command_line(NAME).unwrap();
    let snapshot = libvirt.path("snapshot");
    for via in ["file", "socket"] {
        let socket = text(&libvirt.path("qmp"));
        limosa(["save", "--qmp", &socket, "--via", via, "--force", "--json", &text(&snapshot)]).json();
        // libvirt still knows the domain, and its guest continues. (A virsh that ends while its driver is still
        // connecting to the domain can crash, libvirt 9.0: it is asked again.)
        wait_for("libvirt to call the domain running", || {
            let state = libvirt.virsh(&["domstate", NAME]).ok()?;
            (state.trim() == "running").then_some(())
        });
        let begun = beats(&libvirt, "serial");
        wait_for("the guest to beat", || (beats(&libvirt, "serial") >= begun + 2).then_some(()));
        let mut vm = Destination::start(&libvirt, &words, via);
        limosa(["restore", &text(&snapshot), "--qmp", &vm.monitor, "--memory", "lazy"]).success();
        vm.assert_beats(&libvirt, via);
    }
}
