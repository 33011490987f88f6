//! The driver: what it does about its queues and about the device's configuration.

use std::sync::Arc;
use std::time::Duration;

use limosa_balloon::{Features, QueueRole};
use limosa_page::PAGE_SIZE;
use parking_lot::{Mutex, MutexGuard};
use vm_memory::GuestMemory;

use crate::machine::Machine;
use crate::pages::Pages;
use crate::queue::{BUFFER, Buffer, DriverQueue, RingError};
use crate::shrinker::Shrinker;

/// Number of page numbers of an array (`VIRTIO_BALLOON_ARRAY_PFNS_MAX`).
const ARRAY: usize = 256;
/// Number of blocks of a report (`PAGE_REPORTING_CAPACITY`).
const REPORT: usize = 32;
/// Blocks that one [`Driver::poll`] hints.
const HINTS: usize = 64;
/// Bytes of a hinted block: the largest that Linux's allocator has, 4 MiB on x86-64.
pub const BLOCK: u64 = 4 << 20;

/// Time limit of one wait: the worker may have ended.
const LOOK: Duration = Duration::from_millis(50);

const NUM_PAGES: u32 = 0;
const ACTUAL: u32 = 4;
const COMMAND: u32 = 8;
const POISON: u32 = 12;
const STOP: u32 = 0;
const DONE: u32 = 1;

/// The address of the id that begins a list: one field for all lists, so a device that is behind finds the id of the
/// last list in the buffers of all. And the address of the id that ends them.
const ID: u64 = 0;
const END: u64 = 8;

/// The driver. It works only in [`poll`](Self::poll), on the caller's thread.
#[derive(Debug)]
pub struct Driver<M, P> {
    machine: Arc<Machine<M>>,
    pages: Arc<Mutex<P>>,
    features: Features,
    queues: [Option<DriverQueue<M>>; QueueRole::ALL.len()],
    /// Page numbers in the balloon.
    balloon: Vec<u32>,
    array: usize,
    /// Bytes of a hinted block.
    block: u64,
    held: Shrinker,
    /// The command of the last list, or of the one that is being sent.
    command: u32,
    /// Whether its list is not complete.
    listing: bool,
    /// The machine's count of events before the last look at the queues.
    seen: u64,
}

impl<M: GuestMemory + Send + Sync + 'static, P: Pages> Driver<M, P> {
    /// Attaches to the device: accepts those of its features that are `wanted`.
    ///
    /// # Errors
    /// The rings have no room in the machine's memory.
    pub fn probe(machine: Arc<Machine<M>>, pages: Arc<Mutex<P>>, wanted: Features) -> Result<Self, RingError> {
        let features = machine.features().intersection(wanted);
        machine.begin(features);
        if features.has(Features::PAGE_POISON) {
            // Free pages are filled with zeros.
            machine.write_config(POISON, 0);
        }
        let mut queues = QueueRole::ALL.map(|_| None);
        let roles = QueueRole::ALL.into_iter().filter(|role| features.has(role.feature()));
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
            block: BLOCK,
            held: Shrinker::default(),
            command: DONE,
            listing: false,
            seen: 0,
        };
        driver.give_statistics()?;
        Ok(driver)
    }

    /// Number of page numbers of an array: up to 16,384, if not Linux's 256.
    #[must_use]
    pub fn with_arrays_of(mut self, numbers: usize) -> Self {
        self.array = numbers.clamp(1, BUFFER / 4);
        self
    }

    /// Bytes of a hinted block, if not Linux's [`BLOCK`].
    #[must_use]
    pub fn with_blocks_of(mut self, bytes: u64) -> Self {
        self.block = bytes;
        self
    }

    /// The negotiated features.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Pages in the balloon.
    pub fn balloon_pages(&self) -> usize {
        self.balloon.len()
    }

    /// A handle that takes hinted blocks back, from any thread.
    pub fn shrinker(&self) -> Shrinker {
        self.held.clone()
    }

    /// Does a bounded part of the pending work. Returns whether it did something.
    ///
    /// # Errors
    /// The rings are no longer in the machine's memory, or the device is gone.
    pub fn poll(&mut self) -> Result<bool, RingError> {
        self.machine.work_if_no_worker();
        self.seen = self.machine.events();
        let sized = self.resize()?;
        let hinted = self.hint()?;
        let filled = self.statistics()?;
        self.machine.work_if_no_worker();
        Ok(sized || hinted || filled)
    }

    /// Waits until there may be new work since the last [`poll`](Self::poll), for at most `time`.
    pub fn wait(&self, time: Duration) {
        self.machine.wait(self.seen, time);
    }

    /// Reports free pages, and keeps them allocated until the device has acknowledged the report: up to 32 blocks of
    /// `length` bytes. Returns the number of blocks.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn report(&mut self, length: u64) -> Result<usize, RingError> {
        if self.queue(QueueRole::Reporting).is_none() {
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
            self.send(QueueRole::Reporting, &buffers)?;
            let mut pages = self.pages();
            blocks.iter().for_each(|block| pages.free(block.clone()));
        }
        Ok(blocks.len())
    }

    /// Empties the balloon and detaches from the device.
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
        self.pages.lock()
    }

    fn queue(&mut self, role: QueueRole) -> Option<&mut DriverQueue<M>> {
        self.queues.get_mut(role.index())?.as_mut()
    }

    fn config(&self, offset: u32) -> u32 {
        self.machine.read_config(offset)
    }

    /// Makes buffers available and waits until the device has used them.
    fn send(&mut self, role: QueueRole, buffers: &[Buffer]) -> Result<(), RingError> {
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
        self.send_array(QueueRole::Inflate, &numbers)?;
        self.balloon.extend(numbers);
        self.write_actual();
        Ok(true)
    }

    fn deflate(&mut self, surplus: usize) -> Result<bool, RingError> {
        let rest = self.balloon.len() - surplus.min(self.array).min(self.balloon.len());
        let numbers = self.balloon.split_off(rest);
        if numbers.is_empty() {
            return Ok(false);
        }
        self.send_array(QueueRole::Deflate, &numbers)?;
        let mut pages = self.pages();
        for number in numbers {
            let start = u64::from(number) * PAGE_SIZE;
            pages.free(start..start + PAGE_SIZE);
        }
        drop(pages);
        self.write_actual();
        Ok(true)
    }

    fn send_array(&mut self, role: QueueRole, numbers: &[u32]) -> Result<(), RingError> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let Some(queue) = self.queue(role) else { return Ok(()) };
        let buffer = queue.fill(0, &bytes)?;
        self.send(role, &[buffer])
    }

    fn write_actual(&self) {
        let actual = u32::try_from(self.balloon.len()).unwrap_or(u32::MAX);
        self.machine.write_config(ACTUAL, actual);
    }

    /// Fills the statistics buffer again and gives it to the device, if the device has requested that.
    fn statistics(&mut self) -> Result<bool, RingError> {
        let Some(queue) = self.queue(QueueRole::Statistics) else { return Ok(false) };
        if queue.used()?.is_none() {
            return Ok(false);
        }
        self.give_statistics()?;
        Ok(true)
    }

    fn give_statistics(&mut self) -> Result<(), RingError> {
        let entries = self.pages().statistics();
        let machine = Arc::clone(&self.machine);
        let Some(queue) = self.queue(QueueRole::Statistics) else { return Ok(()) };
        let bytes: Vec<u8> =
            entries.iter().flat_map(|(tag, value)| tag.to_le_bytes().into_iter().chain(value.to_le_bytes())).collect();
        let buffer = queue.fill(0, &bytes)?;
        queue.add(&[buffer])?;
        machine.kick(queue.number());
        Ok(())
    }

    /// Follows the command in the configuration.
    fn hint(&mut self) -> Result<bool, RingError> {
        if !self.features.has(Features::FREE_PAGE_HINT) {
            return Ok(false);
        }
        let command = self.config(COMMAND);
        if self.listing && command != self.command {
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
            self.listing = true;
            self.send_id(ID, command)?;
        }
        let (mut hinted, block) = (false, self.block);
        for _ in 0..HINTS {
            if !self.listing {
                break;
            }
            let Some(start) = self.pages().allocate(block) else {
                self.end_list()?;
                return Ok(true);
            };
            if !self.send_block(start)? {
                self.pages().free(start..start + block);
                break;
            }
            // From here on the shrinker may take it, also before the device has seen it.
            self.held.hold(start..start + block);
            hinted = true;
        }
        Ok(hinted)
    }

    /// Returns whether there was room for it.
    fn send_block(&mut self, start: u64) -> Result<bool, RingError> {
        let (machine, block) = (Arc::clone(&self.machine), self.block);
        let Some(queue) = self.queue(QueueRole::Hint) else { return Ok(false) };
        // The last descriptor is for the end of the list.
        let room = queue.room()? > 1;
        if room {
            queue.add(&[Buffer::writable(start, block)])?;
            machine.kick(queue.number());
        }
        Ok(room)
    }

    fn end_list(&mut self) -> Result<(), RingError> {
        self.listing = false;
        self.send_id(END, STOP)
    }

    /// Sends one of the two fields for ids without waiting. An id that has no room in the ring is not sent.
    fn send_id(&mut self, field: u64, id: u32) -> Result<(), RingError> {
        let machine = Arc::clone(&self.machine);
        let Some(queue) = self.queue(QueueRole::Hint) else { return Ok(()) };
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
