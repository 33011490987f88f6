//! The guest whose processors are vCPUs of KVM.
//!
//! It sees its first RAM block from address 0 on and writes below 3 GiB; its first page is code. Interrupts, a stack or
//! devices it has none, so its state is what its registers hold.

mod code;
mod vcpu;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use kvm_bindings::kvm_regs;
use kvm_ioctls::Kvm;
use limosa_memory::GuestMemory;
use limosa_memory::dirty::{DirtyLog, DirtyLogs, UffdWpAsyncLog, UffdWpSyncLog, Writers};
use limosa_memory::dirty::{KvmLog, KvmRingLog, KvmRings, KvmSlots};
use limosa_page::{PAGE_LEN, PAGE_SIZE};
use parking_lot::{Mutex, MutexGuard};

use super::built_in::{Guest, Verified};
use super::error::GuestError;
use super::gate::Gate;
use super::options::{GuestKind, GuestOptions, LogKind, Rate};
use super::pattern::Plan;
use super::ram::Ram;
use super::state::{State, new_state};
use vcpu::{Vcpu, VcpuState};

const KIND: GuestKind = GuestKind::Kvm;

/// Pages in front that hold the code.
const RESERVED: u64 = 1;

/// Above this a PC has no RAM in its first 4 GiB, and KVM pages of its own.
const VISIBLE: u64 = 3 << 30;

/// Bytes of a vCPU's dirty ring: 4096 pages.
const RING: u32 = 64 << 10;

/// Registers that are saved of each vCPU, 64 bits each.
const REGISTERS: usize = 18;

/// The guest.
pub(super) struct KvmGuest {
    ram: Ram,
    log: LogKind,
    running: Mutex<Option<Arc<RunningVm>>>,
}

/// A guest that has its state: the VM, its vCPUs and their threads.
struct RunningVm {
    context: Arc<VcpuContext>,
    slots: Arc<KvmSlots>,
    rings: Option<Arc<KvmRings>>,
    threads: Vec<JoinHandle<()>>,
}

/// Shared with the threads of the vCPUs.
struct VcpuContext {
    gate: Gate,
    plan: Plan,
    vcpu_states: Vec<Arc<VcpuState>>,
}

impl KvmGuest {
    pub(super) fn boot(memory: Arc<GuestMemory>, options: &GuestOptions) -> Result<Self, GuestError> {
        let guest = Self::receive(memory, options.log)?;
        let state = new_state(KIND, guest.visible(), RESERVED, code::SPACING, options)?;
        guest.memory().block(0)?.write(0, &code::image(&state.plan))?;
        for page in RESERVED..RESERVED + state.plan.layout.filled {
            guest.ram.store(page, state.plan.contents(page, 0));
        }
        guest.start(state, true)?;
        Ok(guest)
    }

    pub(super) fn receive(memory: Arc<GuestMemory>, log: LogKind) -> Result<Self, GuestError> {
        let at_zero = memory
            .regions()
            .first()
            .is_some_and(|first| first.guest_address == 0 && first.block == 0 && first.pages.start.0 == 0);
        if !at_zero {
            return Err(GuestError::Options { kind: KIND, why: "its first RAM block is not at address 0".into() });
        }
        open()?;
        Ok(Self { ram: Ram::new(memory), log, running: Mutex::new(None) })
    }

    /// Pages that the code can reach.
    fn visible(&self) -> u64 {
        self.memory().regions().first().map_or(0, |region| region.pages.len()).min(VISIBLE / PAGE_SIZE)
    }

    /// Makes the VM and its vCPUs, which are paused. With `try_first` each runs its first instructions.
    fn start(&self, state: State, try_first: bool) -> Result<(), GuestError> {
        let vcpu_states = vcpu_states(&state)?;
        // The one before goes first: a VM of its own would still map the memory.
        *self.slot() = None;
        let vm = Arc::new(open()?.create_vm().map_err(|error| unavailable("KVM_CREATE_VM", error))?);
        let slots = KvmSlots::register_memory(Arc::clone(&vm), Arc::clone(self.memory()))?;
        let rings = match self.log {
            LogKind::KvmRing => Some(KvmRings::enable(&vm, Arc::clone(&slots), RING)?),
            _ => None,
        };
        let State { plan, rate, .. } = state;
        let context = Arc::new(VcpuContext { gate: Gate::new(rate), plan, vcpu_states });
        let mut running = RunningVm { context: Arc::clone(&context), slots, rings: rings.clone(), threads: Vec::new() };
        for (index, (vcpu_state, share)) in context.vcpu_states.iter().zip(&context.plan.shares).enumerate() {
            let fd = vm.create_vcpu(index as u64).map_err(|error| unavailable("KVM_CREATE_VCPU", error))?;
            rings.as_ref().map_or(Ok(()), |rings| rings.add(&fd))?;
            let vcpu_state = Arc::clone(vcpu_state);
            let mut vcpu = Vcpu { index, fd, vcpu_state, share: *share, rings: rings.clone(), try_first };
            vcpu.set_up().map_err(|error| unavailable("setting up a vCPU", error))?;
            context.gate.enter();
            let of_thread = Arc::clone(&context);
            let thread = std::thread::Builder::new().name(format!("vcpu {index}")).spawn(move || {
                let ended = catch_unwind(AssertUnwindSafe(|| vcpu.run(&of_thread.gate)));
                of_thread.gate.leave(ended.unwrap_or_else(|_| Err("it panicked".to_owned())).err());
            });
            let failed = |source| GuestError::Kernel { kind: KIND, operation: "a thread", source };
            running.threads.push(thread.map_err(failed).inspect_err(|_| context.gate.leave(None))?);
        }
        context.gate.pause();
        context.gate.all_live(KIND).map_err(|error| GuestError::Unavailable {
            kind: KIND,
            why: format!("/dev/kvm exists, but a vCPU does not run ({error}); use the guest threads"),
        })?;
        *self.slot() = Some(Arc::new(running));
        Ok(())
    }

    fn running(&self) -> Result<Arc<RunningVm>, GuestError> {
        self.slot().clone().ok_or(GuestError::NoState)
    }

    fn paused(&self, what: &'static str) -> Result<Arc<RunningVm>, GuestError> {
        let running = self.running()?;
        running.context.gate.all_live(KIND)?;
        if running.context.gate.is_paused() { Ok(running) } else { Err(GuestError::NotPaused(what)) }
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<RunningVm>>> {
        self.running.lock()
    }
}

fn open() -> Result<Kvm, GuestError> {
    Kvm::new().map_err(|error| {
        let why = format!(
            "/dev/kvm cannot be opened: {error}. It needs a processor with virtualization, its kernel module, and the \
             right to use the device; use the guest threads, which needs none of them"
        );
        GuestError::Unavailable { kind: KIND, why }
    })
}

fn unavailable(operation: &str, error: kvm_ioctls::Error) -> GuestError {
    let why = format!("/dev/kvm exists, but {operation}: {error}; use the guest threads");
    GuestError::Unavailable { kind: KIND, why }
}

/// A state for each vCPU: with the registers of the state, or, in a new guest, those of the beginning.
fn vcpu_states(state: &State) -> Result<Vec<Arc<VcpuState>>, GuestError> {
    let wrong = |why: String| GuestError::State { kind: KIND, offset: 0, why };
    let vcpus = || state.plan.shares.iter().zip(&state.writes).enumerate();
    if state.extra.is_empty() {
        let new =
            vcpus().map(|(index, (share, writes))| VcpuState::new(vcpu::registers(index, share, *writes), *writes));
        return Ok(new.map(Arc::new).collect());
    }
    let (words, rest) = state.extra.as_chunks::<8>();
    let (saved, more) = words.as_chunks::<REGISTERS>();
    if !rest.is_empty() || !more.is_empty() || saved.len() != state.writes.len() {
        return Err(wrong(format!("{} bytes of registers of {} vCPUs", state.extra.len(), state.writes.len())));
    }
    let vcpu_state = |((index, (share, writes)), saved): ((usize, (_, &u64)), &[[u8; 8]; REGISTERS])| {
        let registers = registers_from(saved.map(u64::from_be_bytes));
        if !vcpu::agrees(&registers, index, share, *writes) {
            return Err(wrong(format!("the registers of vCPU {index} are not those after {writes} pages")));
        }
        Ok(Arc::new(VcpuState::new(registers, *writes)))
    };
    vcpus().zip(saved).map(vcpu_state).collect()
}

fn registers_from(words: [u64; REGISTERS]) -> kvm_regs {
    let [rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags] = words;
    kvm_regs { rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags }
}

fn registers_to(from: &kvm_regs) -> [u64; REGISTERS] {
    let kvm_regs { rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags } = *from;
    [rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags]
}

impl VcpuContext {
    fn counters(&self) -> Vec<u64> {
        self.vcpu_states.iter().map(|vcpu_state| vcpu_state.writes.load(Ordering::Relaxed)).collect()
    }
}

impl Guest for KvmGuest {
    fn kind(&self) -> GuestKind {
        KIND
    }

    fn memory(&self) -> &Arc<GuestMemory> {
        self.ram.memory()
    }

    fn writers(&self) -> Writers {
        Writers::VCPUS
    }

    fn dirty_logs(&self) -> Result<DirtyLogs, GuestError> {
        let running = self.running()?;
        let memory = Arc::clone(self.memory());
        let log: Box<dyn DirtyLog> = match (self.log, &running.rings) {
            (LogKind::WpAsync, _) => Box::new(UffdWpAsyncLog::new(memory)?),
            (LogKind::WpThread, _) => Box::new(UffdWpSyncLog::new(memory)?),
            (LogKind::KvmRing, Some(rings)) => Box::new(KvmRingLog::new(Arc::clone(rings))),
            (LogKind::Best | LogKind::KvmLog | LogKind::KvmRing, _) => {
                Box::new(KvmLog::new(Arc::clone(&running.slots)))
            }
            (LogKind::KvmLogInOneStep, _) => Box::new(KvmLog::new(Arc::clone(&running.slots)).without_manual_protect()),
        };
        Ok(DirtyLogs::new(self.writers(), vec![log])?)
    }

    fn run(&self) -> Result<(), GuestError> {
        let running = self.running()?;
        running.context.gate.run();
        running.context.gate.all_live(KIND)
    }

    fn pause(&self) -> Result<(), GuestError> {
        let running = self.running()?;
        running.context.gate.pause();
        running.context.gate.all_live(KIND)
    }

    fn set_rate(&self, rate: Rate) {
        if let Ok(running) = self.running() {
            running.context.gate.set_rate(rate);
        }
    }

    fn throttle(&self, percent: u8) {
        if let Ok(running) = self.running() {
            running.context.gate.throttle(percent);
        }
    }

    fn writes(&self) -> u64 {
        self.running().map_or(0, |running| running.context.counters().iter().sum())
    }

    fn save(&self) -> Result<Vec<u8>, GuestError> {
        let running = self.paused("saving the state")?;
        let VcpuContext { plan, gate, vcpu_states } = &*running.context;
        let words = vcpu_states.iter().flat_map(|vcpu_state| registers_to(&vcpu_state.registers()));
        let extra = words.flat_map(u64::to_be_bytes).collect();
        Ok(State { plan: plan.clone(), rate: gate.rate(), writes: running.context.counters(), extra }.encode())
    }

    fn load(&self, state: &[u8]) -> Result<(), GuestError> {
        if self.running().is_ok() {
            self.paused("loading a state")?;
        }
        let state = State::decode(KIND, state, self.visible(), RESERVED)?;
        if state.extra.is_empty() || state.plan.spacing != code::SPACING {
            return Err(GuestError::State {
                kind: KIND,
                offset: 0,
                why: "it is that of a guest of another kind".into(),
            });
        }
        self.start(state, false)
    }

    fn verify(&self) -> Result<Verified, GuestError> {
        let running = self.paused("looking at all memory")?;
        let mut code = [0; PAGE_LEN];
        let block = self.memory().block(0)?;
        block.read(0, &mut code)?;
        let expected = code::image(&running.context.plan);
        if let Some(at) = code.as_chunks::<4>().0.iter().zip(expected.as_chunks::<4>().0).position(|(a, b)| a != b) {
            let word =
                |bytes: &[u8; PAGE_LEN]| bytes.as_chunks::<4>().0.get(at).map_or(0, |word| u32::from_le_bytes(*word));
            return Err(self.ram.damaged(
                super::ram::Damage {
                    page: 0,
                    offset: at * 4,
                    generation: 0,
                    expected: word(&expected),
                    found: word(&code),
                },
                1,
            ));
        }
        self.ram.verify(&running.context.plan, &running.context.counters())
    }
}

impl Drop for RunningVm {
    fn drop(&mut self) {
        self.context.gate.end();
        for thread in self.threads.drain(..) {
            // A panic of it was its own message.
            let _ = thread.join();
        }
    }
}
