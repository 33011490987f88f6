//! A filesystem whose files share space (XFS), for one test: in memory, behind a loop device, mounted where no other
//! process sees it.
//!
//! Law: what is mounted is mounted in a mount namespace of one thread, from a file on a tmpfs that is mounted there,
//! too. A test that is killed leaves an empty folder behind.

#![allow(unsafe_code)] // unshare(2) of a thread has no safe wrapper.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::{scratch, skipped};

/// XFS is not made smaller than 300 MB (mkfs.xfs); what is not written takes no memory.
const BYTES: u64 = 512 << 20;
/// How long those who had files open get until the kernel has closed them.
const PATIENCE: Duration = Duration::from_secs(30);
const WAYS_OUT: &str = "a filesystem that shares space is made with root, xfsprogs (`cargo xtask setup`), loop devices \
                        (/dev/loop-control) and a kernel that has XFS; or LIMOSA_REFLINK_DIR names a folder on one \
                        that is there (XFS, btrfs), or LIMOSA_SKIP_REFLINK=1 skips the test";

/// A folder of a filesystem that shares space between files.
#[derive(Debug)]
pub struct ReflinkFolder {
    path: PathBuf,
    /// The file that the filesystem is in, if it is the test's own.
    image: Option<PathBuf>,
}

impl ReflinkFolder {
    /// The folder, empty at first.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the filesystem is the test's own, so that its power can be cut.
    pub fn is_own(&self) -> bool {
        self.image.is_some()
    }

    /// Stops the filesystem as a power cut does, what it has not yet written to its log or its files being lost, and
    /// mounts it again, which recovers it from its log. Processes that had files open there must have ended: of a flush
    /// that is under way meanwhile the kernel reports to one thread that it failed, and to another one that it did not.
    ///
    /// # Errors
    /// It is not the test's own, a process still has files open, or it cannot be recovered.
    pub fn cut_power(&self) -> Result<()> {
        let image = self.image.as_ref().context("only a filesystem of the test's own can lose its power")?;
        run("xfs_io", [OsStr::new("-x"), OsStr::new("-c"), OsStr::new("shutdown"), self.path.as_os_str()])?;
        unmount(&self.path)?;
        mount_loop(image, &self.path)
    }

    /// Has the contents of a file written, but neither their places nor anything else of what the filesystem has in
    /// its log: before a power cut, what was written last may survive what was written first.
    ///
    /// # Errors
    /// The file cannot be opened or written.
    pub fn write_back(&self, file: &Path) -> Result<()> {
        let words = ["-c", "sync_range -b -w -a 0 0"].map(OsStr::new);
        run("xfs_io", words.into_iter().chain([file.as_os_str()])).map(|_| ())
    }

    /// How many extents of a file of the test's own filesystem are shared with others.
    ///
    /// # Errors
    /// `xfs_io` fails.
    pub fn shared_extents(&self, file: &Path) -> Result<usize> {
        let words = [OsStr::new("-r"), OsStr::new("-c"), OsStr::new("fiemap -v"), file.as_os_str()];
        Ok(run("xfs_io", words)?.lines().filter(|line| is_shared(line)).count())
    }
}

/// Whether a line of `xfs_io -c "fiemap -v"` ends in flags with `FIEMAP_EXTENT_SHARED` (linux/fiemap.h) among them.
fn is_shared(line: &str) -> bool {
    let flags = line.split_whitespace().last().and_then(|word| word.strip_prefix("0x"));
    flags.and_then(|flags| u32::from_str_radix(flags, 16).ok()).is_some_and(|flags| flags & 0x2000 != 0)
}

/// Runs a test, on its own thread, in a folder of a filesystem that shares space. `None`: `LIMOSA_SKIP_REFLINK=1`.
///
/// `LIMOSA_REFLINK_DIR` names a folder in which to make the test's, where loop devices are missing.
///
/// # Errors
/// No such folder exists or can be made; the message names what is missing, and how to skip the test.
///
/// # Panics
/// As the test does.
pub fn on_reflinks<T: Send>(test: impl FnOnce(&ReflinkFolder) -> T + Send) -> Result<Option<T>> {
    if skipped("LIMOSA_SKIP_REFLINK") {
        return Ok(None);
    }
    if let Some(folder) = std::env::var_os("LIMOSA_REFLINK_DIR") {
        let folder = tempfile::Builder::new().prefix("limosa-").tempdir_in(&folder).context("LIMOSA_REFLINK_DIR")?;
        return Ok(Some(test(&ReflinkFolder { path: folder.path().to_path_buf(), image: None })));
    }
    let outer = scratch()?;
    let ended = thread::scope(|scope| {
        let mounted = || -> Result<T> {
            let own = Own::make(outer.path()).context(WAYS_OUT)?;
            Ok(test(&own.0))
        };
        scope.spawn(mounted).join()
    });
    ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic)).map(Some)
}

/// The filesystem of a test. Unmounted when dropped.
struct Own(ReflinkFolder);

impl Own {
    /// Mounts it below `outer`, as this thread and those that it starts see the world from now on.
    fn make(outer: &Path) -> Result<Self> {
        // SAFETY: descriptors stay those of all threads.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.context("a mount namespace")?;
        run("mount", ["--make-rprivate", "/"])?;
        run("mount", [OsStr::new("-t"), OsStr::new("tmpfs"), OsStr::new("limosa"), outer.as_os_str()])?;
        let (image, path) = (outer.join("image"), outer.join("mounted"));
        let file = File::create(&image).and_then(|file| file.set_len(BYTES));
        file.and_then(|()| std::fs::create_dir(&path)).with_context(|| outer.display().to_string())?;
        run("mkfs.xfs", [OsStr::new("-q"), OsStr::new("-m"), OsStr::new("reflink=1"), image.as_os_str()])?;
        mount_loop(&image, &path)?;
        Ok(Self(ReflinkFolder { path, image: Some(image) }))
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // Threads of a pool may have files open for a moment. What is mounted nowhere goes when they are closed.
        let _ = run("umount", [OsStr::new("-l"), self.0.path.as_os_str()]);
        if let Some(outer) = self.0.path.parent() {
            let _ = run("umount", [OsStr::new("-l"), outer.as_os_str()]);
        }
    }
}

/// The kernel frees the loop device with the mount.
fn mount_loop(image: &Path, path: &Path) -> Result<()> {
    let words = ["-t", "xfs", "-o", "loop"].map(OsStr::new);
    run("mount", words.into_iter().chain([image.as_os_str(), path.as_os_str()])).map(|_| ())
}

fn unmount(path: &Path) -> Result<()> {
    let began = Instant::now();
    loop {
        match run("umount", [path]) {
            Err(_) if began.elapsed() < PATIENCE => thread::sleep(Duration::from_millis(10)),
            result => return result.map(|_| ()),
        }
    }
}

/// Runs a program of the system, also one that only root has in `PATH`; what it prints.
fn run<S: AsRef<OsStr>>(program: &str, words: impl IntoIterator<Item = S>) -> Result<String> {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(program);
    command.args(words).env("PATH", format!("{path}:/usr/sbin:/sbin")).stdin(Stdio::null());
    let output = command.output().with_context(|| format!("{program} is missing: run `cargo xtask setup`"))?;
    if !output.status.success() {
        bail!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::note_skip;

    #[test]
    fn a_private_filesystem_shares_space_and_no_other_process_sees_it() {
        let ended = on_reflinks(|folder| {
            let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
            std::fs::write(&one, vec![7; 1 << 20]).unwrap();
            run("cp", [OsStr::new("--reflink=always"), one.as_os_str(), other.as_os_str()]).unwrap();
            if folder.is_own() {
                assert!(folder.shared_extents(&other).unwrap() > 0);
                let path = folder.path().to_path_buf();
                let outer = std::fs::read_to_string(format!("/proc/{}/mounts", std::process::id())).unwrap();
                assert!(!outer.contains(path.to_str().unwrap()), "{outer}");
                return Some(path);
            }
            None
        });
        if let Some(Some(path)) = ended.unwrap() {
            assert!(!path.parent().unwrap().exists());
        }
    }

    #[test]
    fn a_power_cut_keeps_what_was_synced_and_loses_what_was_not() {
        on_reflinks(|folder| {
            if !folder.is_own() {
                return note_skip("LIMOSA_REFLINK_DIR");
            }
            let [kept, lost] = ["kept", "lost"].map(|name| folder.path().join(name));
            let mut file = File::create(&kept).unwrap();
            file.write_all(&[7; 8192]).unwrap();
            file.sync_all().unwrap();
            drop(file);
            std::fs::write(&lost, [8; 8192]).unwrap();
            folder.cut_power().unwrap();
            assert_eq!(std::fs::read(&kept).unwrap(), [7; 8192]);
            assert!(!lost.exists(), "it was never synced");
        })
        .unwrap();
    }

    #[test]
    fn shared_extents_are_told_by_their_flag() {
        assert!(is_shared("   0: [0..2047]:       2048..4095   2048 0x2001"));
        assert!(!is_shared("   0: [0..2047]:       2048..4095   2048   0x1"));
        assert!(!is_shared(" EXT: FILE-OFFSET      BLOCK-RANGE      TOTAL FLAGS"));
        assert!(!is_shared("   0: [0..2047]:       hole           2048"));
    }
}
