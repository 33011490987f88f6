//! The gates of a series, which hold nothing back any more when it ends, however it ends.

use crate::error::MigrateError;
use crate::live::VmError;
use crate::output::OutputGates;

/// The gates of a series. Dropping it aborts what does not count.
pub(super) struct Gates<'o> {
    gates: OutputGates<'o>,
    /// The epoch that is open.
    open: u64,
    /// The first epoch that does not count.
    uncounted: u64,
}

impl<'o> Gates<'o> {
    /// Begins a series.
    pub(super) fn watch(gates: OutputGates<'o>) -> Result<Self, MigrateError> {
        // Made first: what follows may fail half-way.
        let begun = Self { gates, open: 0, uncounted: 0 };
        gates.watch().map_err(failed)?;
        Ok(begun)
    }

    /// Ends the open epoch; the VM stands still.
    pub(super) fn seal(&mut self) -> Result<(), MigrateError> {
        self.gates.seal(self.open).map_err(failed)?;
        self.open = self.open.saturating_add(1);
        Ok(())
    }

    /// Lets the output of an epoch out: its checkpoint counts.
    pub(super) fn commit(&mut self, epoch: u64) -> Result<(), MigrateError> {
        self.uncounted = epoch.saturating_add(1);
        self.gates.commit(epoch).map_err(failed)
    }
}

impl Drop for Gates<'_> {
    fn drop(&mut self) {
        // A gate that has failed holds nothing back.
        let _ = self.gates.abort(self.uncounted);
    }
}

fn failed(source: VmError) -> MigrateError {
    MigrateError::Vm { what: "hold its output back", source }
}
