//! The guest whose processors are vCPUs of KVM.
//!
//! It sees its first RAM block from address 0 on and writes below 3 GiB; its first page is code. Interrupts, a stack or
//! devices it has none, so its state is what its registers hold.

mod code;
mod vcpu;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use kvm_bindings::kvm_regs;
use kvm_ioctls::Kvm;
use limosa_memory::GuestMemory;
use limosa_memory::dirty::kvm::{KvmLog, KvmRingLog, KvmRings, KvmSlots};
use limosa_memory::dirty::{DirtyLog, DirtyLogs, WriteFaultLog, WriteProtectLog, Writers};
use limosa_page::{PAGE_LEN, PAGE_SIZE};

use super::gate::Gate;
use super::pattern::Plan;
use super::ram::Ram;
use super::state::State;
use super::{Guest, GuestError, GuestKind, GuestOptions, LogKind, Rate, Verified};
use vcpu::{Seat, Vcpu};

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
    life: Mutex<Option<Arc<Life>>>,
}

/// What there is of a guest that has a state.
struct Life {
    body: Arc<Body>,
    slots: Arc<KvmSlots>,
    rings: Option<Arc<KvmRings>>,
    threads: Vec<JoinHandle<()>>,
}

struct Body {
    gate: Gate,
    plan: Plan,
    seats: Vec<Arc<Seat>>,
}

impl KvmGuest {
    pub(super) fn boot(memory: Arc<GuestMemory>, options: &GuestOptions) -> Result<Self, GuestError> {
        let guest = Self::receive(memory, options.log)?;
        let state = super::new_state(KIND, guest.visible(), RESERVED, code::SPACING, options)?;
        guest.memory().block(0)?.write(0, &code::image(&state.plan))?;
        for page in RESERVED..RESERVED + state.plan.layout.filled {
            guest.ram.store(page, state.plan.contents(page, 0));
        }
        guest.live(state, true)?;
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
        Ok(Self { ram: Ram::new(memory), log, life: Mutex::new(None) })
    }

    /// Pages that the code can reach.
    fn visible(&self) -> u64 {
        self.memory().regions().first().map_or(0, |region| region.pages.len()).min(VISIBLE / PAGE_SIZE)
    }

    /// Makes the VM and its vCPUs, which stand still. A vCPU that is tried runs its first instructions.
    fn live(&self, state: State, try_first: bool) -> Result<(), GuestError> {
        let seats = seats(&state)?;
        // The one before goes first: a VM of its own would still map the memory.
        *self.slot() = None;
        let vm = Arc::new(open()?.create_vm().map_err(|error| unavailable("KVM_CREATE_VM", error))?);
        let slots = KvmSlots::map(Arc::clone(&vm), Arc::clone(self.memory()))?;
        let rings = match self.log {
            LogKind::KvmRing => Some(KvmRings::enable(&vm, Arc::clone(&slots), RING)?),
            _ => None,
        };
        let State { plan, rate, .. } = state;
        let body = Arc::new(Body { gate: Gate::new(rate), plan, seats });
        let mut life = Life { body: Arc::clone(&body), slots, rings: rings.clone(), threads: Vec::new() };
        for (index, (seat, share)) in body.seats.iter().zip(&body.plan.shares).enumerate() {
            let fd = vm.create_vcpu(index as u64).map_err(|error| unavailable("KVM_CREATE_VCPU", error))?;
            rings.as_ref().map_or(Ok(()), |rings| rings.add(&fd))?;
            let seat = Arc::clone(seat);
            let mut vcpu = Vcpu { index, fd, seat, share: *share, rings: rings.clone(), try_first };
            vcpu.set_up().map_err(|error| unavailable("setting up a vCPU", error))?;
            body.gate.enter();
            let of_thread = Arc::clone(&body);
            let thread = std::thread::Builder::new().name(format!("vcpu {index}")).spawn(move || {
                let ended = catch_unwind(AssertUnwindSafe(|| vcpu.run(&of_thread.gate)));
                of_thread.gate.leave(ended.unwrap_or_else(|_| Err("it panicked".to_owned())).err());
            });
            let failed = |source| GuestError::Kernel { kind: KIND, operation: "a thread", source };
            life.threads.push(thread.map_err(failed).inspect_err(|_| body.gate.leave(None))?);
        }
        body.gate.pause();
        body.gate.all_live(KIND).map_err(|error| GuestError::Unavailable {
            kind: KIND,
            why: format!("/dev/kvm is there, but a vCPU does not run ({error}); use the guest threads"),
        })?;
        *self.slot() = Some(Arc::new(life));
        Ok(())
    }

    fn life(&self) -> Result<Arc<Life>, GuestError> {
        self.slot().clone().ok_or(GuestError::Unborn)
    }

    fn paused(&self, what: &'static str) -> Result<Arc<Life>, GuestError> {
        let life = self.life()?;
        life.body.gate.all_live(KIND)?;
        if life.body.gate.is_paused() { Ok(life) } else { Err(GuestError::NotPaused(what)) }
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<Life>>> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open() -> Result<Kvm, GuestError> {
    Kvm::new().map_err(|error| {
        let why = format!(
            "/dev/kvm cannot be opened: {error}. It needs a processor with virtualization, its kernel module, and the \
             right to use the device; the guest threads needs none of them"
        );
        GuestError::Unavailable { kind: KIND, why }
    })
}

fn unavailable(operation: &str, error: kvm_ioctls::Error) -> GuestError {
    let why = format!("/dev/kvm is there, but {operation}: {error}; use the guest threads");
    GuestError::Unavailable { kind: KIND, why }
}

/// A seat for each vCPU: with the registers of the state, or, in a new guest, those of the beginning.
fn seats(state: &State) -> Result<Vec<Arc<Seat>>, GuestError> {
    let wrong = |why: String| GuestError::State { kind: KIND, offset: 0, why };
    let vcpus = || state.plan.shares.iter().zip(&state.writes).enumerate();
    if state.extra.is_empty() {
        let new = vcpus().map(|(index, (share, writes))| Seat::new(vcpu::registers(index, share, *writes), *writes));
        return Ok(new.map(Arc::new).collect());
    }
    let (words, rest) = state.extra.as_chunks::<8>();
    let (saved, more) = words.as_chunks::<REGISTERS>();
    if !rest.is_empty() || !more.is_empty() || saved.len() != state.writes.len() {
        return Err(wrong(format!("{} bytes of registers of {} vCPUs", state.extra.len(), state.writes.len())));
    }
    let seat = |((index, (share, writes)), saved): ((usize, (_, &u64)), &[[u8; 8]; REGISTERS])| {
        let registers = registers_from(saved.map(u64::from_be_bytes));
        if !vcpu::agrees(&registers, index, share, *writes) {
            return Err(wrong(format!("the registers of vCPU {index} are not those after {writes} pages")));
        }
        Ok(Arc::new(Seat::new(registers, *writes)))
    };
    vcpus().zip(saved).map(seat).collect()
}

fn registers_from(words: [u64; REGISTERS]) -> kvm_regs {
    let [rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags] = words;
    kvm_regs { rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags }
}

fn registers_to(from: &kvm_regs) -> [u64; REGISTERS] {
    let kvm_regs { rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags } = *from;
    [rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags]
}

impl Body {
    fn counters(&self) -> Vec<u64> {
        self.seats.iter().map(|seat| seat.writes.load(Ordering::Relaxed)).collect()
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
        let life = self.life()?;
        let memory = Arc::clone(self.memory());
        let log: Box<dyn DirtyLog> = match (self.log, &life.rings) {
            (LogKind::WpAsync, _) => Box::new(WriteProtectLog::new(memory)?),
            (LogKind::WpThread, _) => Box::new(WriteFaultLog::new(memory)?),
            (LogKind::KvmRing, Some(rings)) => Box::new(KvmRingLog::new(Arc::clone(rings))),
            (LogKind::Best | LogKind::KvmLog | LogKind::KvmRing, _) => Box::new(KvmLog::new(Arc::clone(&life.slots))),
            (LogKind::KvmLogInOneStep, _) => Box::new(KvmLog::new(Arc::clone(&life.slots)).in_one_step()),
        };
        Ok(DirtyLogs::new(self.writers(), vec![log])?)
    }

    fn run(&self) -> Result<(), GuestError> {
        let life = self.life()?;
        life.body.gate.run();
        life.body.gate.all_live(KIND)
    }

    fn pause(&self) -> Result<(), GuestError> {
        let life = self.life()?;
        life.body.gate.pause();
        life.body.gate.all_live(KIND)
    }

    fn set_rate(&self, rate: Rate) {
        if let Ok(life) = self.life() {
            life.body.gate.set_rate(rate);
        }
    }

    fn throttle(&self, percent: u8) {
        if let Ok(life) = self.life() {
            life.body.gate.throttle(percent);
        }
    }

    fn writes(&self) -> u64 {
        self.life().map_or(0, |life| life.body.counters().iter().sum())
    }

    fn save(&self) -> Result<Vec<u8>, GuestError> {
        let life = self.paused("saving the state")?;
        let Body { plan, gate, seats } = &*life.body;
        let words = seats.iter().flat_map(|seat| registers_to(&seat.registers()));
        let extra = words.flat_map(u64::to_be_bytes).collect();
        Ok(State { plan: plan.clone(), rate: gate.rate(), writes: life.body.counters(), extra }.encode())
    }

    fn load(&self, state: &[u8]) -> Result<(), GuestError> {
        if self.life().is_ok() {
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
        self.live(state, false)
    }

    fn verify(&self) -> Result<Verified, GuestError> {
        let life = self.paused("looking at all memory")?;
        let mut code = [0; PAGE_LEN];
        let block = self.memory().block(0)?;
        block.read(0, &mut code)?;
        let expected = code::image(&life.body.plan);
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
        self.ram.verify(&life.body.plan, &life.body.counters())
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.body.gate.end();
        for thread in self.threads.drain(..) {
            // A panic of it was its own message.
            let _ = thread.join();
        }
    }
}
