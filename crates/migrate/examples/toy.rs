//! Moves a running VM between two threads, over a socket pair.
//!
//! `cargo run -p limosa-migrate --example toy` needs neither KVM nor QEMU nor root: the guest is a thread that writes
//! its memory. It shows what a VMM implements, [`LiveVm`] at the source and [`IncomingVm`] at the destination, and what
//! it does with an outcome. The example `vmm` does the same with a guest under KVM, in two processes.

use std::error::Error;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use limosa_channel::Channel;
use limosa_memory::dirty::{DirtyLogs, SoftwareDirtyBitmap, SoftwareDirtyLog, Writers};
use limosa_memory::{BlockOptions, GuestMemory};
use limosa_migrate::live::LiveDestinationOptions;
use limosa_migrate::{Handle, IncomingOutcome, IncomingVm, LiveDestination, LiveOutcome, LiveSource, LiveVm, VmError};
use limosa_page::{PAGE_SIZE, PageNumber, PageRange};
use limosa_stream::{Configuration, DeviceSections, OpaqueSection};

/// Pages of guest memory.
const PAGES: u64 = 1024;

/// A VM with one device: a counter of the guest's writes.
struct Toy {
    memory: GuestMemory,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    running: bool,
    writes: u64,
}

impl Toy {
    fn new() -> Result<Self, Box<dyn Error>> {
        let ram = BlockOptions::anonymous("ram", PAGES * PAGE_SIZE).map()?;
        Ok(Self { memory: GuestMemory::new(vec![ram])?, state: Mutex::default() })
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One step of the guest: it writes its counter into the next page. Whether the guest runs.
    fn step(&self, marker: &SoftwareDirtyBitmap) -> Result<bool, Box<dyn Error + Send + Sync>> {
        // Held over the write and its mark, so that a pause has all of both.
        let mut state = self.state();
        if state.running {
            state.writes += 1;
            let page = PageNumber(state.writes % PAGES);
            self.memory.block(0)?.write(page.offset(), &state.writes.to_le_bytes())?;
            marker.mark(0, PageRange::starting_at(page, 1));
        }
        Ok(state.running)
    }

    /// Returns the counter of each page, as the guest's last writes left it.
    fn counters(&self) -> Result<Vec<u64>, Box<dyn Error>> {
        let mut counters = Vec::new();
        for page in PageRange::whole_block(PAGES).iter() {
            let mut bytes = [0; 8];
            self.memory.block(0)?.read(page.offset(), &mut bytes)?;
            counters.push(u64::from_le_bytes(bytes));
        }
        Ok(counters)
    }
}

/// The source's side.
impl LiveVm for Toy {
    fn configuration(&self) -> Configuration {
        Configuration::new("toy-1")
    }

    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    fn writers(&self) -> Writers {
        Writers::VCPUS
    }

    fn pause(&self) -> Result<(), VmError> {
        self.state().running = false;
        Ok(())
    }

    fn resume(&self) -> Result<(), VmError> {
        self.state().running = true;
        Ok(())
    }

    fn device_sections(&self) -> Result<DeviceSections, VmError> {
        let mut sections = DeviceSections::new();
        sections.push("counter", 0, 1, &self.state().writes.to_le_bytes())?;
        Ok(sections)
    }
}

/// The destination's side.
impl IncomingVm for Toy {
    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    fn load_device(&self, section: OpaqueSection<'_>) -> Result<(), VmError> {
        match (section.name, section.version) {
            ("counter", 1) => self.state().writes = u64::from_le_bytes(section.state.try_into()?),
            (name, version) => return Err(format!("there is no device {name} of version {version}").into()),
        }
        Ok(())
    }

    fn start(&self) -> Result<(), VmError> {
        self.state().running = true;
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let (source, destination) = (Toy::new()?, Toy::new()?);
    let (near, far) = Channel::pair()?;
    let far = Channel::from_fd(far)?;

    // Every write of the guest is marked in this log. KVM's log, userfaultfd and the soft-dirty log are others.
    let log = SoftwareDirtyLog::new(&source.memory, Writers::VCPUS);
    let marker = log.bitmap();
    let logs = DirtyLogs::new(Writers::VCPUS, vec![Box::new(log)])?;

    source.state().running = true;
    let (sent, arrived) = thread::scope(|scope| {
        let guest = scope.spawn(|| {
            // It ends when the VM is paused for the last time.
            while source.step(&marker)? {
                thread::sleep(Duration::from_micros(20));
            }
            Ok::<_, Box<dyn Error + Send + Sync>>(())
        });
        let receiving = scope.spawn(|| {
            let handle = Handle::new();
            let options = LiveDestinationOptions::default();
            LiveDestination::new(&destination, far, &handle).options(options).run()
        });
        // Clones of these two stop the migration and watch it from other threads.
        let handle = Handle::new();
        let sent = LiveSource::new(&source, logs, near, &handle).destination_zeroed(true).run();
        let arrived = receiving.join().expect("the destination does not panic");
        guest.join().expect("the guest does not panic").map(|()| (sent, arrived))
    })
    .map_err(|error| error.to_string())?;

    match (sent, arrived) {
        (LiveOutcome::Completed(stats), IncomingOutcome::Running(_)) => {
            assert_eq!(source.counters()?, destination.counters()?, "memory differs");
            assert_eq!(source.state().writes, destination.state().writes, "the device's state differs");
            println!("moved in {} rounds, {:?} of downtime", stats.rounds.len(), stats.downtime);
            Ok(())
        }
        // The guest still belongs to the source, and runs there.
        (LiveOutcome::Resumed { error, .. }, _) => Err(error.into()),
        (sent, arrived) => Err(format!("{sent:?}; {arrived:?}").into()),
    }
}
