//! Two ends that trust each other.

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use limosa_channel::{Channel, ChannelError, Listener, Options, Tls};
use limosa_testkit::{Authority, scratch};
use tempfile::TempDir;

/// Longer than a test takes.
pub(crate) const SOON: Duration = Duration::from_secs(60);

pub(crate) struct Bed {
    folder: TempDir,
    pub(crate) authority: Authority,
}

impl Bed {
    pub(crate) fn new() -> Self {
        let (folder, authority) = (scratch().unwrap(), Authority::new().unwrap());
        authority.equip(folder.path()).unwrap();
        Self { folder, authority }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A folder of another end, trusting this bed's authority, with nothing else in it.
    pub(crate) fn another(&self, name: &str) -> PathBuf {
        let path = self.folder().join(name);
        std::fs::create_dir(&path).unwrap();
        self.authority.trusted_in(&path).unwrap();
        path
    }

    pub(crate) fn client(&self) -> Options {
        with(Tls::client(self.folder(), None).unwrap())
    }

    pub(crate) fn server(&self) -> Options {
        with(Tls::server(self.folder(), true).unwrap())
    }

    /// A client and a server that are connected.
    pub(crate) fn pair(&self) -> (Channel, Channel) {
        connected(&self.server(), &self.client()).unwrap()
    }
}

/// Options with TLS that do not wait for ever.
pub(crate) fn with(tls: Tls) -> Options {
    Options { tls: Some(tls), read_timeout: Some(SOON), write_timeout: Some(SOON), ..Options::default() }
}

pub(crate) fn listen(options: &Options) -> Listener {
    Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), options).unwrap()
}

/// Has the server shake hands, in the background, by looking for bytes.
pub(crate) fn look(channel: &Channel) -> Result<(), ChannelError> {
    while channel.peek(&mut [0])?.is_none() {
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// The client's end and the server's, or what the client's failed with.
pub(crate) fn connected(server: &Options, client: &Options) -> Result<(Channel, Channel), ChannelError> {
    let listener = listen(server);
    thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let channel = listener.accept(Some(SOON)).unwrap();
            // It wakes when the client has written, or gone.
            let _ = look(&channel);
            channel
        });
        let connected = Channel::connect(listener.local_uri(), client);
        let channel = connected.inspect(|channel| channel.write_all(b"!").unwrap());
        let accepted = accepted.join().unwrap();
        let channel = channel?;
        accepted.read_exact(&mut [0]).unwrap();
        Ok((channel, accepted))
    })
}

/// Two plain ends of a connection.
pub(crate) fn plain() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

/// Bytes that are all different from their neighbours.
pub(crate) fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 16).to_le_bytes()[0]).collect()
}
