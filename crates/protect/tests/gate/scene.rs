//! A gate on a thread, and its neighbours.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use limosa_protect::gate::{Gate, GateAddresses, GateClient, GateKeeper, GateOptions, GateReport, NetworkAddress};
use rustix::event::{EventfdFlags, eventfd};
use tempfile::TempDir;
use uuid::Uuid;

/// A limit for the stuck.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// A gate that runs.
pub(crate) struct Scene {
    folder: TempDir,
    far: UnixListener,
    stop: Arc<OwnedFd>,
    notices: Arc<Mutex<Vec<String>>>,
    gate: Mutex<Option<JoinHandle<GateReport>>>,
}

impl Scene {
    pub(crate) fn new() -> Self {
        Self::with(GateOptions::default())
    }

    /// A gate whose network listens, and may refuse it for now.
    pub(crate) fn with(options: GateOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let far = UnixListener::bind(at("far")).unwrap();
        let network = NetworkAddress::Unix(at("network"));
        let addresses = GateAddresses { vm: &at("vm"), keeper: &at("keeper"), network: &network };
        let gate = Gate::open(addresses, &options).unwrap();
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let notices = Arc::new(Mutex::new(Vec::new()));
        let (stopped, heard) = (Arc::clone(&stop), Arc::clone(&notices));
        let gate = thread::spawn(move || {
            gate.run(stopped.as_fd(), &|line| heard.lock().unwrap().push(line.to_owned())).unwrap()
        });
        Self { folder, far, stop, notices, gate: Mutex::new(Some(gate)) }
    }

    pub(crate) fn vm_socket(&self) -> PathBuf {
        self.at("vm")
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn keeper_socket(&self) -> PathBuf {
        self.at("keeper")
    }

    /// Connects as QEMU does.
    pub(crate) fn vm(&self) -> Peer {
        Peer::new(UnixStream::connect(self.at("vm")).unwrap())
    }

    /// Lets the gate reach the network, and waits until it has connected.
    pub(crate) fn network(&self) -> Peer {
        let network = self.at("network");
        if !network.exists() {
            std::os::unix::fs::symlink(self.at("far"), network).unwrap();
        }
        Peer::new(self.far.accept().unwrap().0)
    }

    pub(crate) fn connected(&self) -> (Peer, Peer) {
        let network = self.network();
        let vm = self.vm();
        self.wait_notice("the VM is connected");
        (vm, network)
    }

    pub(crate) fn keeper(&self) -> GateClient {
        self.keeper_of(Uuid::new_v4())
    }

    /// The keeper of this protection.
    pub(crate) fn keeper_of(&self, protection: Uuid) -> GateClient {
        let keeper = GateKeeper { protection, vm: None };
        let until = Instant::now() + SOON;
        loop {
            match GateClient::connect(&self.keeper_socket(), SOON, keeper) {
                Ok(keeper) => return keeper,
                // The one before is just leaving.
                Err(error) => assert!(Instant::now() < until, "{error}"),
            }
        }
    }

    /// Waits for a notice that contains this, and forgets all until then.
    #[track_caller]
    pub(crate) fn wait_notice(&self, text: &str) {
        let until = Instant::now() + SOON;
        loop {
            let mut notices = self.notices.lock().unwrap();
            if let Some(at) = notices.iter().position(|notice| notice.contains(text)) {
                notices.drain(..=at);
                return;
            }
            assert!(Instant::now() < until, "no {text:?} in {notices:?}");
            drop(notices);
            thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn stop(&self) -> GateReport {
        rustix::io::write(&self.stop, &1_u64.to_ne_bytes()).unwrap();
        let gate = self.gate.lock().unwrap().take().unwrap();
        let report = gate.join().unwrap();
        assert!(!Path::new(&self.at("vm")).exists() && !self.keeper_socket().exists());
        report
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let gate = self.gate.lock().unwrap().take();
        if let Some(gate) = gate.filter(|_| !thread::panicking()) {
            rustix::io::write(&self.stop, &1_u64.to_ne_bytes()).unwrap();
            gate.join().unwrap();
        }
    }
}

/// A frame behind its length.
pub(crate) fn framed(payload: &[u8]) -> Vec<u8> {
    [&u32::try_from(payload.len()).unwrap().to_be_bytes(), payload].concat()
}

/// A VM or a network.
pub(crate) struct Peer {
    pub(crate) stream: UnixStream,
}

impl Peer {
    fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(SOON)).unwrap();
        Self { stream }
    }

    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub(crate) fn send(&mut self, payload: &[u8]) {
        self.raw(&framed(payload));
    }

    /// Reads the next frame.
    #[track_caller]
    pub(crate) fn frame(&mut self) -> Vec<u8> {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).unwrap();
        let mut payload = vec![0; usize::try_from(u32::from_be_bytes(length)).unwrap()];
        self.stream.read_exact(&mut payload).unwrap();
        payload
    }

    /// Expects that nothing comes for a moment.
    #[track_caller]
    pub(crate) fn expect_silence(&mut self) {
        self.stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let error = self.stream.read(&mut [0; 100]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
        self.stream.set_read_timeout(Some(SOON)).unwrap();
    }
}
