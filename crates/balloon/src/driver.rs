//! A model of Linux's balloon driver, for tests and demonstrations (feature `driver`).
//!
//! It does to the device what the real one does, over real rings: arrays of 256 page numbers, one buffer of statistics that
//! comes and goes, free blocks that it holds until the device says DONE and that its shrinker takes back *without a word*,
//! reports of up to 32 blocks. For lists it waits for nobody: ids and blocks go onto the ring as long as there is room, and the
//! id of each list is written over that of the one before. Where the guest's free pages come from, its [`Pages`] say.
//!
//! A [`Machine`] stands between driver and device, where a VMM has a bus; its device may be behind a vhost-user server
//! (`FrontEnd`, with the feature `vhost-user` too). Either somebody works on its queues on a thread
//! of his own ([`Machine::worker`]), or the driver's own waiting does ([`Machine::work_if_no_worker`]), so that a test knows every step.
//!
//! ```
//! use std::sync::{Arc, Mutex};
//! use limosa_balloon::driver::{Blocks, Driver, Machine, RINGS};
//! use limosa_balloon::{Balloon, Features, GuestRam, Options, Strategy};
//! use limosa_memory::{BlockOptions, GuestMemory};
//! use vm_memory::{GuestAddress, GuestMemoryMmap};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory = Arc::new(GuestMemory::new(vec![BlockOptions::memfd("pc.ram", 64 << 20).map()?])?);
//! let balloon = Arc::new(Balloon::new(Options::default()));
//! balloon.memory(Arc::new(GuestRam::new(memory, Strategy::Auto)));
//!
//! // The rings may lie anywhere, here outside of what moves.
//! let rings = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(1 << 40), RINGS)])?;
//! let machine = Machine::new(balloon.clone(), Arc::new(rings), 1 << 40);
//! let free = Arc::new(Mutex::new(Blocks::new(16 << 20..64 << 20)));
//! let mut driver = Driver::probe(machine, free, Features::default())?;
//!
//! balloon.set_target(48 << 20)?;
//! while driver.poll()? {}
//! assert_eq!(balloon.size().actual, 48 << 20);
//! assert_eq!(balloon.counters().discarded_bytes, 16 << 20);
//! # Ok(()) }
//! ```

#[cfg(feature = "vhost-user")]
mod front_end;
mod machine;
mod pages;
mod queue;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use limosa_page::PAGE_SIZE;
use vm_memory::GuestMemory;

use crate::layout::{Features, Role};
#[cfg(feature = "vhost-user")]
pub use front_end::{FrontEnd, FrontEndError};
pub use machine::{DriverNotifier, Machine, RemoteDevice, Worker};
pub use pages::{Blocks, Pages};
use queue::{Buffer, DriverQueue};
pub use queue::{QUEUE, RINGS, RingError};

/// Page numbers of an array (`VIRTIO_BALLOON_ARRAY_PFNS_MAX`).
const ARRAY: usize = 256;
/// Blocks of a report (`PAGE_REPORTING_CAPACITY`).
const REPORT: usize = 32;
/// Blocks that one [`Driver::poll`] hints.
const HINTS: usize = 64;
/// Bytes of a hinted block: the largest that Linux's allocator has, 4 MiB on x86-64.
pub const BLOCK: u64 = 4 << 20;

/// A worker that dies is not waited for without end, but for this long at a time.
const LOOK: Duration = Duration::from_millis(50);

const NUM_PAGES: u32 = 0;
const ACTUAL: u32 = 4;
const COMMAND: u32 = 8;
const POISON: u32 = 12;
const STOP: u32 = 0;
const DONE: u32 = 1;

/// Where the id that begins a list stands: in one place for all lists, so a device that is behind finds the id of the last list in
/// the buffers of all. And where the one that ends them does.
const ID: u64 = 0;
const END: u64 = 8;

/// The driver. What it does, it does in [`poll`](Self::poll), on the caller's thread.
#[derive(Debug)]
pub struct Driver<M, P> {
    machine: Arc<Machine<M>>,
    pages: Arc<Mutex<P>>,
    features: Features,
    queues: [Option<DriverQueue<M>>; Role::ALL.len()],
    /// Page numbers in the balloon.
    balloon: Vec<u32>,
    array: usize,
    held: Shrinker,
    /// The command that was answered last, or is being answered.
    command: u32,
    /// Whether its list is not complete.
    telling: bool,
    /// The machine's count of events before the last look at the queues.
    seen: u64,
}

/// Free blocks that the driver holds because the device has not said DONE, and who takes them back when memory is short.
#[derive(Debug, Clone, Default)]
pub struct Shrinker {
    held: Arc<Mutex<Vec<Range<u64>>>>,
}

impl Shrinker {
    /// Takes back up to `blocks` of them, the last ones first, without telling the device: the guest may write them at once.
    pub fn take_back(&self, blocks: usize) -> Vec<Range<u64>> {
        let mut held = self.lock();
        let rest = held.len().saturating_sub(blocks);
        held.split_off(rest)
    }

    /// How many there are.
    pub fn held(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: GuestMemory + Send + Sync + 'static, P: Pages> Driver<M, P> {
    /// Takes the device: those of its features that are `wanted`, and what else [`Pages`] need.
    ///
    /// # Errors
    /// The rings have no room in the machine's memory.
    pub fn probe(machine: Arc<Machine<M>>, pages: Arc<Mutex<P>>, wanted: Features) -> Result<Self, RingError> {
        let features = machine.features().and(wanted);
        machine.begin(features);
        if features.has(Features::PAGE_POISON) {
            // Free pages are filled with zeros.
            machine.write_config(POISON, 0);
        }
        let mut queues = Role::ALL.map(|_| None);
        let roles = Role::ALL.into_iter().filter(|role| features.has(role.feature()));
        for (number, role) in roles.enumerate() {
            let queue = DriverQueue::new(machine.memory().clone(), machine.ring_address(number), number)?;
            machine.start(number, queue.for_device()?);
            if let Some(place) = queues.get_mut(role.index()) {
                *place = Some(queue);
            }
        }
        let mut driver = Self {
            machine,
            pages,
            features,
            queues,
            balloon: Vec::new(),
            array: ARRAY,
            held: Shrinker::default(),
            command: DONE,
            telling: false,
            seen: 0,
        };
        driver.give_statistics()?;
        Ok(driver)
    }

    /// Page numbers of an array: up to 16,384, if not Linux's 256.
    #[must_use]
    pub fn with_arrays_of(mut self, numbers: usize) -> Self {
        self.array = numbers.clamp(1, queue::BUFFER / 4);
        self
    }

    /// What was negotiated.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Pages in the balloon.
    pub fn balloon_pages(&self) -> usize {
        self.balloon.len()
    }

    /// Who takes hinted blocks back, from any thread.
    pub fn shrinker(&self) -> Shrinker {
        self.held.clone()
    }

    /// Does a bounded part of what there is to do. Whether it did something.
    ///
    /// # Errors
    /// The rings are not in the machine's memory any more, or the device is gone.
    pub fn poll(&mut self) -> Result<bool, RingError> {
        self.machine.work_if_no_worker();
        self.seen = self.machine.events();
        let sized = self.resize()?;
        let hinted = self.hint()?;
        let told = self.statistics()?;
        self.machine.work_if_no_worker();
        Ok(sized || hinted || told)
    }

    /// Waits until there may be something to do since the last [`poll`](Self::poll), at most for `time`.
    pub fn wait(&self, time: Duration) {
        self.machine.wait(self.seen, time);
    }

    /// Puts pages that are free anyway out of the device's sight until it says that it has seen the report: up to 32 blocks of
    /// `length` bytes. How many there were.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn report(&mut self, length: u64) -> Result<usize, RingError> {
        if self.queue(Role::Reporting).is_none() {
            return Ok(0);
        }
        let mut blocks = Vec::new();
        while blocks.len() < REPORT
            && let Some(start) = self.pages().allocate(length)
        {
            blocks.push(start..start + length);
        }
        if !blocks.is_empty() {
            let buffers: Vec<_> = blocks.iter().map(|block| Buffer::writable(block.start, length)).collect();
            self.tell(Role::Reporting, &buffers)?;
            let mut pages = self.pages();
            blocks.iter().for_each(|block| pages.free(block.clone()));
        }
        Ok(blocks.len())
    }

    /// Gives all pages back and lets the device go.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn unload(mut self) -> Result<(), RingError> {
        while !self.balloon.is_empty() {
            self.deflate(self.balloon.len())?;
        }
        let held = self.held.take_back(usize::MAX);
        let mut pages = self.pages();
        held.into_iter().for_each(|block| pages.free(block));
        drop(pages);
        self.machine.end();
        Ok(())
    }

    fn pages(&self) -> MutexGuard<'_, P> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queue(&mut self, role: Role) -> Option<&mut DriverQueue<M>> {
        self.queues.get_mut(role.index())?.as_mut()
    }

    fn config(&self, offset: u32) -> u32 {
        self.machine.read_config(offset)
    }

    /// Makes buffers available and waits until the device has used them.
    fn tell(&mut self, role: Role, buffers: &[Buffer]) -> Result<(), RingError> {
        let machine = Arc::clone(&self.machine);
        let Some(queue) = self.queue(role) else { return Ok(()) };
        let Some(head) = queue.add(buffers)? else { return Ok(()) };
        machine.kick(queue.number());
        loop {
            let seen = machine.events();
            match queue.used()? {
                Some(used) if used == head => return Ok(()),
                Some(_) => {}
                None if !machine.has_device() => return Err(RingError::gone()),
                None => machine.wait(seen, LOOK),
            }
        }
    }

    fn resize(&mut self) -> Result<bool, RingError> {
        let target = self.config(NUM_PAGES) as usize;
        match target.checked_sub(self.balloon.len()) {
            Some(0) => Ok(false),
            Some(missing) => self.inflate(missing),
            None => self.deflate(self.balloon.len() - target),
        }
    }

    fn inflate(&mut self, missing: usize) -> Result<bool, RingError> {
        let mut numbers = Vec::new();
        while numbers.len() < missing.min(self.array)
            && let Some(address) = self.pages().allocate(PAGE_SIZE)
        {
            numbers.push(number_of(address));
        }
        if numbers.is_empty() {
            return Ok(false);
        }
        self.send_array(Role::Inflate, &numbers)?;
        self.balloon.extend(numbers);
        self.say_actual();
        Ok(true)
    }

    fn deflate(&mut self, superfluous: usize) -> Result<bool, RingError> {
        let rest = self.balloon.len() - superfluous.min(self.array).min(self.balloon.len());
        let numbers = self.balloon.split_off(rest);
        if numbers.is_empty() {
            return Ok(false);
        }
        self.send_array(Role::Deflate, &numbers)?;
        let mut pages = self.pages();
        for number in numbers {
            let start = u64::from(number) * PAGE_SIZE;
            pages.free(start..start + PAGE_SIZE);
        }
        drop(pages);
        self.say_actual();
        Ok(true)
    }

    fn send_array(&mut self, role: Role, numbers: &[u32]) -> Result<(), RingError> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let Some(queue) = self.queue(role) else { return Ok(()) };
        let buffer = queue.fill(0, &bytes)?;
        self.tell(role, &[buffer])
    }

    fn say_actual(&self) {
        let actual = u32::try_from(self.balloon.len()).unwrap_or(u32::MAX);
        self.machine.write_config(ACTUAL, actual);
    }

    /// Gives the device its buffer back, filled anew, if it has asked for that.
    fn statistics(&mut self) -> Result<bool, RingError> {
        let Some(queue) = self.queue(Role::Statistics) else { return Ok(false) };
        if queue.used()?.is_none() {
            return Ok(false);
        }
        self.give_statistics()?;
        Ok(true)
    }

    fn give_statistics(&mut self) -> Result<(), RingError> {
        let entries = self.pages().statistics();
        let machine = Arc::clone(&self.machine);
        let Some(queue) = self.queue(Role::Statistics) else { return Ok(()) };
        let bytes: Vec<u8> =
            entries.iter().flat_map(|(tag, value)| tag.to_le_bytes().into_iter().chain(value.to_le_bytes())).collect();
        let buffer = queue.fill(0, &bytes)?;
        queue.add(&[buffer])?;
        machine.kick(queue.number());
        Ok(())
    }

    /// Answers the command in the configuration.
    fn hint(&mut self) -> Result<bool, RingError> {
        if !self.features.has(Features::FREE_PAGE_HINT) {
            return Ok(false);
        }
        let command = self.config(COMMAND);
        if self.telling && command != self.command {
            self.end_list()?;
        }
        if command == DONE {
            let held = self.held.take_back(usize::MAX);
            let some = !held.is_empty();
            let mut pages = self.pages();
            held.into_iter().for_each(|block| pages.free(block));
            return Ok(some);
        }
        if command != STOP && command != self.command {
            self.command = command;
            self.telling = true;
            self.send_id(ID, command)?;
        }
        let mut told = false;
        for _ in 0..HINTS {
            if !self.telling {
                break;
            }
            let Some(start) = self.pages().allocate(BLOCK) else {
                self.end_list()?;
                return Ok(true);
            };
            if !self.send_block(start)? {
                self.pages().free(start..start + BLOCK);
                break;
            }
            // From here on the shrinker may have it, also before the device has seen it.
            self.held.lock().push(start..start + BLOCK);
            told = true;
        }
        Ok(told)
    }

    /// Whether there was room for it.
    fn send_block(&mut self, start: u64) -> Result<bool, RingError> {
        let machine = Arc::clone(&self.machine);
        let Some(queue) = self.queue(Role::Hint) else { return Ok(false) };
        // The last descriptor is for the end of the list.
        let room = queue.room()? > 1;
        if room {
            queue.add(&[Buffer::writable(start, BLOCK)])?;
            machine.kick(queue.number());
        }
        Ok(room)
    }

    fn end_list(&mut self) -> Result<(), RingError> {
        self.telling = false;
        self.send_id(END, STOP)
    }

    /// Sends what stands in one of the two fields for ids, and waits for nobody. An id that has no room in the ring is not sent.
    fn send_id(&mut self, field: u64, id: u32) -> Result<(), RingError> {
        let machine = Arc::clone(&self.machine);
        let Some(queue) = self.queue(Role::Hint) else { return Ok(()) };
        let buffer = queue.fill(field, &id.to_le_bytes())?;
        if queue.room()? > 0 {
            queue.add(&[buffer])?;
            machine.kick(queue.number());
        }
        Ok(())
    }
}

fn number_of(address: u64) -> u32 {
    u32::try_from(address / PAGE_SIZE).unwrap_or(u32::MAX)
}
