//! The state that the threads of a socket share, and a VMM's part in it.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use limosa_migrate::Handle;
use parking_lot::{Condvar, Mutex};
use serde_json::Value;

/// The kind of a job. It decides the effect of a cancellation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobKind {
    /// The VM is at this side's peer until the job ends: it can be cancelled at any moment.
    Save,
    /// Once the guest runs, the job can only be paused.
    Restore,
    /// Either end of a live migration: as [`Restore`](Self::Restore), and the limit of its downtime can be changed.
    Live,
}

/// A VMM's own commands, in addition to those of a job. Called on the threads of clients, so they must not wait for an
/// engine.
pub trait Commands: Send + Sync {
    /// Answers a command; `None` leaves it to the socket.
    ///
    /// # Errors
    /// The command is refused.
    fn execute(&self, name: &str, arguments: &Value) -> Option<Result<Value, CommandError>>;

    /// Adds to the answer to `query-migrate`, or corrects it: the socket does not know how a job ended.
    fn amend_query_migrate(&self, answer: &mut serde_json::Map<String, Value>) {
        let _ = answer;
    }
}

/// A command that was refused. The client gets the reason and its causes in one line, with QMP's class `GenericError`.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct CommandError(Box<dyn std::error::Error + Send + Sync>);

impl CommandError {
    /// A refusal for this reason.
    pub fn new(reason: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(reason.into())
    }
}

impl From<String> for CommandError {
    fn from(reason: String) -> Self {
        Self(reason.into())
    }
}

impl From<&str> for CommandError {
    fn from(reason: &str) -> Self {
        Self(reason.into())
    }
}

/// The job that the socket reports.
#[derive(Debug, Clone)]
pub(crate) struct Current {
    pub(crate) job: JobKind,
    pub(crate) handle: Handle,
    pub(crate) begun: Instant,
}

/// The state that the threads of the socket share.
pub(crate) struct Server {
    pub(crate) current: Mutex<Option<Current>>,
    pub(crate) commands: Option<Arc<dyn Commands>>,
    pub(crate) clients: Mutex<Vec<Client>>,
    /// Notified when a conversation has ended.
    pub(crate) dismissed: Condvar,
    /// Where the job waits for its peer, as QEMU writes addresses.
    pub(crate) addresses: Mutex<Vec<Value>>,
    pub(crate) admitted: AtomicUsize,
}

impl Server {
    pub(crate) fn current(&self) -> Option<Current> {
        self.current.lock().clone()
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("current", &self.current).finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) struct Client {
    /// Number of its thread.
    pub(crate) number: usize,
    /// For events.
    pub(crate) stream: UnixStream,
    /// Whether it gets events: from `qmp_capabilities` on, as with QEMU. Before, an event could arrive ahead of the
    /// greeting.
    pub(crate) listens: bool,
}
