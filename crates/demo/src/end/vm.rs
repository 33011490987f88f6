//! A built-in guest as the engines want a VM, and the witness that it runs at one end only.

use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use limosa_memory::dirty::{DirtyLogs, Writers};
use limosa_memory::{BlockOptions, FreePageHinting, GuestMemory, GuestRegion, PassedBlock};
use limosa_migrate::{IncomingVm, LiveVm, VmError};
use limosa_page::PAGE_SIZE;
use limosa_stream::{Configuration, DeviceSections, OpaqueSection};
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;

use super::orders::Coordinator;
use crate::error::DemoError;
use crate::guest::heap::HEAP_VERSION;
use crate::guest::{
    self, FreeHeap, Guest, GuestError, GuestKind, GuestOptions, HEAP, Heap, Rate, STATE_VERSION, Verified,
};
use crate::settings::Settings;
use crate::state::Role;
use crate::witness::Witness;

/// Name of the guest's RAM block; the only one, unless it has a heap.
const RAM: &str = "pc.ram";
/// Where the guest sees its heap.
const HEAP_AT: u64 = 4 << 30;
/// Tells the contents of heaps apart.
const HEAP_SEED: u32 = 7;
/// The device sections: the guest's own state, its heap's (whose name is its block's), and when it was paused.
const STATE: &str = "guest";
const CLOCK: &str = "stood-still-since";

/// How long a guest may take to its first write, in nanoseconds: in postcopy it may wait for a page first.
const PATIENCE_NS: u64 = 20_000_000_000;

/// The VM of an end.
pub(super) struct Vm {
    /// Missing until its memory was passed, where memory is passed.
    guest: OnceLock<Arc<dyn Guest>>,
    heap: Option<Heap>,
    settings: Settings,
    /// A page, to be shown as the memory of a VM that has none yet.
    nothing: GuestMemory,
    witness: Witness,
    coordinator: Arc<Coordinator>,
    /// When the guest was paused, by the clock of this machine in nanoseconds.
    stood: Mutex<Option<u64>>,
}

impl Vm {
    /// A source's VM has a guest that is paused at its beginning, a destination's one that waits for its state.
    pub(super) fn new(
        settings: &Settings,
        role: Role,
        witness: Witness,
        coordinator: Arc<Coordinator>,
    ) -> Result<Self, DemoError> {
        let nothing = map(BlockOptions::anonymous(RAM, PAGE_SIZE))?;
        let guest = OnceLock::new();
        let mut vm = Self {
            guest,
            heap: None,
            settings: settings.clone(),
            nothing,
            witness,
            coordinator,
            stood: Mutex::new(None),
        };
        if settings.hints {
            let memory = Arc::new(with_heap(settings.memory)?);
            vm.heap = Some(vm.make_heap(&memory, role)?);
            vm.make(memory, role)?;
        } else if role == Role::Source || !settings.same_host {
            let memory = Arc::new(map(BlockOptions::memfd(RAM, settings.memory))?);
            vm.make(memory, role)?;
        }
        Ok(vm)
    }

    /// Makes the guest's heap: it is paused. Its programs write as much as the rest of the guest.
    fn make_heap(&self, memory: &Arc<GuestMemory>, role: Role) -> Result<Heap, GuestError> {
        // KVM's logs see what vCPUs write, and the heap's programs are threads of this process.
        let marked = self.settings.guest == GuestKind::Kvm;
        let make = if role == Role::Source { Heap::boot } else { Heap::receive };
        make(memory, Rate::BytesPerSecond(self.settings.dirty_rate), HEAP_SEED, marked)
    }

    /// The source of the list of the guest's free pages, if there is one.
    pub(super) fn free_pages(&self) -> Option<Arc<dyn FreePageHinting>> {
        self.heap.as_ref().map(Heap::free_pages)
    }

    /// Makes the guest: it is paused.
    fn make(&self, memory: Arc<GuestMemory>, role: Role) -> Result<(), GuestError> {
        let settings = &self.settings;
        let (kind, log) = (settings.guest, settings.log);
        let guest = match role {
            Role::Source => {
                let rate = Rate::BytesPerSecond(settings.dirty_rate);
                guest::boot(kind, memory, &GuestOptions { rate, log, ..GuestOptions::default() })?
            }
            Role::Destination => guest::receive(kind, memory, log)?,
        };
        let guest = self.guest.get_or_init(|| guest.into());
        self.coordinator.has(Arc::clone(guest));
        Ok(())
    }

    fn guest(&self) -> Result<&Arc<dyn Guest>, GuestError> {
        self.guest.get().ok_or(GuestError::NoState)
    }

    /// Lets the guest run here.
    pub(super) fn run(&self) -> Result<(), VmError> {
        self.witness.run()?;
        if let Err(error) = self.guest().and_then(|guest| guest.run()) {
            let _ = self.witness.pause();
            return Err(error.into());
        }
        self.heap.iter().for_each(Heap::run);
        self.coordinator.runs(true);
        Ok(())
    }

    /// Logs for one migration.
    pub(super) fn logs(&self) -> Result<DirtyLogs, GuestError> {
        let logs = self.guest()?.dirty_logs()?;
        Ok(match self.heap.as_ref().and_then(Heap::log) {
            Some(log) => logs.with_log(log),
            None => logs,
        })
    }

    /// Looks at all of the guest's memory but what is free, pausing the guest for that long if it runs.
    pub(super) fn verify(&self, runs: bool) -> Result<(Verified, FreeHeap), VmError> {
        if runs {
            self.pause()?;
        }
        let verified = self.guest().and_then(|guest| guest.verify()).and_then(|mut verified| {
            let free = self.heap.as_ref().map(|heap| heap.verify(&mut verified)).transpose()?;
            Ok((verified, free.unwrap_or_default()))
        });
        if runs {
            self.resume()?;
        }
        Ok(verified?)
    }

    fn stood_since(&self) -> parking_lot::MutexGuard<'_, Option<u64>> {
        self.stood.lock()
    }

    /// Finds out when the guest first writes here, and with that how long it has been paused: the guest's own measure.
    fn measure_pause(&self, guest: Arc<dyn Guest>, before: u64) {
        let Some(since) = *self.stood_since() else { return };
        // A guest that writes nothing has no beat to be seen by.
        let (coordinator, idle) = (Arc::clone(&self.coordinator), self.settings.dirty_rate == 0);
        let watch = move || {
            let deadline = now().saturating_add(PATIENCE_NS);
            while !idle && guest.writes() == before {
                if now() >= deadline {
                    return;
                }
                thread::sleep(Duration::from_micros(20));
            }
            let stood = now().saturating_sub(since);
            coordinator.tell("downtime", json!(stood / 1_000_000));
            coordinator.stood_still(stood);
        };
        // Without the thread there is one figure less.
        let _ = thread::Builder::new().name("pause".into()).spawn(watch);
    }
}

impl LiveVm for Vm {
    fn configuration(&self) -> Configuration {
        Configuration::new("limosa-demo")
    }

    fn memory(&self) -> &GuestMemory {
        self.guest.get().map_or(&self.nothing, |guest| guest.memory())
    }

    fn writers(&self) -> Writers {
        let heap = if self.heap.is_some() { Writers::DEVICES } else { Writers::NONE };
        self.guest.get().map_or(Writers::NONE, |guest| guest.writers() | heap)
    }

    fn pause(&self) -> Result<(), VmError> {
        *self.stood_since() = Some(now());
        self.guest()?.pause()?;
        self.heap.iter().for_each(Heap::pause);
        self.coordinator.runs(false);
        Ok(self.witness.pause()?)
    }

    fn resume(&self) -> Result<(), VmError> {
        self.run()
    }

    fn device_sections(&self) -> Result<DeviceSections, VmError> {
        let mut sections = DeviceSections::new();
        sections.push(STATE, 0, STATE_VERSION.into(), &self.guest()?.save()?)?;
        if let Some(heap) = &self.heap {
            sections.push(HEAP, 0, HEAP_VERSION.into(), &heap.save())?;
        }
        let since = self.stood_since().unwrap_or_else(now);
        sections.push(CLOCK, 0, 1, &since.to_be_bytes())?;
        Ok(sections)
    }

    fn throttle(&self, percent: u8) -> Result<(), VmError> {
        self.guest()?.throttle(percent);
        self.heap.iter().for_each(|heap| heap.throttle(percent));
        Ok(())
    }
}

impl IncomingVm for Vm {
    fn memory(&self) -> &GuestMemory {
        self.guest.get().map_or(&self.nothing, |guest| guest.memory())
    }

    fn memory_users(&self) -> Writers {
        self.writers()
    }

    fn map_passed_memory(&self, blocks: Vec<PassedBlock>) -> Result<(), VmError> {
        if self.guest.get().is_some() {
            return Err("this end has received memory before; start another one".into());
        }
        // A file of memory may say that it has any length, for nothing: it is mapped only if it is what this end
        // expects.
        let expected = self.settings.memory;
        let passed = blocks.iter().fold(0_u64, |passed, block| passed.saturating_add(block.len()));
        if passed > expected {
            let why = format!("{passed} bytes of memory were passed, and this end's guest has at most {expected}");
            return Err(why.into());
        }
        let blocks = blocks.into_iter().map(|block| block.into_options().map()).collect::<Result<_, _>>()?;
        Ok(self.make(Arc::new(GuestMemory::new(blocks)?), Role::Destination)?)
    }

    fn load_device(&self, section: OpaqueSection<'_>) -> Result<(), VmError> {
        match (section.name, section.version) {
            (STATE, version) if version == u32::from(STATE_VERSION) => Ok(self.guest()?.load(section.state)?),
            (HEAP, version) if version == u32::from(HEAP_VERSION) => match &self.heap {
                Some(heap) => Ok(heap.load(section.state)?),
                None => Err("the guest here has no heap: both ends need --hints on".into()),
            },
            (CLOCK, 1) => {
                let since = section.state.try_into().map_err(|_| "the moment of the pause is not 8 bytes")?;
                *self.stood_since() = Some(u64::from_be_bytes(since));
                Ok(())
            }
            (name, version) => Err(format!("no device {name:?} of version {version} exists here").into()),
        }
    }

    fn start(&self) -> Result<(), VmError> {
        let guest = self.guest()?;
        let before = guest.writes();
        self.run()?;
        self.measure_pause(Arc::clone(guest), before);
        Ok(())
    }
}

/// Memory of one block.
fn map(block: BlockOptions) -> Result<GuestMemory, GuestError> {
    Ok(GuestMemory::new(vec![block.map()?])?)
}

/// Memory, half of it the guest's heap.
fn with_heap(bytes: u64) -> Result<GuestMemory, GuestError> {
    let half = (bytes / 2).next_multiple_of(PAGE_SIZE);
    let blocks = vec![BlockOptions::memfd(RAM, half).map()?, BlockOptions::memfd(HEAP, bytes - half).map()?];
    let region = |block: usize, guest_address| -> Option<GuestRegion> {
        Some(GuestRegion { guest_address, block, pages: blocks.get(block)?.pages() })
    };
    let regions = [region(0, 0), region(1, HEAP_AT)].into_iter().flatten().collect();
    Ok(GuestMemory::with_regions(blocks, regions)?)
}

/// The machine's clock, which both ends share, in nanoseconds.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = time.tv_sec.cast_unsigned();
    seconds.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec.cast_unsigned())
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, OwnedFd};

    use super::*;

    fn passed(bytes: u64) -> Vec<PassedBlock> {
        let file = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        let fd: OwnedFd = file.as_fd().try_clone_to_owned().unwrap();
        vec![PassedBlock::from_fd(RAM, bytes, fd).unwrap().unwrap()]
    }

    #[test]
    fn memory_that_is_longer_than_the_guests_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let witness = Witness::open(&folder.path().join("witness"), "destination").unwrap();
        let settings = Settings { same_host: true, memory: 16 << 20, ..Settings::default() };
        let (coordinator, _orders) = Coordinator::new(Role::Destination, "d".into());
        let vm = Vm::new(&settings, Role::Destination, witness, coordinator).unwrap();
        // What costs the giver nothing would cost this end tables for all of it.
        for bytes in [(16 << 20) + PAGE_SIZE, 16 << 40] {
            let refused = vm.map_passed_memory(passed(bytes)).unwrap_err().to_string();
            assert!(refused.contains("this end's guest has at most 16777216"), "{refused}");
        }
        vm.map_passed_memory(passed(16 << 20)).unwrap();
        assert_eq!(IncomingVm::memory(&vm).blocks()[0].len(), 16 << 20);
    }
}
