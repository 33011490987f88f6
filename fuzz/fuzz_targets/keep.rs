//! Anything that connects to a keeper: greetings, and the stream of a limosa with its notes. The keeper never ends,
//! says how it went for each whom it let in, and its directory has whole checkpoints and nothing else.

#![no_main]

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{LazyLock, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use limosa_channel::{Listener, Options};
use limosa_fuzz::colo::{ANSWER_LENGTH, base, hello};
use limosa_migrate::Handle;
use limosa_protect::{KeepEvent, KeepOptions, KeepRequest, keep};
use limosa_qemu::JobContext;
use limosa_snapshot::{CHECKPOINT_NAME, Snapshot};

/// How long a keeper may take for what has ended.
const SOON: Duration = Duration::from_secs(20);
/// How long a keeper may take to say who has come, once it has closed the connection.
const AGAIN_AFTER: Duration = Duration::from_millis(100);
/// Bytes of a keeper's answer that lets a limosa in, before its text.
const WELCOME: usize = 16;

/// Something that a keeper says of a primary.
#[derive(Debug, PartialEq, Eq)]
enum Said {
    Connected,
    Ended,
}

/// A keeper that runs as long as the fuzzer.
struct Keeper {
    socket: PathBuf,
    directory: PathBuf,
    said: Mutex<Receiver<Said>>,
}

static KEEPER: LazyLock<Keeper> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("limosa-fuzz-keep-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let (socket, directory) = (folder.join("keeper"), folder.join("kept"));
    let uri = format!("unix:{}", socket.display()).parse().expect("an address");
    let listener = Listener::bind(&uri, &Options::default()).expect("a listener");
    let (say, said) = channel();
    let path = directory.clone();
    thread::spawn(move || {
        let (handle, notice, mut options) = (Handle::new(), |_: &str| {}, KeepOptions::default());
        options.lost_after = SOON;
        options.stall_timeout = SOON;
        let event = |event: &KeepEvent<'_>| {
            let said = match event {
                KeepEvent::Connected { .. } => Said::Connected,
                KeepEvent::Ended { .. } => Said::Ended,
                _ => return,
            };
            say.send(said).expect("the fuzzer listens");
        };
        let watch = JobContext::new(&handle, &notice);
        let standby = None;
        keep(KeepRequest { listener: &listener, directory: &path, options: &options, standby, watch, event: &event })
            .expect("it keeps on");
        unreachable!("nobody has told it to stop");
    });
    Keeper { socket, directory, said: Mutex::new(said) }
});

fn read_all(stream: &mut UnixStream) -> Vec<u8> {
    let mut answer = Vec::new();
    // What was not read when the keeper closed is reset.
    let _ = stream.read_to_end(&mut answer);
    answer
}

/// Expects whole checkpoints, if any.
fn check(directory: &Path) {
    for entry in std::fs::read_dir(directory).expect("a directory") {
        let name = entry.expect("an entry").file_name();
        assert_eq!(name, CHECKPOINT_NAME);
        Snapshot::open(&directory.join(name)).expect("it is whole");
    }
}

/// Sends bytes, and waits until the keeper has closed the connection.
fn send(mut stream: UnixStream, data: &[u8]) {
    let _ = stream.write_all(&data[..data.len().min(64 << 10)]);
    let _ = stream.shutdown(Shutdown::Write);
    read_all(&mut stream);
}

fn connect(keeper: &Keeper) -> UnixStream {
    let stream = UnixStream::connect(&keeper.socket).expect("it listens");
    stream.set_read_timeout(Some(SOON)).expect("a timeout");
    stream
}

fuzz_target!(|data: &[u8]| {
    let Some((&kind, data)) = data.split_first() else { return };
    let keeper = &*KEEPER;
    let said = keeper.said.lock().expect("one input at a time");
    if kind % 4 > 0 {
        let mut stream = connect(keeper);
        // One whose disks belong to the checkpoints, or not.
        stream.write_all(&hello(kind % 4 > 1)).expect("the buffer has room");
        let mut answer = [0; WELCOME];
        stream.read_exact(&mut answer).expect("it answers");
        if answer[8..12] != [0; 4] {
            // The one before is not quite over.
            return;
        }
        let text = u32::from_be_bytes([answer[12], answer[13], answer[14], answer[15]]);
        let mut room = vec![0; text as usize];
        stream.read_exact(&mut room).expect("a text");
        stream.write_all(&base().expect("it is well-formed")).expect("the buffer has room");
        stream.read_exact(&mut [0; ANSWER_LENGTH]).expect("the base is answered");
        send(stream, data);
        assert_eq!(said.recv_timeout(SOON).expect("it says who comes"), Said::Connected);
        assert_eq!(said.recv_timeout(SOON).expect("it says how it went"), Said::Ended);
    } else {
        let begun = Instant::now();
        loop {
            send(connect(keeper), data);
            if !data.starts_with(b"QEVM") {
                break;
            }
            // A bare stream is not answered: it is turned away without a word while the one before is not quite over.
            match said.recv_timeout(AGAIN_AFTER) {
                Ok(Said::Connected) => {
                    assert_eq!(said.recv_timeout(SOON).expect("it says how it went"), Said::Ended);
                    break;
                }
                Ok(Said::Ended) => panic!("nobody has come"),
                Err(_) => assert!(begun.elapsed() < SOON, "it does not say who comes"),
            }
        }
    }
    while said.try_recv().is_ok() {}
    check(&keeper.directory);
});
