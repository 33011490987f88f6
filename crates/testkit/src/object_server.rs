//! Object stores of two makes, which `cargo xtask setup` installs under target/.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use parking_lot::Mutex;

use crate::process::Process;
use crate::program::wait_for;
use crate::requirement::skipped;

/// The make of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectServerKind {
    /// s3s-fs: objects are files of a folder, signatures are checked.
    S3s,
    /// moto: objects are in its memory.
    Moto,
    /// s3s-fs, which takes requests without a signature, as a web server does.
    Open,
}

impl ObjectServerKind {
    /// Those that have credentials.
    pub const ALL: [Self; 2] = [Self::S3s, Self::Moto];

    /// Its program, below target/.
    fn program(self) -> PathBuf {
        let program = match self {
            Self::S3s | Self::Open => "s3s/bin/s3s-fs",
            Self::Moto => "moto/bin/moto_server",
        };
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target").join(program)
    }
}

/// The first port that a server may have: below are those that need a right, and of well-known services.
const PORTS_FROM: u16 = 5_000;

/// Ports that servers have at least, if they are below those of connections.
const PORTS_LEAST: u16 = 500;

/// The bucket of every server.
pub const BUCKET: &str = "bucket";

/// The credentials of every server: key id and secret.
pub const CREDENTIALS: (&str, &str) = ("limosa-test", "a-secret-for-tests");

/// A server of objects with one bucket, [`BUCKET`], on a port of this machine.
#[derive(Debug)]
pub struct ObjectServer {
    kind: ObjectServerKind,
    address: SocketAddr,
    folder: tempfile::TempDir,
    process: Mutex<Option<Process>>,
}

impl ObjectServer {
    /// Starts one.
    ///
    /// # Errors
    /// It is not installed; the message names the command that installs it.
    pub fn start(kind: ObjectServerKind) -> Result<Self> {
        Self::start_in(kind, &std::env::temp_dir())
    }

    /// Starts one that keeps its objects in a new folder in `parent`.
    ///
    /// # Errors
    /// It is not installed; the message names the command that installs it.
    pub fn start_in(kind: ObjectServerKind, parent: &Path) -> Result<Self> {
        if !kind.program().is_file() {
            let program = kind.program();
            bail!("no {}: run `cargo xtask setup` (or skip with LIMOSA_SKIP_STORES=1)", program.display());
        }
        let folder = tempfile::tempdir_in(parent)?;
        std::fs::create_dir(folder.path().join(BUCKET))?;
        let address = free_address()?;
        let server = Self { kind, address, folder, process: Mutex::new(None) };
        server.resume()?;
        if kind == ObjectServerKind::Moto {
            server.create_bucket()?;
        }
        Ok(server)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The folder of the bucket; its files are the objects of [`ObjectServerKind::S3s`].
    pub fn folder(&self) -> PathBuf {
        self.folder.path().join(BUCKET)
    }

    /// Variables for a client that goes to `address`: the server's own, or that of a proxy before it.
    pub fn environment(address: SocketAddr) -> [(&'static str, String); 6] {
        [
            // A proxy of this machine does not know its own address.
            ("NO_PROXY", "127.0.0.1".to_owned()),
            ("AWS_ENDPOINT_URL", format!("http://{address}")),
            ("AWS_ACCESS_KEY_ID", CREDENTIALS.0.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", CREDENTIALS.1.to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_EC2_METADATA_DISABLED", "true".to_owned()),
        ]
    }

    /// Kills it. What it keeps in files stays.
    pub fn stop(&self) {
        *self.process.lock() = None;
    }

    /// Starts it again, at the same port.
    ///
    /// # Errors
    /// It does not listen.
    pub fn resume(&self) -> Result<()> {
        let mut command = Command::new(self.kind.program());
        let port = self.address.port().to_string();
        match self.kind {
            ObjectServerKind::S3s | ObjectServerKind::Open => {
                command.args(["--host", "127.0.0.1", "--port", &port]);
                if self.kind == ObjectServerKind::S3s {
                    command.args(["--access-key", CREDENTIALS.0, "--secret-key", CREDENTIALS.1]);
                }
                command.arg(self.folder.path());
            }
            ObjectServerKind::Moto => _ = command.args(["-H", "127.0.0.1", "-p", &port]),
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).env("RUST_LOG", "error");
        // Whoever listens there now is not the server.
        if TcpStream::connect_timeout(&self.address, Duration::from_secs(1)).is_ok() {
            bail!("another program listens at {}", self.address);
        }
        let process = Process::spawn("the object server", command)?;
        let connect = || TcpStream::connect_timeout(&self.address, Duration::from_secs(1)).ok();
        wait_for("the object server to listen", connect);
        if let Some(status) = process.try_wait()? {
            bail!("the object server has ended, and another program listens at {}: {status}", self.address);
        }
        *self.process.lock() = Some(process);
        Ok(())
    }

    /// Moto takes requests without signatures.
    fn create_bucket(&self) -> Result<()> {
        use std::io::{Read as _, Write as _};
        let mut stream = TcpStream::connect(self.address)?;
        let head = format!("PUT /{BUCKET} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", self.address);
        write!(stream, "{head}Content-Length: 0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).context("creating a bucket")?;
        if !answer.starts_with("HTTP/1.1 200") {
            bail!("cannot create a bucket: {answer}");
        }
        Ok(())
    }
}

/// An address where nobody listens. Its port is outside the range that the kernel gives to connections: one of them
/// could take it while the server starts, or starts again.
fn free_address() -> Result<SocketAddr> {
    static COUNT: AtomicU16 = AtomicU16::new(0);
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").context("the range of ports")?;
    let mut ends = range.split_whitespace().map(|end| end.parse::<u16>());
    let (Some(Ok(first)), Some(Ok(last))) = (ends.next(), ends.next()) else { bail!("the range of ports: {range}") };
    // Those before it, or those behind it.
    let (from, end) =
        if first > PORTS_FROM + PORTS_LEAST { (PORTS_FROM, first) } else { (last.saturating_add(1), u16::MAX) };
    let count = end.checked_sub(from).filter(|count| *count > 0).context("no ports but those of connections")?;
    // Far from those of other processes that start at the same time.
    let first = std::process::id().wrapping_mul(7919);
    for _ in 0..count {
        let number = first.wrapping_add(COUNT.fetch_add(1, Ordering::Relaxed).into());
        let port = from + u16::try_from(number % u32::from(count))?;
        if let Ok(listener) = TcpListener::bind(("127.0.0.1", port)) {
            return Ok(listener.local_addr()?);
        }
    }
    bail!("no port is free")
}

/// Whether `LIMOSA_SKIP_STORES=1` is set: then a test that needs object servers returns at once, and is counted as
/// skipped.
pub fn stores_skipped() -> bool {
    skipped("LIMOSA_SKIP_STORES")
}
