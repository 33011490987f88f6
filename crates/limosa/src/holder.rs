//! Other processes of limosa that hold a VM's monitor, which serves one client at a time.
//!
//! They are found by the command line of their watchdog, which names the monitor and the process that it watches over.

use std::fs;
use std::path::{Path, PathBuf};

use limosa_qemu::qmp::MonitorAddress;

/// A watchdog that holds a monitor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holder {
    /// The watchdog's process.
    pub(crate) watchdog: u32,
    /// The process that it watches over; it may have ended.
    watched: u32,
}

impl Holder {
    /// The watchdogs of this machine that hold the monitor.
    pub(crate) fn of(monitor: &MonitorAddress) -> Vec<Self> {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter_map(|pid| Self::parse(pid, &fs::read(format!("/proc/{pid}/cmdline")).ok()?, monitor)).collect()
    }

    fn parse(watchdog: u32, line: &[u8], monitor: &MonitorAddress) -> Option<Self> {
        let words: Vec<_> = line.split(|byte| *byte == 0).collect();
        let [_, b"watchdog", b"--", held, _qemu, _started, pid, ..] = words.as_slice() else { return None };
        let watched = std::str::from_utf8(pid).ok()?.parse().ok()?;
        let held: MonitorAddress = std::str::from_utf8(held).ok()?.parse().ok()?;
        is_same(&held, watched, monitor).then_some(Self { watchdog, watched })
    }

    /// The process of `limosa protect` that it watches over, if it is one and lives.
    pub(crate) fn protector(&self) -> Option<u32> {
        let line = fs::read(format!("/proc/{}/cmdline", self.watched)).ok()?;
        let mut words = line.split(|byte| *byte == 0).skip(1);
        (words.find(|word| !word.starts_with(b"-")) == Some(b"protect")).then_some(self.watched)
    }
}

/// Whether both are one monitor: a relative path of the other process is relative to its own directory.
fn is_same(held: &MonitorAddress, watched: u32, monitor: &MonitorAddress) -> bool {
    let (MonitorAddress::Unix(theirs), MonitorAddress::Unix(ours)) = (held, monitor) else { return held == monitor };
    let whole = |path: &Path, directory: &str| -> Option<PathBuf> {
        let path = if path.is_absolute() { path.to_path_buf() } else { fs::read_link(directory).ok()?.join(path) };
        Some(fs::canonicalize(&path).unwrap_or(path))
    };
    let (theirs, ours) = (whole(theirs, &format!("/proc/{watched}/cwd")), whole(ours, "/proc/self/cwd"));
    theirs.is_some_and(|path| Some(path) == ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &[&str]) -> Vec<u8> {
        words.iter().flat_map(|word| word.as_bytes().iter().copied().chain([0])).collect()
    }

    #[test]
    fn a_watchdog_is_known_by_its_monitor_and_other_processes_are_not() {
        let own = std::process::id().to_string();
        let monitor: MonitorAddress = "unix:/run/vm.qmp".parse().unwrap();
        let words = ["/proc/self/exe", "watchdog", "--", "unix:/run/vm.qmp", "12", "34", &own];
        let found = Holder::parse(7, &line(&words), &monitor);
        assert_eq!(found, Some(Holder { watchdog: 7, watched: std::process::id() }));
        assert_eq!(found.unwrap().protector(), None, "this process is no limosa protect");
        let relative = std::env::current_dir().unwrap().join("vm.qmp");
        let relative = MonitorAddress::Unix(relative);
        let words = ["/proc/self/exe", "watchdog", "--", "unix:vm.qmp", "12", "34", &own];
        assert!(Holder::parse(7, &line(&words), &relative).is_some());
        for words in [
            &["limosa", "watchdog", "--", "unix:/run/other", "12", "34", &own][..],
            &["limosa", "watchdog", "--", "unix:/run/vm.qmp"],
            &["limosa", "save", "--qmp", "unix:/run/vm.qmp", "12", "34", &own],
            &[],
        ] {
            assert_eq!(Holder::parse(7, &line(words), &monitor), None, "{words:?}");
        }
    }
}
