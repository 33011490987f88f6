//! Guest memory as a [`PageSource`].

use std::os::fd::OwnedFd;

use limosa_memory::{GuestMemory, MemoryBlock};
use limosa_page::{PageBitmap, PageRange};
use limosa_stream::RamBlock;

use crate::error::MigrateError;
use crate::live::{LiveVm, SharedMemoryMode};
use crate::pages::{PageError, PageSource, StreamSetup};

/// The section id of `ram`; any number that differs from those of the devices, which begin at 16.
const RAM_SECTION: u32 = 2;

/// The memory of a VM.
#[derive(Debug)]
pub(super) struct GuestSource<'a> {
    memory: &'a GuestMemory,
    start: StreamSetup,
    shared: SharedMemoryMode,
    /// Pages that are not known to be zero at both ends.
    pub(super) stored: Vec<PageBitmap>,
    /// The device sections, once the VM is stopped.
    pub(super) devices: Vec<u8>,
}

impl<'a> GuestSource<'a> {
    /// The memory of `vm`, all of it.
    pub(super) fn new<V: LiveVm + ?Sized>(vm: &'a V) -> Self {
        let memory = vm.memory();
        let blocks: Vec<_> = memory.blocks().iter().map(|block| RamBlock::new(block.name(), block.len())).collect();
        let stored = memory.blocks().iter().map(|block| PageBitmap::full(block.pages().len())).collect();
        let start = StreamSetup { configuration: vm.configuration(), section_id: RAM_SECTION, blocks };
        Self { memory, start, shared: SharedMemoryMode::Sent, stored, devices: Vec::new() }
    }

    /// The same, with memory that the destination may have too.
    pub(super) fn with_shared(mut self, shared: SharedMemoryMode) -> Self {
        self.shared = shared;
        if shared != SharedMemoryMode::Sent {
            self.start.configuration = self.start.configuration.with_ignore_shared();
            for (listed, block) in self.start.blocks.iter_mut().zip(self.memory.blocks()) {
                listed.address = Some(block.region_address());
            }
        }
        self
    }

    /// Whether a block is the destination's memory too.
    pub(super) fn leaves_out(&self, block: &MemoryBlock) -> bool {
        self.shared.leaves_out(block)
    }

    /// Returns the descriptors that go with the stream's first byte.
    pub(super) fn to_pass(&self) -> Result<Vec<OwnedFd>, MigrateError> {
        self.shared.to_pass(self.memory).map_err(|error| MigrateError::Source(error.into()))
    }
}

impl PageSource for GuestSource<'_> {
    fn setup(&self) -> &StreamSetup {
        &self.start
    }

    fn stored_bitmap(&self, block: usize) -> &PageBitmap {
        // Only the indices of `start` are asked for, and there are as many.
        &self.stored[block]
    }

    fn read(&self, block: usize, pages: PageRange, into: &mut [u8]) -> Result<(), PageError> {
        Ok(self.memory.block(block)?.read(pages.bytes().start, into)?)
    }

    fn memory(&self, block: usize) -> Option<&MemoryBlock> {
        self.memory.block(block).ok()
    }

    fn device_sections(&self) -> &[u8] {
        &self.devices
    }

    fn description(&self) -> &[u8] {
        &[]
    }
}
