//! KVM's dirty ring: each vCPU lists the pages that it writes, in shared memory.
//!
//! A fetch costs time for the written pages, not for all memory. Entries are taken and marked, and
//! `KVM_RESET_DIRTY_RINGS` then protects their pages again before they are reported: a page written in between is read
//! after that, and a page written later is listed again.
//!
//! **A write of a running vCPU may be listed only when the vCPU leaves `KVM_RUN`**: processors buffer such pages before
//! KVM sees them. So a fetch from a running guest may miss pages that a later one reports. The last fetch comes after
//! every vCPU has left `KVM_RUN`, that is, after the VM was paused. A vCPU also leaves it when its ring is full
//! (`KVM_EXIT_DIRTY_RING_FULL`): its loop calls [`KvmRings::reap`] and continues.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_DIRTY_LOG_PAGE_OFFSET, kvm_dirty_gfn, kvm_enable_cap,
};
use kvm_ioctls::{VcpuFd, VmFd};
use limosa_page::{PAGE_SIZE, PageRange};
use parking_lot::Mutex;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::KvmSlots;
use crate::dirty::log::{DirtyLog, DirtyPages, LogError, Writers};
use crate::discarding::DiscardWatch;

const NAME: &str = "KVM's dirty ring";

/// Flags of an entry: a page was written; its entry was taken.
const DIRTY: u32 = 1;
const TAKEN: u32 = 2;

/// The rings of a VM's vCPUs. Made before the first vCPU; each vCPU is added.
#[derive(Debug)]
pub struct KvmRings {
    slots: Arc<KvmSlots>,
    bytes: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    rings: Vec<Ring>,
    /// Pages taken from rings and not fetched yet.
    taken: DirtyPages,
    /// KVM has all entries of its rings back. Otherwise a vCPU with a full ring leaves `KVM_RUN` again and again.
    given_back: bool,
    /// The reason why the rings are incomplete until the log is restarted. A vCPU's loop may have detected it.
    lost: Option<&'static str>,
}

/// One vCPU's ring.
#[derive(Debug)]
struct Ring {
    start: NonNull<kvm_dirty_gfn>,
    entries: usize,
    next: usize,
}

// SAFETY: shared memory, which is accessed under a lock, by atomic and volatile accesses.
unsafe impl Send for Ring {}

impl KvmRings {
    /// Enables rings of `bytes` each, a power of two, for all vCPUs that the VM will have; each written page takes 16
    /// bytes. The VM's memory slots may exist already.
    ///
    /// # Errors
    /// [`LogError::Unavailable`]: KVM has no rings or only smaller ones, or the VM has a vCPU already.
    pub fn enable(vm: &VmFd, slots: Arc<KvmSlots>, bytes: u32) -> Result<Arc<Self>, LogError> {
        let unavailable = |why: String| LogError::Unavailable { log: NAME, why };
        // The first one is for processors with weak memory order; on x86 both are the same.
        let capabilities = [KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING];
        let found = capabilities.into_iter().map(|cap| (cap, vm.check_extension_raw(cap.into())));
        let Some((cap, most)) = found.into_iter().find(|(_, most)| *most > 0) else {
            return Err(unavailable(
                "this KVM has no dirty ring (kernel 5.11, x86); use its dirty log (KvmLog)".into(),
            ));
        };
        if !bytes.is_power_of_two() || i64::from(bytes) > i64::from(most) {
            return Err(unavailable(format!("a ring has a power of two of bytes up to {most}, and not {bytes}")));
        }
        let mut enable = kvm_enable_cap { cap, ..kvm_enable_cap::default() };
        enable.args[0] = bytes.into();
        vm.enable_cap(&enable).map_err(|error| {
            unavailable(format!("rings of {bytes} bytes: {error}; they have to be set up before the first vCPU"))
        })?;
        let taken = DirtyPages::new(slots.memory());
        let state = State { rings: Vec::new(), taken, given_back: true, lost: None };
        Ok(Arc::new(Self { slots, bytes: bytes as usize, state: Mutex::new(state) }))
    }

    /// Adds a vCPU before it first runs.
    ///
    /// # Errors
    /// Its ring cannot be mapped.
    pub fn add(&self, vcpu: &VcpuFd) -> Result<(), LogError> {
        let offset = u64::from(KVM_DIRTY_LOG_PAGE_OFFSET) * PAGE_SIZE;
        // SAFETY: the descriptor is open as long as `vcpu` is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice replaces no other one.
        let start = unsafe { mmap(std::ptr::null_mut(), self.bytes, access, flags, fd, offset) };
        let start = start.map_err(|error| failed("mapping a vCPU's ring")(error.into()))?;
        let start = NonNull::new(start.cast()).ok_or_else(|| failed("mmap")(io::ErrorKind::OutOfMemory.into()))?;
        self.state.lock().rings.push(Ring { start, entries: self.bytes / size_of::<kvm_dirty_gfn>(), next: 0 });
        Ok(())
    }

    /// Empties all rings and keeps their pages for the next fetch. A vCPU's loop calls it on
    /// `KVM_EXIT_DIRTY_RING_FULL`, before it runs the vCPU again. Lost pages are reported by the next fetch: the guest
    /// can continue.
    ///
    /// # Errors
    /// KVM does not take the rings back: the log is useless, and the vCPU cannot continue while it is on.
    pub fn reap(&self) -> Result<(), LogError> {
        self.empty(&mut self.state.lock())
    }

    /// Takes the entries of all rings, and makes KVM protect their pages and reuse the rings.
    fn empty(&self, State { rings, taken, given_back, lost }: &mut State) -> Result<(), LogError> {
        for ring in rings {
            let mut count = 0;
            while let Some((slot, offset)) = ring.take() {
                count += 1;
                let region = self.slots.slots().iter().find(|one| one.slot == slot).map(|one| one.region);
                let page = region.and_then(|region| Some((region.block, region.pages.start.checked_add(offset)?)));
                if let Some((block, page)) = page {
                    taken.add(block, PageRange::starting_at(page, 1));
                }
            }
            *given_back &= count == 0;
            // A vCPU leaves KVM_RUN before its ring is full to the last entry. If it is full, entries may have been
            // overwritten.
            if count >= ring.entries {
                *lost =
                    Some("a ring was full before its vCPU left KVM_RUN, so pages may be lost: larger rings are needed");
            }
        }
        if !*given_back {
            // A signal may interrupt it halfway.
            let done = rustix::io::retry_on_intr(|| {
                // SAFETY: takes no argument.
                unsafe { ioctl(self.slots.fd(), ResetRings) }
            });
            done.map_err(|error| {
                *lost = Some("KVM_RESET_DIRTY_RINGS failed, so pages are not protected: restart the log");
                failed("KVM_RESET_DIRTY_RINGS")(error.into())
            })?;
            *given_back = true;
        }
        Ok(())
    }
}

impl Ring {
    /// Takes the next page of the list: its slot and its number there.
    fn take(&mut self) -> Option<(u32, u64)> {
        let entry = self.start.as_ptr().wrapping_add(self.next);
        // SAFETY: `next` is below `entries`, so this is an entry of the mapping, which is aligned; KVM changes it too;
        // atomic accesses to the flags pass the entry back and forth.
        let flags = unsafe { AtomicU32::from_ptr(&raw mut (*entry).flags) };
        if flags.load(Ordering::Acquire) & (DIRTY | TAKEN) != DIRTY {
            return None;
        }
        // SAFETY: as above; while the entry is dirty KVM does not change it.
        let found =
            unsafe { ((&raw const (*entry).slot).read_volatile(), (&raw const (*entry).offset).read_volatile()) };
        flags.store(TAKEN, Ordering::Release);
        self.next = (self.next + 1) % self.entries.max(1);
        Some(found)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the address has no other user.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.entries * size_of::<kvm_dirty_gfn>()) };
    }
}

/// `KVM_RESET_DIRTY_RINGS`.
struct ResetRings;

// SAFETY: the operation has no argument.
unsafe impl Ioctl for ResetRings {
    type Output = ();
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        opcode::none(0xAE, 0xc7)
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut std::ffi::c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

fn failed(operation: &'static str) -> impl Fn(io::Error) -> LogError {
    move |source| LogError::Failed { log: NAME, operation, source }
}

/// The log over a VM's rings. It sees vCPUs only, and their writes possibly late (see the module).
#[derive(Debug)]
pub struct KvmRingLog {
    rings: Arc<KvmRings>,
    discards: Option<DiscardWatch>,
    on: bool,
}

impl KvmRingLog {
    /// Creates a log over the rings.
    pub fn new(rings: Arc<KvmRings>) -> Self {
        Self { rings, discards: None, on: false }
    }
}

impl DirtyLog for KvmRingLog {
    fn name(&self) -> &'static str {
        NAME
    }

    fn writers(&self) -> Writers {
        Writers::VCPUS
    }

    fn start(&mut self) -> Result<(), LogError> {
        self.stop()?;
        self.discards = Some(self.rings.slots.memory().discardable().watch());
        let mut state = self.rings.state.lock();
        // Entries of an earlier log.
        self.rings.empty(&mut state)?;
        state.taken = DirtyPages::new(self.rings.slots.memory());
        state.lost = None;
        drop(state);
        self.rings.slots.set_logging(true).map_err(failed("KVM_SET_USER_MEMORY_REGION"))?;
        self.on = true;
        Ok(())
    }

    fn fetch(&mut self, into: &mut DirtyPages) -> Result<(), LogError> {
        if !self.on {
            return Err(LogError::NotStarted { log: NAME });
        }
        let mut state = self.rings.state.lock();
        self.rings.empty(&mut state)?;
        if let Some(why) = state.lost {
            return Err(failed("emptying the rings")(io::Error::other(why)));
        }
        into.union_with(&state.taken);
        into.add_discards(self.discards.as_ref());
        state.taken = DirtyPages::new(self.rings.slots.memory());
        Ok(())
    }

    fn stop(&mut self) -> Result<(), LogError> {
        self.discards = None;
        if !std::mem::take(&mut self.on) {
            return Ok(());
        }
        self.rings.slots.set_logging(false).map_err(failed("KVM_SET_USER_MEMORY_REGION"))
    }
}

impl Drop for KvmRingLog {
    fn drop(&mut self) {
        // A log left on costs the guest time and is harmless.
        let _ = self.stop();
    }
}

#[cfg(test)]
mod tests {
    use kvm_ioctls::Kvm;

    use super::*;
    use crate::{BlockOptions, GuestMemory};

    /// A ring as KVM would have filled it.
    fn ring(entries: usize, dirty: u64) -> Ring {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        let bytes = entries * size_of::<kvm_dirty_gfn>();
        // SAFETY: new memory, which the ring gives back.
        let start = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, access, flags) }.unwrap();
        let start = NonNull::new(start.cast::<kvm_dirty_gfn>()).unwrap();
        for number in 0..dirty {
            let entry = kvm_dirty_gfn { flags: DIRTY, slot: 0, offset: number };
            // SAFETY: the first `dirty` of the entries.
            unsafe { start.as_ptr().add(usize::try_from(number).unwrap()).write(entry) };
        }
        Ring { start, entries, next: 0 }
    }

    #[test]
    fn pages_lost_while_a_vcpu_empties_the_rings_fail_every_fetch_until_the_log_starts_anew() {
        if limosa_testkit::skipped("LIMOSA_SKIP_KVM") {
            return;
        }
        let vm = Arc::new(Kvm::new().expect("without /dev/kvm, set LIMOSA_SKIP_KVM=1").create_vm().unwrap());
        let memory = BlockOptions::memfd("pc.ram", 4096 * PAGE_SIZE).map().unwrap();
        let slots =
            KvmSlots::register_memory(Arc::clone(&vm), Arc::new(GuestMemory::new(vec![memory]).unwrap())).unwrap();
        let rings = KvmRings::enable(&vm, Arc::clone(&slots), 64 << 10).unwrap();
        let mut log = KvmRingLog::new(Arc::clone(&rings));
        log.start().unwrap();

        rings.state.lock().rings.push(ring(256, 255));
        rings.reap().unwrap();
        let mut dirty = DirtyPages::new(slots.memory());
        log.fetch(&mut dirty).unwrap();
        assert_eq!(dirty.count(), 255);

        // Full to the last entry: the guest continues, and the user of the log gets an error.
        rings.state.lock().rings.push(ring(256, 256));
        rings.reap().unwrap();
        for _ in 0..2 {
            let refused = limosa_page::error_with_causes(&log.fetch(&mut dirty).unwrap_err());
            assert!(refused.contains("larger rings are needed"), "{refused}");
        }
        log.start().unwrap();
        let mut dirty = DirtyPages::new(slots.memory());
        log.fetch(&mut dirty).unwrap();
        assert_eq!(dirty.count(), 0);
    }
}
