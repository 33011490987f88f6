//! The confinement of a server after its start (`--sandbox`).
//!
//! Laws: all that the server needs by name is open before. From then on it starts no program, opens no file but those
//! that it has open and those in the folders that were allowed, and calls nothing in the kernel that it does not need.
//! That holds for all threads, because it happens while there is one.

mod calls;
mod files;

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use limosa_console::{anyhow_error_line, say};

use crate::args::SandboxArg;

/// Time that threads get to be gone that have ended.
const GONE: Duration = Duration::from_secs(5);
/// Interval at which the threads are counted.
const TICK: Duration = Duration::from_millis(1);

/// The names that a server uses after its start.
#[derive(Debug, Default)]
pub(super) struct Needs {
    /// Folders of the files of its sockets, which it removes at its end.
    pub(super) socket_folders: Vec<PathBuf>,
    /// Whether there are front ends over vhost-user.
    pub(super) devices: bool,
    /// Folders in which images may be opened, and overlays created.
    pub(super) image_folders: Vec<PathBuf>,
    /// The folder of journals, which are removed when images are closed, and made for images that are opened.
    pub(super) journal_folder: Option<PathBuf>,
}

/// Confines this process, which has no thread but this one.
///
/// # Errors
/// `on`, and the kernel cannot, or other threads run.
pub(super) fn confine(mode: SandboxArg, needs: &Needs) -> anyhow::Result<()> {
    if mode == SandboxArg::Off {
        return Ok(());
    }
    let missing = match wait_for_one_thread() {
        Ok(()) => apply(needs),
        Err(error) => vec![anyhow_error_line(&error)],
    };
    if mode == SandboxArg::On && !missing.is_empty() {
        anyhow::bail!("--sandbox on: {}", missing.join("; "));
    }
    missing.iter().for_each(|why| say!("limosa: the sandbox is incomplete: {why}"));
    Ok(())
}

/// Confines this thread, and those that it starts. Returns the parts that are not enforced, with their reasons: the
/// others are, as each is worth having alone.
fn apply(needs: &Needs) -> Vec<String> {
    let privileges = rustix::thread::set_no_new_privs(true).map(|()| true).map_err(anyhow::Error::from);
    let files = files::restrict(needs);
    // At last: it forbids what the others call.
    let calls = calls::restrict(needs);
    let parts = [("no_new_privs", privileges), ("landlock", files), ("seccomp", calls)];
    let missing = |(part, enforced)| match enforced {
        Ok(true) => None,
        Ok(false) => Some(format!("{part} is not in this kernel")),
        Err(error) => Some(format!("{part}: {}", anyhow_error_line(&error))),
    };
    parts.into_iter().filter_map(missing).collect()
}

/// Waits until all other threads are gone. Those of the storage pool and of NBD clients are ended; the kernel's own
/// threads for a ring end with the thread that had it.
fn wait_for_one_thread() -> anyhow::Result<()> {
    limosa_storage::retire_threads();
    limosa_nbd::retire_threads();
    let begun = Instant::now();
    loop {
        let count = std::fs::read_dir("/proc/self/task").context("/proc/self/task")?.count();
        if count == 1 {
            return Ok(());
        }
        anyhow::ensure!(begun.elapsed() < GONE, "{} other threads run", count.saturating_sub(1));
        thread::sleep(TICK);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, OpenOptions};
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::process::Command;

    use rustix::fs::{CWD, RenameFlags, renameat_with};

    use super::*;

    /// The folder that a child of a test uses.
    const FOLDER: &str = "LIMOSA_TEST_SANDBOX";

    /// Runs a test of this module in a process of its own, with a folder.
    fn in_child(mut command: Command) {
        let folder = tempfile::tempdir().unwrap();
        for name in ["sockets", "allowed", "other"] {
            fs::create_dir(folder.path().join(name)).unwrap();
            fs::write(folder.path().join(name).join("file"), "contents").unwrap();
        }
        let output = command.env(FOLDER, folder.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && said.contains("1 passed"),
            "{said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }

    /// The folder, if this is a child.
    fn folder() -> Option<PathBuf> {
        std::env::var_os(FOLDER).map(PathBuf::from)
    }

    fn needs(folder: &Path, images: bool) -> Needs {
        Needs {
            socket_folders: vec![folder.join("sockets")],
            devices: false,
            image_folders: images.then(|| folder.join("allowed")).into_iter().collect(),
            journal_folder: None,
        }
    }

    #[test]
    fn nothing_is_started_and_no_other_file_is_opened() {
        in_child(limosa_testkit::own_test!(confined_without_images));
    }

    #[test]
    #[ignore = "run by another test, in a process that it confines"]
    fn confined_without_images() {
        let Some(folder) = folder() else { return };
        let open = File::open(folder.join("other/file")).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (mut near, mut far) = UnixStream::pair().unwrap();
        assert!(Command::new("/bin/true").status().unwrap().success());
        assert_eq!(apply(&needs(&folder, false)), [""; 0]);
        // Its own work continues.
        near.write_all(b"x").unwrap();
        far.read_exact(&mut [0]).unwrap();
        assert_eq!(thread::spawn(|| 7).join().unwrap(), 7);
        // What is open can be opened again to be read, as the rings do.
        let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open));
        let mut contents = String::new();
        File::open(&again).unwrap().read_to_string(&mut contents).unwrap();
        assert_eq!(contents, "contents");
        assert!(OpenOptions::new().write(true).open(&again).is_err());
        // Nothing else.
        for path in ["/etc/passwd", "/proc/self/maps", "/dev/null"] {
            assert!(File::open(path).is_err(), "{path}");
        }
        assert!(File::open(folder.join("allowed/file")).is_err());
        assert!(File::create(folder.join("sockets/new")).is_err());
        assert!(fs::read_dir(&folder).is_err());
        assert!(Command::new("/bin/true").status().is_err());
        assert!(TcpStream::connect(address).is_err());
        assert!(TcpListener::bind("127.0.0.1:0").is_err());
        assert!(UnixStream::pair().is_err());
        assert!(rustix::fs::unlink(folder.join("other/file")).is_err());
        assert!(fs::rename(folder.join("sockets/file"), folder.join("sockets/moved")).is_err());
        // As the file of a socket is removed.
        rustix::fs::unlink(folder.join("sockets/file")).unwrap();
        // Threads that it starts are confined as well.
        assert!(thread::spawn(|| File::open("/etc/passwd").is_err()).join().unwrap());
    }

    #[test]
    fn images_may_be_opened_and_created_in_allowed_folders_only() {
        in_child(limosa_testkit::own_test!(confined_with_images));
    }

    #[test]
    #[ignore = "run by another test, in a process that it confines"]
    fn confined_with_images() {
        let Some(folder) = folder() else { return };
        assert_eq!(apply(&needs(&folder, true)), [""; 0]);
        let path = folder.join("allowed/file");
        OpenOptions::new().read(true).write(true).open(&path).unwrap();
        fs::write(folder.join("allowed/new"), "x").unwrap();
        let (new, none) = (folder.join("allowed/new"), RenameFlags::empty());
        let renamed = |to: &str| renameat_with(CWD, &new, CWD, folder.join(to), none);
        assert!(renamed("other/new").is_err());
        renamed("allowed/named").unwrap();
        rustix::fs::unlink(folder.join("allowed/named")).unwrap();
        File::open(folder.join("allowed")).unwrap().sync_all().unwrap();
        for path in ["other/file", "allowed/../other/file", "sockets/file"] {
            assert!(File::open(folder.join(path)).is_err(), "{path}");
        }
        for path in ["other/new", "sockets/new"] {
            assert!(File::create(folder.join(path)).is_err(), "{path}");
        }
        assert!(std::os::unix::fs::symlink("/etc/passwd", folder.join("allowed/link")).is_err());
        assert!(fs::hard_link(&path, folder.join("allowed/link")).is_err());
        assert!(rustix::fs::unlink(folder.join("other/file")).is_err());
        assert!(Command::new("/bin/true").status().is_err());
    }

    #[test]
    fn a_process_with_another_thread_is_not_confined() {
        in_child(limosa_testkit::own_test!(with_another_thread));
    }

    #[test]
    #[ignore = "run by another test, in a process that it would confine"]
    fn with_another_thread() {
        if folder().is_none() {
            return;
        }
        let (_kept, wait) = std::sync::mpsc::channel::<()>();
        thread::spawn(move || wait.recv());
        let error = confine(SandboxArg::On, &Needs::default()).unwrap_err();
        assert!(format!("{error:#}").contains("other threads run"), "{error:#}");
        confine(SandboxArg::Auto, &Needs::default()).unwrap();
        confine(SandboxArg::Off, &Needs::default()).unwrap();
        assert!(File::open("/etc/passwd").is_ok());
    }
}
