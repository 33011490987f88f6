//! All gates of a VM.

use limosa_migrate::VmError;
use limosa_migrate::output::{OutputCounters, OutputGate, OutputSignal};

use crate::error::ProtectError;
use crate::options::ProtectOptions;

/// The gates of a VM and the signal by which they ask for checkpoints.
#[derive(Clone, Copy)]
pub(crate) struct Outputs<'a> {
    pub(crate) gates: &'a [&'a dyn OutputGate],
    pub(crate) signal: &'a OutputSignal,
}

impl Outputs<'_> {
    /// Whether the time between checkpoints is kept here, not by QEMU.
    pub(crate) fn paces(self, options: &ProtectOptions) -> bool {
        !self.gates.is_empty() || options.every.is_by_output()
    }

    /// Begins a series.
    pub(crate) fn watch(self) -> Result<(), ProtectError> {
        self.each(|gate| gate.watch(self.signal))
    }

    /// Ends an epoch of all gates. The VM stands still.
    pub(crate) fn seal(self, epoch: u64) -> Result<(), ProtectError> {
        self.each(|gate| gate.seal(epoch))?;
        self.signal.sealed();
        Ok(())
    }

    /// Lets an epoch out.
    pub(crate) fn commit(self, epoch: u64) -> Result<(), ProtectError> {
        self.each(|gate| gate.commit(epoch))
    }

    /// Drops what waits; all gates hear of it even if one fails.
    pub(crate) fn abort(self, epoch: u64) -> Result<(), ProtectError> {
        let all = self.gates.iter().map(|gate| gate.abort(epoch));
        all.fold(Ok(()), Result::and).map_err(ProtectError::Gate)
    }

    /// The sum of all counters; `None` if nothing is gated.
    pub(crate) fn counters(self) -> Option<OutputCounters> {
        let counters = self.gates.iter().map(|gate| gate.counters());
        counters.reduce(|mut sum, more| {
            sum.add(&more);
            sum
        })
    }

    fn each(self, order: impl FnMut(&&dyn OutputGate) -> Result<(), VmError>) -> Result<(), ProtectError> {
        self.gates.iter().try_for_each(order).map_err(ProtectError::Gate)
    }
}
