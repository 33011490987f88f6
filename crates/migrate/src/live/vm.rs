//! The VM as its VMM offers it to an engine: [`LiveVm`] at the source, [`IncomingVm`] at the destination.

use std::error::Error;

use limosa_memory::dirty::Writers;
use limosa_memory::{GuestMemory, PassedBlock};
use limosa_stream::{Configuration, DeviceSections, OpaqueSection};

/// An error of a VMM. It names its own object.
pub type VmError = Box<dyn Error + Send + Sync>;

/// A running VM, as the source's VMM offers it to the engine.
pub trait LiveVm: Sync {
    /// The machine, and the capabilities both ends must agree on.
    fn configuration(&self) -> Configuration;

    /// Its memory: the same blocks, by name and length, as at the destination.
    fn memory(&self) -> &GuestMemory;

    /// Who writes its memory while it runs. The engine refuses a VM with a writer that no dirty log covers.
    fn writers(&self) -> Writers;

    /// Stops vCPUs and devices. On success nothing writes guest memory any more, and everything that was written before
    /// is in the dirty logs: rings are drained, requests in flight are completed.
    ///
    /// # Errors
    /// The VM cannot be stopped; it continues as before.
    fn pause(&self) -> Result<(), VmError>;

    /// Lets the VM go on where [`pause`](Self::pause) stopped it. Also called when `pause` has failed half-way.
    ///
    /// # Errors
    /// The VM cannot go on.
    fn resume(&self) -> Result<(), VmError>;

    /// The state of its devices and vCPUs. Only asked for while it is paused.
    ///
    /// # Errors
    /// The state is unavailable: the VM is resumed.
    fn device_sections(&self) -> Result<DeviceSections, VmError>;

    /// Slows the vCPUs down: for `percent` (0 to 99) of the time they do not run. 0 lifts it.
    ///
    /// # Errors
    /// The VM cannot be slowed down: the migration continues without.
    fn throttle(&self, percent: u8) -> Result<(), VmError> {
        let _ = percent;
        Err("this VMM cannot slow its vCPUs down".into())
    }
}

/// A VM that waits for its state, as the destination's VMM offers it to the engine.
pub trait IncomingVm: Sync {
    /// Its memory. Nothing runs in it before [`start`](Self::start). Where memory is
    /// [passed](crate::live::SharedMemoryMode::Passed) it is asked for only after
    /// [`map_passed_memory`](Self::map_passed_memory).
    fn memory(&self) -> &GuestMemory;

    /// Who reads or writes its memory once it runs, or before. Postcopy is refused, as soon as the source announces it,
    /// if [vhost](Writers::VHOST) is among them: memory that has not come is missing in this process alone, and another
    /// process that maps it finds zeros there.
    ///
    /// By default only the vCPUs and this process's own devices.
    fn memory_users(&self) -> Writers {
        Writers::VCPUS | Writers::DEVICES
    }

    /// Takes memory that the source passes: the VMM maps these blocks as [they say](PassedBlock::into_options), and
    /// they are among [`memory`](Self::memory) from now on. Until the VM is started here, the source's VM runs in them:
    /// nothing may write them, [`load_device`](Self::load_device) included.
    ///
    /// # Errors
    /// By default: that this VM has its own memory.
    fn map_passed_memory(&self, blocks: Vec<PassedBlock>) -> Result<(), VmError> {
        Err(format!("this VM has its own memory and takes none ({} blocks were passed)", blocks.len()).into())
    }

    /// Takes the state of one device, by name. In postcopy guest memory that is touched here is fetched on demand.
    ///
    /// # Errors
    /// There is no such device, or it does not take the state: the source's VM continues.
    fn load_device(&self, section: OpaqueSection<'_>) -> Result<(), VmError>;

    /// Takes all device sections at once, as stock QEMU packs them for postcopy: they say nothing about their lengths,
    /// so only a VMM that knows the devices can tell them apart. As [`load_device`](Self::load_device) otherwise.
    ///
    /// # Errors
    /// By default: that this VM does not know stock QEMU's devices.
    fn load_package(&self, sections: &[u8]) -> Result<(), VmError> {
        let _ = sections;
        Err("the source's device sections do not say where they end, and this VMM does not know them".into())
    }

    /// Runs the VM. Called once, when every device section was loaded and the source has given the VM away. It lets
    /// vCPUs and devices run and does not touch guest memory itself: in postcopy there may be no source to bring it.
    ///
    /// # Errors
    /// The VM cannot run, and nothing of it does. A source that has committed stays undecided then, and this may be
    /// called once more; a stock QEMU source is told, and its VM continues.
    fn start(&self) -> Result<(), VmError>;
}
