//! A QEMU that is to take a VM: all that a restore compares with its snapshot, asked at once.
//!
//! Every exchange with a monitor costs about half a millisecond, most of it the time in which each side wakes the
//! other. A restore asks some ten questions before its guest runs.

use super::{Device, MemoryBackend, MigrationInfo, Monitor, RamBlockInfo, Settings, VmStatus};
use super::{FileBackend, devices, machine, ram_blocks, settings, state};
use crate::qmp::QmpError;

/// A QEMU as it is before a restore changes anything.
#[derive(Debug)]
pub(crate) struct WaitingQemu {
    pub(crate) status: VmStatus,
    pub(crate) migration: MigrationInfo,
    /// The machine type, as [`Monitor::machine`].
    pub(crate) machine: String,
    pub(crate) devices: Vec<Device>,
    pub(crate) memory_backends: Vec<MemoryBackend>,
    /// Those of the memory backends that map files.
    pub(crate) file_backends: Vec<FileBackend>,
    pub(crate) ram_blocks: Vec<RamBlockInfo>,
    /// Capabilities and parameters of migrations.
    pub(crate) settings: Settings,
}

impl Monitor {
    /// Asks for all that a restore has to know.
    pub(crate) fn waiting_qemu(&self) -> Result<WaitingQemu, QmpError> {
        let ([status, migration], [kinds, backends]) = (state::questions(), machine::backends_questions());
        let first = [status, migration, kinds, backends, machine::type_question()];
        let [status, migration, kinds, backends, machine] = self.qmp().execute_all(first)?;
        // Before more is asked: a QEMU that answers nothing would have ten commands waiting.
        let (status, migration) = state::answers(status, migration)?;
        let memory_backends = machine::backends_answers(kinds, backends)?;
        let machine = machine::type_answer(machine)?;
        let ([with_id, without_id], [capabilities, parameters]) = (devices::questions(), settings::questions());
        let second = [with_id, without_id, capabilities, parameters, ram_blocks::question()];
        let [with_id, without_id, capabilities, parameters, ram_blocks] = self.qmp().execute_all(second)?;
        Ok(WaitingQemu {
            status,
            migration,
            machine,
            devices: devices::answers([with_id, without_id])?,
            file_backends: self.file_backends_among(&memory_backends)?,
            memory_backends,
            ram_blocks: ram_blocks::answer(ram_blocks)?,
            settings: settings::answers(capabilities, parameters)?,
        })
    }
}
