//! For fuzzers and property tests: a session without a socket, and a device that does a little of everything.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::{Context, Waker};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::pwrite;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::fault::Faults;
use crate::message::Request;
use crate::postcopy::Postcopy;
use crate::session::{Answer, Session};
use crate::worker::Worker;
use crate::{Device, FrontEnd, MoreWork, QueueError, Ram, Vring};

/// Bytes of the guest's memory.
const MEMORY: u64 = 64 << 10;

/// Sums the lengths of descriptors, and gives back every other buffer at once.
#[derive(Default)]
struct TestDevice {
    held: Mutex<Vec<u16>>,
}

impl Device for TestDevice {
    fn features(&self) -> u64 {
        0x2e
    }

    fn num_queues(&self) -> usize {
        3
    }

    fn marks_written_memory(&self) -> bool {
        true
    }

    fn ack_features(&self, _features: u64) {}

    fn read_config(&self, _offset: u32, _into: &mut [u8]) {}

    fn write_config(&self, _offset: u32, _bytes: &[u8]) {}

    fn set_memory(&self, _memory: Arc<Ram>) {}

    fn front_end_connected(&self, _front_end: FrontEnd) {}

    fn process_queue(&self, _queue: usize, vring: &Vring) -> Result<MoreWork, QueueError> {
        let mut held = self.held.lock();
        for _ in 0..16 {
            let Some(chain) = vring.pop()? else { return Ok(MoreWork::No) };
            let head = chain.head_index();
            let bytes = chain.fold(0_u32, |sum, descriptor| sum.wrapping_add(descriptor.len()));
            if head % 2 == 0 {
                vring.add_used(head, bytes)?;
            } else {
                held.push(head);
            }
            if held.len() > 8 {
                match vring.add_used(held.remove(0), 0) {
                    Ok(()) | Err(QueueError::NotTaken { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            vring.notify()?;
        }
        Ok(MoreWork::Yes)
    }

    fn queue_stopped(&self, _queue: usize) {
        // Of all queues: a buffer that is not given back is lost to its driver only.
        self.reset();
    }

    fn reset(&self) {
        self.held.lock().clear();
    }
}

struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        bytes
    }
}

/// Plays the input to a device that does a little of everything, as [`play_to`].
pub fn play(input: &[u8]) -> usize {
    play_to(Arc::new(TestDevice::default()), input)
}

/// Plays the input as messages, writes of the guest to its memory, and processing of the queues. Returns how many
/// messages succeeded. The device's requests in flight need nothing but to be polled.
///
/// An input is a list of steps: a byte for the request, or (from 0xe0 on) a write to memory or (from 0xf0 on)
/// processing of the queues; then the descriptors that come with it (two bits each, at most two); then the length of
/// the body, and the body.
pub fn play_to(device: Arc<dyn Device>, input: &[u8]) -> usize {
    let Ok(memory) = memfd_create("fuzz", MemfdFlags::CLOEXEC) else { return 0 };
    let Ok(front_end) = FrontEnd::new() else { return 0 };
    if ftruncate(&memory, MEMORY).is_err() {
        return 0;
    }
    let faults = Arc::new(Faults::default());
    let Ok(worker) = Worker::new(device.clone(), front_end.clone(), device.num_queues(), faults.clone()) else {
        return 0;
    };
    let worker = Arc::new(worker);
    let mut session = Session::new(device, worker.clone(), (front_end, faults), Postcopy::new(None));
    let Some(mut thread) = worker.threads().next() else { return 0 };
    let mut context = Context::from_waker(Waker::noop());
    let (mut input, mut followed) = (Input(input), 0);
    while let Some(step) = input.byte() {
        if step >= 0xf0 {
            thread.take_kicks();
            let wanted = thread.take_pending() | u64::from(step & 7);
            thread.process(wanted, &mut context);
            // A message that stops a ring waits for them, on this thread.
            while thread.has_requests() {
                thread.process(0, &mut context);
            }
            continue;
        }
        if step >= 0xe0 {
            let (place, length) = (input.bytes(2), input.byte().unwrap_or(0));
            let at = place.iter().fold(0_u64, |at, &byte| at << 8 | u64::from(byte));
            let _ = pwrite(&memory, input.bytes(usize::from(length)), at);
            continue;
        }
        let (kinds, length) = (input.byte().unwrap_or(0), input.byte().unwrap_or(0));
        let descriptors =
            [kinds & 3, kinds >> 2 & 3].into_iter().filter_map(|kind| descriptor(kind, &memory)).collect();
        let body = input.bytes(usize::from(length));
        let request = Request::ALL.get(usize::from(step) % Request::ALL.len()).copied();
        if let Some(request) = request
            && let Ok(answer) = session.handle(request, body, descriptors)
        {
            followed += 1;
            if let (Answer::Body(answer), Request::GetConfig) = (answer, request) {
                assert!(answer.is_empty() || answer.len() == body.len(), "an answer is as long as its question");
            }
        }
    }
    session.end();
    assert!(worker.rings().iter().all(|ring| !ring.vring.is_running()), "no ring runs when the front end has gone");
    followed
}

fn descriptor(kind: u8, memory: &OwnedFd) -> Option<OwnedFd> {
    match kind {
        1 => memory.try_clone().ok(),
        2 => eventfd(0, EventfdFlags::CLOEXEC).ok(),
        3 => socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).ok().map(|(one, _)| one),
        _ => None,
    }
}

/// Writes an input step by step.
#[derive(Debug, Default)]
pub struct Script(Vec<u8>);

impl Script {
    /// An input: a front end that has set up ring 1 of 8 descriptors, and acknowledged these features of the device.
    /// Guest address 0x1000 has its descriptors, 0x2000 what is available, 0x3000 what is used.
    pub fn with_ring(features: u64) -> Self {
        let mut script = Self::default();
        let at = |offset: u64| (1 << 20) + offset;
        script.message(Request::GetFeatures, 0, &[]);
        script.message(Request::SetProtocolFeatures, 0, &longs(&[0xb229]));
        script.message(Request::SetFeatures, 0, &longs(&[features | 1 << 32 | 1 << 30 | 1 << 29]));
        script.message(Request::SetMemTable, 1, &[words(&[1, 0]), longs(&[0, MEMORY, at(0), 0])].concat());
        script.message(Request::GetInflightFd, 0, &[longs(&[0, 0]), vec![3, 0, 8, 0]].concat());
        script.start_ring(0);
        script
    }

    /// Sets ring 1 up, and starts it.
    pub fn start_ring(&mut self, base: u32) {
        let at = |offset: u64| (1 << 20) + offset;
        self.message(Request::SetVringNum, 0, &words(&[1, 8]));
        self.message(Request::SetVringBase, 0, &words(&[1, base]));
        self.message(
            Request::SetVringAddr,
            0,
            &[words(&[1, 0]), longs(&[at(0x1000), at(0x3000), at(0x2000), 0])].concat(),
        );
        self.message(Request::SetVringCall, 3, &longs(&[1]));
        self.message(Request::SetVringKick, 2, &longs(&[1]));
        self.message(Request::SetVringEnable, 0, &words(&[1, 1]));
    }

    /// A message of the front end, with descriptors of these kinds.
    pub fn message(&mut self, request: Request, kinds: u8, body: &[u8]) {
        let number = Request::ALL.iter().position(|&other| other == request).unwrap_or(0);
        self.0.extend([u8::try_from(number).unwrap_or(0), kinds, u8::try_from(body.len()).unwrap_or(0)]);
        self.0.extend_from_slice(body);
    }

    /// The guest writes at most 255 bytes to its memory.
    pub fn write(&mut self, place: u16, bytes: &[u8]) {
        let [high, low] = place.to_be_bytes();
        self.0.extend([0xe0, high, low, u8::try_from(bytes.len()).unwrap_or(0)]);
        self.0.extend_from_slice(bytes);
    }

    /// All queues are processed.
    pub fn process(&mut self) {
        self.0.push(0xf7);
    }

    /// The input.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_le_bytes()).collect()
}

/// A well-formed input: a front end that sets up a ring with one buffer, processing of it, and the ring stopped and
/// started.
pub fn seed() -> Vec<u8> {
    let mut script = Script::with_ring(0);
    // A descriptor of 16 bytes, and one buffer that begins with it.
    script.write(0x1000, &longs(&[0x5000, 16]));
    script.write(0x2000, &[0, 0, 1, 0, 0, 0]);
    script.process();
    script.message(Request::GetConfig, 0, &words(&[0, 4, 0, 0]));
    // The VM stops, continues, and is reset.
    for base in [1, 0] {
        script.message(Request::GetVringBase, 0, &words(&[1, 0]));
        script.message(Request::SetFeatures, 0, &longs(&[1 << 32 | 1 << 30 | 1 << 29]));
        script.start_ring(base);
    }
    script.message(Request::GetVringBase, 0, &words(&[1, 0]));
    script.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_seed_is_followed_to_its_end() {
        assert_eq!(play(&seed()), 29);
    }

    proptest! {
        #[test]
        fn nothing_that_a_front_end_or_a_guest_says_makes_it_panic(
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            more in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut input = seed();
            for (place, byte) in edits {
                let place = place.index(input.len());
                input[place] = byte;
            }
            input.extend(more);
            play(&input);
        }
    }
}
