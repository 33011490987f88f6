//! The gates of a series, which hold nothing back any more when it ends, however it ends.

use std::sync::Arc;

use crate::error::MigrateError;
use crate::live::VmError;
use crate::output::{OutputGate, OutputSignal};

/// The gates of a series.
pub(super) struct Gates<'o> {
    gates: &'o [Arc<dyn OutputGate>],
    signal: &'o OutputSignal,
    /// The epoch that is open.
    open: u64,
    /// The first epoch that does not count.
    uncounted: u64,
}

impl<'o> Gates<'o> {
    /// Begins a series.
    pub(super) fn watch(gates: &'o [Arc<dyn OutputGate>], signal: &'o OutputSignal) -> Result<Self, MigrateError> {
        // Made first: what follows may fail half-way.
        let begun = Self { gates, signal, open: 0, uncounted: 0 };
        begun.each(|gate| gate.watch(signal))?;
        Ok(begun)
    }

    /// Ends the open epoch; the VM stands still.
    pub(super) fn seal(&mut self) -> Result<(), MigrateError> {
        let epoch = self.open;
        self.each(|gate| gate.seal(epoch))?;
        self.signal.sealed();
        self.open = epoch.saturating_add(1);
        Ok(())
    }

    /// Lets the output of an epoch out: its checkpoint counts.
    pub(super) fn commit(&mut self, epoch: u64) -> Result<(), MigrateError> {
        self.uncounted = epoch.saturating_add(1);
        self.each(|gate| gate.commit(epoch))
    }

    fn each(&self, act: impl Fn(&dyn OutputGate) -> Result<(), VmError>) -> Result<(), MigrateError> {
        let failed = |source| MigrateError::Vm { what: "hold its output back", source };
        self.gates.iter().try_for_each(|gate| act(gate.as_ref())).map_err(failed)
    }
}

impl Drop for Gates<'_> {
    fn drop(&mut self) {
        for gate in self.gates {
            // One that has failed holds nothing back, and the others are told all the same.
            let _ = gate.abort(self.uncounted);
        }
    }
}
