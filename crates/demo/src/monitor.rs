//! Talking to an end over its control socket, as to a QEMU over its monitor.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use limosa_channel::Uri;
use limosa_qemu::qmp::{MonitorAddress, Options, Qmp, QmpError};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::error::DemoError;
use crate::state::{State, Status};

/// How often an end is asked again.
const TICK: Duration = Duration::from_millis(2);

/// A connection to an end.
#[derive(Debug)]
pub struct EndMonitor {
    qmp: Qmp,
    control: PathBuf,
}

impl EndMonitor {
    /// Connects.
    ///
    /// # Errors
    /// No process listens there.
    pub fn connect(control: &Path) -> Result<Self, DemoError> {
        let options = Options { reply_timeout: Duration::from_secs(60), ..Options::default() };
        let address = MonitorAddress::Unix(control.to_owned());
        let qmp = Qmp::connect(&address, &options).map_err(|error| explain(control, error))?;
        Ok(Self { qmp, control: control.to_owned() })
    }

    /// Executes a command.
    ///
    /// # Errors
    /// The end refuses, with its words, or is gone.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value, DemoError> {
        self.qmp.execute(command, arguments).map_err(|error| explain(&self.control, error))
    }

    /// The state of the end.
    ///
    /// # Errors
    /// It is gone.
    pub fn status(&self) -> Result<Status, DemoError> {
        self.typed("query-status")
    }

    /// Executes a command whose answer has this shape.
    ///
    /// # Errors
    /// As [`execute`](Self::execute), or an answer of another shape.
    pub fn typed<T: DeserializeOwned>(&self, command: &str) -> Result<T, DemoError> {
        let answer = self.execute(command, Value::Null)?;
        serde_json::from_value(answer).map_err(|error| DemoError::Answer(format!("{command}: {error}")))
    }

    /// Waits until the end's status is as wanted.
    ///
    /// # Errors
    /// It is gone, or the time is over.
    pub fn wait_status(
        &self,
        within: Duration,
        what: &'static str,
        wanted: impl Fn(&Status) -> bool,
    ) -> Result<Status, DemoError> {
        let deadline = Instant::now() + within;
        loop {
            let status = self.status()?;
            if wanted(&status) {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                return Err(DemoError::Late { what, status: format!("{status:?}") });
            }
            std::thread::sleep(TICK);
        }
    }

    /// Has a destination listen: for a guest (`migrate-incoming`), or for one to continue (`migrate-recover`). Where it
    /// listens.
    ///
    /// # Errors
    /// The end refuses, or does not listen in time.
    pub fn listen(&self, command: &str, at: &Uri) -> Result<Uri, DemoError> {
        self.execute(command, json!({ "uri": at.to_string() }))?;
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let report = self.execute("query-migrate", Value::Null)?;
            if let Some(uri) = report.pointer("/socket-address/0").and_then(address) {
                return Ok(uri);
            }
            // Its state changed together with taking the order, so this is what came of this order and of none before.
            let status = self.status()?;
            if matches!(status.state, State::Failed | State::PostcopyPaused) {
                return Err(DemoError::Refused {
                    control: self.control.display().to_string(),
                    command: command.to_owned(),
                    why: status.why.unwrap_or_else(|| "no reason given".into()),
                });
            }
            if Instant::now() >= deadline {
                return Err(DemoError::Late { what: "listen", status: report.to_string() });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// An address as QEMU writes it.
fn address(report: &Value) -> Option<Uri> {
    let text = |key: &str| report.get(key).and_then(Value::as_str);
    match text("type")? {
        "inet" => Some(Uri::Tcp { host: text("host")?.to_owned(), port: text("port")?.parse().ok()? }),
        "unix" => Some(Uri::Unix(text("path")?.into())),
        _ => None,
    }
}

/// Converts a failure of the monitor into an error of the end.
fn explain(control: &Path, error: QmpError) -> DemoError {
    let control = control.display().to_string();
    match error {
        QmpError::Connect { .. } | QmpError::Closed { .. } => DemoError::Gone { control },
        QmpError::Command { command, desc, .. } => DemoError::Refused { control, command, why: desc },
        error => DemoError::Monitor { control, source: Box::new(error) },
    }
}
