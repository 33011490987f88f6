//! Who is at the other end of a connection, and who is refused.
//!
//! Law: **a VM that was dropped does not come back to its disk, and nobody else is taken for it.** A process that has
//! connected to a unix socket is recognized for as long as it lives. One that cannot be identified, as descriptors are
//! short for example, may be any: it is refused while a process lives that is. Over TCP there is no process: what came
//! from another host is recognized as that, since none of its connections ever looks like one of this host.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use limosa_socket::PeerProcess;
use rustix::net::{AddressFamily, SocketAddrAny, getpeername, getsockname};

/// Processes; those that have ended are forgotten.
const PROCESSES: usize = 64;

/// The other end of a connection.
#[derive(Debug)]
pub(crate) enum Peer {
    /// A process of this host.
    Process(PeerProcess),
    /// Some process at a unix socket.
    Unidentified,
    /// Some process of another host, or of a container with an address of its own.
    OtherHost,
    /// Some process.
    Unknown,
}

impl Peer {
    /// Asks the kernel.
    pub(crate) fn of(socket: BorrowedFd<'_>) -> Self {
        if let Ok(process) = PeerProcess::of(socket) {
            return Self::Process(process);
        }
        let own = getsockname(socket).ok();
        if own.as_ref().is_some_and(|own| own.address_family() == AddressFamily::UNIX) {
            return Self::Unidentified;
        }
        let ends = getpeername(socket).ok().flatten().zip(own);
        let ends = ends.and_then(|(peer, own)| Some((address(&peer)?, address(&own)?)));
        ends.map_or(Self::Unknown, |(peer, own)| Self::at(peer, own))
    }

    /// The other end of a TCP connection, by the addresses of both. A host that reaches itself has one at both.
    fn at(peer: IpAddr, own: IpAddr) -> Self {
        if peer == own || peer.is_loopback() { Self::Unknown } else { Self::OtherHost }
    }
}

/// The address of an end of a TCP connection.
fn address(end: &SocketAddrAny) -> Option<IpAddr> {
    std::net::SocketAddr::try_from(end.clone()).ok().map(|end| end.ip().to_canonical())
}

/// The peers of a protected VM's disk: those that were connected when protection began, while the VM stood still, and
/// those that have written since.
#[derive(Debug, Clone, Default)]
pub struct VmPeers {
    processes: Vec<Arc<Peer>>,
    other_hosts: bool,
    unknown: bool,
}

impl VmPeers {
    pub(crate) fn add(&mut self, peer: &Arc<Peer>) {
        match &**peer {
            Peer::Process(process) if !self.has(process) => {
                if self.processes.len() >= PROCESSES {
                    self.processes.retain(|peer| matches!(&**peer, Peer::Process(process) if process.is_alive()));
                }
                self.processes.push(Arc::clone(peer));
            }
            Peer::Process(_) => {}
            Peer::OtherHost => self.other_hosts = true,
            Peer::Unidentified | Peer::Unknown => self.unknown = true,
        }
    }

    pub(crate) fn add_all(&mut self, other: &Self) {
        other.processes.iter().for_each(|peer| self.add(peer));
        self.other_hosts |= other.other_hosts;
        self.unknown |= other.unknown;
    }

    fn has(&self, process: &PeerProcess) -> bool {
        self.processes.iter().any(|peer| matches!(&**peer, Peer::Process(known) if known.is(process)))
    }

    fn has_live_process(&self) -> bool {
        self.processes.iter().any(|peer| matches!(&**peer, Peer::Process(known) if known.is_alive()))
    }

    /// Returns the numbers of the processes of this host that have one here.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        let pid = |peer: &Arc<Peer>| match &**peer {
            Peer::Process(process) => process.pid(),
            Peer::Unidentified | Peer::OtherHost | Peer::Unknown => None,
        };
        self.processes.iter().filter_map(pid).collect()
    }

    /// Returns whether there are some of other hosts.
    #[must_use]
    pub const fn has_other_hosts(&self) -> bool {
        self.other_hosts
    }

    /// Returns whether all of them are recognized when they come back, and there are some.
    #[must_use]
    pub const fn are_recognized(&self) -> bool {
        !self.unknown && (self.other_hosts || !self.processes.is_empty())
    }
}

/// The peers that are refused at exports.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Vec<Refused>);

#[derive(Debug)]
struct Refused {
    export: String,
    peers: VmPeers,
    /// Whether the VM that was dropped last is among them as a whole.
    is_whole: bool,
}

impl Refusals {
    /// Refuses the peers of an export from now on; those of other hosts if `other_hosts`.
    pub(crate) fn add(&mut self, export: &str, peers: &VmPeers, other_hosts: bool) {
        let refused = VmPeers { other_hosts: peers.other_hosts && other_hosts, ..peers.clone() };
        let is_whole = peers.are_recognized() && refused.other_hosts == peers.other_hosts;
        match self.0.iter_mut().find(|known| known.export == export) {
            Some(known) => {
                known.peers.add_all(&refused);
                known.is_whole = is_whole;
            }
            None => self.0.push(Refused { export: export.to_owned(), peers: refused, is_whole }),
        }
    }

    /// Whether the VM that was dropped last at an export is refused, however it comes back.
    pub(crate) fn has_all(&self, export: &str) -> bool {
        self.0.iter().any(|known| known.export == export && known.is_whole)
    }

    /// Whether a peer is refused.
    pub(crate) fn has(&self, export: &str, peer: &Peer) -> bool {
        let is_its = |peers: &VmPeers| match peer {
            Peer::Process(process) => peers.has(process),
            Peer::Unidentified => peers.has_live_process(),
            Peer::OtherHost => peers.other_hosts,
            Peer::Unknown => false,
        };
        self.0.iter().any(|known| known.export == export && is_its(&known.peers))
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsFd as _, AsRawFd as _};
    use std::os::unix::net::UnixStream;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    fn of_this_process() -> Arc<Peer> {
        let (near, _far) = UnixStream::pair().unwrap();
        Arc::new(Peer::of(near.as_fd()))
    }

    #[test]
    fn a_process_is_recognized_and_a_tcp_connection_of_this_host_is_not() {
        assert!(matches!(&*of_this_process(), Peer::Process(process) if process.pid() == Some(std::process::id())));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = listener.accept().unwrap().0;
        assert!(matches!(Peer::of(accepted.as_fd()), Peer::Unknown));
        let (read, _write) = std::io::pipe().unwrap();
        assert!(matches!(Peer::of(read.as_fd()), Peer::Unknown));
    }

    #[test]
    fn a_process_that_cannot_be_identified_is_refused_while_a_process_lives_that_is() {
        let (near, _far) = UnixStream::pair().unwrap();
        let open = || std::fs::File::open("/dev/null").unwrap();
        let free = open().as_raw_fd();
        let limits = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: u64::try_from(free).ok(), ..limits }).unwrap();
        let peer = Peer::of(near.as_fd());
        setrlimit(Resource::Nofile, limits).unwrap();
        assert!(matches!(peer, Peer::Unidentified), "{peer:?}");
        let (mut refusals, mut peers) = (Refusals::default(), VmPeers::default());
        assert!(!refusals.has("vm", &peer));
        refusals.add("vm", &VmPeers { unknown: true, ..VmPeers::default() }, true);
        assert!(!refusals.has("vm", &peer), "its user has said that it is off");
        peers.add(&of_this_process());
        refusals.add("vm", &peers, true);
        assert!(refusals.has("vm", &peer) && !refusals.has("other", &peer));
    }

    #[test]
    fn a_host_that_reaches_itself_has_one_address_at_both_ends() {
        let at = |peer: &str, own: &str| Peer::at(peer.parse().unwrap(), own.parse().unwrap());
        assert!(matches!(at("10.0.0.2", "10.0.0.1"), Peer::OtherHost));
        assert!(matches!(at("fd00::2", "fd00::1"), Peer::OtherHost));
        for [peer, own] in [["10.0.0.1"; 2], ["127.0.0.1"; 2], ["127.0.0.2", "127.0.0.1"], ["::1"; 2]] {
            assert!(matches!(at(peer, own), Peer::Unknown), "{peer} {own}");
        }
    }

    #[test]
    fn peers_are_recognized_if_there_are_some_and_all_can_be_told_from_others() {
        let mut peers = VmPeers::default();
        assert!(!peers.are_recognized(), "the VM was not connected");
        peers.add(&of_this_process());
        peers.add(&of_this_process());
        assert!(peers.are_recognized());
        assert_eq!(peers.pids(), [std::process::id()]);
        peers.add(&Arc::new(Peer::OtherHost));
        assert!(peers.are_recognized() && peers.has_other_hosts());
        peers.add(&Arc::new(Peer::Unknown));
        assert!(!peers.are_recognized());
    }

    #[test]
    fn those_of_one_export_are_refused_there_alone_and_other_hosts_only_if_that_is_wanted() {
        let (mut refusals, mut peers) = (Refusals::default(), VmPeers::default());
        peers.add(&of_this_process());
        peers.add(&Arc::new(Peer::OtherHost));
        refusals.add("vm", &peers, false);
        assert!(refusals.has("vm", &of_this_process()) && !refusals.has("other", &of_this_process()));
        assert!(!refusals.has("vm", &Peer::OtherHost) && !refusals.has("vm", &Peer::Unknown));
        refusals.add("vm", &peers, true);
        assert!(refusals.has("vm", &Peer::OtherHost) && !refusals.has("other", &Peer::OtherHost));
    }
}
