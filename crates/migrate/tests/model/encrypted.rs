//! Two ends that trust each other, and others who come to where they meet.

use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use limosa_channel::{Acceptor, Channel, ChannelError, Listener, Options, Tls, Uri};
use limosa_migrate::live::AcceptPreempt;
use limosa_testkit::{Authority, scratch};
use tempfile::TempDir;

/// Longer than a test takes.
const SOON: Duration = Duration::from_secs(30);

pub struct Meeting {
    folder: TempDir,
    pub listener: Listener,
}

impl Meeting {
    pub fn new() -> Self {
        let folder = scratch().unwrap();
        Authority::new().unwrap().equip(folder.path()).unwrap();
        let options = Options { tls: Some(Tls::server(folder.path(), true).unwrap()), ..Options::default() };
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), &options).unwrap();
        Self { folder, listener }
    }

    /// One that shakes hands when it is used.
    pub fn connect(&self) -> Result<Channel, ChannelError> {
        let tls = Tls::client(self.folder.path(), None).unwrap().with_deferred_handshake();
        Channel::connect(self.listener.local_uri(), &Options { tls: Some(tls), ..Options::default() })
    }

    /// The next one who is trusted.
    pub fn accept(&self) -> Result<Channel, ChannelError> {
        Acceptor::new(&self.listener).accept_within(SOON)
    }

    /// Waits for the next one who is trusted, while the destination does something else.
    pub fn doorkeeper(&self) -> AcceptPreempt<'_> {
        let mut acceptor = Acceptor::new(&self.listener);
        Box::new(move |wait| acceptor.poll(wait))
    }

    /// Both ends of a connection.
    pub fn pair(&self) -> (Channel, Channel) {
        thread::scope(|scope| {
            let far = scope.spawn(|| self.accept().unwrap());
            let near = self.connect().unwrap();
            near.complete_handshake().unwrap();
            near.set_timeouts(Some(SOON), Some(SOON)).unwrap();
            (near, far.join().unwrap())
        })
    }

    /// A peer that connects.
    pub fn stranger(&self) -> TcpStream {
        let Uri::Tcp { port, .. } = *self.listener.local_uri() else { unreachable!() };
        TcpStream::connect(("127.0.0.1", port)).unwrap()
    }
}
