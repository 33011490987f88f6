//! KVM's dirty log: a bitmap for each memory slot.
//!
//! With `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`, reading the bitmap changes nothing, and the pages found are protected
//! afterwards in slices, so that vCPUs wait for a slice and not for the whole slot. A page written between the two is
//! among those found, and is read after both; other pages are not cleared. Without it one call reads and protects all
//! of a slot.

use std::io;
use std::sync::Arc;

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, kvm_clear_dirty_log,
    kvm_clear_dirty_log__bindgen_ty_1, kvm_enable_cap,
};
use limosa_page::{PAGE_SIZE, to_usize};
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use super::{KvmSlot, KvmSlots};
use crate::dirty::log::{DirtyLog, DirtyPages, LogError, Writers};
use crate::discarding::DiscardWatch;

const NAME: &str = "KVM's dirty log";

const CLEAR: Opcode = opcode::read_write::<kvm_clear_dirty_log>(0xAE, 0xc0);

/// Words of the bitmap that are cleared in one step: 256 MiB of memory.
const SLICE: usize = 1024;

/// The log. It sees vCPUs only.
#[derive(Debug)]
pub struct KvmLog {
    slots: Arc<KvmSlots>,
    manual: bool,
    discards: Option<DiscardWatch>,
    on: bool,
}

impl KvmLog {
    /// Creates the log of a VM without a dirty ring. Pages are protected in slices if KVM supports it. That is a
    /// setting of the whole VM, so another reader of its dirty log must clear what it reads.
    pub fn new(slots: Arc<KvmSlots>) -> Self {
        let can = slots.vm().check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into());
        let manual = u64::try_from(can).is_ok_and(|can| can & u64::from(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE) != 0);
        Self { slots, manual, discards: None, on: false }
    }

    /// Protects all pages of a slot in one step, as a KVM without the capability does.
    #[must_use]
    pub fn without_manual_protect(mut self) -> Self {
        self.manual = false;
        self
    }

    /// Sets the mode of protection, if KVM has both.
    fn choose(&self) -> io::Result<()> {
        if self.slots.vm().check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into()) <= 0 {
            return Ok(());
        }
        let mut choice = kvm_enable_cap { cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, ..kvm_enable_cap::default() };
        choice.args[0] = if self.manual { KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE.into() } else { 0 };
        self.slots.vm().enable_cap(&choice).map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }

    fn fetch_slot(&self, slot: &KvmSlot, into: &mut DirtyPages) -> Result<(), LogError> {
        let pages = slot.region.pages.len();
        let length = to_usize(pages * PAGE_SIZE);
        let found = self.slots.vm().get_dirty_log(slot.slot, length);
        let mut bitmap = found.map_err(|e| failed("KVM_GET_DIRTY_LOG")(io::Error::from_raw_os_error(e.errno())))?;
        let mut first = 0;
        for words in bitmap.chunks_mut(SLICE) {
            let count = (pages - first).min(words.len() as u64 * 64);
            if words.iter().any(|word| *word != 0) {
                if self.manual {
                    self.clear(slot.slot, first, count, words).map_err(failed("KVM_CLEAR_DIRTY_LOG"))?;
                }
                into.add_words(&slot.region, first, words);
            }
            first += count;
        }
        Ok(())
    }

    fn clear(&self, slot: u32, first_page: u64, pages: u64, words: &mut [u64]) -> io::Result<()> {
        let num_pages = u32::try_from(pages).map_err(io::Error::other)?;
        let dirty_bitmap = words.as_mut_ptr().cast();
        let bitmap = kvm_clear_dirty_log__bindgen_ty_1 { dirty_bitmap };
        let mut argument = kvm_clear_dirty_log { slot, num_pages, first_page, __bindgen_anon_1: bitmap };
        // SAFETY: the argument is the operation's, and `words` has a bit for each of the pages, which KVM reads.
        Ok(unsafe { ioctl(self.slots.fd(), Updater::<CLEAR, _>::new(&mut argument)) }?)
    }
}

fn failed(operation: &'static str) -> impl Fn(io::Error) -> LogError {
    move |source| LogError::Failed { log: NAME, operation, source }
}

impl DirtyLog for KvmLog {
    fn name(&self) -> &'static str {
        NAME
    }

    fn writers(&self) -> Writers {
        Writers::VCPUS
    }

    fn start(&mut self) -> Result<(), LogError> {
        self.stop()?;
        self.discards = Some(self.slots.memory().discardable().watch());
        self.choose().map_err(failed("KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2"))?;
        self.slots.set_logging(true).map_err(failed("KVM_SET_USER_MEMORY_REGION"))?;
        self.on = true;
        Ok(())
    }

    fn fetch(&mut self, into: &mut DirtyPages) -> Result<(), LogError> {
        if !self.on {
            return Err(LogError::NotStarted { log: NAME });
        }
        self.slots.slots().iter().try_for_each(|slot| self.fetch_slot(slot, into))?;
        into.add_discards(self.discards.as_ref());
        Ok(())
    }

    fn stop(&mut self) -> Result<(), LogError> {
        self.discards = None;
        if !std::mem::take(&mut self.on) {
            return Ok(());
        }
        self.slots.set_logging(false).map_err(failed("KVM_SET_USER_MEMORY_REGION"))
    }
}

impl Drop for KvmLog {
    fn drop(&mut self) {
        // A log left on costs the guest time and is harmless.
        let _ = self.stop();
    }
}
