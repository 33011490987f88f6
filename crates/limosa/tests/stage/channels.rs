//! Saving and loading over several channels: the cells of a table of machine types, channels, compressions, transports.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Mutex;

use limosa_testkit::Machine;
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket, sockopt};

use super::{Found, assert_beats, limosa, load_in_stock_qemu, place, save_arguments, small};

/// A port of this host that no process listens at, and that the kernel assigns to no other until this one ends: it is
/// bound here, in a way that lets a process that names it listen there all the same.
pub(crate) fn free_port() -> String {
    static BOUND: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    sockopt::set_socket_reuseaddr(&socket, true).unwrap();
    bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let address = SocketAddr::try_from(getsockname(&socket).unwrap()).unwrap();
    BOUND.lock().unwrap().push(socket);
    format!("tcp:{address}")
}

/// A kind of address for `--listen`, by the word that a table has for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    /// The private socket that limosa makes by itself.
    Private,
    /// A unix socket that is named.
    Unix,
    /// TCP on this host.
    Tcp,
}

impl Transport {
    /// The value of `--listen` where limosa listens, if it has one; a socket with a name is in `folder`.
    pub(crate) fn of_limosa(self, folder: &Path) -> Option<String> {
        match self {
            Self::Private => None,
            Self::Unix => Some(format!("unix:{}", folder.join("socket").display())),
            Self::Tcp => Some("tcp:127.0.0.1:0".to_owned()),
        }
    }

    /// As [`of_limosa`](Self::of_limosa), where QEMU listens: it does not report which port it took.
    pub(crate) fn of_qemu(self, folder: &Path) -> Option<String> {
        if self == Self::Tcp { Some(free_port()) } else { self.of_limosa(folder) }
    }
}

/// One cell: how many channels, compressed how, over what.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cell {
    pub(crate) channels: u8,
    pub(crate) compression: &'static str,
    pub(crate) transport: Transport,
}

/// A machine whose processors are taken saves more slowly over channels than the guest writes: there the guest is
/// stopped for the rest, which ends every save. A machine with time to spare is done before.
pub(crate) const STOPPED_WHERE_SLOW: [&str; 4] = ["--timeout", "5s", "--on-timeout", "pause"];

/// Saves a beat guest on a machine of this type over the cell's channels; expects that the guest beats on, that QEMU is
/// set as it was found, and that a stock QEMU loads the file and beats on there too.
#[track_caller]
pub(crate) fn saves_over_channels(kind: &str, cells: &[Cell]) {
    let machine: Machine = small().kind(kind);
    let vm = machine.start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    let found = Found::of(&vm);
    for cell in cells {
        let (folder, file) = place();
        let channels = cell.channels.to_string();
        let mut more = vec!["--via", "socket", "--json", "--channels", &channels, "--compression", cell.compression];
        more.extend(STOPPED_WHERE_SLOW);
        let listen = cell.transport.of_limosa(folder.path());
        more.extend(listen.iter().flat_map(|uri| ["--listen", uri]));
        let answer = limosa(save_arguments(&vm, &file, &more)).json();
        assert_eq!(answer["via"], "socket", "{kind} {cell:?}");
        found.assert_same(&vm);
        assert_beats(&vm);
        drop(load_in_stock_qemu(&machine, &file, 0));
    }
}
