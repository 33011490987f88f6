//! Host names, machine ids, ssh host keys, hardware addresses: `contrib/new-identity`, called by the host through the
//! guest agent.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;

use super::*;
use crate::needs_qemu;

/// ssh-keygen in the guest. Of the host keys that `-A` stands for it makes one: an RSA key takes a minute under TCG.
const SSH_KEYGEN: &str = r#"#!/bin/sh
[ "$1" != -A ] || set -- -q -t ed25519 -N "" -f /etc/ssh/ssh_host_ed25519_key
exec /host/ld.so --library-path /host /host/ssh-keygen "$@"
"#;

/// Has the agent of a clone execute a command, and waits for its end.
fn guest_exec(clone: &Value, path: &str, args: &[&str]) {
    let mut socket = UnixStream::connect(folder(clone).join("qga")).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    let mut answers = BufReader::new(socket.try_clone().unwrap()).lines();
    let mut ask = |command: Value| -> Value {
        socket.write_all(format!("{command}\n").as_bytes()).unwrap();
        let answer: Value = serde_json::from_str(&answers.next().unwrap().unwrap()).unwrap();
        assert!(answer["error"].is_null(), "{command}: {answer}");
        answer["return"].clone()
    };
    let arguments = json!({ "path": path, "arg": args, "capture-output": true });
    let pid = ask(json!({ "execute": "guest-exec", "arguments": arguments }))["pid"].clone();
    let ended = wait_for("the command in the guest", || {
        let status = ask(json!({ "execute": "guest-exec-status", "arguments": { "pid": pid } }));
        (status["exited"] == true).then_some(status)
    });
    assert_eq!(ended["exitcode"], 0, "{ended}");
}

/// The program of this name that the tests' host has.
fn host_program(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap();
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|path| path.is_file()).unwrap_or_else(|| {
        panic!("no {name}: run `cargo xtask setup`");
    })
}

/// Writes a program into a guest, in lines that are not too long for its console.
fn write_program(vm: &Vm, path: &str, text: &str) {
    vm.shell(&format!("mkdir -p {} && : > {path}", Path::new(path).parent().unwrap().display())).unwrap();
    for piece in text.as_bytes().chunks(500) {
        let bytes: String = piece.iter().map(|byte| format!("\\x{byte:02x}")).collect();
        vm.shell(&format!("printf '{bytes}' >> {path}")).unwrap();
    }
    vm.shell(&format!("chmod +x {path}")).unwrap();
}

/// A guest with an identity that its clones would share.
fn identified(source: &Vm) {
    wait_agent(source);
    write_program(source, "/usr/bin/ssh-keygen", SSH_KEYGEN);
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/new-identity");
    write_program(source, "/usr/local/sbin/new-identity", &std::fs::read_to_string(recipe).unwrap());
    source.shell("mkdir -p /etc/ssh && echo 'root:x:0:0:root:/:/bin/sh' > /etc/passwd").unwrap();
    source.shell("PATH=$PATH:/usr/bin sh /usr/local/sbin/new-identity saved").unwrap();
}

/// The properties that tell a guest from others.
fn identity(clone: &Value) -> Vec<String> {
    let console = console(clone);
    let asked = ["hostname", "cat /etc/hostname", "cat /etc/machine-id", "cat /sys/class/net/eth0/address"];
    let mut said: Vec<_> = asked.iter().flat_map(|line| console.shell(line).unwrap()).collect();
    said.extend(console.shell("cat /etc/ssh/ssh_host_*_key.pub").unwrap());
    said
}

#[test]
fn clones_that_are_told_to_have_names_ids_keys_and_addresses_of_their_own() {
    needs_qemu!();
    let guest = LinuxGuest { programs: vec![host_program("ssh-keygen")], ..with_agent() };
    let devices = |folder: &str| {
        let network = ["-netdev", "user,id=net0,restrict=on", "-device", "virtio-net-pci,netdev=net0"];
        [agent_port(folder), network.map(str::to_owned).into()].concat()
    };
    let scene = LinuxScene::new(&guest, &devices, identified);
    let clones = scene.start(2, &[], &[]);
    let before: BTreeSet<_> = clones.iter().map(identity).collect();
    assert_eq!(before.len(), 1, "clones are copies: {before:?}");
    let old = before.into_iter().next().unwrap();
    assert!(old.len() == 5 && old[0] == "saved" && old[3].starts_with("52:54:00:"), "{old:?}");
    for clone in &clones {
        let name = format!("vm-{}", clone["name"].as_str().unwrap());
        let line = format!("PATH=$PATH:/usr/bin:/bin /usr/local/sbin/new-identity {name}");
        guest_exec(clone, "/bin/sh", &["-c", &line]);
    }
    let mut seen: BTreeSet<_> = old.iter().skip(2).cloned().collect();
    for clone in &clones {
        let new = identity(clone);
        assert_eq!(
            (new.len(), &new[0], &new[1]),
            (old.len(), &new[1], &format!("vm-{}", clone["name"].as_str().unwrap()))
        );
        assert_eq!(new[2].len(), 32, "{new:?}");
        assert!(new.iter().skip(2).all(|part| seen.insert(part.clone())), "something of {new:?} is another's");
    }
}
