//! A forwarder between two unix sockets that can stall, delay, or cut a connection at an exact byte.
//!
//! It carries bytes only, no descriptors: made for migration channels, where every connection made to it becomes one to
//! the real listener.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use limosa_page::to_usize;
use parking_lot::{Condvar, Mutex, MutexGuard};

/// A direction through the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client of the proxy to the listener behind it: the migration stream.
    Forward,
    /// Back: the return path.
    Backward,
}

#[derive(Debug, Default)]
struct DirectionState {
    passed: u64,
    stalled: bool,
    cut_at: Option<u64>,
    stall_at: Option<u64>,
    delay: Duration,
}

#[derive(Debug, Default)]
struct State {
    directions: [DirectionState; 2],
    connections: Vec<(UnixStream, UnixStream)>,
    accepted: usize,
    /// Cuts so far: a connection that was being made when one came is cut too.
    cuts: u64,
    closed: bool,
}

impl DirectionState {
    /// Stalls if the byte has come at which to.
    fn stall_if_due(&mut self) {
        if self.stall_at.is_some_and(|at| self.passed >= at) {
            self.stall_at = None;
            self.stalled = true;
        }
    }
}

type SharedState = Arc<(Mutex<State>, Condvar)>;

/// The forwarder; dropping it closes every connection through it.
#[derive(Debug)]
pub struct Proxy {
    path: PathBuf,
    shared: SharedState,
}

impl Proxy {
    /// Listens at `path` and connects to `target` for each connection it gets. The target need not listen yet.
    ///
    /// # Errors
    /// The path cannot be bound.
    pub fn start(path: &Path, target: &Path) -> Result<Self> {
        let listener = UnixListener::bind(path).with_context(|| format!("binding {}", path.display()))?;
        let shared = SharedState::default();
        let (state, target) = (Arc::clone(&shared), target.to_path_buf());
        std::thread::spawn(move || accept(&listener, &target, &state));
        Ok(Self { path: path.to_path_buf(), shared })
    }

    /// Where to connect to.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that went through so far, over all connections.
    pub fn passed(&self, direction: Direction) -> u64 {
        state_of(&mut self.lock(), direction).passed
    }

    /// Connections made so far.
    pub fn accepted(&self) -> usize {
        self.lock().accepted
    }

    /// Lets nothing through until [`Proxy::go_on`]; the connections stay open.
    pub fn stall(&self, direction: Direction) {
        state_of(&mut self.lock(), direction).stalled = true;
    }

    /// Stalls when exactly `byte` bytes in all have gone through in this direction.
    pub fn stall_at(&self, direction: Direction, byte: u64) {
        let mut state = self.lock();
        let flow = state_of(&mut state, direction);
        flow.stall_at = Some(byte);
        flow.stall_if_due();
    }

    /// Waits until this direction is stalled: false if that does not come about in time.
    pub fn wait_stalled(&self, direction: Direction, within: Duration) -> bool {
        let not_yet = |state: &mut State| !state_of(state, direction).stalled;
        !self.shared.1.wait_while_for(&mut self.lock(), not_yet, within).timed_out()
    }

    /// Ends a stall.
    pub fn go_on(&self, direction: Direction) {
        state_of(&mut self.lock(), direction).stalled = false;
        self.shared.1.notify_all();
    }

    /// Closes all connections, both ways, when exactly `byte` bytes in all have gone through in this direction.
    pub fn cut_at(&self, direction: Direction, byte: u64) {
        state_of(&mut self.lock(), direction).cut_at = Some(byte);
        self.shared.1.notify_all();
    }

    /// Closes all connections now; new ones are accepted.
    pub fn cut(&self) {
        cut(&mut self.lock());
        self.shared.1.notify_all();
    }

    /// Holds every piece back for `delay` before it is passed on.
    pub fn delay(&self, direction: Direction, delay: Duration) {
        state_of(&mut self.lock(), direction).delay = delay;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.shared)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let mut state = self.lock();
        state.closed = true;
        cut(&mut state);
        drop(state);
        self.shared.1.notify_all();
        // Wakes the accepting thread, which then sees that all is over.
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
    }
}

fn lock(shared: &SharedState) -> MutexGuard<'_, State> {
    shared.0.lock()
}

fn state_of(state: &mut State, direction: Direction) -> &mut DirectionState {
    let [forward, backward] = &mut state.directions;
    match direction {
        Direction::Forward => forward,
        Direction::Backward => backward,
    }
}

fn cut(state: &mut State) {
    state.cuts += 1;
    for (a, b) in state.connections.drain(..) {
        // Either may be closed by its other end already.
        let _ = a.shutdown(Shutdown::Both);
        let _ = b.shutdown(Shutdown::Both);
    }
}

fn accept(listener: &UnixListener, target: &Path, shared: &SharedState) {
    while let Ok((near, _)) = listener.accept() {
        let state = lock(shared);
        if state.closed {
            return;
        }
        let cuts = state.cuts;
        drop(state);
        // A refused connection is closed again: the caller sees what it would see without the proxy, only later.
        let Ok(far) = UnixStream::connect(target) else { continue };
        let (Ok(near_too), Ok(far_too)) = (near.try_clone(), far.try_clone()) else { continue };
        let (Ok(near_kept), Ok(far_kept)) = (near.try_clone(), far.try_clone()) else { continue };
        let mut state = lock(shared);
        if state.closed {
            return;
        }
        state.accepted += 1;
        state.connections.push((near_kept, far_kept));
        if state.cuts != cuts {
            cut(&mut state);
        }
        drop(state);
        let (there, back) = (Arc::clone(shared), Arc::clone(shared));
        std::thread::spawn(move || forward(near, far, Direction::Forward, &there));
        std::thread::spawn(move || forward(far_too, near_too, Direction::Backward, &back));
    }
}

/// Passes bytes on until one side closes; the close is passed on too, for this direction alone.
fn forward(mut from: UnixStream, mut to: UnixStream, direction: Direction, shared: &SharedState) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let length = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        let mut piece = &buffer[..length];
        while !piece.is_empty() {
            let (count, delay) = admit(shared, direction, piece.len());
            if count == 0 {
                return;
            }
            if !delay.is_zero() {
                std::thread::sleep(delay);
            }
            let (now, later) = piece.split_at(count.min(piece.len()));
            if to.write_all(now).is_err() {
                // Tell the sender, as a direct connection would.
                let _ = from.shutdown(Shutdown::Both);
                return;
            }
            piece = later;
            let mut state = lock(shared);
            let flow = state_of(&mut state, direction);
            flow.passed += now.len() as u64;
            flow.stall_if_due();
            shared.1.notify_all();
            if flow.cut_at.is_some_and(|at| flow.passed >= at) {
                flow.cut_at = None;
                cut(&mut state);
                return;
            }
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// Waits while the direction is stalled; says how many of `wanted` bytes may go (0: all is over) and how long to hold
/// them.
fn admit(shared: &SharedState, direction: Direction, wanted: usize) -> (usize, Duration) {
    let mut state = lock(shared);
    loop {
        if state.closed {
            return (0, Duration::ZERO);
        }
        let flow = state_of(&mut state, direction);
        if !flow.stalled {
            let left = flow.cut_at.map_or(u64::MAX, |at| at.saturating_sub(flow.passed));
            if left == 0 {
                flow.cut_at = None;
                cut(&mut state);
                return (0, Duration::ZERO);
            }
            let left = flow.stall_at.map_or(left, |at| left.min(at.saturating_sub(flow.passed)));
            return (wanted.min(to_usize(left)), flow.delay);
        }
        shared.1.wait(&mut state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Through {
        proxy: Proxy,
        near: UnixStream,
        far: UnixStream,
        _folder: tempfile::TempDir,
    }

    fn through() -> Through {
        let folder = crate::scratch().unwrap();
        let listener = UnixListener::bind(folder.path().join("real")).unwrap();
        let proxy = Proxy::start(&folder.path().join("proxy"), &folder.path().join("real")).unwrap();
        let near = UnixStream::connect(proxy.path()).unwrap();
        let far = listener.accept().unwrap().0;
        for stream in [&near, &far] {
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        }
        Through { proxy, near, far, _folder: folder }
    }

    fn read(stream: &mut UnixStream, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn bytes_go_both_ways_and_a_close_goes_through() {
        let mut t = through();
        t.near.write_all(b"there").unwrap();
        assert_eq!(read(&mut t.far, 5), b"there");
        t.far.write_all(b"back").unwrap();
        assert_eq!(read(&mut t.near, 4), b"back");
        t.near.shutdown(Shutdown::Write).unwrap();
        assert_eq!(t.far.read(&mut [0; 1]).unwrap(), 0);
        assert_eq!((t.proxy.passed(Direction::Forward), t.proxy.accepted()), (5, 1));
    }

    #[test]
    fn a_connection_is_cut_after_exactly_the_bytes_asked_for() {
        let mut t = through();
        t.proxy.cut_at(Direction::Forward, 100_001);
        t.near.write_all(&[7; 100_000]).unwrap();
        // The sender may see the cut while it writes the rest.
        let _ = t.near.write_all(&[7; 1000]);
        let mut all = Vec::new();
        t.far.read_to_end(&mut all).unwrap();
        assert_eq!(all.len(), 100_001);
        assert_eq!(t.near.read(&mut [0; 1]).unwrap(), 0);
    }

    #[test]
    fn a_stalled_connection_passes_nothing_until_it_goes_on() {
        let mut t = through();
        t.proxy.stall(Direction::Forward);
        t.near.write_all(b"wait").unwrap();
        t.far.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert!(t.far.read(&mut [0; 4]).is_err());
        t.proxy.go_on(Direction::Forward);
        t.far.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert_eq!(read(&mut t.far, 4), b"wait");
    }

    #[test]
    fn a_connection_stalls_behind_exactly_the_bytes_asked_for() {
        let mut t = through();
        t.proxy.stall_at(Direction::Forward, 3);
        assert!(!t.proxy.wait_stalled(Direction::Forward, Duration::ZERO));
        t.near.write_all(b"here").unwrap();
        assert!(t.proxy.wait_stalled(Direction::Forward, Duration::from_secs(20)));
        assert_eq!(read(&mut t.far, 3), b"her");
        t.far.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert!(t.far.read(&mut [0; 1]).is_err());
        t.proxy.go_on(Direction::Forward);
        t.far.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert_eq!(read(&mut t.far, 1), b"e");
        t.proxy.stall_at(Direction::Forward, 1);
        assert!(t.proxy.wait_stalled(Direction::Forward, Duration::ZERO), "that byte is long past");
    }

    #[test]
    fn cutting_now_ends_a_stalled_connection_too() {
        let mut t = through();
        t.proxy.stall(Direction::Forward);
        t.near.write_all(b"lost").unwrap();
        t.proxy.cut();
        assert_eq!(t.far.read(&mut [0; 4]).unwrap(), 0);
    }

    #[test]
    fn dropping_the_proxy_ends_everything_through_it() {
        let mut t = through();
        drop(t.proxy);
        assert_eq!(t.far.read(&mut [0; 1]).unwrap(), 0);
        assert_eq!(t.near.read(&mut [0; 1]).unwrap(), 0);
    }
}
