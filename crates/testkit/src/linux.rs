//! The Linux guest: the distribution's kernel with a busybox whose init counts and takes commands.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::busybox::System;
use crate::requirement::guest_folder;
use crate::serial::{LINE, Serial};

/// In the order in which they can be loaded; a kernel that has one built in has no file for it.
const MODULES: [&str; 10] = [
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
    "virtio_balloon",
    "failover",
    "net_failover",
    "virtio_net",
];

/// The ports of virtio-serial.
const AGENT_MODULES: [&str; 1] = ["virtio_console"];

/// Linux with busybox. On its serial port it prints `count N` about ten times a second, and runs each line it gets
/// there as a shell line, whose output is followed by `done STATUS`. [`crate::Vm::shell`] and
/// [`crate::Vm::wait_counts`] use that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinuxGuest {
    /// Whether virtio devices get their drivers.
    pub modules: bool,
    /// Whether QEMU's guest agent runs, on the port `org.qemu.guest_agent.0` of a virtio-serial device. Its process id
    /// is in `/tmp/qemu-ga.pid`.
    pub agent: bool,
    /// Whether it has a kernel with a driver of vmgenid, which has no modules.
    pub vmgenid: bool,
    /// More words for the kernel's command line.
    pub kernel_words: String,
    /// Programs of the host that it has too, by their names, in `/host`; run there by `host NAME ...` with the host's
    /// libraries, if they need any.
    pub programs: Vec<PathBuf>,
}

impl Default for LinuxGuest {
    fn default() -> Self {
        let (kernel_words, programs) = (String::new(), Vec::new());
        Self { modules: true, agent: false, vmgenid: false, kernel_words, programs }
    }
}

/// The serial port is its console; a counter has lines between those of the commands.
const CONSOLE: &str = "mount -t devtmpfs dev /dev 2>/dev/null
exec 0</dev/ttyS0 1>/dev/ttyS0 2>&1";
const COUNTER: &str = "( n=0; while :; do n=$((n+1)); echo \"count $n\"; sleep 0.1; done ) &";
/// The agent sets the hardware clock too, by a program that it looks for where Linux has it.
const AGENT: &str = "mkdir -p /sbin && ln -s /bin/hwclock /sbin/hwclock
for port in /sys/class/virtio-ports/*; do
    if [ \"$(cat \"$port/name\")\" = org.qemu.guest_agent.0 ]; then
        agent=\"/host/ld.so --library-path /host /host/qemu-ga -m virtio-serial -t /tmp\"
        $agent -p \"/dev/${port##*/}\" > /tmp/qemu-ga.log 2>&1 &
        echo $! > /tmp/qemu-ga.pid
    fi
done";

impl LinuxGuest {
    /// Returns QEMU's arguments. The initrd is written into `folder`.
    ///
    /// # Errors
    /// The guest's parts are not there (`cargo xtask setup`), or the initrd cannot be written.
    pub fn arguments(&self, folder: &Path) -> Result<Vec<(&'static str, String)>> {
        let parts = guest_folder()?;
        let virtio: &[&str] = if self.modules { &MODULES } else { &[] };
        let agent: &[&str] = if self.agent { &AGENT_MODULES } else { &[] };
        let modules = if self.vmgenid { Vec::new() } else { [virtio, agent].concat() };
        let mut programs = self.programs.clone();
        let mut beside = COUNTER.to_owned();
        if self.agent {
            programs.push(parts.join("qemu-ga"));
            beside = format!("{AGENT}\n{COUNTER}");
        }
        let system = System {
            modules: &modules,
            modules_in: &parts.join("modules"),
            first: CONSOLE,
            beside: &beside,
            programs: &programs,
        };
        let path = system.write_initrd(folder)?;
        // A host that is busy is late with the ticks that the kernel counts at boot to see whether its timer works; the
        // kernel panics over it.
        let words = format!("console=ttyS0 quiet panic=-1 no_timer_check init_on_alloc=0 {}", self.kernel_words);
        let kernel = if self.vmgenid { "vmlinuz-vmgenid" } else { "vmlinuz" };
        Ok(vec![
            ("-kernel", parts.join(kernel).to_string_lossy().into_owned()),
            ("-initrd", path.to_string_lossy().into_owned()),
            ("-append", words.trim().to_owned()),
            ("-cpu", "max".to_owned()),
        ])
    }
}

impl Serial {
    /// Waits for the count of the Linux guest behind this port to go up `times` times from now on; returns the last
    /// number.
    ///
    /// # Errors
    /// It does not.
    pub fn wait_counts(&self, times: usize) -> Result<u64> {
        let mut from = self.mark();
        let mut last = None;
        for _ in 0..times {
            let (position, line) = self.wait_from(from, LINE, |text| count_number(text).is_some())?;
            (from, last) = (position + 1, count_number(&line.text));
        }
        last.context("no count to wait for")
    }

    /// Runs one shell line in the Linux guest behind this port; returns what it printed. Lines of the counter are left
    /// out.
    ///
    /// # Errors
    /// It fails or does not end.
    pub fn shell(&self, line: &str) -> Result<Vec<String>> {
        self.shell_within(line, LINE)
    }

    /// Runs one shell line as [`shell`](Self::shell) does, which may take this long.
    ///
    /// # Errors
    /// It fails or does not end.
    pub fn shell_within(&self, line: &str, limit: Duration) -> Result<Vec<String>> {
        let from = self.mark();
        self.send(line)?;
        let (end, status) = self.wait_from(from, limit, |text| text.starts_with("done "))?;
        let lines = self.lines();
        let said =
            lines.get(from..end).context("the line that ended is not among the lines of the serial port")?.iter();
        // A guest that was saved in the middle of a line continues with its rest, before it echoes what was sent.
        let rest = usize::from(from == 0 && lines.first().is_some_and(|line| is_rest_of_count(&line.text)));
        let said: Vec<String> = said
            .skip(rest)
            .map(|line| line.text.clone())
            .filter(|text| count_number(text).is_none() && text != line)
            .collect();
        if status.text != "done 0" {
            bail!("`{line}` in the guest: {} after {said:?}", status.text);
        }
        Ok(said)
    }
}

/// `count 42`.
fn count_number(text: &str) -> Option<u64> {
    text.strip_prefix("count ")?.parse().ok()
}

/// Whether it is the end of such a line: `ount 42`. A number alone is taken for output.
fn is_rest_of_count(text: &str) -> bool {
    let word = text.trim_end_matches(|letter: char| letter.is_ascii_digit());
    "count ".ends_with(word) && (text.is_empty() || !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_of_a_line_of_the_counter_is_known_from_other_lines() {
        for rest in ["", " 42", "t 42", "ount 42", "count 42", "unt "] {
            assert!(is_rest_of_count(rest), "{rest:?}");
        }
        for other in ["done 0", "count x", "46bd /held", "account 42", "1764"] {
            assert!(!is_rest_of_count(other), "{other:?}");
        }
    }
}
