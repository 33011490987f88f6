//! Addresses of the server, and of its clients.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use anyhow::Context as _;
use limosa_channel::{Channel, Listener, Options, Uri};
use rustix::net::SocketAddrUnix;
use serde_json::{Value, json};

use crate::args::ServeArgs;
use crate::usage::misused;

/// The first descriptor that systemd passes (`sd_listen_fds(3)`).
const LISTEN_FDS_START: i32 = 3;

/// The context of a host (vsock(7): `VMADDR_CID_HOST`).
const VSOCK_HOST: u32 = 2;

/// Returns the addresses to serve at: those of the command line, or the sockets that systemd passes.
pub(super) fn all(args: &ServeArgs) -> Vec<Uri> {
    if !args.nbd.is_empty() {
        return args.nbd.clone();
    }
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    let passed = number("LISTEN_FDS").filter(|_| number("LISTEN_PID") == Some(std::process::id()));
    match passed.and_then(|count| i32::try_from(count).ok()) {
        Some(count @ 1..=1024) => (LISTEN_FDS_START..LISTEN_FDS_START + count).map(Uri::Fd).collect(),
        _ if !args.vhost_user_blk.is_empty() => Vec::new(),
        _ => misused("--nbd URI or --vhost-user-blk SOCK is missing, and systemd passes no socket (LISTEN_FDS)"),
    }
}

/// Puts `/dev/null` in the place of standard error, if it is the client's socket: inetd passes it as all three.
pub(super) fn keep_messages_from_client() {
    let error = std::io::stderr();
    let is_client =
        is_same(error.as_fd(), std::io::stdin().as_fd()) || is_same(error.as_fd(), std::io::stdout().as_fd());
    if is_client
        && rustix::net::sockopt::socket_type(&error).is_ok()
        && let Ok(null) = std::fs::File::options().write(true).open("/dev/null")
    {
        let _ = rustix::stdio::dup2_stderr(null);
    }
}

/// Whether two descriptors are of one file or socket.
fn is_same(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
    let identity = |fd| rustix::fs::fstat(fd).map(|found| (found.st_dev, found.st_ino));
    identity(one).is_ok_and(|one| identity(other) == Ok(one))
}

/// Returns a channel over standard input and output. A socket, which inetd and its successors pass as both, is used as
/// one, so that it can be encrypted.
///
/// # Errors
/// They are not connected to a client.
pub(super) fn standard_streams(options: &Options) -> anyhow::Result<Channel> {
    let input = std::io::stdin();
    if rustix::net::sockopt::socket_type(&input).is_ok() && is_same(input.as_fd(), std::io::stdout().as_fd()) {
        let socket = input.as_fd().try_clone_to_owned().context("standard input")?;
        return Ok(Channel::from_fd_with(socket, options)?);
    }
    Channel::connect(&Uri::Stdio, options).context("--nbd - needs a client on standard input and output")
}

/// Returns the URI by which clients reach an export (doc/uri.md of the protocol's repository).
pub(super) fn client_uri(listener: &Uri, export: &str, encrypted: bool) -> String {
    let scheme = if encrypted { "nbds" } else { "nbd" };
    let name = escaped(export.as_bytes());
    match listener {
        Uri::Unix(path) => format!("{scheme}+unix:///{name}?socket={}", escaped(path.as_os_str().as_bytes())),
        Uri::Tcp { host, port } if host.contains(':') => format!("{scheme}://[{host}]:{port}/{name}"),
        Uri::Tcp { host, port } => format!("{scheme}://{host}:{port}/{name}"),
        // Who listens for all is the host to the machines on it.
        Uri::Vsock { cid, port } => {
            let cid = if *cid == u32::MAX { VSOCK_HOST } else { *cid };
            format!("{scheme}+vsock://{cid}:{port}/{name}")
        }
        other => other.to_string(),
    }
}

/// Returns the address at which a socket listens, for programs: QEMU's `SocketAddress`, with an IP address as its host.
/// `None`: the kernel has none that clients could reach.
pub(super) fn description(listener: &Listener) -> Option<Value> {
    if let Uri::Vsock { cid, port } = listener.local_uri() {
        return Some(json!({ "type": "vsock", "cid": cid.to_string(), "port": port.to_string() }));
    }
    let address = rustix::net::getsockname(listener.socket()?).ok()?;
    if let Ok(address) = SocketAddr::try_from(address.clone()) {
        return Some(json!({ "type": "inet", "host": address.ip().to_string(), "port": address.port().to_string() }));
    }
    let address = SocketAddrUnix::try_from(address).ok()?;
    let path = Path::new(OsStr::from_bytes(address.path_bytes()?));
    Some(json!({ "type": "unix", "path": std::path::absolute(path).ok()?.to_string_lossy() }))
}

/// Escapes all but unreserved characters and slashes (RFC 3986, section 2).
fn escaped(bytes: &[u8]) -> String {
    let mut text = String::new();
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            text.push(char::from(byte));
        } else {
            // Writing into a string does not fail.
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_get_an_address_that_they_understand() {
        let uri = |listener: &str, export| client_uri(&listener.parse().unwrap(), export, false);
        assert_eq!(uri("unix:/run/a b.sock", ""), "nbd+unix:///?socket=/run/a%20b.sock");
        assert_eq!(uri("unix:x", "disk?1"), "nbd+unix:///disk%3F1?socket=x");
        assert_eq!(uri("tcp:localhost:10809", "a"), "nbd://localhost:10809/a");
        assert_eq!(uri("tcp:[::1]:1", ""), "nbd://[::1]:1/");
        assert_eq!(uri("vsock:3:10809", "a"), "nbd+vsock://3:10809/a");
        assert_eq!(uri("vsock:4294967295:10809", "a"), "nbd+vsock://2:10809/a");
        assert_eq!(uri("fd:3", ""), "fd:3");
        assert_eq!(client_uri(&"unix:x".parse().unwrap(), "", true), "nbds+unix:///?socket=x");
    }
}
