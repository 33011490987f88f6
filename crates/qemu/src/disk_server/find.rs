//! Finds the exports that the disks of a VM are.
//!
//! Facts found with QEMU 10.0.2:
//!
//! * A vhost-user device names its character device in the property `chardev`; `query-chardev` shows the path of that
//!   one's socket: `unix:PATH`, with `disconnected:` before it and options behind it.
//! * A node over NBD has a name that is no URI, because nothing in it is escaped: `nbd+unix:///EXPORT?socket=PATH` and
//!   `nbd://HOST:PORT/EXPORT`; or `json:{...}` if it was given more than that.

use std::net::{IpAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::{DiskServer, ServedImage};
use crate::file_identity::FileId;
use crate::job::JobError;
use crate::monitor::{Device, Disk, Monitor};

/// A disk of a VM that a server serves.
#[derive(Debug, Clone)]
pub(crate) struct Served {
    /// The server.
    pub(crate) server: Arc<DiskServer>,
    /// The export's name.
    pub(crate) export: String,
    /// The disk, as QEMU names it.
    pub(crate) device: String,
    /// The block node, if QEMU has one.
    pub(crate) node: String,
    /// Its image.
    pub(crate) image: ServedImage,
}

/// The disks of a VM whose contents QEMU gets from another process.
#[derive(Debug, Default)]
pub(crate) struct Remote {
    /// Block devices without a file of this host.
    pub(crate) disks: Vec<Disk>,
    /// Devices that QEMU has no block node for.
    pub(crate) devices: Vec<Device>,
}

/// Where a VM finds a disk.
#[derive(Debug, PartialEq, Eq)]
enum Source {
    /// vhost-user at this socket.
    VhostUser(PathBuf),
    /// An export over NBD at a unix socket.
    NbdUnix { socket: PathBuf, export: String },
    /// An export over NBD at a port.
    NbdInet { host: String, port: u16, export: String },
}

/// Finds the export of each disk among those of the servers. A read-only disk need not be one.
///
/// # Errors
/// A disk is served by none of them; a server serves no disk of the VM; the monitor's and the servers'.
pub(crate) fn find(monitor: &Monitor, remote: &Remote, controls: &[PathBuf]) -> Result<Vec<Served>, JobError> {
    let servers = controls.iter().map(|control| Listening::ask(control)).collect::<Result<Vec<_>, _>>()?;
    let process = monitor.qmp().process();
    let mut found = Vec::new();
    for device in &remote.devices {
        let socket = monitor.device_socket(&device.id)?;
        let source = socket.as_deref().and_then(unix_path).map(Source::VhostUser);
        found.push(served(&servers, source, process, (&device.id, ""))?);
    }
    for disk in &remote.disks {
        match of_node(&servers, disk, process) {
            Ok(served) => found.push(served),
            Err(_) if !disk.writable => {}
            Err(other) => return Err(other),
        }
    }
    if let Some(unused) =
        servers.iter().find(|server| !found.iter().any(|disk| Arc::ptr_eq(&disk.server, &server.server)))
    {
        let control = unused.server.control().display();
        return Err(JobError::refused(format!("the server of disks at {control} serves no disk of this VM")));
    }
    Ok(found)
}

/// The disk of a block node.
fn of_node(servers: &[Listening], disk: &Disk, process: Option<u32>) -> Result<Served, JobError> {
    // Another driver above it could hold back what the server has to have when its disk is frozen.
    if !matches!(disk.format.as_str(), "raw" | "nbd") {
        let (device, format) = (label(&disk.device, &disk.node), &disk.format);
        return Err(JobError::refused(format!(
            "no overlay can be put under the disk {device}: QEMU has the driver '{format}' above what is served"
        )));
    }
    served(servers, nbd_source(&disk.filename), process, (&disk.device, &disk.node))
}

/// The name of a disk for people: one of `-blockdev` has that of its node alone.
fn label<'a>(device: &'a str, node: &'a str) -> &'a str {
    if device.is_empty() { node } else { device }
}

/// The disk of a source of a VM whose QEMU is this process.
fn served(
    servers: &[Listening],
    source: Option<Source>,
    process: Option<u32>,
    (device, node): (&str, &str),
) -> Result<Served, JobError> {
    let name = label(device, node);
    let source = source.ok_or_else(|| {
        JobError::refused(format!("the disk {name} is no export of a server of disks: QEMU does not show which it is"))
    })?;
    let found = servers.iter().find_map(|server| Some((&server.server, server.export(&source, process)?)));
    let (server, export) = found.ok_or_else(|| {
        let controls: Vec<_> = servers.iter().map(|server| server.server.control().display().to_string()).collect();
        JobError::refused(format!("the disk {name} ({source}) is not served by {}", controls.join(" or ")))
    })?;
    let image = server.image(&export)?;
    Ok(Served { server: Arc::clone(server), export, device: device.to_owned(), node: node.to_owned(), image })
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::VhostUser(socket) => write!(f, "vhost-user at {}", socket.display()),
            Self::NbdUnix { socket, export } => write!(f, "export {export:?} at {}", socket.display()),
            Self::NbdInet { host, port, export } => write!(f, "export {export:?} at {host}:{port}"),
        }
    }
}

/// A server, and where it listens.
struct Listening {
    server: Arc<DiskServer>,
    /// Sockets of vhost-user devices, with the names of their exports.
    devices: Vec<(PathBuf, String)>,
    /// Sockets for clients of NBD.
    sockets: Vec<PathBuf>,
    /// Addresses and ports for clients of NBD.
    ports: Vec<(IpAddr, u16)>,
}

impl Listening {
    fn ask(control: &Path) -> Result<Self, JobError> {
        let server = DiskServer::connect(control)?;
        let answer = server.ask("query-server", Value::Null)?;
        let list = |key: &str| answer.get(key).and_then(Value::as_array).into_iter().flatten();
        let text = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
        let devices = list("vhost-user-blk")
            .filter_map(|device| Some((text(device, "socket")?.into(), text(device, "export")?)))
            .collect();
        let sockets = list("nbd").filter_map(|address| text(address, "path").map(PathBuf::from)).collect();
        let ports = list("nbd")
            .filter_map(|address| Some((text(address, "host")?.parse().ok()?, text(address, "port")?.parse().ok()?)))
            .collect();
        Ok(Self { server: Arc::new(server), devices, sockets, ports })
    }

    /// Returns the name of the export that a VM whose QEMU is this process finds there.
    fn export(&self, source: &Source, process: Option<u32>) -> Option<String> {
        match source {
            Source::VhostUser(socket) => {
                let seen = seen_by(process?, socket)?;
                let device = self.devices.iter().find(|(path, _)| FileId::of_path(path).is_ok_and(|id| id == seen));
                device.map(|(_, export)| export.clone())
            }
            Source::NbdUnix { socket, export } => {
                let seen = seen_by(process?, socket)?;
                let is_here = self.sockets.iter().any(|path| FileId::of_path(path).is_ok_and(|id| id == seen));
                is_here.then(|| export.clone())
            }
            Source::NbdInet { host, port, export } => {
                let addresses: Vec<_> = (host.as_str(), *port).to_socket_addrs().ok()?.collect();
                // One that listens at all addresses is this host's if the client's is.
                let is_here = |listened: IpAddr, asked: IpAddr| {
                    listened == asked || listened.is_unspecified() && asked.is_loopback()
                };
                // QEMU has taken one of them.
                let all_here = addresses.iter().all(|asked| {
                    self.ports.iter().any(|(listened, own)| own == port && is_here(*listened, asked.ip()))
                });
                (all_here && !addresses.is_empty()).then(|| export.clone())
            }
        }
    }
}

/// The file that a path leads to for a process, which may be in a container.
fn seen_by(process: u32, path: &Path) -> Option<FileId> {
    let place = if path.is_absolute() {
        Path::new(&format!("/proc/{process}/root")).join(path.strip_prefix("/").ok()?)
    } else {
        Path::new(&format!("/proc/{process}/cwd")).join(path)
    };
    FileId::of_path(&place).ok()
}

/// The socket in QEMU's name for a character device.
fn unix_path(filename: &str) -> Option<PathBuf> {
    let path = filename.strip_prefix("disconnected:").unwrap_or(filename).strip_prefix("unix:")?;
    let path = path.split_once(" <-> ").map_or(path, |(path, _)| path);
    let path = path.split_once(",server").map_or(path, |(path, _)| path);
    (!path.is_empty()).then(|| path.into())
}

/// Whether QEMU's name for a node is that of an export over NBD.
pub(crate) fn is_nbd(filename: &str) -> bool {
    nbd_source(filename).is_some()
}

/// Where QEMU's name for a node finds an export.
fn nbd_source(filename: &str) -> Option<Source> {
    if let Some(json) = filename.strip_prefix("json:") {
        let mut node: &Value = &serde_json::from_str(json).ok()?;
        while let Some(file) = node.get("file").filter(|file| file.is_object()) {
            // More about the format would show another disk than the export (`offset`).
            let plain = |key: &String| matches!(key.as_str(), "driver" | "file");
            if !node.as_object()?.keys().all(plain) {
                return None;
            }
            node = file;
        }
        let text = |key: &str| {
            let nested = node.get("server").and_then(|server| server.get(key));
            nested.or_else(|| node.get(format!("server.{key}"))).and_then(Value::as_str).map(str::to_owned)
        };
        if node.get("driver").and_then(Value::as_str) != Some("nbd") {
            return None;
        }
        let export = node.get("export").and_then(Value::as_str).unwrap_or_default().to_owned();
        return match text("path") {
            Some(path) => Some(Source::NbdUnix { socket: path.into(), export }),
            None => Some(Source::NbdInet { host: text("host")?, port: text("port")?.parse().ok()?, export }),
        };
    }
    if let Some(rest) = filename.strip_prefix("nbd+unix://") {
        let (export, socket) = rest.rsplit_once("?socket=")?;
        let export = export.strip_prefix('/').unwrap_or(export).to_owned();
        return Some(Source::NbdUnix { socket: socket.into(), export });
    }
    let rest = filename.strip_prefix("nbd://")?;
    let (address, export) = rest.split_once('/').unwrap_or((rest, ""));
    let (host, port) = address.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    Some(Source::NbdInet { host: host.to_owned(), port: port.parse().ok()?, export: export.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_read_from_what_qemu_calls_a_character_device() {
        let path = |name: &str| unix_path(name).map(|path| path.display().to_string());
        assert_eq!(path("unix:blk.sock").as_deref(), Some("blk.sock"));
        assert_eq!(path("disconnected:unix:/run/blk,server=on").as_deref(), Some("/run/blk"));
        assert_eq!(path("unix:/run/blk,server=on <-> unix:").as_deref(), Some("/run/blk"));
        assert_eq!([path("unix:"), path("tcp:localhost:1"), path("vc")], [None, None, None]);
    }

    #[test]
    fn an_export_is_read_from_what_qemu_calls_a_node() {
        let unix =
            |socket: &str, export: &str| Some(Source::NbdUnix { socket: socket.into(), export: export.to_owned() });
        let inet = |host: &str, port, export: &str| {
            Some(Source::NbdInet { host: host.to_owned(), port, export: export.to_owned() })
        };
        assert_eq!(nbd_source("nbd+unix:///a b?socket=/run/x"), unix("/run/x", "a b"));
        assert_eq!(nbd_source("nbd+unix:///?socket=x"), unix("x", ""));
        assert_eq!(nbd_source("nbd+unix://?socket=x"), unix("x", ""));
        assert_eq!(nbd_source("nbd://[::1]:10809/a/b"), inet("::1", 10809, "a/b"));
        assert_eq!(nbd_source("nbd://host:1"), inet("host", 1, ""));
        let json = r#"json:{"driver": "raw", "file": {"driver": "nbd", "server": {"type": "unix", "path": "/x"}, "export": "e"}}"#;
        assert_eq!(nbd_source(json), unix("/x", "e"));
        let json = r#"json:{"driver": "nbd", "server.type": "inet", "server.host": "h", "server.port": "7", "reconnect-delay": 3}"#;
        assert_eq!(nbd_source(json), inet("h", 7, ""));
        let offset = r#"json:{"driver": "raw", "offset": 512, "file": {"driver": "nbd", "server.path": "/x"}}"#;
        for other in
            [offset, "/disk", "json:{", r#"json:{"driver": "file", "filename": "/x"}"#, "nbd://host", "ssh://x"]
        {
            assert_eq!(nbd_source(other), None, "{other}");
        }
    }
}
