//! A process with a limit of its memory: its own control group, version 2 or 1, whichever the machine has.
//!
//! Counted is what is allocated from the moment a process is put in; huge pages of hugetlbfs are not.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

const ROOT: &str = "/sys/fs/cgroup";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A control group with a limit for memory. Removed when dropped, which needs its processes to be gone.
#[derive(Debug)]
pub struct MemoryGroup {
    folder: PathBuf,
    version: Version,
}

impl MemoryGroup {
    /// Makes a group of this name in which `limit` bytes may be had.
    ///
    /// # Errors
    /// We are not root, or control groups are not to be written here: the message says so.
    pub fn create(name: &str, limit: u64) -> Result<Self> {
        let (parent, version) = parent()?;
        let folder = parent.join(format!("limosa-test-{}-{name}", std::process::id()));
        fs::create_dir(&folder)
            .with_context(|| format!("{}: no control group can be made (root is needed)", folder.display()))?;
        let group = Self { folder, version };
        let file = if version == Version::Two { "memory.max" } else { "memory.limit_in_bytes" };
        group.write(file, &limit.to_string())?;
        Ok(group)
    }

    /// Puts a process in, with all its threads.
    ///
    /// # Errors
    /// There is no such process, or it may not be moved.
    pub fn add(&self, pid: u32) -> Result<()> {
        self.write("cgroup.procs", &pid.to_string())
    }

    /// The most bytes that the group had at a time: memory of its processes, the kernel's for them, and cached files
    /// that they were the first to read.
    ///
    /// # Errors
    /// The kernel does not report it (version 2 before Linux 5.19).
    pub fn peak(&self) -> Result<u64> {
        let file = if self.version == Version::Two { "memory.peak" } else { "memory.max_usage_in_bytes" };
        self.read(file)?.trim().parse().with_context(|| file.to_owned())
    }

    /// How many processes were killed because the limit was too low.
    ///
    /// # Errors
    /// The kernel does not report it.
    pub fn killed(&self) -> Result<u64> {
        let file = if self.version == Version::Two { "memory.events" } else { "memory.oom_control" };
        let text = self.read(file)?;
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.trim().parse().ok()).with_context(|| format!("{file} has no oom_kill"))
    }

    fn read(&self, file: &str) -> Result<String> {
        let path = self.folder.join(file);
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        let path = self.folder.join(file);
        fs::write(&path, value).with_context(|| path.display().to_string())
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // A process that was just killed may still be counted.
        for _ in 0..100 {
            if fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Where groups for memory are made: below our own, so that what limits us limits them too.
fn parent() -> Result<(PathBuf, Version)> {
    let own = fs::read_to_string("/proc/self/cgroup").context("/proc/self/cgroup")?;
    let place = |root: &Path, own: Option<&str>| {
        let own = own.map(|own| root.join(own.trim_start_matches('/'))).filter(|own| own.is_dir());
        own.unwrap_or_else(|| root.to_owned())
    };
    let old = Path::new(ROOT).join("memory");
    if old.join("memory.limit_in_bytes").exists() || old.join("cgroup.procs").exists() {
        let mut lines = own.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let own = lines.find(|(controllers, _)| controllers.split(',').any(|one| one == "memory"));
        return Ok((place(&old, own.map(|(_, path)| path)), Version::One));
    }
    let root = Path::new(ROOT);
    let has_memory = |file: PathBuf| {
        fs::read_to_string(file)
            .is_ok_and(|text| text.split_ascii_whitespace().any(|controller| controller == "memory"))
    };
    if !has_memory(root.join("cgroup.controllers")) {
        bail!("{ROOT}: no control groups for memory");
    }
    // A group that has processes of its own cannot hand the controller down, so ours usually cannot: the root can.
    if !has_memory(root.join("cgroup.subtree_control")) {
        fs::write(root.join("cgroup.subtree_control"), "+memory")
            .with_context(|| format!("{ROOT}: the memory controller cannot be handed down"))?;
    }
    Ok((root.to_owned(), Version::Two))
}
