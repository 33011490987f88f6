//! The machine that the figures were measured on.

use std::fmt;
use std::fs;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// The machine's shape, without anything that names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Model name of the first core.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Memory in GiB, rounded to the nearest.
    pub memory_gib: u64,
    /// Kernel release.
    pub kernel: String,
    /// Version of the QEMU found in the path; none without one.
    pub qemu: Option<String>,
}

impl Machine {
    /// This machine. `qemu` is the QEMU binary whose version to name.
    pub fn this(qemu: &str) -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kib: u64 = field(&meminfo, "MemTotal").and_then(|value| value.split(' ').next()?.parse().ok()).unwrap_or(0);
        Self {
            cpu: field(&cpuinfo, "model name").unwrap_or("unknown").to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_gib: kib.saturating_add(1 << 19) >> 20,
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
            qemu: qemu_version(qemu),
        }
    }
}

impl Machine {
    /// Why the QEMU here cannot write or read mapped-ram files, if it cannot.
    pub(crate) fn lacks_mapped_ram(&self) -> Option<String> {
        let Some(version) = &self.qemu else { return Some("no QEMU was found".into()) };
        let major: u32 = version.split('.').next().and_then(|number| number.parse().ok()).unwrap_or(0);
        (major < 9).then(|| format!("QEMU {version} has no mapped-ram; that takes 9.0"))
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpu, cores, memory_gib, kernel, qemu } = self;
        let qemu = qemu.as_deref().unwrap_or("none");
        write!(f, "{cpu}, {cores} cores, {memory_gib} GiB, Linux {kernel}, QEMU {qemu}")
    }
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim())
}

fn qemu_version(qemu: &str) -> Option<String> {
    let output = Command::new(qemu).arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.split("version ").nth(1)?.split([' ', '\n']).next()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_cores_and_memory() {
        let machine = Machine::this("qemu-system-that-does-not-exist");
        assert!(machine.cores >= 1 && machine.memory_gib >= 1 && !machine.kernel.is_empty());
        assert_eq!(machine.qemu, None);
    }

    #[test]
    fn a_field_is_found_by_its_name() {
        assert_eq!(field("MemTotal:       24 kB\nMemFree: 3 kB\n", "MemTotal"), Some("24 kB"));
        assert_eq!(field("", "MemTotal"), None);
    }
}
