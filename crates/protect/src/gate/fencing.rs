//! A failover's end of a gate in another process.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use uuid::Uuid;

use super::error::GateError;
use super::message::{Answer, Order};

/// Most bytes of an answer.
const ANSWER_MAX: usize = 4096;

/// The outcome of a fence at a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GateFence {
    /// The VM's process is refused from now on; its number, if the gate can see it. Other processes are taken.
    Refused(Option<u32>),
    /// The protection has ended at the gate, but its VM cannot be told from others: none was connected, or it is in
    /// another container and the kernel too old.
    Unidentified,
    /// The gate has not had this protection since it was started, or has had another one later. Nothing has changed.
    Unknown,
}

/// Has the gate at this socket refuse the VM of a protection, which continues elsewhere from the checkpoint of a number.
/// The VM and its keeper are cut off; frames that the checkpoint knows leave, later ones are dropped, and those of other
/// processes leave at once. It can be repeated. The gate may take `timeout` for its answer.
///
/// # Errors
/// No gate is there, or it does not answer.
pub fn fence_gate(path: &Path, timeout: Duration, protection: Uuid, epoch: u64) -> Result<GateFence, GateError> {
    let failed = |source| GateError::Connect { path: path.to_owned(), source };
    let mut stream = UnixStream::connect(path).map_err(failed)?;
    stream.set_write_timeout(Some(timeout)).map_err(failed)?;
    stream.set_read_timeout(Some(timeout)).map_err(failed)?;
    let mut order = Vec::new();
    Order::Fence { epoch, protection }.encode(&mut order);
    let ended = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock => GateError::Timeout { path: path.to_owned(), after: timeout },
        _ => GateError::Ended { path: path.to_owned() },
    };
    stream.write_all(&order).map_err(ended)?;
    let protocol = |found: String| GateError::Protocol { path: path.to_owned(), found };
    let mut bytes = Vec::new();
    loop {
        let mut room = [0; 256];
        match stream.read(&mut room) {
            Ok(0) => return Err(GateError::Ended { path: path.to_owned() }),
            Ok(count) => bytes.extend_from_slice(room.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ended(error)),
        }
        let Some((answer, _)) = Answer::decode(&bytes).map_err(|error| protocol(error.to_string()))? else {
            if bytes.len() > ANSWER_MAX {
                return Err(protocol("an answer without an end".into()));
            }
            continue;
        };
        return match answer {
            Answer::Fenced(pid) => Ok(GateFence::Refused(u32::try_from(pid).ok().filter(|pid| *pid > 0))),
            Answer::Unidentified => Ok(GateFence::Unidentified),
            Answer::Unknown => Ok(GateFence::Unknown),
            other => Err(protocol(format!("{other:?} in answer to a fence"))),
        };
    }
}
