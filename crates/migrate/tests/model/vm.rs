//! A VM that waits for its state, in a test.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use limosa_memory::dirty::Writers;
use limosa_memory::{BlockOptions, GuestMemory};
use limosa_migrate::{IncomingVm, VmError};
use limosa_page::PAGE_LEN;
use limosa_stream::OpaqueSection;

/// A VM: its memory, what was loaded into its devices, and how often it was started.
pub struct Vm {
    pub memory: Arc<GuestMemory>,
    pub loaded: Mutex<Vec<(String, u32, Vec<u8>)>>,
    pub started: AtomicU32,
    /// The part that it refuses: to take the state of a device of this name, or "start".
    pub refuses: Option<&'static str>,
    /// Whether the VMM panics where it refuses.
    pub panics: bool,
    pub users: Writers,
    /// Pages of block 0 that loading a device looks at, and what it found in the first byte of each.
    pub looks_at: Vec<u64>,
    pub seen: Mutex<Vec<u8>>,
    /// Whether a thread that waits for the VM to run may go on, and whether it runs.
    pub over: Mutex<Option<bool>>,
    pub changed: Condvar,
}

impl Vm {
    /// Blocks of private memory, of these numbers of pages.
    pub fn new(blocks: &[(&str, u64)]) -> Self {
        Self::of(blocks.iter().map(|(name, pages)| BlockOptions::anonymous(*name, pages * 4096)).collect())
    }

    pub fn of(blocks: Vec<BlockOptions>) -> Self {
        let blocks = blocks.into_iter().map(|options| options.map().unwrap()).collect();
        let memory = Arc::new(GuestMemory::new(blocks).unwrap());
        let (started, over, changed) = (AtomicU32::new(0), Mutex::default(), Condvar::new());
        let (loaded, seen, looks_at) = (Mutex::default(), Mutex::default(), Vec::new());
        let users = Writers::VCPUS;
        Self { memory, loaded, started, refuses: None, panics: false, users, looks_at, seen, over, changed }
    }

    pub fn started(&self) -> u32 {
        self.started.load(Ordering::SeqCst)
    }

    /// Waits until the VM runs, or never will: which.
    pub fn runs(&self) -> bool {
        let over = self.over.lock().unwrap();
        let (over, late) =
            self.changed.wait_timeout_while(over, Duration::from_secs(60), |over| over.is_none()).unwrap();
        assert!(!late.timed_out(), "the VM neither runs nor was given up");
        over.unwrap()
    }

    /// Lets those go on who wait for a VM that will not run.
    pub fn give_up(&self) {
        self.over.lock().unwrap().get_or_insert(false);
        self.changed.notify_all();
    }

    fn look(&self) {
        for page in &self.looks_at {
            let mut byte = [0];
            self.memory.block(0).unwrap().read(page * 4096, &mut byte).unwrap();
            self.seen.lock().unwrap().push(byte[0]);
        }
    }

    /// The first byte of a page, all of whose bytes must be it.
    pub fn fill_of(&self, block: usize, page: u64) -> u8 {
        let mut bytes = [0; PAGE_LEN];
        self.memory.block(block).unwrap().read(page * 4096, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "page {page} of block {block} is torn");
        bytes[0]
    }
}

impl IncomingVm for Vm {
    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    fn memory_users(&self) -> Writers {
        self.users
    }

    fn load_device(&self, section: OpaqueSection<'_>) -> Result<(), VmError> {
        if self.refuses == Some(section.name) {
            assert!(!self.panics, "the VMM is broken");
            return Err(format!("device {} does not take it", section.name).into());
        }
        self.look();
        self.loaded.lock().unwrap().push((section.name.to_owned(), section.instance, section.state.to_vec()));
        Ok(())
    }

    fn load_package(&self, sections: &[u8]) -> Result<(), VmError> {
        if let Some(device) = self.refuses.filter(|what| *what != "start") {
            return Err(format!("device {device} does not take it").into());
        }
        self.look();
        self.loaded.lock().unwrap().push(("package".to_owned(), 0, sections.to_vec()));
        Ok(())
    }

    fn start(&self) -> Result<(), VmError> {
        if self.refuses == Some("start") {
            return Err("a vCPU does not run".into());
        }
        self.started.fetch_add(1, Ordering::SeqCst);
        *self.over.lock().unwrap() = Some(true);
        self.changed.notify_all();
        Ok(())
    }
}
