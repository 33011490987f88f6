//! `MSG_ZEROCOPY` where it pays: out of a Linux guest, whose network card reads the pages from where they are.
//!
//! Between two processes of one machine the kernel copies what is lent, so only a kernel with a card can report that
//! nothing was copied. The guest has a virtio card, connected with a tap device in a network namespace of the test's
//! own.

use std::io::Write as _;
use std::process::{Command, Stdio};

use limosa_testkit::{LinuxGuest, Machine, Program, Vm, own_test, qemu_skipped, skipped, wait_for};
use serde_json::{Value, json};

/// Memory that is sent.
const BYTES: u64 = 32 << 20;

const HOST: &str = "10.79.0.1";
const GUEST: &str = "10.79.0.2";

/// Gives this process's network a tap device.
fn lay_tap() {
    for arguments in
        ["tuntap add dev tap0 mode tap vnet_hdr", &format!("address add {HOST}/24 dev tap0"), "link set tap0 up"]
    {
        let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
        assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Runs a test of this program in its own network, which goes with it, however it ends.
fn run_apart(test: &Command) {
    let output = Command::new("unshare").arg("--net").arg(test.get_program()).args(test.get_args()).output().unwrap();
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{errors}: needs root and iproute2, or skip with LIMOSA_SKIP_NETNS=1"
    );
    print!("{said}");
}

/// Sends the guest's memory to this machine, in this way: what the guest says that came of it.
fn send(vm: &Vm, zero_copy: &str) -> Value {
    let (input, mut to) = std::io::pipe().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_limosa-bench"));
    command.arg("stream-end").stdin(Stdio::from(input));
    let destination = Program::start_with_input("limosa-bench", command);
    let setup = json!({ "Destination": {
        "memory": BYTES, "uri": format!("tcp:{HOST}:0"), "channels": 2, "plain": false, "faulting": false,
    } });
    writeln!(to, "{setup}").unwrap();
    let listening = wait_for("the destination's address", || serde_json::from_str::<Value>(&destination.stdout()).ok());
    let source = json!({ "Source": { "file": "/memory", "memory": BYTES, "plain": false } });
    let way = json!({
        "channels": 2, "packet_pages": null, "copied": false, "max_bandwidth": null,
        "zeros": "Always", "zero_copy": zero_copy,
    });
    let order = json!({ "uri": listening["Listening"], "way": way });
    let said = vm.shell(&format!("printf '%s\\n' '{source}' '{order}' | host limosa-bench stream-end")).unwrap();
    drop(to);
    let ended = destination.wait().success();
    assert!(ended.stdout.contains("Running"), "{ended:?}");
    let sent = said.iter().find_map(|line| serde_json::from_str::<Value>(line).ok()?.get("Sent").cloned());
    sent.unwrap_or_else(|| panic!("{said:?}"))
}

#[test]
fn a_guest_with_a_network_card_copies_nothing_of_what_is_lent() {
    if qemu_skipped() || skipped("LIMOSA_SKIP_NETNS") {
        return;
    }
    run_apart(&own_test!(from_a_guest));
}

#[test]
#[ignore = "needs a network of its own: run by the test above"]
fn from_a_guest() {
    lay_tap();
    let guest = LinuxGuest { programs: vec![env!("CARGO_BIN_EXE_limosa-bench").into()], ..LinuxGuest::default() };
    let machine = Machine::linux(guest).memory(512 << 20);
    let card = ["-netdev", "tap,id=net0,ifname=tap0,script=no,downscript=no", "-device", "virtio-net-pci,netdev=net0"];
    let vm = card.into_iter().fold(machine, Machine::argument).start().unwrap();
    vm.wait_counts(1).unwrap();
    vm.shell(&format!("ip address add {GUEST}/24 dev eth0 && ip link set eth0 up")).unwrap();
    vm.shell(&format!("head -c {BYTES} /dev/urandom > /memory")).unwrap();
    let pages = BYTES / 4096;
    for (zero_copy, lends) in [("off", false), ("msg", true), ("auto", true)] {
        let sent = send(&vm, zero_copy);
        println!("{zero_copy}: {sent}");
        let lent = |name: &str| sent["lent"][name].as_u64().unwrap();
        assert_eq!(sent["pages"], pages);
        // The kernel's own word, in each of its notifications.
        assert_eq!((lent("copied"), lent("spliced")), (0, 0));
        assert_eq!(lent("completed"), lent("calls"));
        assert_eq!(lent("calls") >= pages / 128, lends);
        assert_eq!(lent("calls") != 0, lends);
    }
}
