//! The guest's serial port: a thread drains it into lines with their times, so that the guest never waits for us.
//!
//! Law: a caller that asks what the guest has written so far gets all of it, however far the thread is.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, ioctl_fionread};
use rustix::net::{RecvFlags, recv};

/// How long a guest may take for a line: generous, because tests run in parallel.
pub(crate) const LINE: Duration = Duration::from_secs(120);

/// One line that the guest wrote.
#[derive(Debug, Clone)]
pub struct Line {
    /// When its end arrived here.
    pub at: Instant,
    /// The text without its line end.
    pub text: String,
}

#[derive(Debug, Default)]
struct Received {
    lines: Vec<Line>,
    unfinished: Vec<u8>,
    /// Bytes that were taken from the socket, which happens under the lock alone.
    taken: u64,
    closed: bool,
}

/// The serial port of a running VM.
#[derive(Debug)]
pub struct Serial {
    stream: UnixStream,
    shared: Arc<(Mutex<Received>, Condvar)>,
}

impl Serial {
    /// Connects to the socket of a character device.
    ///
    /// # Errors
    /// No process listens there.
    pub fn connect(path: &Path) -> Result<Self> {
        Self::over(UnixStream::connect(path).with_context(|| format!("the serial port {}", path.display()))?)
    }

    /// The port at the other end of a socket.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn over(stream: UnixStream) -> Result<Self> {
        let reader = stream.try_clone().context("the serial port")?;
        let shared = Arc::new((Mutex::default(), Condvar::new()));
        let writer = Arc::clone(&shared);
        std::thread::spawn(move || drain(&reader, &writer));
        Ok(Self { stream, shared })
    }

    /// How many lines the guest has written: the position from which [`Serial::wait_from`] looks for new ones.
    pub fn mark(&self) -> usize {
        self.so_far().lines.len()
    }

    /// Every line so far.
    pub fn lines(&self) -> Vec<Line> {
        self.so_far().lines.clone()
    }

    /// Waits until what is in the socket now has become lines.
    fn so_far(&self) -> MutexGuard<'_, Received> {
        let mut received = self.lock();
        let written = received.taken + ioctl_fionread(&self.stream).unwrap_or(0);
        let not_yet = |received: &mut Received| received.taken < written && !received.closed;
        self.shared.1.wait_while(&mut received, not_yet);
        received
    }

    /// The first line at or after position `from` that `wanted` accepts, with its position.
    ///
    /// # Errors
    /// None within `limit`, or the VM is gone; the message holds the last lines.
    pub fn wait_from(&self, from: usize, limit: Duration, wanted: impl Fn(&str) -> bool) -> Result<(usize, Line)> {
        let end = Instant::now() + limit;
        let mut received = self.lock();
        let mut next = from;
        loop {
            while let Some(line) = received.lines.get(next) {
                if wanted(&line.text) {
                    return Ok((next, line.clone()));
                }
                next += 1;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || received.closed {
                let tail: Vec<&str> =
                    received.lines.iter().rev().take(5).rev().map(|line| line.text.as_str()).collect();
                let why = if received.closed { "the serial port was closed" } else { "time is up" };
                bail!("the line waited for did not come ({why}, limit {limit:?}); last lines: {tail:?}");
            }
            self.shared.1.wait_for(&mut received, left);
        }
    }

    /// Sends one line to the guest.
    ///
    /// # Errors
    /// The VM is gone.
    pub fn send(&self, line: &str) -> Result<()> {
        (&self.stream).write_all(format!("{line}\n").as_bytes()).context("writing to the serial port")
    }

    fn lock(&self) -> MutexGuard<'_, Received> {
        self.shared.0.lock()
    }
}

impl Drop for Serial {
    fn drop(&mut self) {
        // Ends the reading thread; it fails only if the VM is gone already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

fn drain(stream: &UnixStream, shared: &(Mutex<Received>, Condvar)) {
    let mut buffer = [0; 4096];
    loop {
        // Any failure shows again at the call below.
        let _ = poll(&mut [PollFd::new(stream, PollFlags::IN)], None);
        let mut received = shared.0.lock();
        let length = match recv(stream, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => break,
            Ok((_, length)) => length,
            Err(Errno::AGAIN | Errno::INTR) => continue,
            Err(_) => break,
        };
        let at = Instant::now();
        received.taken += length as u64;
        for &byte in buffer.iter().take(length) {
            match byte {
                b'\n' => {
                    let text = String::from_utf8_lossy(&std::mem::take(&mut received.unfinished)).into_owned();
                    received.lines.push(Line { at, text });
                }
                b'\r' => {}
                other => received.unfinished.push(other),
            }
        }
        shared.1.notify_all();
    }
    shared.0.lock().closed = true;
    shared.1.notify_all();
}
