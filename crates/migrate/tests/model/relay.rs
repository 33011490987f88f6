//! A network between two ends that can be cut.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use limosa_channel::{Channel, Shutdown, ZeroCopy};

use super::{lending_pair, pair};

/// Passes bytes on in both directions, until a number of them have gone from `near` to `far`; then cuts both.
pub struct Relay {
    near: Arc<Channel>,
    far: Arc<Channel>,
}

impl Relay {
    /// The ends for source and destination.
    pub fn new() -> (Channel, Channel, Self) {
        Self::between(pair(), pair())
    }

    /// The same; the source's end lends pages in this way over TCP.
    pub fn lending(zero_copy: ZeroCopy) -> (Channel, Channel, Self) {
        Self::between(lending_pair(zero_copy, true), pair())
    }

    fn between((source, near): (Channel, Channel), (far, destination): (Channel, Channel)) -> (Channel, Channel, Self) {
        (source, destination, Self { near: Arc::new(near), far: Arc::new(far) })
    }

    pub fn cut(&self) {
        for channel in [&self.near, &self.far] {
            let _ = channel.shutdown(Shutdown::Both);
        }
    }

    /// Runs until one side ends, or `limit` bytes of both directions together have passed.
    pub fn run(&self, limit: u64) {
        let left = AtomicU64::new(limit);
        thread::scope(|scope| {
            for (from, to) in [(&self.near, &self.far), (&self.far, &self.near)] {
                let left = &left;
                scope.spawn(move || {
                    let mut room = vec![0; 16 << 10];
                    while let Ok(got @ 1..) = from.read(&mut room) {
                        let take = |left: u64| Some(left.saturating_sub(got as u64));
                        let before = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).unwrap();
                        let may = usize::try_from(before).unwrap_or(usize::MAX).min(got);
                        if to.write_all(&room[..may]).is_err() || may < got {
                            break;
                        }
                    }
                    self.cut();
                });
            }
        });
    }
}
