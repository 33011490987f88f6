//! A device, a guest's memory and a driver that inflates the balloon: what the guest gives is given back to the host.
//!
//!     cargo run -p limosa-balloon --example inflate
//!
//! The driver is played by this program: it puts one array of page numbers into queue 0. In a VMM the guest's kernel
//! does that.

use std::error::Error;
use std::sync::Arc;

use limosa_balloon::{Balloon, Features, GuestRam, MoreWork, Options, Strategy, Transport, VirtioQueueRing};
use limosa_memory::{BlockOptions, GuestMemory, rust_vmm};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// Pages that the guest gives: 4 MiB from address 8 MiB on.
const GIVEN: std::ops::Range<u64> = 8 * MIB / PAGE..12 * MIB / PAGE;

/// Connects the device with its driver: here there is nothing to interrupt or to wake.
struct Bus;

impl Transport for Bus {
    fn config_changed(&self) {
        println!("transport: the driver is to read the configuration");
    }

    fn kick(&self, queue: usize) {
        println!("transport: queue {queue} is to be worked on");
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let memory = Arc::new(GuestMemory::new(vec![BlockOptions::memfd("pc.ram", 16 * MIB).map()?])?);
    let block = memory.block(0)?;
    block.write(GIVEN.start * PAGE, &vec![7; 4 << 20])?;

    let balloon = Balloon::new(Options::default());
    balloon.set_memory(Arc::new(GuestRam::new(Arc::clone(&memory), Strategy::Auto)));
    balloon.attach(Arc::new(Bus));
    balloon.ack_features(Features::STATS_VQ);
    balloon.set_target(12 * MIB)?;
    println!("device: {:?}", balloon.size());

    let guest = rust_vmm::export(&memory)?;
    let ring = VirtioQueueRing::new(offer_pages(&guest)?, &guest, || println!("transport: interrupt"));
    println!("memory: {} pages are populated", block.populated(block.pages())?.count());
    while balloon.process_queue(0, &ring)? == MoreWork::Yes {}
    println!("memory: {} pages are populated", block.populated(block.pages())?.count());
    for (name, count) in balloon.counters().iter().filter(|(_, count)| *count > 0) {
        println!("device: {name} {count}");
    }
    Ok(())
}

/// The driver's side: an array of page numbers at 16 KiB, and a split virtqueue with one buffer that holds it.
fn offer_pages<B: vm_memory::bitmap::Bitmap + 'static>(guest: &GuestMemoryMmap<B>) -> Result<Queue, Box<dyn Error>> {
    let numbers: Vec<u8> = GIVEN.filter_map(|page| u32::try_from(page).ok()).flat_map(u32::to_le_bytes).collect();
    guest.write_slice(&numbers, GuestAddress(0x4000))?;
    // The descriptor: address and length; flags and next stay 0.
    guest.write_obj(0x4000_u64.to_le(), GuestAddress(0x1000))?;
    guest.write_obj(u32::try_from(numbers.len())?.to_le(), GuestAddress(0x1008))?;
    // The available ring: index 1, so that its first entry, descriptor 0, is available.
    guest.write_obj(1_u16.to_le(), GuestAddress(0x2002))?;
    let mut queue = Queue::new(256)?;
    queue.set_desc_table_address(Some(0x1000), None);
    queue.set_avail_ring_address(Some(0x2000), None);
    queue.set_used_ring_address(Some(0x3000), None);
    queue.set_ready(true);
    Ok(queue)
}
