//! The identity of a job's process, by which another limosa finds out whether it still lives.
//!
//! A number alone proves nothing: numbers are reused, and mean other processes in other containers and on other hosts.
//! So the time at which the process started goes with it, and the boot and the pid namespace in which the number
//! counts.

use std::fmt;
use std::fs;

use serde::{Deserialize, Serialize};

/// The identity of a process, also after its number is used again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// Its number.
    pub pid: u32,
    /// When it started, in clock ticks after boot (`/proc/PID/stat`, field 22).
    pub started: u64,
    /// The boot id and the pid namespace in which the number counts.
    #[serde(rename = "place")]
    pub pid_scope: String,
    /// Its name, for messages.
    pub name: String,
}

/// Whether a process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// It lives.
    Alive,
    /// It is dead.
    Dead,
    /// It ran on another host, under another boot or in another container: unknown here.
    Elsewhere,
}

impl ProcessIdentity {
    /// Returns the identity of this process.
    #[must_use]
    pub fn own() -> Self {
        let pid = std::process::id();
        let (name, started) = stat(pid).unwrap_or_else(|| ("limosa".to_owned(), 0));
        Self { pid, started, pid_scope: place(), name }
    }

    /// Returns the identity of another process of this host, if it lives.
    #[must_use]
    pub fn of(pid: u32) -> Option<Self> {
        let (name, started) = stat(pid)?;
        Some(Self { pid, started, pid_scope: place(), name })
    }

    /// Whether both are the same process; its name may have changed.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        (self.pid, self.started, &self.pid_scope) == (other.pid, other.started, &other.pid_scope)
    }

    /// Whether the process lives now. A process that has ended but was not reaped counts as dead.
    #[must_use]
    pub fn liveness(&self) -> Liveness {
        if self.pid_scope != place() {
            return Liveness::Elsewhere;
        }
        match stat(self.pid) {
            Some((_, started)) if started == self.started => Liveness::Alive,
            Some(_) => Liveness::Dead,
            // Where /proc hides the processes of others (hidepid), only the kernel's answer to a signal tells.
            None if hidden(self.pid) => Liveness::Alive,
            None => Liveness::Dead,
        }
    }
}

/// Whether a process exists that /proc does not show.
fn hidden(pid: u32) -> bool {
    let unseen = !std::path::Path::new(&format!("/proc/{pid}")).exists();
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    unseen && pid.is_some_and(|pid| !matches!(rustix::process::test_kill_process(pid), Err(rustix::io::Errno::SRCH)))
}

impl fmt::Display for ProcessIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {})", self.name, self.pid)
    }
}

fn place() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}

/// The user and the group by whose rights a process acts on files; `None` if /proc does not show it.
pub(crate) fn user(pid: u32) -> Option<(u32, u32)> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    // Real, effective, saved and file system id (proc_pid_status(5)).
    let last = |key: &str| text.lines().find_map(|line| line.strip_prefix(key))?.split_ascii_whitespace().nth(3);
    Some((last("Uid:")?.parse().ok()?, last("Gid:")?.parse().ok()?))
}

/// Name and start time; `None` if there is no such process or it is a zombie.
fn stat(pid: u32) -> Option<(String, u64)> {
    // A process may give itself a name that is not UTF-8.
    parse_stat(&String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/stat")).ok()?))
}

fn parse_stat(text: &str) -> Option<(String, u64)> {
    // The name stands in parentheses and may itself hold parentheses and spaces; the fields after it are plain.
    let (before, after) = text.rsplit_once(')')?;
    let name = before.split_once('(')?.1;
    let fields: Vec<&str> = after.split_ascii_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X") {
        return None;
    }
    Some((name.to_owned(), fields.get(19)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_alive_and_another_start_time_is_another_process() {
        let own = ProcessIdentity::own();
        assert_eq!(own.liveness(), Liveness::Alive);
        assert_eq!(ProcessIdentity { started: own.started + 1, ..own.clone() }.liveness(), Liveness::Dead);
        assert_eq!(ProcessIdentity { pid_scope: "another boot".into(), ..own }.liveness(), Liveness::Elsewhere);
    }

    #[test]
    fn a_child_is_dead_as_soon_as_it_has_ended_even_unreaped() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let (name, started) = stat(child.id()).unwrap();
        let identity = ProcessIdentity { pid: child.id(), started, pid_scope: place(), name };
        assert_eq!(identity.liveness(), Liveness::Alive);
        child.kill().unwrap();
        while identity.liveness() == Liveness::Alive {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert_eq!(identity.liveness(), Liveness::Dead);
    }

    #[test]
    fn a_process_acts_as_its_user() {
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        assert_eq!(user(std::process::id()), Some(own));
        assert_eq!(user(0), None);
    }

    #[test]
    fn names_with_parentheses_do_not_shift_the_fields() {
        let fields: Vec<String> = (4..60).map(|field| field.to_string()).collect();
        let text = format!("7 (a) b (c) S {}", fields.join(" "));
        assert_eq!(parse_stat(&text), Some(("a) b (c".to_owned(), 22)));
        assert_eq!(parse_stat("7 (a) Z 1"), None);
        assert_eq!(parse_stat(""), None);
    }
}
