//! Connecting to the control socket of a gate.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::error::GateError;

/// Interval at which a gate is tried again that has too many connections to accept.
const AGAIN_AFTER: Duration = Duration::from_millis(10);

/// Connects to a gate. One that hangs stops accepting: its queue of connections fills up, and a blocking connect would
/// wait for ever.
///
/// # Errors
/// No gate is there, or it does not accept the connection within `timeout`.
pub(super) fn connect_within(path: &Path, timeout: Duration) -> Result<UnixStream, GateError> {
    let until = Instant::now() + timeout;
    let failed = |errno: Errno| GateError::Connect { path: path.to_owned(), source: errno.into() };
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
    loop {
        match connect(&socket, &address) {
            Ok(()) => break,
            // Nothing can be polled for: the kernel keeps no connection that the queue has no room for.
            Err(Errno::AGAIN) if Instant::now() < until => thread::sleep(AGAIN_AFTER),
            Err(Errno::AGAIN) => return Err(GateError::Timeout { path: path.to_owned(), after: timeout }),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(failed(errno)),
        }
    }
    ioctl_fionbio(&socket, false).map_err(failed)?;
    Ok(UnixStream::from(socket))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_gate_that_accepts_nobody_is_waited_for_as_long_as_it_was_said() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gate");
        let (listener, _file) = limosa_socket::listen(&path, 1).unwrap();
        let timeout = Duration::from_millis(50);
        let mut waiting = Vec::new();
        let error = loop {
            match connect_within(&path, timeout) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
            assert!(waiting.len() < 100, "its queue has no end");
        };
        assert!(matches!(error, GateError::Timeout { after, .. } if after == timeout), "{error}");
        // One that continues in time is connected to.
        let listener = UnixListener::from(listener);
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(50));
                listener.accept().unwrap()
            });
            connect_within(&path, Duration::from_secs(60)).unwrap();
        });
        drop(listener);
        assert!(matches!(connect_within(&path, timeout), Err(GateError::Connect { .. })));
    }
}
