//! KVM's own logs of what its vCPUs write: the [dirty log](KvmLog), one bit a page, and the [dirty ring](KvmRingLog), a
//! list of pages for each vCPU. A VM has one or the other; the ring has to be chosen before its first vCPU is made.
//!
//! Both see what vCPUs write and what KVM writes for them, and nothing else: a device model in this process marks its
//! writes in a [`SoftwareDirtyLog`](super::SoftwareDirtyLog).
//!
//! Facts: the kernel's virt/kvm/api.rst (`KVM_GET_DIRTY_LOG`, `KVM_CLEAR_DIRTY_LOG`, `KVM_CAP_DIRTY_LOG_RING`).
#![allow(unsafe_code, reason = "tells KVM where guest memory is, and shares rings with it")]

mod log;
mod ring;

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Arc;

use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use limosa_page::PAGE_SIZE;

use crate::{GuestMemory, GuestRegion, MemoryError};

pub use log::KvmLog;
pub use ring::{KvmRingLog, KvmRings};

/// A memory slot of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvmSlot {
    /// Its number, with the address space in bits 16 to 31.
    pub slot: u32,
    /// Its guest memory.
    pub region: GuestRegion,
    /// Its flags without logging (`KVM_MEM_*`).
    pub flags: u32,
}

/// The memory slots of a VM, for its logs.
#[derive(Debug)]
pub struct KvmSlots {
    vm: Arc<VmFd>,
    memory: Arc<GuestMemory>,
    slots: Vec<KvmSlot>,
}

impl KvmSlots {
    /// Adds all regions of `memory` to a VM without memory, in slots numbered from 0. They are removed when the last
    /// owner of the result is dropped, before the memory is.
    ///
    /// # Errors
    /// An error of KVM.
    pub fn register_memory(vm: Arc<VmFd>, memory: Arc<GuestMemory>) -> Result<Arc<Self>, MemoryError> {
        let slots = (0..).zip(memory.regions()).map(|(slot, region)| KvmSlot { slot, region: *region, flags: 0 });
        let slots = Self { vm, slots: slots.collect(), memory: Arc::clone(&memory) };
        for slot in &slots.slots {
            slots.set(slot, slot.flags, true).map_err(|source| MemoryError::Kernel {
                block: memory.blocks()[slot.region.block].name().to_owned(),
                operation: "KVM_SET_USER_MEMORY_REGION",
                source,
            })?;
        }
        Ok(Arc::new(slots))
    }

    /// Returns the VM.
    pub fn vm(&self) -> &Arc<VmFd> {
        &self.vm
    }

    /// Returns the slots.
    pub fn slots(&self) -> &[KvmSlot] {
        &self.slots
    }

    /// Returns the slots' memory.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Makes KVM log writes to all slots, or stop; if starting one slot fails, none is logged.
    fn set_logging(&self, on: bool) -> io::Result<()> {
        let flags = |slot: &KvmSlot| if on { slot.flags | KVM_MEM_LOG_DIRTY_PAGES } else { slot.flags };
        let done = self.slots.iter().map(|slot| self.set(slot, flags(slot), true));
        if on {
            let done = done.collect::<io::Result<()>>();
            return done.inspect_err(|_| drop(self.set_logging(false)));
        }
        done.fold(Ok(()), Result::and)
    }

    fn set(&self, slot: &KvmSlot, flags: u32, present: bool) -> io::Result<()> {
        let block = self.memory.block(slot.region.block).map_err(io::Error::other)?;
        let place = block.iovec(slot.region.pages).ok_or_else(|| io::Error::other("the region is not in its block"))?;
        let region = kvm_userspace_memory_region {
            slot: slot.slot,
            flags,
            guest_phys_addr: slot.region.guest_address,
            memory_size: if present { slot.region.pages.len() * PAGE_SIZE } else { 0 },
            userspace_addr: place.iov_base.expose_provenance() as u64,
        };
        // SAFETY: the memory is mapped as long as `self.memory` lives, and this is dropped, with its slots, before
        // that; there is no reference into guest memory.
        unsafe { self.vm.set_user_memory_region(region) }.map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the VM's descriptor is open as long as `self.vm` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.vm.as_raw_fd()) }
    }
}

impl Drop for KvmSlots {
    fn drop(&mut self) {
        for slot in &self.slots {
            // Adding this slot may have failed.
            let _ = self.set(slot, 0, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use kvm_ioctls::Kvm;
    use limosa_page::{PageNumber, PageRange};

    use super::*;
    use crate::dirty::{DirtyLog, DirtyPages};
    use crate::{BlockOptions, GuestMemory, ReleaseMethod};

    #[test]
    fn a_page_that_is_given_back_is_written_though_no_vcpu_has() {
        if limosa_testkit::skipped("LIMOSA_SKIP_KVM") {
            return;
        }
        for ring in [false, true] {
            for options in [BlockOptions::memfd("pc.ram", 64 << 12), BlockOptions::anonymous("pc.ram", 64 << 12)] {
                let vm = Arc::new(Kvm::new().expect("without /dev/kvm, set LIMOSA_SKIP_KVM=1").create_vm().unwrap());
                let memory = Arc::new(GuestMemory::new(vec![options.map().unwrap()]).unwrap());
                let slots = KvmSlots::register_memory(Arc::clone(&vm), Arc::clone(&memory)).unwrap();
                let mut log: Box<dyn DirtyLog> = match ring {
                    true => Box::new(KvmRingLog::new(KvmRings::enable(&vm, slots, 64 << 10).unwrap())),
                    false => Box::new(KvmLog::new(slots)),
                };
                let block = memory.block(0).unwrap();
                block.write(0, &[7; 64 << 12]).unwrap();
                log.start().unwrap();
                block.discard(PageRange::starting_at(PageNumber(3), 2)).unwrap();
                let method = if block.is_shared() { ReleaseMethod::PunchHole } else { ReleaseMethod::Free };
                block.release(PageRange::starting_at(PageNumber(9), 1), method).unwrap();
                let expected = [PageRange::starting_at(PageNumber(3), 2), PageRange::starting_at(PageNumber(9), 1)];
                for expected in [&expected[..], &[]] {
                    let mut dirty = DirtyPages::new(&memory);
                    log.fetch(&mut dirty).unwrap();
                    assert_eq!(dirty.block(0).unwrap().runs().collect::<Vec<_>>(), expected, "{}", log.name());
                }
            }
        }
    }
}
