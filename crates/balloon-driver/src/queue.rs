//! The driver's half of a split virtqueue (virtio 1.2, 2.7).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress, GuestMemory};

/// Descriptors of a queue, as of user-mode Linux.
pub const QUEUE: u16 = 256;
/// Bytes of a queue's buffer area.
pub(crate) const BUFFER: usize = 64 << 10;
/// Bytes of a queue without its buffers.
const AREA: usize = 8 << 10;

/// Offsets of the parts of a queue in its area.
const AVAILABLE: u64 = 16 * QUEUE as u64;
const USED: u64 = AVAILABLE + 1024;
/// Bytes from one queue to the next.
pub(crate) const STRIDE: u64 = (AREA + BUFFER) as u64;

/// Bytes of memory that the rings and buffers of a driver take.
pub const RINGS: usize = 5 * (AREA + BUFFER);

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// The rings are not accessible.
#[derive(Debug, thiserror::Error)]
#[error("the rings of the balloon's driver: {0}")]
pub struct RingError(String);

impl RingError {
    pub(crate) fn gone() -> Self {
        Self("the device is gone".into())
    }
}

impl From<vm_memory::GuestMemoryError> for RingError {
    fn from(error: vm_memory::GuestMemoryError) -> Self {
        Self(error.to_string())
    }
}

impl From<virtio_queue::Error> for RingError {
    fn from(error: virtio_queue::Error) -> Self {
        Self(error.to_string())
    }
}

/// A descriptor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Buffer {
    address: u64,
    length: u32,
    writable: bool,
}

impl Buffer {
    pub(crate) fn writable(address: u64, length: u64) -> Self {
        Self { address, length: u32::try_from(length).unwrap_or(u32::MAX), writable: true }
    }
}

/// A queue.
#[derive(Debug)]
pub(crate) struct DriverQueue<M> {
    memory: Arc<M>,
    base: u64,
    number: usize,
    /// Free descriptors.
    free: Vec<u16>,
    /// The descriptors of a chain, by its head.
    chains: Vec<Vec<u16>>,
    available: u16,
    used: u16,
}

impl<M: GuestMemory> DriverQueue<M> {
    pub(crate) fn new(memory: Arc<M>, base: u64, number: usize) -> Result<Self, RingError> {
        memory.write_slice(&[0; AREA], GuestAddress(base))?;
        let chains = vec![Vec::new(); usize::from(QUEUE)];
        Ok(Self { memory, base, number, free: (0..QUEUE).rev().collect(), chains, available: 0, used: 0 })
    }

    /// The queue, for the device to set it up.
    pub(crate) fn for_device(&self) -> Result<Queue, RingError> {
        let mut queue = Queue::new(QUEUE)?;
        queue.try_set_desc_table_address(GuestAddress(self.base))?;
        queue.try_set_avail_ring_address(GuestAddress(self.base + AVAILABLE))?;
        queue.try_set_used_ring_address(GuestAddress(self.base + USED))?;
        queue.set_ready(true);
        Ok(queue)
    }

    pub(crate) fn number(&self) -> usize {
        self.number
    }

    /// Puts bytes into the buffer area, to be read by the device.
    pub(crate) fn fill(&self, at: u64, bytes: &[u8]) -> Result<Buffer, RingError> {
        let address = self.base + AREA as u64 + at;
        self.memory.write_slice(bytes, GuestAddress(address))?;
        Ok(Buffer { address, length: u32::try_from(bytes.len()).unwrap_or(u32::MAX), writable: false })
    }

    /// Number of free descriptors, after those that the device has used are taken back.
    pub(crate) fn room(&mut self) -> Result<usize, RingError> {
        while self.used()?.is_some() {}
        Ok(self.free.len())
    }

    /// Makes a chain of buffers available; returns its head. `None`: there are not enough descriptors.
    pub(crate) fn add(&mut self, buffers: &[Buffer]) -> Result<Option<u16>, RingError> {
        let Some(rest) = self.free.len().checked_sub(buffers.len()) else { return Ok(None) };
        let chain = self.free.split_off(rest);
        let Some(head) = chain.first().copied() else { return Ok(None) };
        for (at, (descriptor, buffer)) in chain.iter().zip(buffers).enumerate() {
            let next = chain.get(at + 1).copied();
            let flags = next.map_or(0, |_| NEXT) | if buffer.writable { WRITE } else { 0 };
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&buffer.address.to_le_bytes());
            bytes[8..12].copy_from_slice(&buffer.length.to_le_bytes());
            bytes[12..14].copy_from_slice(&flags.to_le_bytes());
            bytes[14..].copy_from_slice(&next.unwrap_or(0).to_le_bytes());
            self.memory.write_slice(&bytes, GuestAddress(self.base + 16 * u64::from(*descriptor)))?;
        }
        if let Some(place) = self.chains.get_mut(usize::from(head)) {
            *place = chain;
        }
        let slot = self.base + AVAILABLE + 4 + 2 * u64::from(self.available % QUEUE);
        self.memory.write_obj(head.to_le(), GuestAddress(slot))?;
        self.available = self.available.wrapping_add(1);
        let index = GuestAddress(self.base + AVAILABLE + 2);
        self.memory.store(self.available.to_le(), index, Ordering::Release)?;
        Ok(Some(head))
    }

    /// The next chain that the device has used: its head.
    pub(crate) fn used(&mut self) -> Result<Option<u16>, RingError> {
        let index = self.memory.load::<u16>(GuestAddress(self.base + USED + 2), Ordering::Acquire)?;
        if u16::from_le(index) == self.used {
            return Ok(None);
        }
        let slot = self.base + USED + 4 + 8 * u64::from(self.used % QUEUE);
        let head = u32::from_le(self.memory.read_obj::<u32>(GuestAddress(slot))?);
        self.used = self.used.wrapping_add(1);
        let wrong = || RingError(format!("the device has used descriptor {head}, which it was not given"));
        let head = u16::try_from(head).map_err(|_| wrong())?;
        let chain = self.chains.get_mut(usize::from(head)).map(std::mem::take).unwrap_or_default();
        if chain.is_empty() {
            return Err(wrong());
        }
        self.free.extend(chain);
        Ok(Some(head))
    }
}
