//! The agent's port in QEMU: a `virtserialport` of a well-known name, and the socket of its chardev.
//!
//! Facts found with QEMU 10.0.2: `query-chardev` describes a server that has no client as
//! `disconnected:unix:PATH,server=on`, and one that has a client without the first word. `frontend-open` is whether a
//! program in the guest has the port open. A VM that was loaded has it closed until it runs.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::error::GuestAgentError;
use crate::monitor::Monitor;
use crate::qmp::{Peer, QmpError, connect_unix};

/// The name of the port in the guest (QEMU docs: interop/qemu-ga).
const PORT_NAME: &str = "org.qemu.guest_agent.0";
/// Time in which QEMU must answer all that it is asked here.
const LOOK_WITHIN: Duration = Duration::from_secs(5);
/// QEMU opens the port in its main loop as soon as the VM runs, which is before it has answered as many questions.
const LOOKS: u32 = 5;
/// Interval between them.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Connects to the agent of a VM that runs.
pub(super) fn connect(monitor: &Monitor) -> Result<OwnedFd, GuestAgentError> {
    if !monitor.qmp().passes_descriptors() {
        return Err(GuestAgentError::Remote);
    }
    let qemu = Questions { monitor, deadline: Instant::now() + LOOK_WITHIN };
    let chardev = qemu.agent_chardev()?.ok_or(GuestAgentError::NoPort)?;
    let socket = qemu.free_socket(&chardev)?;
    let path = absolute(&socket, monitor.qmp().process())
        .ok_or_else(|| GuestAgentError::NotASocket { chardev, found: socket.display().to_string() })?;
    let connected = connect_unix(&path, qemu.left()).and_then(|found| found.ok_or(std::io::ErrorKind::TimedOut.into()));
    let connected = connected.map_err(|source| GuestAgentError::Connect { path: path.clone(), source })?;
    if !is_of_qemu(&connected, monitor) {
        return Err(GuestAgentError::OtherProcess { path });
    }
    Ok(connected)
}

/// Whether the process that listens at a socket is the one behind the monitor. QEMU's names may mean other files here:
/// it can have another root directory.
fn is_of_qemu(socket: &OwnedFd, monitor: &Monitor) -> bool {
    let Ok(listener) = Peer::of(socket.as_fd()) else { return false };
    match monitor.qmp().process() {
        Some(pid) => listener.pid == Some(pid),
        // Of a process in another pid namespace the users are all that can be compared.
        None => Peer::of(monitor.qmp().descriptor()).is_ok_and(|qemu| qemu == listener),
    }
}

/// Returns the path as this process can use it; a relative one is relative to QEMU's working directory.
fn absolute(path: &Path, qemu: Option<u32>) -> Option<PathBuf> {
    if path.is_absolute() {
        return Some(path.to_path_buf());
    }
    Some(Path::new(&format!("/proc/{}/cwd", qemu?)).join(path))
}

/// Questions to QEMU, all within one time limit.
struct Questions<'a> {
    monitor: &'a Monitor,
    deadline: Instant,
}

impl Questions<'_> {
    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn ask(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.monitor.qmp().execute_within(command, arguments, self.left())
    }

    /// The id of the chardev behind the agent's port; `None` if the VM has no such port.
    fn agent_chardev(&self) -> Result<Option<String>, QmpError> {
        for place in ["/machine/peripheral", "/machine/peripheral-anon"] {
            let listed = self.ask("qom-list", json!({ "path": place }))?;
            let is_port = |item: &&Value| item["type"] == "child<virtserialport>";
            for port in listed.as_array().into_iter().flatten().filter(is_port) {
                let path = format!("{place}/{}", port["name"].as_str().unwrap_or_default());
                let property = |name: &str| self.ask("qom-get", json!({ "path": path, "property": name }));
                if property("name")? == PORT_NAME {
                    return Ok(property("chardev")?.as_str().filter(|id| !id.is_empty()).map(str::to_owned));
                }
            }
        }
        Ok(None)
    }

    /// The path of the chardev's socket, if a program in the guest has the port open and no other program of the host
    /// is connected to it.
    fn free_socket(&self, chardev: &str) -> Result<PathBuf, GuestAgentError> {
        for _ in 0..LOOKS {
            let listed = self.ask("query-chardev", Value::Null)?;
            let found = listed.as_array().into_iter().flatten().find(|found| found["label"] == chardev);
            let found = found.ok_or_else(|| QmpError::unexpected("query-chardev", "the agent's chardev", &listed))?;
            if found["frontend-open"] == true {
                return server_path(chardev, found["filename"].as_str().unwrap_or_default());
            }
            thread::sleep(LOOK_EVERY);
        }
        Err(GuestAgentError::NotRunning)
    }
}

/// Returns the path in QEMU's description of a unix socket at which it waits for a client.
fn server_path(chardev: &str, description: &str) -> Result<PathBuf, GuestAgentError> {
    let (free, socket) = match description.strip_prefix("disconnected:") {
        Some(socket) => (true, socket),
        None => (false, description),
    };
    // `,server` is what QEMU before 6.0 says.
    let path = socket.strip_prefix("unix:").and_then(|text| {
        [",server=on", ",server"].iter().find_map(|end| text.strip_suffix(end)).filter(|path| !path.starts_with('@'))
    });
    match path {
        Some(path) if free => Ok(path.into()),
        Some(_) => Err(GuestAgentError::InUse { chardev: chardev.to_owned() }),
        None => {
            let found = crate::qmp::excerpt(description.as_bytes());
            Err(GuestAgentError::NotASocket { chardev: chardev.to_owned(), found })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_unix_socket_that_waits_for_a_client_is_connected_to() {
        let path = |description: &str| server_path("qga0", description);
        assert_eq!(path("disconnected:unix:/run/a,b,server=on").unwrap(), Path::new("/run/a,b"));
        assert_eq!(path("disconnected:unix:ga,server").unwrap(), Path::new("ga"));
        assert!(matches!(path("unix:/run/a,server=on"), Err(GuestAgentError::InUse { .. })));
        for other in
            ["disconnected:unix:/run/a", "disconnected:unix:@a,server=on", "disconnected:tcp:a:1,server=on", "pty", ""]
        {
            assert!(matches!(path(other), Err(GuestAgentError::NotASocket { .. })), "{other}");
        }
    }

    #[test]
    fn a_relative_path_is_of_qemus_directory() {
        assert_eq!(absolute(Path::new("/run/a"), None), Some("/run/a".into()));
        assert_eq!(absolute(Path::new("a"), Some(7)), Some("/proc/7/cwd/a".into()));
        assert_eq!(absolute(Path::new("a"), None), None);
    }
}
