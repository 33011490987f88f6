//! The world outside a VM: the far end of its network, which remembers each frame.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use crate::stage::wait_for;

/// Every line that a guest's syslogd has sent by UDP, and the other frames.
#[derive(Debug, Clone)]
pub(crate) struct Outside {
    seen: Arc<Mutex<Vec<Seen>>>,
    link: Arc<Mutex<Option<UnixStream>>>,
}

#[derive(Debug, Clone)]
struct Seen {
    at: Instant,
    frame: Vec<u8>,
}

impl Outside {
    /// Listens at this socket, as QEMU's stream back end and passt do.
    pub(crate) fn listen(path: &Path) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let outside = Self { seen: Arc::default(), link: Arc::default() };
        let shared = outside.clone();
        // It ends with the test program.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                *shared.link.lock().unwrap() = Some(stream.try_clone().unwrap());
                shared.read(stream);
            }
        });
        outside
    }

    fn read(&self, mut stream: UnixStream) {
        let mut length = [0; 4];
        while stream.read_exact(&mut length).is_ok() {
            let mut frame = vec![0; usize::try_from(u32::from_be_bytes(length)).unwrap()];
            stream.read_exact(&mut frame).unwrap();
            self.seen.lock().unwrap().push(Seen { at: Instant::now(), frame });
        }
    }

    /// Sends a frame to the VM.
    pub(crate) fn send(&self, frame: &[u8]) {
        let link = wait_for("the gate to connect", || self.link.lock().unwrap().as_ref()?.try_clone().ok());
        let length = u32::try_from(frame.len()).unwrap().to_be_bytes();
        (&link).write_all(&[&length[..], frame].concat()).unwrap();
    }

    /// The numbers `count=N.` in all frames, in the order in which they came.
    pub(crate) fn counts(&self) -> Vec<u64> {
        let seen = self.seen.lock().unwrap();
        let number = |seen: &Seen| {
            let text = String::from_utf8_lossy(&seen.frame);
            text.split_once("count=")?.1.split_once('.')?.0.parse().ok()
        };
        seen.iter().filter_map(number).collect()
    }

    /// Waits until `count` more numbers have come.
    pub(crate) fn wait_counts(&self, count: usize) {
        let before = self.counts().len();
        wait_for("numbers from the guest", || (self.counts().len() >= before + count).then_some(()));
    }

    /// The moment of the first frame since `from` that this accepts, if it has come.
    pub(crate) fn first_since(&self, from: Instant, accept: impl Fn(&[u8]) -> bool) -> Option<Instant> {
        let seen = self.seen.lock().unwrap();
        seen.iter().find(|seen| seen.at >= from && accept(&seen.frame)).map(|seen| seen.at)
    }

    /// Expects that each number came once and in its order, from 1.
    #[track_caller]
    pub(crate) fn assert_whole(&self) {
        let counts = self.counts();
        let wrong = counts.iter().zip(1..).position(|(count, expected)| *count != expected);
        if let Some(at) = wrong {
            let around = &counts[at.saturating_sub(3)..(at + 4).min(counts.len())];
            panic!("number {} is not the one after its predecessor: {around:?}", counts[at]);
        }
    }
}
