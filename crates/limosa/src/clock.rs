//! `--set-clock`: sets guests' clocks and reports the result to people and programs.

use std::time::Duration;

use limosa_console::{error_line, quantity, say};
use limosa_qemu::monitor::Monitor;
use limosa_qemu::{ClockSet, GuestAgentError, GuestClock};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::args::SetClockArg;

/// The outcome of a clock that was to be set; `None` if it was not to be, or the VM does not run.
pub(crate) type ClockOutcome = Option<Result<ClockSet, GuestAgentError>>;

/// The clock of a guest that is being restored.
pub(crate) struct RestoredClock<'a> {
    monitor: &'a Monitor,
    wish: SetClockArg,
    begun: Mutex<Option<GuestClock>>,
}

impl<'a> RestoredClock<'a> {
    pub(crate) fn new(monitor: &'a Monitor, wish: SetClockArg) -> Self {
        Self { monitor, wish, begun: Mutex::new(None) }
    }

    /// Begins to set it, if the VM runs.
    pub(crate) fn guest_ready(&self) {
        if self.wish != SetClockArg::Off && self.monitor.status().is_ok_and(|status| status.running) {
            *self.begun.lock() = Some(GuestClock::begin(self.monitor));
        }
    }

    /// Waits for the outcome.
    pub(crate) fn outcome(&self) -> ClockOutcome {
        self.begun.lock().take().map(GuestClock::finish)
    }
}

/// Returns why a clock is not set that must be.
pub(crate) fn failure(outcome: &ClockOutcome, wish: SetClockArg) -> Option<String> {
    let why = match outcome {
        _ if wish != SetClockArg::On => return None,
        Some(Ok(_)) => return None,
        Some(Err(error)) => error_line(error),
        None => "the VM does not run".to_owned(),
    };
    Some(format!("the guest's clock is not set: {why}"))
}

/// Tells a person about a clock that need not be set, after `name`, which may be empty. A guest without an agent is
/// nothing unusual.
pub(crate) fn tell(outcome: &ClockOutcome, name: &str) {
    match outcome {
        None => {}
        Some(Ok(set)) => say!("  {name}the guest's clock is set{}", distance(*set)),
        Some(Err(error)) if error.is_absence() => {
            tracing::info!("{name}the guest's clock is not set: {}", error_line(error));
        }
        Some(Err(error)) => say!("limosa: {name}the guest's clock is not set: {}", error_line(error)),
    }
}

/// How far the clock was from the host's.
fn distance(set: ClockSet) -> String {
    set.behind_nanos.map_or_else(String::new, |nanos| {
        let off = quantity::time(Duration::from_nanos(nanos.unsigned_abs()));
        format!("; it was {off} {}", if nanos < 0 { "ahead" } else { "behind" })
    })
}

/// The outcome for programs.
pub(crate) fn object(outcome: &ClockOutcome) -> Value {
    match outcome {
        None => Value::Null,
        Some(Ok(set)) => json!({ "set": true, "behind_ms": set.behind_nanos.map(millis) }),
        Some(Err(error)) => json!({ "set": false, "reason": error_line(error) }),
    }
}

/// Milliseconds with a sign.
fn millis(nanos: i64) -> f64 {
    let millis = quantity::millis(Duration::from_nanos(nanos.unsigned_abs()));
    if nanos < 0 { -millis } else { millis }
}
