//! A device behind a vhost-user socket, and the first two requests of a front end to it:
//!
//!     cargo run -p limosa-vhost --example config_space
//!
//! The device returns every buffer unread; its configuration is one byte. A VMM would continue with memory and rings.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::{io, thread};

use limosa_vhost::{Device, FrontEnd, MoreWork, QueueError, Ram, Server, Vring};

struct Sink;

impl Device for Sink {
    fn features(&self) -> u64 {
        0
    }

    fn num_queues(&self) -> usize {
        1
    }

    fn ack_features(&self, features: u64) {
        println!("device: the driver accepted {features:#x}");
    }

    fn read_config(&self, offset: u32, into: &mut [u8]) {
        into.fill(0);
        if let (0, Some(first)) = (offset, into.first_mut()) {
            *first = 42;
        }
    }

    fn write_config(&self, _offset: u32, _bytes: &[u8]) {}

    fn set_memory(&self, _memory: Arc<Ram>) {}

    fn front_end_connected(&self, front_end: FrontEnd) {
        println!("device: front end connected: {}", front_end.is_connected());
    }

    fn process_queue(&self, _queue: usize, vring: &Vring) -> Result<MoreWork, QueueError> {
        // One buffer a call, so that the ring can be stopped between two of them.
        let Some(chain) = vring.pop()? else { return Ok(MoreWork::No) };
        vring.add_used(chain.head_index(), 0)?;
        vring.notify()?;
        Ok(MoreWork::Yes)
    }

    fn queue_stopped(&self, _queue: usize) {}

    fn reset(&self) {}
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("sink.sock");
    let server = Server::bind(&path, Arc::new(Sink))?;
    let stopper = server.stopper();
    thread::scope(|scope| {
        let serving = scope.spawn(|| server.serve());
        let asked = ask(&path);
        stopper.stop();
        serving.join().map_err(|_| "the server panicked")??;
        Ok(asked?)
    })
}

/// Sends `VHOST_USER_GET_FEATURES` and `VHOST_USER_GET_QUEUE_NUM` (QEMU: docs/interop/vhost-user.rst); each reply has 8
/// bytes.
fn ask(path: &Path) -> io::Result<()> {
    let mut socket = UnixStream::connect(path)?;
    for (name, request) in [("features", 1_u32), ("queues", 17)] {
        // Request, flags (version 1), length of the body.
        let header: Vec<u8> = [request, 1, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
        socket.write_all(&header)?;
        let (mut header, mut body) = ([0; 12], [0; 8]);
        socket.read_exact(&mut header)?;
        socket.read_exact(&mut body)?;
        println!("front end: {name} {:#x}", u64::from_le_bytes(body));
    }
    Ok(())
}
