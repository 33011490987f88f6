//! From a connected socket to keys.
//!
//! The laws: it takes a bounded time and a bounded buffer; it never waits unless it is asked to; and
//! no byte behind the handshake goes through it: rustls is shown one record at a time, so that what follows the last
//! one stays where it is.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::kernel::KernelConnection;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, UnbufferedStatus};
use rustls::{ConnectionTrafficSecrets, Error, ExtractedSecrets};

use super::credentials::{Role, Tls};
use super::failure::TlsFailure;
use super::kernel::Key;
use super::record::{self, BODY_MAX, Decrypter, Encrypter, HEADER, NewKeys};

/// How long a peer may take, if nothing else was said: as long as a busy machine needs, and not as long as a stranger
/// likes.
pub(super) const WITHIN: Duration = Duration::from_secs(30);
/// Most bytes of a handshake that may be waiting to be understood: a chain of some dozen certificates.
const INCOMING_MAX: usize = 128 << 10;
/// The types that records have (RFC 8446, section 5.1).
const RECORD_TYPES: std::ops::RangeInclusive<u8> = 20..=23;
/// A fatal alert, that this is not what is spoken here (RFC 8446, section 6.2): who means to speak something else may
/// know it.
const UNEXPECTED: [u8; 7] = [21, 3, 3, 0, 2, 2, 10];
/// Bytes read at once.
const PIECE: usize = 16 << 10;

/// Whether there is time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// What can be done now.
    No,
    /// As long as a handshake may take.
    Yes,
}

/// What comes of a handshake.
pub(super) struct Agreed {
    pub(super) encrypter: Encrypter,
    pub(super) decrypter: Decrypter,
    pub(super) keys: Keys,
    /// The keys for sending and receiving, as the kernel takes them, if it is to have them.
    pub(super) for_kernel: Option<(Key, Key)>,
    /// What the peer has sent behind it.
    pub(super) rest: Vec<u8>,
}

enum Connection {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// The secret that new keys come from.
pub(super) enum Keys {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl NewKeys for Keys {
    fn next_sending(&mut self) -> Result<ConnectionTrafficSecrets, TlsFailure> {
        let next = match self {
            Self::Client(kernel) => kernel.update_tx_secret(),
            Self::Server(kernel) => kernel.update_tx_secret(),
        };
        Ok(next.map_err(|error| TlsFailure::Protocol(error.to_string()))?.1)
    }

    fn next_receiving(&mut self) -> Result<ConnectionTrafficSecrets, TlsFailure> {
        let next = match self {
            Self::Client(kernel) => kernel.update_rx_secret(),
            Self::Server(kernel) => kernel.update_rx_secret(),
        };
        Ok(next.map_err(|error| TlsFailure::Protocol(error.to_string()))?.1)
    }
}

/// A handshake under way.
pub(super) struct Handshake {
    connection: Option<Connection>,
    authorities: Arc<str>,
    /// When the time of an accepted connection began. That of an outgoing one runs from when it is waited for: this end
    /// may have other work before that.
    begun: Option<Instant>,
    within: Duration,
    incoming: Vec<u8>,
    /// How much of it rustls has been shown: whole records.
    shown: usize,
    outgoing: Vec<u8>,
    sent: usize,
    done: bool,
    /// Whether the kernel is to have the keys.
    for_kernel: bool,
    /// Records that one key may seal, at most.
    renewed_after: u64,
}

/// What rustls wants next.
enum Next {
    Again,
    Record,
    Done,
}

impl Handshake {
    /// A handshake that may take so long: a server's from now on, a client's from when it is waited for.
    ///
    /// # Errors
    /// It is not known whom to expect.
    pub(super) fn new(tls: &Tls, within: Option<Duration>, for_kernel: bool) -> Result<Self, TlsFailure> {
        let authorities = Arc::clone(&tls.authorities);
        let wrong = |error: Error| TlsFailure::of(error, &authorities);
        let connection = match &tls.role {
            Role::Client { config, name, .. } => {
                let name = name.clone().ok_or(TlsFailure::NoHostName)?;
                Connection::Client(UnbufferedClientConnection::new(Arc::clone(config), name).map_err(wrong)?)
            }
            Role::Server(config) => {
                Connection::Server(UnbufferedServerConnection::new(Arc::clone(config)).map_err(wrong)?)
            }
        };
        Ok(Self {
            connection: Some(connection),
            authorities,
            begun: matches!(tls.role, Role::Server(_)).then(Instant::now),
            within: within.unwrap_or(WITHIN),
            incoming: Vec::new(),
            shown: 0,
            outgoing: Vec::new(),
            sent: 0,
            done: false,
            for_kernel,
            renewed_after: tls.renewed_after,
        })
    }

    /// Goes on as far as it can; what both ends have agreed on, once they have.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if it was not to wait; a [`TlsFailure`] otherwise, or what the kernel says.
    pub(super) fn go_on(&mut self, socket: BorrowedFd<'_>, wait: Wait) -> io::Result<Agreed> {
        if wait == Wait::Yes {
            self.begun.get_or_insert_with(Instant::now);
        }
        loop {
            // In every turn: a peer that always has another byte to say gets no more time than one that is silent.
            let rest = self.within.saturating_sub(self.begun.map_or(Duration::ZERO, |begun| begun.elapsed()));
            if rest.is_zero() {
                return Err(TlsFailure::Late(self.within).into());
            }
            if let Err(failure) = self.understand() {
                self.tell_why(&failure);
                // The peer may be gone, or not listen.
                let _ = self.flush(socket);
                return Err(failure.into());
            }
            let ready = if !self.flush(socket)? {
                PollFlags::OUT
            } else if self.done {
                return Ok(self.agree()?);
            } else if self.fill(socket)? {
                continue;
            } else {
                PollFlags::IN
            };
            if wait == Wait::No {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            match poll(&mut [PollFd::from_borrowed_fd(socket, ready)], Timespec::try_from(rest).ok().as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Has rustls go through what has come.
    fn understand(&mut self) -> Result<(), TlsFailure> {
        while !self.done {
            match self.step()? {
                Next::Again => {}
                Next::Done => self.done = true,
                Next::Record if self.show()? => {}
                Next::Record => break,
            }
        }
        Ok(())
    }

    /// Has rustls do the next thing.
    fn step(&mut self) -> Result<Next, TlsFailure> {
        let shown = &mut self.incoming[..self.shown];
        let (discard, next, handshaking) = match &mut self.connection {
            Some(Connection::Client(client)) => {
                let (discard, next) = obey(client.process_tls_records(shown), &mut self.outgoing);
                (discard, next, client.is_handshaking())
            }
            Some(Connection::Server(server)) => {
                let (discard, next) = obey(server.process_tls_records(shown), &mut self.outgoing);
                (discard, next, server.is_handshaking())
            }
            None => return Err(TlsFailure::Protocol("the handshake is over".into())),
        };
        let discard = discard.min(self.shown);
        self.incoming.drain(..discard);
        self.shown -= discard;
        match next.map_err(|error| TlsFailure::of(error, &self.authorities))? {
            // A server may put before it has heard the client's last word, and must not take it for said.
            Next::Done if handshaking => Ok(Next::Record),
            next => Ok(next),
        }
    }

    /// Shows rustls one more record; false if none is there.
    fn show(&mut self) -> Result<bool, TlsFailure> {
        let rest = &self.incoming[self.shown..];
        if rest.first().is_some_and(|typ| !RECORD_TYPES.contains(typ)) {
            return Err(TlsFailure::NotTls);
        }
        let Some(&[_, major, _, high, low]) = rest.first_chunk::<HEADER>() else { return Ok(false) };
        let length = usize::from(u16::from_be_bytes([high, low]));
        if major != 3 || length > BODY_MAX {
            return Err(TlsFailure::NotTls);
        }
        let there = rest.len() >= HEADER + length;
        if there {
            self.shown += HEADER + length;
        }
        Ok(there)
    }

    /// What rustls has to say about a failure is to go out as well.
    fn tell_why(&mut self, failure: &TlsFailure) {
        match failure {
            // Rustls has not seen what this is about.
            TlsFailure::NotTls => self.outgoing.extend_from_slice(&UNEXPECTED),
            // That comes before anything else that it would do.
            _ => drop(self.step()),
        }
    }

    /// Sends what there is to send, without waiting; whether it all went out.
    fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        while let Some(rest) = self.outgoing.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match send(socket, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => self.sent += sent,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                // What it had to say may have come before.
                Err(Errno::CONNRESET | Errno::PIPE) => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        self.outgoing.clear();
        self.sent = 0;
        Ok(true)
    }

    /// Reads what is there, without waiting; whether there was something.
    fn fill(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        let have = self.incoming.len();
        if have >= INCOMING_MAX {
            return Err(TlsFailure::Protocol("a handshake that does not end".into()).into());
        }
        self.incoming.resize(have + PIECE, 0);
        let got = loop {
            let room = &mut self.incoming[have..];
            match recv(socket, room, RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                answer => break answer.map(|(got, _)| got),
            }
        };
        self.incoming.truncate(got.map_or(have, |got| have + got));
        match got {
            Ok(0) | Err(Errno::CONNRESET | Errno::PIPE) => Err(TlsFailure::Ended.into()),
            Ok(_) => Ok(true),
            Err(Errno::AGAIN) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    fn agree(&mut self) -> Result<Agreed, TlsFailure> {
        let wrong = |error: Error| TlsFailure::Protocol(error.to_string());
        let over = || TlsFailure::Protocol("the handshake is over".into());
        let (secrets, keys, suite) = match self.connection.take().ok_or_else(over)? {
            Connection::Client(client) => {
                let (secrets, kernel) = client.dangerous_into_kernel_connection().map_err(wrong)?;
                let suite = kernel.negotiated_cipher_suite();
                (secrets, Keys::Client(kernel), suite)
            }
            Connection::Server(server) => {
                let (secrets, kernel) = server.dangerous_into_kernel_connection().map_err(wrong)?;
                let suite = kernel.negotiated_cipher_suite();
                (secrets, Keys::Server(kernel), suite)
            }
        };
        let ExtractedSecrets { tx, rx } = secrets;
        let cipher = record::cipher(suite)?;
        let rest = self.incoming.split_off(self.shown);
        let key = |(number, secrets): &(u64, ConnectionTrafficSecrets)| Key::new(secrets, *number);
        let for_kernel = if self.for_kernel { key(&tx).zip(key(&rx)) } else { None };
        let encrypter = Encrypter::new(cipher, tx)?.renewed_after(self.renewed_after);
        Ok(Agreed { encrypter, decrypter: Decrypter::new(cipher, rx)?, keys, for_kernel, rest })
    }
}

/// Does what rustls asks for: how many bytes it needs no more, and what is next.
fn obey<D>(status: UnbufferedStatus<'_, '_, D>, outgoing: &mut Vec<u8>) -> (usize, Result<Next, Error>) {
    let UnbufferedStatus { discard, state } = status;
    let next = state.and_then(|state| match state {
        ConnectionState::EncodeTlsData(mut data) => {
            let begin = outgoing.len();
            // As long as any record.
            outgoing.resize(begin + HEADER + BODY_MAX, 0);
            let encoded = data.encode(&mut outgoing[begin..]);
            outgoing.truncate(begin + *encoded.as_ref().unwrap_or(&0));
            encoded.map(|_| Next::Again).map_err(|error| Error::General(error.to_string()))
        }
        // It is sent before anything is waited for.
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            Ok(Next::Again)
        }
        ConnectionState::BlockedHandshake => Ok(Next::Record),
        ConnectionState::WriteTraffic(_) => Ok(Next::Done),
        _ => Err(Error::General("the peer says more than a handshake".into())),
    });
    (discard, next)
}
