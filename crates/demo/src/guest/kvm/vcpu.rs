//! One vCPU, on its own thread.
//!
//! **Law: a paused vCPU is at the beginning of its loop, outside of `KVM_RUN`, with nothing half done in KVM**,
//! and its registers are in [`VcpuState`]. So saving the state asks no vCPU anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::{KVM_EXIT_DIRTY_RING_FULL, kvm_regs, kvm_segment};
use kvm_ioctls::{VcpuExit, VcpuFd};
use limosa_console::error_line;
use limosa_memory::dirty::KvmRings;
use parking_lot::Mutex;

use super::code::{PARAMETERS, PORT};
use crate::guest::gate::{Gate, Pace};
use crate::guest::pattern::Share;

/// Pages that a vCPU with a dirty ring writes between two questions. KVM keeps 64 entries back for what comes between
/// two looks at how full the ring is; one that emulates this guest looks only as it enters it, and lists every store, 8
/// a page.
const AT_ONCE_WITH_RING: u64 = 4;

/// The part of a vCPU that other threads read.
#[derive(Debug)]
pub(super) struct VcpuState {
    /// As of its last pause.
    pub(super) registers: Mutex<kvm_regs>,
    /// Pages that it has been given leave for; it has written all of them when it is paused.
    pub(super) writes: AtomicU64,
}

impl VcpuState {
    pub(super) fn new(registers: kvm_regs, writes: u64) -> Self {
        Self { registers: Mutex::new(registers), writes: AtomicU64::new(writes) }
    }

    pub(super) fn registers(&self) -> kvm_regs {
        *self.registers.lock()
    }
}

/// The registers of a vCPU that has written this number of pages of its share.
pub(super) fn registers(index: usize, share: &Share, writes: u64) -> kvm_regs {
    let (page, generation) = share.write(writes);
    let parameters = (PARAMETERS + 16 * index) as u64;
    // Bit 1 of the flags is always set.
    kvm_regs { rsi: page - share.first, rdx: generation, rbp: parameters, rflags: 2, ..kvm_regs::default() }
}

/// Whether registers are of a vCPU that has come so far: what its code does not use as it begins its loop is left open.
pub(super) fn agrees(found: &kvm_regs, index: usize, share: &Share, writes: u64) -> bool {
    let expected = registers(index, share, writes);
    let of = |registers: &kvm_regs| (registers.rsi, registers.rdx, registers.rbp);
    // At the loop's begin, or behind the instruction that asks, with 0 for an answer.
    of(found) == of(&expected) && (found.rip == 0 || found.rip == 2 && found.rax == 0)
}

/// A vCPU and what it needs.
pub(super) struct Vcpu {
    pub(super) index: usize,
    pub(super) fd: VcpuFd,
    pub(super) vcpu_state: Arc<VcpuState>,
    pub(super) share: Share,
    pub(super) rings: Option<Arc<KvmRings>>,
    /// Whether it runs up to its first question before the guest runs: shows that it can.
    pub(super) try_first: bool,
}

/// The outcome of `KVM_RUN`.
enum Outcome {
    /// The guest asks for leave and was given it.
    Yield(u64),
    /// There was something to be done, which is done.
    Handled,
}

impl Vcpu {
    /// 32-bit code and data segments over all addresses, without paging, and the registers of its state.
    pub(super) fn set_up(&self) -> Result<(), kvm_ioctls::Error> {
        let mut special = self.fd.get_sregs()?;
        let data = kvm_segment {
            limit: u32::MAX,
            selector: 16,
            type_: 3,
            present: 1,
            db: 1,
            s: 1,
            g: 1,
            ..kvm_segment::default()
        };
        special.cs = kvm_segment { selector: 8, type_: 11, ..data };
        [special.ds, special.es, special.fs, special.gs, special.ss] = [data; 5];
        // PE, ET and NE: protected mode.
        special.cr0 = 1 | 1 << 4 | 1 << 5;
        self.fd.set_sregs(&special)?;
        self.fd.set_regs(&self.vcpu_state.registers())
    }

    /// Until the guest ends.
    pub(super) fn run(&mut self, gate: &Gate) -> Result<(), String> {
        let most = if self.rings.is_some() { AT_ONCE_WITH_RING } else { u64::MAX };
        let mut pace = Pace::default();
        let mut leave = if self.try_first { 0 } else { gate.admit(&mut pace).unwrap_or(0) };
        if leave == 0 && !self.try_first {
            return Ok(());
        }
        loop {
            match self.enter(&mut || {
                if leave == 0 {
                    leave = gate.try_admit(&mut pace);
                }
                let now = leave.min(most);
                leave -= now;
                now
            })? {
                Outcome::Handled => {}
                Outcome::Yield(0) => {
                    self.finish_instruction()?;
                    match gate.admit(&mut pace) {
                        Some(pages) => leave = pages,
                        None => return Ok(()),
                    }
                }
                Outcome::Yield(pages) => {
                    self.vcpu_state.writes.fetch_add(pages, Ordering::Relaxed);
                }
            }
        }
    }

    /// Runs it until it wants something of us; `leave` says how many pages it may write.
    fn enter(&mut self, leave: &mut dyn FnMut() -> u64) -> Result<Outcome, String> {
        match self.fd.run() {
            Ok(VcpuExit::IoIn(PORT, answer)) => {
                let pages = leave();
                let bytes = u32::try_from(pages).unwrap_or(0).to_le_bytes();
                answer.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
                Ok(Outcome::Yield(pages))
            }
            Ok(VcpuExit::Intr) => Ok(Outcome::Handled),
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                let rings = self.rings.as_ref().ok_or("its dirty ring is full, and it has none")?;
                rings.reap().map_err(|error| error_line(&error))?;
                Ok(Outcome::Handled)
            }
            Ok(other) => Err(format!("vCPU {}: {other:?}", self.index)),
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => Ok(Outcome::Handled),
            Err(error) => Err(format!("vCPU {}: KVM_RUN: {error}", self.index)),
        }
    }

    /// Has KVM finish the instruction that asked, without running another one, and notes the registers.
    fn finish_instruction(&mut self) -> Result<(), String> {
        self.fd.set_kvm_immediate_exit(1);
        let back = self.fd.run().map(|exit| format!("{exit:?}"));
        self.fd.set_kvm_immediate_exit(0);
        match back {
            Err(error) if error.errno() == libc::EINTR => {}
            other => return Err(format!("vCPU {}: expected an immediate exit, got {other:?}", self.index)),
        }
        let registers = self.fd.get_regs().map_err(|error| format!("vCPU {}: KVM_GET_REGS: {error}", self.index))?;
        let writes = self.vcpu_state.writes.load(Ordering::Relaxed);
        if !agrees(&registers, self.index, &self.share, writes) {
            return Err(format!("vCPU {}: after {writes} pages its registers are {registers:x?}", self.index));
        }
        *self.vcpu_state.registers.lock() = registers;
        Ok(())
    }
}
