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

use super::error::GateError;
use super::message::{Answer, Order, VERSION};

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
    busy: bool,
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
    /// No gate is there, it belongs to another keeper, the VM was failed over, or it does not answer.
    pub fn connect(path: &Path, timeout: Duration, keeper: GateKeeper) -> Result<Self, GateError> {
        let failed = |source| GateError::Connect { path: path.to_owned(), source };
        let stream = Arc::new(UnixStream::connect(path).map_err(failed)?);
        stream.set_write_timeout(Some(timeout)).map_err(failed)?;
        let shared = Arc::new(Shared::default());
        let (reading, heard) = (Arc::clone(&stream), Arc::clone(&shared));
        let reader = thread::Builder::new().name("gate".into()).spawn(move || heard.read(&reading)).map_err(failed)?;
        let client = Self { path: path.to_owned(), timeout, stream, shared, reader: Some(reader) };
        // A gate that is busy closes without reading it.
        let GateKeeper { protection, vm } = keeper;
        let sent = client.order(Order::Hello { version: VERSION, protection, vm: vm.unwrap_or(0).into() });
        let heard = client.wait(|heard| heard.welcome.is_some() || heard.busy || heard.refused);
        let (busy, refused, welcome) = {
            let heard = client.shared.heard.lock();
            (heard.busy, heard.refused, heard.welcome)
        };
        if busy {
            return Err(GateError::Busy { path: path.to_owned() });
        }
        if refused {
            return Err(GateError::FailedOver { path: path.to_owned() });
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

    fn order(&self, order: Order) -> Result<(), GateError> {
        let mut bytes = Vec::new();
        order.encode(&mut bytes);
        (&*self.stream).write_all(&bytes).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => GateError::Timeout { path: self.path.clone(), after: self.timeout },
            _ => self.ended(&mut self.shared.heard.lock()),
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
        let path = self.path.clone();
        if heard.refused {
            return GateError::FailedOver { path };
        }
        match heard.ended.as_mut().and_then(Option::take) {
            Some(error) if error.kind() == io::ErrorKind::InvalidData => {
                GateError::Protocol { path, found: error.to_string() }
            }
            _ => GateError::Ended { path },
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
                Answer::Welcome(version) => heard.welcome = Some(version),
                Answer::Busy => heard.busy = true,
                Answer::Refused => heard.refused = true,
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
