//! A failover's end of a gate in another process.

use std::io::{self, Read as _, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::connect::connect_within;
use super::error::GateError;
use super::message::{Answer, Order};

/// Most bytes of an answer.
const ANSWER_MAX: usize = 4096;

/// The outcome of a fence at a gate, or of a [query](query_gate) about one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GateFence {
    /// The VM's process is refused from now on; its number, if the gate can see it. Other processes are taken.
    Refused(Option<u32>),
    /// The protection has ended at the gate, but its VM is not identified: none was connected, or it is in
    /// another container and the kernel too old.
    Unidentified,
    /// The gate has not had this protection since it was started, or has had another one later. Nothing has changed.
    Unknown,
}

/// Has the gate at this socket refuse the VM of a protection, which continues elsewhere from checkpoint `epoch`. The VM
/// and its keeper are cut off; frames that the checkpoint knows leave, later ones are dropped, and those of other
/// processes leave at once. It can be repeated. The gate may take `timeout` for its answer.
///
/// # Errors
/// No gate is there, or it does not answer.
pub fn fence_gate(path: &Path, timeout: Duration, protection: Uuid, epoch: u64) -> Result<GateFence, GateError> {
    ask(path, timeout, Order::Fence { epoch, protection })
}

/// Asks the gate at this socket for the outcome that a [fence](fence_gate) of a protection would have. Nothing changes.
/// The gate may take `timeout` for its answer.
///
/// # Errors
/// As of [`fence_gate`].
pub fn query_gate(path: &Path, timeout: Duration, protection: Uuid) -> Result<GateFence, GateError> {
    ask(path, timeout, Order::Query { protection })
}

/// Gives a gate an order of a failover.
fn ask(path: &Path, timeout: Duration, order: Order) -> Result<GateFence, GateError> {
    let failed = |source| GateError::Connect { path: path.to_owned(), source };
    let until = Instant::now() + timeout;
    let mut stream = connect_within(path, timeout)?;
    stream.set_write_timeout(Some(timeout)).map_err(failed)?;
    let mut bytes = Vec::new();
    order.encode(&mut bytes);
    let late = || GateError::Timeout { path: path.to_owned(), after: timeout };
    let ended = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock => late(),
        _ => GateError::Ended { path: path.to_owned() },
    };
    stream.write_all(&bytes).map_err(ended)?;
    let protocol = |found: String| GateError::Protocol { path: path.to_owned(), found };
    let mut bytes = Vec::new();
    loop {
        let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()).ok_or_else(late)?;
        stream.set_read_timeout(Some(left)).map_err(failed)?;
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
