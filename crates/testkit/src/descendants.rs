//! The processes below a process: those that it has started, and those that they have.
//!
//! Law: no process is killed by a number that may be another's. A process that is stopped starts no child and reaps
//! none, so the numbers of its children stay theirs.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::process::{has_state, is_alive};

/// How long a process may take to stop, or to end. One that the kernel holds takes longer, and is not waited for.
const WITHIN: Duration = Duration::from_secs(5);

/// Stops a process, and kills all that are below it. The caller must be its parent and must not have waited for it.
pub(crate) fn kill_below(pid: u32) {
    send(pid, Signal::STOP);
    wait(|| is_stopped(pid));
    for child in children(pid) {
        kill_below(child);
        send(child, Signal::KILL);
        wait(|| !is_alive(child));
    }
}

fn send(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // It may have ended, or be another user's.
        let _ = kill_process(pid, signal);
    }
}

fn wait(is_done: impl Fn() -> bool) {
    let end = Instant::now() + WITHIN;
    while !is_done() && Instant::now() < end {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Reads this file of each thread of a process.
fn of_threads(pid: u32, file: &str) -> Vec<String> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join(file)).ok()).collect()
}

/// Whether no thread runs: one that was starting a child when the signal came still does.
fn is_stopped(pid: u32) -> bool {
    of_threads(pid, "stat").iter().all(|stat| has_state(stat, &['T', 't', 'Z', 'X']))
}

/// The children of all threads. The list is exact only while the process is stopped (`proc_tid_children(5)`).
fn children(pid: u32) -> Vec<u32> {
    let lists = of_threads(pid, "children");
    lists.iter().flat_map(|list| list.split_ascii_whitespace()).filter_map(|child| child.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::{Process, wait_for};

    #[test]
    fn all_that_are_below_a_process_end_when_it_is_dropped() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000 & sh -c 'sleep 1000 & sleep 1000 & wait' & wait"]);
        let process = Process::spawn("sh", command).unwrap();
        let below = || {
            let children = children(process.pid());
            let grandchildren = children.iter().flat_map(|child| self::children(*child));
            grandchildren.chain(children.iter().copied()).collect::<Vec<_>>()
        };
        let below = wait_for("four processes", || Some(below()).filter(|below| below.len() == 4));
        assert!(below.iter().all(|pid| is_alive(*pid)));
        drop(process);
        assert!(!below.iter().any(|pid| is_alive(*pid)));
    }
}
