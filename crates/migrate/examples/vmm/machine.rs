//! The machine: 16 MiB of memory, one vCPU, one device.
//!
//! The guest counts: it adds one to the first word of every page from [`COUNTED`] on, tells the device that the lap is
//! over, and begins again. The device writes the number of laps into [`STATUS`]. So whenever the vCPU stands still,
//! every word has the same value, and a single write that was lost would show.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, Result, bail, ensure};
use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use limosa_memory::GuestMemory;
use limosa_memory::dirty::KvmSlots;
use limosa_memory::rust_vmm::{DirtyMarks, import};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

const MEMORY: usize = 16 << 20;
/// Where the device writes the number of laps.
const STATUS: u64 = 0x1000;
/// The first page that the guest counts in.
const COUNTED: u64 = 0x10_000;
/// The device's port.
const PORT: u16 = 0x10;

/// 32-bit code, flat and without paging, at address 0; `edx` is the number of laps.
const CODE: [u8; 28] = [
    // lap:
    0xb9, 0x00, 0x00, 0x01, 0x00, //       mov  ecx, COUNTED
    // page:
    0xff, 0x01, //                         inc  dword [ecx]
    0x81, 0xc1, 0x00, 0x10, 0x00, 0x00, // add  ecx, 0x1000
    0x81, 0xf9, 0x00, 0x00, 0x00, 0x01, // cmp  ecx, MEMORY
    0x72, 0xf0, //                         jb   page
    0x42, //                               inc  edx
    0x89, 0xd0, //                         mov  eax, edx
    0xe7, 0x10, //                         out  PORT, eax
    0xeb, 0xe4, //                         jmp  lap
];

pub(crate) struct Machine {
    /// The memory, as migration sees it: the same mappings.
    pub(crate) memory: Arc<GuestMemory>,
    /// The memory, as the device sees it: what it writes is marked.
    pub(crate) devices: GuestMemoryMmap<DirtyMarks>,
    pub(crate) slots: Arc<KvmSlots>,
    control: Arc<VcpuControl>,
    vcpu: Option<JoinHandle<()>>,
}

/// The state that the vCPU's thread shares with the other threads.
#[derive(Default)]
struct VcpuControl {
    seat: Mutex<Seat>,
    changed: Condvar,
    laps: AtomicU64,
}

#[derive(Default)]
struct Seat {
    wanted: Wanted,
    /// The vCPU stands still, outside of `KVM_RUN` with nothing half done, and these are its registers.
    parked: bool,
    registers: kvm_regs,
    failed: Option<String>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Wanted {
    #[default]
    Pause,
    Run,
    End,
}

impl Machine {
    pub(crate) fn new() -> Result<Self> {
        let vm = Arc::new(Kvm::new().context("/dev/kvm")?.create_vm().context("KVM_CREATE_VM")?);
        let devices = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).context("memory")?;
        let memory = Arc::new(import(&devices, |_| "ram".into())?);
        let slots = KvmSlots::register_memory(Arc::clone(&vm), Arc::clone(&memory))?;
        let vcpu = vm.create_vcpu(0).context("KVM_CREATE_VCPU")?;
        flat(&vcpu)?;
        let control = Arc::new(VcpuControl::default());
        let (of_thread, status) = (Arc::clone(&control), devices.clone());
        let thread = thread::spawn(move || {
            let ended = run(vcpu, &of_thread, &status);
            let mut seat = of_thread.lock();
            seat.failed = ended.err().map(|error| format!("{error:#}"));
            seat.parked = true;
            of_thread.changed.notify_all();
        });
        Ok(Self { memory, devices, slots, control, vcpu: Some(thread) })
    }

    /// Puts a new guest into the memory.
    pub(crate) fn boot(&self) -> Result<()> {
        self.devices.write_slice(&CODE, GuestAddress(0))?;
        self.control.lock().registers = kvm_regs { rflags: 2, ..kvm_regs::default() };
        Ok(())
    }

    pub(crate) fn go(&self) {
        let mut seat = self.control.lock();
        (seat.wanted, seat.parked) = (Wanted::Run, false);
        self.control.changed.notify_all();
    }

    /// Returns when the vCPU stands still.
    pub(crate) fn stop(&self) -> Result<()> {
        let mut seat = self.control.lock();
        seat.wanted = Wanted::Pause;
        while !seat.parked {
            seat = self.control.wait(seat);
        }
        seat.failed.as_ref().map_or(Ok(()), |why| bail!("the vCPU has failed: {why}"))
    }

    pub(crate) fn laps(&self) -> u64 {
        self.control.laps.load(Ordering::SeqCst)
    }

    pub(crate) fn wait_for_laps(&self, laps: u64) -> Result<()> {
        let mut seat = self.control.lock();
        while self.laps() < laps {
            if let Some(why) = &seat.failed {
                bail!("the vCPU has failed: {why}");
            }
            seat = self.control.wait(seat);
        }
        Ok(())
    }

    /// The vCPU's registers. (Its segments are the same for ever.)
    pub(crate) fn state(&self) -> Vec<u8> {
        let kvm_regs { rax, rcx, rdx, rip, rflags, .. } = self.control.lock().registers;
        [rax, rcx, rdx, rip, rflags].into_iter().flat_map(u64::to_be_bytes).collect()
    }

    pub(crate) fn load(&self, state: &[u8]) -> Result<()> {
        let words: Vec<_> = state.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)).collect();
        let [rax, rcx, rdx, rip, rflags] = words[..] else { bail!("{} bytes are no state of a vCPU", state.len()) };
        self.control.lock().registers = kvm_regs { rax, rcx, rdx, rip, rflags, ..kvm_regs::default() };
        self.control.laps.store(rdx, Ordering::SeqCst);
        Ok(())
    }

    /// Whether all memory is as the guest and the device wrote it; it stands still.
    pub(crate) fn check(&self) -> Result<()> {
        let laps = self.control.lock().registers.rdx;
        for address in (COUNTED..MEMORY as u64).step_by(4096).chain([STATUS]) {
            let word: u32 = self.devices.read_obj(GuestAddress(address))?;
            ensure!(u64::from(word) == laps, "{address:#x} has {word}, and {laps} laps are over");
        }
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.control.lock().wanted = Wanted::End;
        self.control.changed.notify_all();
        if let Some(thread) = self.vcpu.take() {
            let _ = thread.join();
        }
    }
}

impl VcpuControl {
    fn lock(&self) -> MutexGuard<'_, Seat> {
        self.seat.lock().expect("no thread panics with it")
    }

    fn wait<'a>(&self, seat: MutexGuard<'a, Seat>) -> MutexGuard<'a, Seat> {
        self.changed.wait(seat).expect("no thread panics with it")
    }
}

/// The life of the vCPU.
fn run(mut vcpu: VcpuFd, control: &VcpuControl, memory: &GuestMemoryMmap<DirtyMarks>) -> Result<()> {
    let mut set = false;
    loop {
        let mut seat = control.lock();
        seat.parked = seat.wanted != Wanted::Run;
        set &= !seat.parked;
        control.changed.notify_all();
        while seat.wanted == Wanted::Pause {
            seat = control.wait(seat);
        }
        if seat.wanted == Wanted::End {
            return Ok(());
        }
        if !set {
            // They may be those of another process by now.
            vcpu.set_regs(&seat.registers)?;
        }
        (seat.parked, set) = (false, true);
        drop(seat);
        match vcpu.run().map_err(|error| error.errno()) {
            Ok(VcpuExit::IoOut(PORT, _)) => {}
            Err(libc::EINTR | libc::EAGAIN) => continue,
            other => bail!("unexpected exit: {other:?}"),
        }
        // The instruction is finished by the next entry, which is told to come back at once: only then are the
        // registers those behind it, and a pause may come now.
        vcpu.set_kvm_immediate_exit(1);
        match vcpu.run().map_err(|error| error.errno()) {
            Err(libc::EINTR) => {}
            other => bail!("unexpected exit: {other:?}"),
        }
        vcpu.set_kvm_immediate_exit(0);
        let registers = vcpu.get_regs()?;
        let laps = u32::try_from(registers.rdx).context("laps")?;
        memory.write_obj(laps, GuestAddress(STATUS))?;
        control.lock().registers = registers;
        control.laps.store(laps.into(), Ordering::SeqCst);
    }
}

/// 32-bit segments over all addresses, protected mode, no paging.
fn flat(vcpu: &VcpuFd) -> Result<()> {
    let mut special = vcpu.get_sregs()?;
    let flat = kvm_segment { limit: u32::MAX, present: 1, db: 1, s: 1, g: 1, ..kvm_segment::default() };
    special.cs = kvm_segment { selector: 8, type_: 11, ..flat };
    let data = kvm_segment { selector: 16, type_: 3, ..flat };
    [special.ds, special.es, special.fs, special.gs, special.ss] = [data; 5];
    special.cr0 = 1 | 1 << 4 | 1 << 5;
    Ok(vcpu.set_sregs(&special)?)
}
