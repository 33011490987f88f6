//! The threads of a QEMU process.

use std::fs;

/// Whether all threads of a process sleep, except those with the ids in `ignored`, which are as QEMU itself sees them
/// (in the innermost pid namespace). `None` if `/proc` does not show them.
///
/// A thread that waits for a disk does not count as sleeping (`proc_pid_status(5)`: state `D`). One that waits for a
/// file system in another process (FUSE) does.
pub(crate) fn all_sleep_except(pid: u32, ignored: &[u64]) -> Option<bool> {
    for task in fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        // A thread may have ended since.
        let Ok(status) = fs::read_to_string(task.ok()?.path().join("status")) else { continue };
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let id = field("NSpid").or_else(|| field("Pid"))?.split_ascii_whitespace().next_back()?.parse().ok()?;
        if !ignored.contains(&id) && !field("State")?.trim_start().starts_with('S') {
            return Some(false);
        }
    }
    Some(true)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    /// A program that waits for its input.
    fn sleeper() -> std::process::Child {
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn a_process_sleeps_when_it_waits_for_input() {
        let mut sleeper = sleeper();
        let end = Instant::now() + Duration::from_secs(60);
        while all_sleep_except(sleeper.id(), &[]) != Some(true) {
            assert!(Instant::now() < end, "it never sleeps");
            std::thread::sleep(Duration::from_millis(5));
        }
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        assert_eq!(all_sleep_except(sleeper.id(), &[]), None, "it has ended");
    }

    #[test]
    fn a_thread_that_runs_counts_unless_it_is_ignored() {
        let mut busy = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let pid = busy.id();
        assert_eq!(all_sleep_except(pid, &[]), Some(false));
        assert_eq!(all_sleep_except(pid, &[pid.into()]), Some(true));
        busy.kill().unwrap();
        busy.wait().unwrap();
    }
}
