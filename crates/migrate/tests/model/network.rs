//! A network in memory whose steps, delays and cut follow from a seed, so that a failure can be repeated by it.
//!
//! Its clock counts steps: pieces of at most some KiB that one of the ends writes or reads. Offsets of cuts and delays
//! are bytes, so they do not depend on the speed of the machine.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use limosa_channel::{Channel, TransferHook};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use super::live::random;

/// The variables of the first seed, and of the number of seeds.
const SEED: &str = "LIMOSA_CHAOS_SEED";
const TRIALS: &str = "LIMOSA_CHAOS_TRIALS";

/// Most bytes of a step.
const STEP_MAX: u64 = 96 << 10;
/// A delayed end continues after this time even if the clock stands still: the other end may wait for it.
const DELAY_MAX: Duration = Duration::from_millis(3);

/// The direction in which a channel is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    ToDestination,
    ToSource,
}

/// The place of a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CutAt {
    pub way: Way,
    /// Bytes of that direction that arrive.
    pub offset: u64,
}

struct Wire {
    seed: u64,
    cut: Option<CutAt>,
    /// Steps of both ends.
    clock: Mutex<u64>,
    ticked: Condvar,
    /// Both ends, for as long as they may be cut.
    ends: Mutex<Option<[OwnedFd; 2]>>,
}

/// A network between a source and a destination.
#[derive(Clone)]
pub struct Network(Arc<Wire>);

impl Network {
    /// Returns the ends for source and destination. `on_step` is called on every step of the source's writes, on the
    /// thread that writes.
    pub fn new(
        seed: u64,
        cut: Option<CutAt>,
        on_step: impl Fn(u64) + Send + Sync + 'static,
    ) -> (Channel, Channel, Self) {
        let (near, far) = net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let ends = [near.try_clone().unwrap(), far.try_clone().unwrap()];
        let (source, destination) = (Channel::from_fd(near).unwrap(), Channel::from_fd(far).unwrap());
        let (clock, ticked) = (Mutex::default(), Condvar::new());
        let network = Self(Arc::new(Wire { seed, cut, clock, ticked, ends: Mutex::new(Some(ends)) }));
        let free = || -> TransferHook { Box::new(|_| Ok(usize::MAX)) };
        let there = network.clone();
        let write: TransferHook = Box::new(move |offset| {
            on_step(offset);
            there.step(Way::ToDestination, offset)
        });
        source.set_transfer_hooks(free(), write);
        let back = network.clone();
        destination.set_transfer_hooks(free(), Box::new(move |offset| back.step(Way::ToSource, offset)));
        (source, destination, network)
    }

    /// Ends the connection: what has not been read is lost to nobody, but no byte follows.
    pub fn cut(&self) {
        if let Some(ends) = self.0.ends.lock().unwrap().take() {
            for end in ends {
                let _ = net::shutdown(&end, net::Shutdown::Both);
            }
        }
    }

    /// Bytes that may move at an offset of a direction.
    fn step(&self, way: Way, offset: u64) -> io::Result<usize> {
        let drawn = random(self.0.seed ^ offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (way as u64) << 60 | 1);
        if drawn.is_multiple_of(64) {
            self.wait(drawn >> 8 & 7);
        }
        *self.0.clock.lock().unwrap() += 1;
        self.0.ticked.notify_all();
        let step = 1 + (drawn >> 20) % STEP_MAX;
        let left = match self.0.cut {
            Some(cut) if cut.way == way => cut.offset.saturating_sub(offset),
            _ => u64::MAX,
        };
        if left == 0 {
            self.cut();
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(usize::try_from(step.min(left)).unwrap())
    }

    /// Waits for this number of steps.
    fn wait(&self, steps: u64) {
        let clock = self.0.clock.lock().unwrap();
        let until = *clock + steps;
        drop(self.0.ticked.wait_timeout_while(clock, DELAY_MAX, |now| *now < until).unwrap());
    }
}

/// The seeds of a test: `LIMOSA_CHAOS_TRIALS` of them, the first one `LIMOSA_CHAOS_SEED`.
pub fn seeds(first: u64, count: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().expect("a number"));
    let first = number(SEED).unwrap_or(first);
    first..first + number(TRIALS).unwrap_or(count)
}

/// Prints the seed of a case that panics.
pub struct SaySeed(pub u64);

impl Drop for SaySeed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed with seed {0}: repeat with {SEED}={0} {TRIALS}=1", self.0);
        }
    }
}
