//! The guest whose processors are threads of this process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use limosa_memory::GuestMemory;
use limosa_memory::dirty::{self, DirtyLog, DirtyLogs, UffdWpAsyncLog, UffdWpSyncLog, Writers};
use parking_lot::{Mutex, MutexGuard};

use super::built_in::{Guest, Verified};
use super::error::GuestError;
use super::gate::{Gate, Pace};
use super::options::{GuestKind, GuestOptions, LogKind, Rate};
use super::pattern::{Plan, Share};
use super::ram::{Damage, Ram};
use super::state::{State, new_state};

const KIND: GuestKind = GuestKind::Threads;

/// The guest.
pub(super) struct Threads {
    ram: Ram,
    log: LogKind,
    running: Mutex<Option<Arc<RunningWriters>>>,
}

/// A guest that has its state, and the threads of its writers.
struct RunningWriters {
    context: Arc<WriterContext>,
    threads: Vec<JoinHandle<()>>,
}

/// Shared with the threads of the writers.
struct WriterContext {
    ram: Ram,
    gate: Gate,
    plan: Plan,
    /// Pages written by each writer.
    writes: Vec<AtomicU64>,
    /// The damage that a writer found where it was about to write.
    damage: Mutex<Option<Damage>>,
}

impl Threads {
    pub(super) fn boot(memory: Arc<GuestMemory>, options: &GuestOptions) -> Result<Self, GuestError> {
        let guest = Self::receive(memory, options.log)?;
        let state = new_state(KIND, guest.ram.pages(), 0, 1, options)?;
        for page in 0..state.plan.layout.filled {
            guest.ram.store(page, state.plan.contents(page, 0));
        }
        guest.start(state)?;
        Ok(guest)
    }

    pub(super) fn receive(memory: Arc<GuestMemory>, log: LogKind) -> Result<Self, GuestError> {
        if matches!(log, LogKind::KvmLog | LogKind::KvmLogInOneStep | LogKind::KvmRing) {
            let why = "KVM's logs see what vCPUs write, and it has none: use one of userfaultfd's".into();
            return Err(GuestError::Options { kind: KIND, why });
        }
        Ok(Self { ram: Ram::new(memory), log, running: Mutex::new(None) })
    }

    fn start(&self, state: State) -> Result<(), GuestError> {
        let State { plan, rate, writes, .. } = state;
        let writes = writes.into_iter().map(AtomicU64::new).collect();
        let context =
            WriterContext { ram: self.ram.clone(), gate: Gate::new(rate), plan, writes, damage: Mutex::new(None) };
        let mut running = RunningWriters { context: Arc::new(context), threads: Vec::new() };
        for index in 0..running.context.plan.shares.len() {
            let context = Arc::clone(&running.context);
            context.gate.enter();
            let thread = std::thread::Builder::new().name(format!("guest {index}")).spawn(move || {
                let ended = catch_unwind(AssertUnwindSafe(|| context.write(index)));
                context.gate.leave(ended.err().map(|_| "it panicked".to_owned()));
            });
            let failed = |source| GuestError::Kernel { kind: KIND, operation: "a thread", source };
            running.threads.push(thread.map_err(failed).inspect_err(|_| running.context.gate.leave(None))?);
        }
        running.context.gate.pause();
        // The one before, if there was one, ends here.
        *self.slot() = Some(Arc::new(running));
        Ok(())
    }

    fn running(&self) -> Result<Arc<RunningWriters>, GuestError> {
        self.slot().clone().ok_or(GuestError::NoState)
    }

    fn paused(&self, what: &'static str) -> Result<Arc<RunningWriters>, GuestError> {
        let running = self.running()?;
        if running.context.gate.is_paused() { Ok(running) } else { Err(GuestError::NotPaused(what)) }
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<RunningWriters>>> {
        self.running.lock()
    }
}

impl WriterContext {
    /// The loop of a writer.
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
            self.damage.lock().get_or_insert(damage);
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
            LogKind::WpAsync => Box::new(UffdWpAsyncLog::new(memory)?),
            LogKind::WpThread => Box::new(UffdWpSyncLog::new(memory)?),
            _ => dirty::best_uffd_log(&memory)?,
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
        let WriterContext { plan, gate, .. } = &*running.context;
        let state =
            State { plan: plan.clone(), rate: gate.rate(), writes: running.context.counters(), extra: Vec::new() };
        Ok(state.encode())
    }

    fn load(&self, state: &[u8]) -> Result<(), GuestError> {
        if self.running().is_ok() {
            self.paused("loading a state")?;
        }
        self.start(State::decode(KIND, state, self.ram.pages(), 0)?)
    }

    fn verify(&self) -> Result<Verified, GuestError> {
        let running = self.paused("looking at all memory")?;
        let context = &running.context;
        if let Some(damage) = *context.damage.lock() {
            return Err(self.ram.damaged(damage, 1));
        }
        self.ram.verify(&context.plan, &context.counters())
    }
}

impl Drop for RunningWriters {
    fn drop(&mut self) {
        self.context.gate.end();
        for thread in self.threads.drain(..) {
            // A panic of it was its own message.
            let _ = thread.join();
        }
    }
}
