//! Two network namespaces and a cable between them: a network for two processes of a bench.
//!
//! Law: the machine's own network is not touched, and nothing is left behind after this process. The
//! namespaces have no name: they exist as long as a process holds their descriptors or runs in them, and the cable goes
//! with them.
//!
//! Both ends prefer Reno, which every kernel has. What the machine itself prefers may spread what is sent over time
//! (BBR does), and then a timer is measured.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};

use crate::raw;

/// The name of the interface in either namespace.
const CABLE: &str = "cable";

/// An end of a [`Cable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Near,
    Far,
}

impl End {
    const BOTH: [Self; 2] = [Self::Near, Self::Far];

    /// Its address, known in the two namespaces alone.
    pub(crate) fn address(self) -> &'static str {
        match self {
            Self::Near => "10.77.0.1",
            Self::Far => "10.77.0.2",
        }
    }
}

/// A veth pair, each end in its own network namespace.
#[derive(Debug)]
pub(crate) struct Cable {
    near: OwnedFd,
    far: OwnedFd,
}

impl Cable {
    /// Lays it.
    ///
    /// # Errors
    /// This process may not (it takes root, also that of `unshare -r`), the kernel has no veth, or there is no `ip` of
    /// iproute2.
    pub(crate) fn lay() -> Result<Self> {
        let cable = Self { near: namespace()?, far: namespace()? };
        let peer = format!("/proc/{}/fd/{}", std::process::id(), cable.far.as_raw_fd());
        cable.ip(End::Near, &["link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", &peer])?;
        for end in End::BOTH {
            cable.ip(end, &["address", "add", &format!("{}/24", end.address()), "dev", CABLE])?;
            cable.ip(end, &["link", "set", CABLE, "up"])?;
        }
        Ok(cable)
    }

    /// Has a command run at this end, and see no other network.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub(crate) fn plug(&self, end: End, command: &mut Command) -> Result<()> {
        let namespace = match end {
            End::Near => &self.near,
            End::Far => &self.far,
        };
        raw::enter_network(command, namespace.try_clone().context("a descriptor of a network namespace")?);
        Ok(())
    }

    fn ip(&self, end: End, arguments: &[&str]) -> Result<()> {
        let mut command = Command::new("ip");
        self.plug(end, command.args(arguments))?;
        let output = command.output().context("ip (of iproute2)")?;
        let words = arguments.join(" ");
        ensure!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    }
}

/// A network namespace with nothing in it but the loopback interface.
#[derive(Debug)]
pub(crate) struct Loopback(OwnedFd);

impl Loopback {
    /// Makes it.
    ///
    /// # Errors
    /// As [`Cable::lay`].
    pub(crate) fn new() -> Result<Self> {
        let loopback = Self(namespace()?);
        let mut command = Command::new("ip");
        loopback.plug(command.args(["link", "set", "lo", "up"]))?;
        ensure!(command.status().context("ip (of iproute2)")?.success(), "ip link set lo up");
        Ok(loopback)
    }

    /// Has a command run in it.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub(crate) fn plug(&self, command: &mut Command) -> Result<()> {
        raw::enter_network(command, self.0.try_clone().context("a descriptor of a network namespace")?);
        Ok(())
    }
}

/// A new network namespace. A namespace belongs to a thread, so one that does nothing else makes it.
fn namespace() -> Result<OwnedFd> {
    let make = || -> Result<OwnedFd> {
        raw::leave_network().context("cannot create a network namespace")?;
        fs::write("/proc/sys/net/ipv4/tcp_congestion_control", "reno")
            .context("cannot choose Reno in a new network namespace")?;
        Ok(File::open("/proc/thread-self/ns/net").context("/proc/thread-self/ns/net")?.into())
    };
    let made = thread::Builder::new().name("namespace".into()).spawn(make).context("a thread")?;
    made.join().map_err(|_| anyhow!("the thread that makes a network namespace panicked"))?
}

#[cfg(test)]
mod tests {
    use limosa_testkit::skipped;

    use super::*;

    /// Returns the output of a command at an end.
    fn said(cable: &Cable, end: End, words: &[&str]) -> String {
        let (program, arguments) = words.split_first().expect("words");
        let mut command = Command::new(program);
        cable.plug(end, command.args(arguments)).expect("plugs");
        let output = command.output().expect("runs");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    #[test]
    fn each_end_has_its_address_and_reaches_the_other_by_reno() {
        if skipped("LIMOSA_SKIP_NETNS") {
            return;
        }
        let cable = Cable::lay().expect("needs root and iproute2, or skip with LIMOSA_SKIP_NETNS=1");
        for (end, other) in [(End::Near, End::Far), (End::Far, End::Near)] {
            let addresses = said(&cable, end, &["ip", "-o", "-4", "address"]);
            assert!(addresses.contains(end.address()) && !addresses.contains(other.address()), "{addresses}");
            let route = said(&cable, end, &["ip", "route", "get", other.address()]);
            assert!(route.contains(CABLE), "{route}");
            let control = said(&cable, end, &["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]);
            assert_eq!(control.trim(), "reno");
        }
    }

    #[test]
    fn nothing_of_it_is_seen_outside_nor_left_behind() {
        if skipped("LIMOSA_SKIP_NETNS") {
            return;
        }
        let here = |words: &[&str]| Command::new("ip").args(words).output().expect("ip").stdout;
        let before = [here(&["-o", "link"]), here(&["netns", "list"])];
        let cable = Cable::lay().expect("needs root and iproute2, or skip with LIMOSA_SKIP_NETNS=1");
        assert!(!String::from_utf8_lossy(&here(&["-o", "link"])).contains(CABLE));
        drop(cable);
        assert_eq!([here(&["-o", "link"]), here(&["netns", "list"])], before);
    }
}
