//! Any bytes as what an NBD client sends: over a real qcow2 image, which stays sound, and the connection ends.

#![no_main]

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use libfuzzer_sys::fuzz_target;
use limosa_channel::Channel;
use limosa_export::nbd::{Limits, Server, ServerOptions};
use limosa_export::{Export, Exports};
use limosa_fuzz::image::{empty, open};
use limosa_fuzz::nbd::agreement;
use limosa_image::Disk;
use limosa_image::qcow2::{CheckOptions, check};
use limosa_storage::block_on;

fuzz_target!(|data: &[u8]| {
    let Some((&how, data)) = data.split_first() else { return };
    let storage = empty();
    let disk = open(&storage, false).expect("a sound image opens");
    let exports = Exports::new();
    let disk: Arc<dyn Disk> = disk;
    exports.add(Export::new("", Arc::clone(&disk)).expect("a name")).expect("the only one");
    let limits = Limits::default().bytes(1 << 20).requests(16);
    let server = Server::new(exports, ServerOptions::default().limits(limits)).expect("a server");
    let (near, mut far) = UnixStream::pair().expect("a pair");
    let mut bytes = agreement(how);
    // What fits into the socket's buffer with nobody to read it.
    bytes.extend_from_slice(&data[..data.len().min(32 << 10)]);
    far.write_all(&bytes).expect("the buffer has room");
    far.shutdown(Shutdown::Write).expect("a socket");
    let drain = thread::spawn(move || {
        let mut room = [0; 4096];
        while far.read(&mut room).is_ok_and(|got| got > 0) {}
    });
    server.serve_channel(Channel::from_fd(near.into()).expect("a socket")).expect("a thread");
    drain.join().expect("it only reads");
    block_on(disk.close()).expect("memory does not fail");
    let report = block_on(check(&storage, CheckOptions::default())).expect("memory does not fail");
    assert!(report.is_clean(), "{report:?}");
});
