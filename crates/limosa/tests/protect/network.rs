//! Hosts and their networks: network namespaces, with a tap device or a cable between two of them.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use limosa_testkit::skipped;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The tap device of a gate.
pub(crate) const TAP: &str = "tap0";
/// The device at each end of a cable.
const CABLE: &str = "cable";

/// Whether tests that need network namespaces are switched off.
pub(crate) fn network_skipped() -> bool {
    skipped("LIMOSA_SKIP_NETNS")
}

fn ip(words: &[&str]) {
    let output = Command::new("ip").args(words).output().expect("iproute2, or skip with LIMOSA_SKIP_NETNS=1");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {words:?}: {error}: needs root, or skip with LIMOSA_SKIP_NETNS=1");
}

/// A network namespace; removed when dropped.
#[derive(Debug)]
pub(crate) struct Namespace {
    name: String,
}

impl Namespace {
    /// A namespace whose loopback device is up.
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("limosa-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        ip(&["netns", "add", &name]);
        let namespace = Self { name };
        namespace.ip(&["link", "set", "lo", "up"]);
        namespace
    }

    /// One with the world's end of a VM's network: a tap device with the address 10.9.0.1/24, and a guest at 10.9.0.2.
    pub(crate) fn with_tap(guest_mac: &str) -> Self {
        let namespace = Self::new();
        namespace.ip(&["tuntap", "add", TAP, "mode", "tap"]);
        namespace.ip(&["link", "set", TAP, "address", "02:00:00:00:00:01"]);
        namespace.ip(&["address", "add", "10.9.0.1/24", "dev", TAP]);
        namespace.ip(&["link", "set", TAP, "up"]);
        // No frame is lost to the search for an address.
        namespace.ip(&["neigh", "add", "10.9.0.2", "lladdr", guest_mac, "dev", TAP, "nud", "permanent"]);
        namespace
    }

    /// Two with a cable between them: 10.8.0.1 and 10.8.0.2.
    pub(crate) fn pair() -> [Self; 2] {
        let [one, two] = [Self::new(), Self::new()];
        one.ip(&["link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", &two.name]);
        for (end, address) in [(&one, "10.8.0.1/24"), (&two, "10.8.0.2/24")] {
            end.ip(&["address", "add", address, "dev", CABLE]);
            end.ip(&["link", "set", CABLE, "up"]);
        }
        [one, two]
    }

    fn ip(&self, words: &[&str]) {
        ip(&[&["-n", &self.name], words].concat());
    }

    /// Pulls the cable out: nothing passes, and no connection is told.
    pub(crate) fn cut(&self) {
        self.ip(&["link", "set", CABLE, "down"]);
    }

    pub(crate) fn mend(&self) {
        self.ip(&["link", "set", CABLE, "up"]);
    }

    /// A program in this namespace; its arguments follow.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]);
        command
    }

    /// Calls `done` on a thread that is in this namespace, as those are that it starts. Sockets stay in it.
    pub(crate) fn within<T: Send>(&self, done: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/run/netns/{}", self.name)).unwrap();
        let there = || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            done()
        };
        thread::scope(|scope| scope.spawn(there).join().unwrap())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // It may not have been made.
        let _ = Command::new("ip").args(["netns", "del", &self.name]).output();
    }
}
