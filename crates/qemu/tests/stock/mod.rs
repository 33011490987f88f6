//! Starts stock QEMU for these tests, under TCG and without a guest to boot.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::fs::File;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use limosa_qemu::monitor::{Monitor, RunState};
use limosa_qemu::qmp::{MonitorAddress, Options, Qmp, QmpError};

/// Bytes of guest memory.
pub const MEMORY: u64 = 64 << 20;

/// A QEMU process; killed when dropped.
pub struct Stock {
    pub child: Child,
    pub directory: tempfile::TempDir,
}

/// Whether the tests that need QEMU are left out. Says so.
pub fn skipped() -> bool {
    let skip = std::env::var_os("LIMOSA_SKIP_QEMU").is_some_and(|value| value == "1");
    if skip {
        eprintln!("skipped: LIMOSA_SKIP_QEMU=1");
    }
    skip
}

impl Stock {
    /// A QEMU whose memory holds no zero page, so that a bandwidth limit slows its migration down.
    pub fn start(arguments: &[&str]) -> Self {
        Self::prepared(arguments, |_| {})
    }

    /// The same, in a directory that is prepared first.
    pub fn prepared(arguments: &[&str], prepare: impl FnOnce(&Path)) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let memory = directory.path().join("memory");
        let mut file = File::create(&memory).unwrap();
        let page: Vec<u8> = (0..4096_u32).map(|at| u8::try_from(at % 251 + 1).unwrap()).collect();
        for _ in 0..MEMORY / 4096 {
            file.write_all(&page).unwrap();
        }
        prepare(directory.path());
        Self::start_in(directory, arguments)
    }

    fn start_in(directory: tempfile::TempDir, arguments: &[&str]) -> Self {
        let socket = directory.path().join("qmp");
        let memory = directory.path().join("memory");
        let child = Command::new("qemu-system-x86_64")
            .args([
                "-accel",
                "tcg",
                "-nodefaults",
                "-display",
                "none",
                "-m",
                "64M",
                "-machine",
                "pc,memory-backend=mem",
            ])
            .args(["-object", &format!("memory-backend-file,id=mem,size=64M,share=on,mem-path={}", memory.display())])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
            .args(arguments)
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("qemu-system-x86_64 does not start: run `cargo xtask setup`");
        let mut stock = Self { child, directory };
        let begun = Instant::now();
        // Its file is there before QEMU listens.
        while UnixStream::connect(&socket).is_err() {
            assert!(stock.child.try_wait().unwrap().is_none(), "QEMU ended at once");
            assert!(begun.elapsed() < Duration::from_secs(60), "QEMU opens no monitor");
            std::thread::sleep(Duration::from_millis(5));
        }
        stock
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn address(&self) -> MonitorAddress {
        MonitorAddress::Unix(self.path("qmp"))
    }

    /// Connects; waits for the client that holds the monitor.
    pub fn monitor(&self) -> Monitor {
        let patient = Options { greeting_timeout: Duration::from_secs(60), ..Options::default() };
        loop {
            match Qmp::connect(&self.address(), &patient) {
                Ok(qmp) => return Monitor::new(qmp),
                // The socket is there a moment before QEMU listens on it.
                Err(QmpError::Connect { .. }) => std::thread::sleep(Duration::from_millis(5)),
                Err(other) => panic!("{other}"),
            }
        }
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Looks until `is_so`, for a minute.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The VM's state.
pub fn run_state(monitor: &Monitor) -> RunState {
    monitor.status().unwrap().state
}
