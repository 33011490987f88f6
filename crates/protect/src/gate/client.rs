//! A keeper's end of a gate in another process.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use limosa_migrate::VmError;
use limosa_migrate::output::{OutputCounters, OutputGate, OutputSignal};
use parking_lot::{Condvar, Mutex};
use uuid::Uuid;

use super::connect::connect_within;
use super::error::GateError;
use super::message::{Answer, Hello, Order, VERSION};
use super::vm::pid_namespace;

/// The name of a keeper at gates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GateKeeper {
    /// Its protection, by which a failover fences its VM.
    pub protection: Uuid,
    /// The process of the VM's QEMU, if it is known.
    pub vm: Option<u32>,
}

/// A gate that another process runs, held for this keeper until the value is dropped.
#[derive(Debug)]
pub struct GateClient {
    path: PathBuf,
    timeout: Duration,
    stream: Arc<UnixStream>,
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    heard: Mutex<Heard>,
    changed: Condvar,
}

/// The gate's answers.
#[derive(Debug, Default)]
struct Heard {
    welcome: Option<u64>,
    /// A VM was connected to the gate then.
    has_vm: bool,
    busy: bool,
    /// The process of another VM that is connected to it.
    other_vm: Option<u32>,
    /// Its VM was failed over.
    refused: bool,
    sealed: Option<u64>,
    aborted: Option<u64>,
    counters: OutputCounters,
    signal: Option<OutputSignal>,
    /// The connection has ended; with a reason if it was not by its end.
    ended: Option<Option<io::Error>>,
}

impl GateClient {
    /// Connects to the gate at this socket, which may take `timeout` for an answer.
    ///
    /// # Errors
    /// No gate is there, it belongs to another keeper, another VM is connected to it, the VM was failed over, or it
    /// does not answer.
    pub fn connect(path: &Path, timeout: Duration, keeper: GateKeeper) -> Result<Self, GateError> {
        let failed = |source| GateError::Connect { path: path.to_owned(), source };
        let stream = Arc::new(connect_within(path, timeout)?);
        stream.set_write_timeout(Some(timeout)).map_err(failed)?;
        let shared = Arc::new(Shared::default());
        let (reading, heard) = (Arc::clone(&stream), Arc::clone(&shared));
        let reader = thread::Builder::new().name("gate".into()).spawn(move || heard.read(&reading)).map_err(failed)?;
        let client = Self { path: path.to_owned(), timeout, stream, shared, reader: Some(reader) };
        // A gate that is busy closes without reading it.
        let GateKeeper { protection, vm } = keeper;
        let hello = Hello { version: VERSION, protection, vm, namespace: pid_namespace() };
        let sent = client.order(Order::Hello(hello));
        let heard = client.wait(|heard| heard.welcome.is_some() || heard.busy || heard.is_refused());
        let (busy, welcome) = {
            let heard = client.shared.heard.lock();
            if let Some(refusal) = heard.refusal(path) {
                return Err(refusal);
            }
            (heard.busy, heard.welcome)
        };
        if busy {
            return Err(GateError::Busy { path: path.to_owned() });
        }
        heard.and(sent)?;
        match welcome {
            Some(VERSION) => Ok(client),
            other => {
                let found = format!("version {}, expected {VERSION}", other.unwrap_or(0));
                Err(GateError::Protocol { path: path.to_owned(), found })
            }
        }
    }

    /// Returns whether a VM was connected to the gate when this keeper came. Until one is, the gate holds nothing.
    #[must_use]
    pub fn has_vm(&self) -> bool {
        self.shared.heard.lock().has_vm
    }

    fn order(&self, order: Order) -> Result<(), GateError> {
        let mut bytes = Vec::new();
        order.encode(&mut bytes);
        (&*self.stream).write_all(&bytes).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => GateError::Timeout { path: self.path.clone(), after: self.timeout },
            _ => {
                // Its last answer may say why, and may not have been read yet.
                let (until, mut heard) = (Instant::now() + self.timeout, self.shared.heard.lock());
                while heard.ended.is_none() && !self.shared.changed.wait_until(&mut heard, until).timed_out() {}
                self.ended(&mut heard)
            }
        })
    }

    /// Waits for an answer.
    fn wait(&self, is_there: impl Fn(&Heard) -> bool) -> Result<(), GateError> {
        let until = Instant::now() + self.timeout;
        let mut heard = self.shared.heard.lock();
        while !is_there(&heard) {
            if heard.ended.is_some() {
                return Err(self.ended(&mut heard));
            }
            if self.shared.changed.wait_until(&mut heard, until).timed_out() && !is_there(&heard) {
                return Err(GateError::Timeout { path: self.path.clone(), after: self.timeout });
            }
        }
        Ok(())
    }

    fn ended(&self, heard: &mut Heard) -> GateError {
        if let Some(refusal) = heard.refusal(&self.path) {
            return refusal;
        }
        let path = self.path.clone();
        match heard.ended.as_mut().and_then(Option::take) {
            Some(error) if error.kind() == io::ErrorKind::InvalidData => {
                GateError::Protocol { path, found: error.to_string() }
            }
            _ => GateError::Ended { path },
        }
    }
}

impl Heard {
    fn is_refused(&self) -> bool {
        self.refused || self.other_vm.is_some()
    }

    /// Returns why the gate refuses its keeper.
    fn refusal(&self, path: &Path) -> Option<GateError> {
        let path = path.to_owned();
        match self.other_vm {
            Some(process) => Some(GateError::OtherVm { path, process }),
            None => self.refused.then_some(GateError::FailedOver { path }),
        }
    }
}

impl OutputGate for GateClient {
    fn watch(&self, signal: &OutputSignal) -> Result<(), VmError> {
        let mut heard = self.shared.heard.lock();
        if heard.ended.is_some() {
            return Err(self.ended(&mut heard).into());
        }
        heard.signal = Some(signal.clone());
        Ok(())
    }

    fn seal(&self, epoch: u64) -> Result<(), VmError> {
        self.shared.heard.lock().sealed = None;
        self.order(Order::Seal(epoch))?;
        Ok(self.wait(|heard| heard.sealed == Some(epoch))?)
    }

    fn commit(&self, epoch: u64) -> Result<(), VmError> {
        Ok(self.order(Order::Commit(epoch))?)
    }

    fn hold_when_lost(&self, time: Duration) -> Result<(), VmError> {
        let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Ok(self.order(Order::HoldWhenLost(millis))?)
    }

    fn abort(&self, epoch: u64) -> Result<(), VmError> {
        self.shared.heard.lock().aborted = None;
        self.order(Order::Abort(epoch))?;
        Ok(self.wait(|heard| heard.aborted == Some(epoch))?)
    }

    fn counters(&self) -> OutputCounters {
        self.shared.heard.lock().counters
    }
}

impl Drop for GateClient {
    fn drop(&mut self) {
        // The reader ends with it.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

impl Shared {
    /// Reads answers until the connection ends.
    fn read(&self, mut stream: &UnixStream) {
        let (mut unread, mut room) = (Vec::new(), [0; 4096]);
        let ended = loop {
            match stream.read(&mut room) {
                Ok(0) => break None,
                Ok(count) => unread.extend_from_slice(room.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => break Some(error),
            }
            match self.hear(&mut unread) {
                Ok(()) => {}
                Err(error) => break Some(error),
            }
        };
        let mut heard = self.heard.lock();
        heard.ended = Some(ended);
        // A keeper that waits for output must find out.
        if let Some(signal) = &heard.signal {
            signal.nearly_full();
        }
        drop(heard);
        self.changed.notify_all();
    }

    /// Takes all answers that are whole.
    fn hear(&self, unread: &mut Vec<u8>) -> io::Result<()> {
        let mut heard = self.heard.lock();
        loop {
            let decoded = Answer::decode(unread).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            let Some((answer, length)) = decoded else { break };
            unread.drain(..length);
            match answer {
                Answer::Welcome { version, has_vm } => (heard.welcome, heard.has_vm) = (Some(version), has_vm),
                Answer::Busy => heard.busy = true,
                Answer::Refused => heard.refused = true,
                Answer::OtherVm(process) => heard.other_vm = Some(process),
                Answer::Sealed(epoch) => heard.sealed = Some(epoch),
                Answer::Aborted(epoch) => heard.aborted = Some(epoch),
                Answer::Counters(counters) => heard.counters = counters,
                Answer::Output => heard.signal.iter().for_each(OutputSignal::before_output),
                Answer::Full => heard.signal.iter().for_each(OutputSignal::nearly_full),
                // A failover's.
                Answer::Fenced(_) | Answer::Unknown | Answer::Unidentified => {}
            }
        }
        drop(heard);
        self.changed.notify_all();
        Ok(())
    }
}
