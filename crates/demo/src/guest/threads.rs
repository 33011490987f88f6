//! The guest whose processors are threads of this process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use limosa_memory::GuestMemory;
use limosa_memory::dirty::{self, DirtyLog, DirtyLogs, WriteFaultLog, WriteProtectLog, Writers};

use super::gate::{Gate, Pace};
use super::pattern::{Plan, Share};
use super::ram::{Damage, Ram};
use super::state::State;
use super::{Guest, GuestError, GuestKind, GuestOptions, LogKind, Rate, Verified};

const KIND: GuestKind = GuestKind::Threads;

/// The guest.
pub(super) struct Threads {
    ram: Ram,
    log: LogKind,
    life: Mutex<Option<Arc<Life>>>,
}

/// What there is of a guest that has a state.
struct Life {
    body: Arc<Body>,
    threads: Vec<JoinHandle<()>>,
}

struct Body {
    ram: Ram,
    gate: Gate,
    plan: Plan,
    /// Pages written by each writer.
    writes: Vec<AtomicU64>,
    /// What a writer found where it was about to write.
    damage: Mutex<Option<Damage>>,
}

impl Threads {
    pub(super) fn boot(memory: Arc<GuestMemory>, options: &GuestOptions) -> Result<Self, GuestError> {
        let guest = Self::receive(memory, options.log)?;
        let state = super::new_state(KIND, guest.ram.pages(), 0, 1, options)?;
        for page in 0..state.plan.layout.filled {
            guest.ram.store(page, state.plan.contents(page, 0));
        }
        guest.live(state)?;
        Ok(guest)
    }

    pub(super) fn receive(memory: Arc<GuestMemory>, log: LogKind) -> Result<Self, GuestError> {
        if matches!(log, LogKind::KvmLog | LogKind::KvmLogInOneStep | LogKind::KvmRing) {
            let why = "KVM's logs see what vCPUs write, and it has none: use one of userfaultfd's".into();
            return Err(GuestError::Options { kind: KIND, why });
        }
        Ok(Self { ram: Ram::new(memory), log, life: Mutex::new(None) })
    }

    fn live(&self, state: State) -> Result<(), GuestError> {
        let State { plan, rate, writes, .. } = state;
        let writes = writes.into_iter().map(AtomicU64::new).collect();
        let body = Body { ram: self.ram.clone(), gate: Gate::new(rate), plan, writes, damage: Mutex::new(None) };
        let mut life = Life { body: Arc::new(body), threads: Vec::new() };
        for index in 0..life.body.plan.shares.len() {
            let body = Arc::clone(&life.body);
            body.gate.enter();
            let thread = std::thread::Builder::new().name(format!("guest {index}")).spawn(move || {
                let ended = catch_unwind(AssertUnwindSafe(|| body.write(index)));
                body.gate.leave(ended.err().map(|_| "it panicked".to_owned()));
            });
            let failed = |source| GuestError::Kernel { kind: KIND, operation: "a thread", source };
            life.threads.push(thread.map_err(failed).inspect_err(|_| life.body.gate.leave(None))?);
        }
        life.body.gate.pause();
        // The one before, if there was one, ends here.
        *self.slot() = Some(Arc::new(life));
        Ok(())
    }

    fn life(&self) -> Result<Arc<Life>, GuestError> {
        self.slot().clone().ok_or(GuestError::Unborn)
    }

    fn paused(&self, what: &'static str) -> Result<Arc<Life>, GuestError> {
        let life = self.life()?;
        if life.body.gate.is_paused() { Ok(life) } else { Err(GuestError::NotPaused(what)) }
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<Life>>> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Body {
    /// What a writer does all its life.
    fn write(&self, index: usize) {
        if let (Some(share), Some(count)) = (self.plan.shares.get(index), self.writes.get(index)) {
            let mut pace = Pace::default();
            while let Some(pages) = self.gate.admit(&mut pace) {
                for _ in 0..pages {
                    let number = count.load(Ordering::Relaxed);
                    self.write_one(share, number);
                    count.store(number + 1, Ordering::Relaxed);
                }
            }
        }
    }

    fn write_one(&self, share: &Share, number: u64) {
        let (page, generation) = share.write(number);
        // A guest that runs on memory that is not its own finds out here, and not only when it is asked.
        let expected = self.plan.contents(page, generation - 1).word(0);
        if let Some(found) = self.ram.first_word(page).filter(|found| *found != expected) {
            let damage = Damage { page, offset: 0, generation: generation - 1, expected, found };
            self.damage.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(damage);
        }
        self.ram.store(page, self.plan.contents(page, generation));
    }

    fn counters(&self) -> Vec<u64> {
        self.writes.iter().map(|writes| writes.load(Ordering::Relaxed)).collect()
    }
}

impl Guest for Threads {
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
        let memory = Arc::clone(self.memory());
        let log: Box<dyn DirtyLog> = match self.log {
            LogKind::WpAsync => Box::new(WriteProtectLog::new(memory)?),
            LogKind::WpThread => Box::new(WriteFaultLog::new(memory)?),
            _ => dirty::best_for(&memory)?,
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
        let Body { plan, gate, .. } = &*life.body;
        let state = State { plan: plan.clone(), rate: gate.rate(), writes: life.body.counters(), extra: Vec::new() };
        Ok(state.encode())
    }

    fn load(&self, state: &[u8]) -> Result<(), GuestError> {
        if self.life().is_ok() {
            self.paused("loading a state")?;
        }
        self.live(State::decode(KIND, state, self.ram.pages(), 0)?)
    }

    fn verify(&self) -> Result<Verified, GuestError> {
        let life = self.paused("looking at all memory")?;
        let body = &life.body;
        if let Some(damage) = *body.damage.lock().unwrap_or_else(PoisonError::into_inner) {
            return Err(self.ram.damaged(damage, 1));
        }
        self.ram.verify(&body.plan, &body.counters())
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
