//! Any bytes as the main channel of a live migration whose VM may come by postcopy, and of a second connection that
//! recovers it. The VM runs at most once, and one that has come as a whole has all of its memory.

#![no_main]

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use limosa_channel::Channel;
use limosa_fuzz::postcopy::Vm;
use limosa_migrate::live::LiveDestinationOptions;
use limosa_migrate::{Handle, IncomingOutcome, LiveDestination};

/// A connection on which these bytes come, and then no more.
fn connection(bytes: &[u8]) -> (Channel, JoinHandle<()>) {
    let (near, mut far) = UnixStream::pair().expect("a pair");
    // What fits into the socket's buffer with nobody to read it.
    far.write_all(&bytes[..bytes.len().min(64 << 10)]).expect("the buffer has room");
    far.shutdown(Shutdown::Write).expect("a socket");
    let drain = thread::spawn(move || {
        let mut room = [0; 4096];
        while far.read(&mut room).is_ok_and(|got| got > 0) {}
    });
    (Channel::from_fd(near.into()).expect("a socket"), drain)
}

/// Whether the VM runs here, and if it lacks memory, how it continues.
fn conclude<'a>(vm: &Vm, outcome: IncomingOutcome<'a, Vm>) -> Option<limosa_migrate::live::PostcopyPaused<'a, Vm>> {
    match outcome {
        IncomingOutcome::Running(_) => {
            assert_eq!(vm.started(), 1);
            vm.read().expect("memory that has come");
            None
        }
        IncomingOutcome::Failed(_) | IncomingOutcome::Undecided(_) => {
            assert_eq!(vm.started(), 0);
            None
        }
        IncomingOutcome::PostcopyPaused(paused) => {
            assert_eq!(vm.started(), 1);
            Some(paused)
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((cut, bytes)) = data.split_first_chunk::<2>() else { return };
    let (first, second) = bytes.split_at(usize::from(u16::from_le_bytes(*cut)).min(bytes.len()));
    let vm = Vm::new().expect("memory");
    let options = LiveDestinationOptions {
        answer_timeout: Some(Duration::from_secs(5)),
        end_of_stream_timeout: Duration::from_millis(1),
        populate: false,
        ..LiveDestinationOptions::default()
    };
    let (channel, drain) = connection(first);
    let outcome = LiveDestination::new(&vm, channel, &Handle::new()).options(options).run();
    let paused = conclude(&vm, outcome);
    drain.join().expect("it only reads");
    let Some(paused) = paused else { return };
    let (channel, drain) = connection(second);
    let recovered = conclude(&vm, paused.recover(channel, None, &Handle::new()));
    drain.join().expect("it only reads");
    if let Some(paused) = recovered {
        paused.discard();
    }
});
