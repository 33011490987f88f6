//! Memory that comes while the guest runs (postcopy), as a front end announces it.
//!
//! In time: `POSTCOPY_ADVISE` gets a descriptor with the faults of this process; from `POSTCOPY_LISTEN` on memory is
//! registered with it when it is mapped, and the front end gets the addresses of the mappings, in which faults are
//! reported; after `POSTCOPY_END` all memory has come.
//!
//! The front end acknowledges these addresses by an empty message of the same kind. Memory is registered before that,
//! so nothing can touch it too early.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use limosa_memory::{ForwardedFaults, ForwardedFaultsSource};
use limosa_page::{PAGE_SIZE, to_usize};

use crate::message::TableRegion;
use crate::ram::RamRegion;

/// Bytes of the message by which a front end acknowledges the addresses.
const ACKNOWLEDGEMENT: usize = 8;

/// How the memory of a front end comes.
#[derive(Debug)]
pub(crate) struct Postcopy {
    /// `None`: this process may not have its faults reported, or the device cannot wait.
    source: Option<Arc<ForwardedFaultsSource>>,
    faults: Option<ForwardedFaults>,
    listens: bool,
}

impl Postcopy {
    pub(crate) const fn new(source: Option<Arc<ForwardedFaultsSource>>) -> Self {
        Self { source, faults: None, listens: false }
    }

    /// Whether memory may come by postcopy.
    pub(crate) const fn is_possible(&self) -> bool {
        self.source.is_some()
    }

    /// Returns the descriptor for the front end.
    pub(crate) fn advise(&mut self) -> std::io::Result<OwnedFd> {
        let source = self.source.as_ref().ok_or(std::io::ErrorKind::Unsupported)?;
        let faults = source.open()?;
        let descriptor = faults.as_fd().try_clone_to_owned()?;
        (self.faults, self.listens) = (Some(faults), false);
        Ok(descriptor)
    }

    /// Memory that is mapped from now on may not have come. That which is mapped already is registered now.
    pub(crate) fn listen(&mut self, regions: &[RamRegion]) -> std::io::Result<()> {
        if self.faults.is_none() {
            return Err(std::io::Error::other("it was not announced"));
        }
        self.listens = true;
        regions.iter().try_for_each(|region| self.register(region))
    }

    /// All memory has come, or nobody brings it any more: who waits for some continues.
    pub(crate) fn end(&mut self) {
        (self.faults, self.listens) = (None, false);
    }

    /// Registers a region that was mapped, if its memory may not have come.
    pub(crate) fn register(&mut self, region: &RamRegion) -> std::io::Result<()> {
        match &mut self.faults {
            Some(faults) if self.listens => {
                // The kernel maps and registers whole pages.
                let length = region.mapping().size().next_multiple_of(to_usize(PAGE_SIZE));
                faults.register(region.mapping().as_ptr(), length)
            }
            _ => Ok(()),
        }
    }

    /// Whether a message of regions is the front end's acknowledgement of addresses.
    pub(crate) const fn is_acknowledgement(&self, body: &[u8]) -> bool {
        self.listens && body.len() == ACKNOWLEDGEMENT
    }

    /// Returns the answer to a message of regions, if the front end waits for the addresses of their mappings.
    pub(crate) fn addresses(&self, body: &[u8], regions: &[RamRegion]) -> Option<Vec<u8>> {
        let address = |region: &RamRegion| region.mapping().as_ptr().expose_provenance() as u64;
        self.listens.then(|| TableRegion::with_user_addresses(body, regions.iter().map(address)))
    }
}
