//! The guest's work while it is protected, through its serial port.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::guest::{BEAT, Task};

/// How long beats may be missing: for a guest that hangs, not a measure.
const LIMIT: Duration = Duration::from_secs(60);

/// The guest's work besides beating.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Load {
    /// Nothing.
    None,
    /// It changes 32 MiB in turns of half a second.
    Moderate,
    /// It changes 57 MiB again as soon as it is done, with a pause of 20 ms in which it beats.
    Heavy,
    /// It writes 32 MiB in such turns, with what they have already.
    Same,
}

impl Load {
    /// Time from the end of a turn to the next one.
    fn rest(self) -> Option<Duration> {
        match self {
            Self::None => None,
            Self::Moderate => Some(Duration::from_millis(500)),
            Self::Heavy | Self::Same => Some(Duration::from_millis(20)),
        }
    }

    /// The task of a turn.
    fn task(self) -> Task {
        match self {
            Self::None | Self::Moderate => Task::Write,
            Self::Heavy => Task::WriteMore,
            Self::Same => Task::Rewrite,
        }
    }
}

/// The guest's output, counted by a thread that ends with the VM.
pub(super) struct Guest {
    beats: Arc<AtomicU64>,
}

impl Guest {
    /// Reads the serial port, and has the guest work from its first beat on.
    pub(super) fn start(serial: UnixStream, load: Load) -> Result<Self> {
        let beats = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&beats);
        let mut orders = serial.try_clone().context("the serial port")?;
        let mut order = move || orders.write_all(&[load.task().byte()]).is_ok();
        let read = move || {
            let (mut serial, mut bytes, mut next) = (serial, [0; 4096], load.rest().map(|rest| Instant::now() + rest));
            let mut works = false;
            while let Ok(got @ 1..) = serial.read(&mut bytes) {
                for byte in bytes.iter().take(got) {
                    if *byte == BEAT {
                        counted.fetch_add(1, Ordering::Relaxed);
                    } else if *byte == load.task().answer() {
                        works = false;
                        next = load.rest().map(|rest| Instant::now() + rest);
                    }
                }
                if !works && next.is_some_and(|next| Instant::now() >= next) {
                    works = order();
                }
            }
        };
        thread::Builder::new().name("serial".into()).spawn(read).context("a thread for the serial port")?;
        Ok(Self { beats })
    }

    /// Beats so far.
    pub(super) fn beats(&self) -> u64 {
        self.beats.load(Ordering::Relaxed)
    }

    /// Waits for this many beats.
    pub(super) fn wait_beats(&self, count: u64) -> Result<()> {
        let end = Instant::now() + LIMIT;
        while self.beats() < count {
            if Instant::now() >= end {
                bail!("the guest does not beat");
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Beats within this time from now on.
    pub(super) fn beats_in(&self, time: Duration) -> u64 {
        let before = self.beats();
        thread::sleep(time);
        self.beats().saturating_sub(before)
    }
}
