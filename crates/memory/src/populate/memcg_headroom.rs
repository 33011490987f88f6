//! The amount of memory that may be allocated before the kernel's OOM killer acts.
//!
//! The kernel answers a control group over its limit not with `ENOMEM` but by killing a process. So the limits are
//! checked before: of the group of this process and its ancestors (version 2 or 1), and of the machine.

use std::fs;
use std::path::{Path, PathBuf};

/// The memory limits of this process.
#[derive(Debug, Clone, Default)]
pub struct MemcgHeadroom {
    groups: Vec<Group>,
    /// `MemAvailable` counts too.
    machine: bool,
}

/// The files of a control group.
#[derive(Debug, Clone)]
struct Group {
    limit: PathBuf,
    usage: PathBuf,
    stat: PathBuf,
    /// The line in `stat` that counts reclaimable file cache.
    reclaimable: &'static str,
}

impl MemcgHeadroom {
    /// Returns the limits of the control groups of this process, and of the machine.
    pub fn of_this_process() -> Self {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mut groups = Vec::new();
        for line in own.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
            let roots: &[&str] = if controllers.is_empty() {
                &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
            } else if controllers.split(',').any(|one| one == "memory") {
                &["/sys/fs/cgroup/memory"]
            } else {
                continue;
            };
            for root in roots {
                add_groups(Path::new(root), path, &mut groups);
            }
        }
        Self { groups, machine: true }
    }

    /// Returns no limit.
    pub fn unlimited() -> Self {
        Self::default()
    }

    /// Returns the bytes that may be allocated, less a reserve for other processes; `None`: no limit is known.
    pub fn left(&self) -> Option<u64> {
        let machine = || {
            let text = fs::read_to_string("/proc/meminfo").ok()?;
            let count = |name| Some(field(&text, name)?.saturating_mul(1024));
            Some(after_reserve(count("MemTotal:")?, count("MemAvailable:")?))
        };
        let machine = self.machine.then(machine).flatten();
        self.groups.iter().filter_map(Group::left).chain(machine).min()
    }
}

/// Subtracts a reserve: a 16th of the limit, at most 64 MiB.
fn after_reserve(limit: u64, left: u64) -> u64 {
    left.saturating_sub((limit / 16).min(64 << 20))
}

/// Adds the group at `path` below `root` and all visible ancestors.
fn add_groups(root: &Path, path: &str, groups: &mut Vec<Group>) {
    // In a container the path may be one of the host; then only the root is visible.
    let own = root.join(path.trim_start_matches('/'));
    let own = if own.is_dir() { own } else { root.to_owned() };
    for folder in own.ancestors().take_while(|folder| folder.starts_with(root)) {
        for (limit, usage, reclaimable) in [
            ("memory.max", "memory.current", "inactive_file "),
            // Over it the group is not killed but held up.
            ("memory.high", "memory.current", "inactive_file "),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
        ] {
            if folder.join(limit).is_file() {
                let stat = folder.join("memory.stat");
                groups.push(Group { limit: folder.join(limit), usage: folder.join(usage), stat, reclaimable });
            }
        }
    }
}

impl Group {
    /// Returns the bytes that may be allocated; `None`: it has no limit, or is gone.
    fn left(&self) -> Option<u64> {
        let number = |path: &Path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        let limit = number(&self.limit)?; // "max" is no number.
        let reclaimable = field(&fs::read_to_string(&self.stat).unwrap_or_default(), self.reclaimable).unwrap_or(0);
        let used = number(&self.usage)?.saturating_sub(reclaimable);
        Some(after_reserve(limit, limit.saturating_sub(used)))
    }
}

/// Returns the number after a name at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(root: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(root).unwrap();
        for (name, text) in files {
            fs::write(root.join(name), text).unwrap();
        }
    }

    fn left(root: &Path, path: &str) -> Option<u64> {
        let mut groups = Vec::new();
        add_groups(root, path, &mut groups);
        MemcgHeadroom { groups, machine: false }.left()
    }

    #[test]
    fn the_tightest_limit_of_a_group_and_those_above_counts() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        group(root, &[("memory.max", "max\n"), ("memory.current", "99\n"), ("memory.stat", "")]);
        let stat = "anon 5\ninactive_file 100000\nactive_file 7\n";
        group(&root.join("a"), &[("memory.max", "1600000\n"), ("memory.current", "600000\n"), ("memory.stat", stat)]);
        group(&root.join("a/b"), &[("memory.max", "max\n"), ("memory.current", "5\n"), ("memory.stat", "")]);
        // 1600000 - (600000 - 100000) - 1600000 / 16
        assert_eq!(left(root, "/a/b"), Some(1_000_000));
        assert_eq!(left(root, "/"), None);
        group(&root.join("a/b"), &[("memory.max", "160000\n"), ("memory.current", "159999\n")]);
        assert_eq!(left(root, "/a/b"), Some(0));
        assert_eq!(left(root, "/not/to/be/seen"), None);
    }

    #[test]
    fn groups_of_version_1_count_too() {
        let folder = tempfile::tempdir().unwrap();
        let files = [
            ("memory.limit_in_bytes", "1600000\n"),
            ("memory.usage_in_bytes", "600000\n"),
            ("memory.stat", "inactive_file 5\ntotal_inactive_file 100000\n"),
        ];
        group(&folder.path().join("x"), &files);
        assert_eq!(left(folder.path(), "/x"), Some(1_000_000));
    }

    #[test]
    fn this_process_can_have_some_memory() {
        assert!(MemcgHeadroom::of_this_process().left().is_some_and(|left| left > 0));
        assert_eq!(MemcgHeadroom::unlimited().left(), None);
    }
}
