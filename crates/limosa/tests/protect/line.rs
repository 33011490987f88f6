//! The line between two hosts: a proxy that is cut, stops or delays.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// A line to a TCP address.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    shared: Arc<Mutex<State>>,
    port: u16,
}

#[derive(Debug)]
struct State {
    /// Nothing passes, and nobody is told.
    stalled: bool,
    /// Connections are refused.
    cut: bool,
    /// Each piece takes this much longer.
    delay: Duration,
    open: Vec<TcpStream>,
}

impl Line {
    /// A line to `tcp:HOST:PORT`.
    pub(crate) fn to(address: &str) -> Self {
        let far = address.strip_prefix("tcp:").unwrap().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = State { stalled: false, cut: false, delay: Duration::ZERO, open: Vec::new() };
        let line = Self { shared: Arc::new(Mutex::new(state)), port };
        let shared = line.clone();
        // It ends with the test program.
        thread::spawn(move || {
            for near in listener.incoming() {
                let near = near.unwrap();
                if shared.shared.lock().unwrap().cut {
                    continue;
                }
                let Ok(far) = TcpStream::connect(&far) else { continue };
                for socket in [&near, &far] {
                    socket.set_nodelay(true).unwrap();
                    shared.shared.lock().unwrap().open.push(socket.try_clone().unwrap());
                }
                for (from, to) in [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)] {
                    let shared = shared.clone();
                    thread::spawn(move || shared.pass(from, to));
                }
            }
        });
        line
    }

    pub(crate) fn uri(&self) -> String {
        format!("tcp:127.0.0.1:{}", self.port)
    }

    fn pass(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(got) = from.read(&mut bytes) {
            let delay = self.shared.lock().unwrap().delay;
            thread::sleep(delay);
            while self.shared.lock().unwrap().stalled {
                thread::sleep(Duration::from_millis(5));
            }
            if got == 0 || to.write_all(&bytes[..got]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }

    /// Breaks all connections, and refuses others from now on.
    pub(crate) fn cut(&self) {
        let mut state = self.shared.lock().unwrap();
        state.cut = true;
        for socket in state.open.drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Connections are possible again.
    pub(crate) fn mend(&self) {
        let mut state = self.shared.lock().unwrap();
        (state.cut, state.stalled) = (false, false);
    }

    /// Whether nothing passes.
    pub(crate) fn stall(&self, stalled: bool) {
        self.shared.lock().unwrap().stalled = stalled;
    }

    pub(crate) fn delay(&self, delay: Duration) {
        self.shared.lock().unwrap().delay = delay;
    }
}
