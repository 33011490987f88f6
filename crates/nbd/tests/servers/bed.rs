//! Servers that a test makes up.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use limosa_channel::Uri;
use limosa_nbd::protocol::Headers;
use limosa_nbd::protocol::handshake::{OptionCode, OptionReply, greeting, push_option_reply};
use limosa_nbd::protocol::reply::Subject;
use limosa_nbd::{ConnectOptions, NbdAddress, NbdStorage};
use limosa_storage::StorageError;
use tempfile::TempDir;

pub(crate) const SIZE: u64 = 1 << 20;
pub(crate) const SOON: Duration = Duration::from_secs(20);
/// Flags, flush, zeros, trim.
pub(crate) const FLAGS: u16 = 0x65;

/// The reply to a request with this cookie.
pub(crate) type Replies = Box<dyn Fn(u64) -> Vec<u8> + Send>;

/// A server of one client.
pub(crate) struct Liar {
    folder: TempDir,
    serving: Option<JoinHandle<()>>,
}

impl Liar {
    pub(crate) fn new(serve: impl FnOnce(UnixStream) + Send + 'static) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("s")).unwrap();
        let serving = thread::spawn(move || serve(listener.accept().unwrap().0));
        Self { folder, serving: Some(serving) }
    }

    /// One that agrees on these headers, and then does this with each request.
    pub(crate) fn agreeing(headers: Headers, replies: impl Fn(u64) -> Vec<u8> + Send + 'static) -> Self {
        Self::new(move |mut stream| {
            agree(&mut stream, headers, export(SIZE, FLAGS));
            while let Some(cookie) = request(&mut stream, headers) {
                if stream.write_all(&replies(cookie)).is_err() {
                    break;
                }
            }
        })
    }

    pub(crate) fn address(&self) -> NbdAddress {
        NbdAddress::new(Uri::Unix(self.folder.path().join("s")), "disk")
    }

    pub(crate) fn connect(&self) -> Result<Arc<NbdStorage>, StorageError> {
        self.silent_for(Duration::from_secs(5))
    }

    /// Connects, with a server that may be silent for this long while requests are in flight.
    pub(crate) fn silent_for(&self, time: Duration) -> Result<Arc<NbdStorage>, StorageError> {
        NbdStorage::connect(&self.address(), &ConnectOptions::default().timeouts(Duration::from_secs(5), time))
    }

    pub(crate) fn connect_within(&self, time: Duration) -> Result<Arc<NbdStorage>, StorageError> {
        NbdStorage::connect(&self.address(), &ConnectOptions::default().timeouts(time, time))
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        // One that was never asked still listens.
        let _ = UnixStream::connect(Path::new(&self.folder.path().join("s")));
        if let Some(serving) = self.serving.take() {
            let _ = serving.join();
        }
    }
}

pub(crate) fn export(size: u64, flags: u16) -> Vec<u8> {
    [&0_u16.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()
}

/// Receives an option. Returns its number.
pub(crate) fn option(stream: &mut UnixStream) -> Option<u32> {
    let mut header = [0; 16];
    stream.read_exact(&mut header).ok()?;
    let number = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
    stream.read_exact(&mut vec![0; usize::try_from(number(12)).unwrap()]).ok()?;
    Some(number(8))
}

/// The handshake of an honest server, whose export has this description.
pub(crate) fn agree(stream: &mut UnixStream, headers: Headers, description: Vec<u8>) {
    stream.write_all(&greeting()).unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
    while let Some(number) = option(stream) {
        let mut bytes = Vec::new();
        let has = match OptionCode::from_repr(number) {
            Some(OptionCode::ExtendedHeaders) => headers == Headers::Extended,
            Some(OptionCode::StructuredReply) => headers == Headers::Structured,
            Some(OptionCode::SetMetaContext) => {
                let context = [&9_u32.to_be_bytes()[..], b"base:allocation"].concat();
                push_option_reply(&mut bytes, number, OptionReply::MetaContext, &context);
                true
            }
            _ => true,
        };
        let go = number == OptionCode::Go as u32;
        if go {
            push_option_reply(&mut bytes, number, OptionReply::Info, &description);
        }
        push_option_reply(&mut bytes, number, if has { OptionReply::Ack } else { OptionReply::Unsupported }, b"");
        if stream.write_all(&bytes).is_err() || go {
            return;
        }
    }
}

/// Receives a request without a payload. Returns its cookie; `None`: it is the farewell, or nothing.
pub(crate) fn request(stream: &mut UnixStream, headers: Headers) -> Option<u64> {
    let mut header = vec![0; headers.request_len()];
    stream.read_exact(&mut header).ok()?;
    let is_farewell = header[6..8] == [0, 2];
    (!is_farewell).then(|| u64::from_be_bytes(header[8..16].try_into().unwrap()))
}

pub(crate) fn subject(headers: Headers, cookie: u64) -> Subject {
    Subject { headers, cookie, offset: 0 }
}
