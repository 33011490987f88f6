//! The TLS handshake: from a connected socket to keys.
//!
//! The laws: it takes a bounded time and a bounded buffer; it waits only on request; and it consumes no byte behind the
//! handshake: rustls is given one record at a time, so that bytes after the last one stay in the buffer.

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
use super::record::{self, BODY_MAX, Decrypter, Encrypter, HEADER, NewKeys};

/// Default time limit of a handshake: long enough for a busy machine, short enough for an unauthenticated peer.
pub(super) const WITHIN: Duration = Duration::from_secs(30);
/// Maximum number of unprocessed bytes of a handshake: a chain of some dozen certificates.
const INCOMING_MAX: usize = 128 << 10;
/// Record types (RFC 8446, section 5.1).
const RECORD_TYPES: std::ops::RangeInclusive<u8> = 20..=23;
/// A fatal `unexpected_message` alert (RFC 8446, section 6.2), for a peer that uses another protocol.
const UNEXPECTED_MESSAGE: [u8; 7] = [21, 3, 3, 0, 2, 2, 10];
/// Bytes read at once.
const READ_LEN: usize = 16 << 10;

/// Whether a call may wait for the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// It does not wait.
    No,
    /// It waits up to the time limit of the handshake.
    Yes,
}

/// Result of a handshake.
pub(super) struct Established {
    pub(super) encrypter: Encrypter,
    pub(super) decrypter: Decrypter,
    pub(super) keys: Keys,
    /// Bytes that the peer sent after the handshake.
    pub(super) rest: Vec<u8>,
}

enum Connection {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// The secrets from which new keys are derived. rustls names their type after the kernel's TLS, which is not used.
pub(super) enum Keys {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl NewKeys for Keys {
    fn next_sending(&mut self) -> Result<ConnectionTrafficSecrets, TlsFailure> {
        let next = match self {
            Self::Client(secrets) => secrets.update_tx_secret(),
            Self::Server(secrets) => secrets.update_tx_secret(),
        };
        Ok(next.map_err(|error| TlsFailure::Protocol(error.to_string()))?.1)
    }

    fn next_receiving(&mut self) -> Result<ConnectionTrafficSecrets, TlsFailure> {
        let next = match self {
            Self::Client(secrets) => secrets.update_rx_secret(),
            Self::Server(secrets) => secrets.update_rx_secret(),
        };
        Ok(next.map_err(|error| TlsFailure::Protocol(error.to_string()))?.1)
    }
}

/// A handshake in progress.
pub(super) struct Handshake {
    connection: Option<Connection>,
    authorities: Arc<str>,
    /// Start of the time limit: of an accepted connection, its creation; of an outgoing one, the first call that waits,
    /// because this end may have other work before that.
    begun: Option<Instant>,
    within: Duration,
    incoming: Vec<u8>,
    /// Length of the whole records at its front that rustls may read.
    fed: usize,
    outgoing: Vec<u8>,
    sent: usize,
    done: bool,
    /// Maximum number of records that one key encrypts.
    key_update_after: u64,
}

/// The next step of the handshake.
enum Next {
    Again,
    Record,
    Done,
}

impl Handshake {
    /// Creates a handshake with a time limit: a server's from now on, a client's from the first call that waits.
    ///
    /// # Errors
    /// The expected host name of the server is unknown.
    pub(super) fn new(tls: &Tls, within: Option<Duration>) -> Result<Self, TlsFailure> {
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
            fed: 0,
            outgoing: Vec::new(),
            sent: 0,
            done: false,
            key_update_after: tls.key_update_after,
        })
    }

    /// Advances the handshake until it must wait, and returns the keys once it is complete.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if it must not wait; otherwise a [`TlsFailure`], or an error of the kernel.
    pub(super) fn advance(&mut self, socket: BorrowedFd<'_>, wait: Wait) -> io::Result<Established> {
        if wait == Wait::Yes {
            self.begun.get_or_insert_with(Instant::now);
        }
        loop {
            // In every iteration: a peer that keeps sending single bytes gets no more time than a silent one.
            let rest = self.within.saturating_sub(self.begun.map_or(Duration::ZERO, |begun| begun.elapsed()));
            if rest.is_zero() {
                return Err(TlsFailure::HandshakeTimedOut(self.within).into());
            }
            if let Err(failure) = self.process() {
                self.queue_alert(&failure);
                // The peer may be gone.
                let _ = self.flush(socket);
                return Err(failure.into());
            }
            let ready = if !self.flush(socket)? {
                PollFlags::OUT
            } else if self.done {
                return Ok(self.finish()?);
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

    /// Has rustls process the received records.
    fn process(&mut self) -> Result<(), TlsFailure> {
        while !self.done {
            match self.step()? {
                Next::Again => {}
                Next::Done => self.done = true,
                Next::Record if self.feed()? => {}
                Next::Record => break,
            }
        }
        Ok(())
    }

    /// Runs one step of rustls' state machine.
    fn step(&mut self) -> Result<Next, TlsFailure> {
        let fed = &mut self.incoming[..self.fed];
        let (discard, next, handshaking) = match &mut self.connection {
            Some(Connection::Client(client)) => {
                let (discard, next) = execute(client.process_tls_records(fed), &mut self.outgoing);
                (discard, next, client.is_handshaking())
            }
            Some(Connection::Server(server)) => {
                let (discard, next) = execute(server.process_tls_records(fed), &mut self.outgoing);
                (discard, next, server.is_handshaking())
            }
            None => return Err(TlsFailure::Protocol("the handshake is over".into())),
        };
        let discard = discard.min(self.fed);
        self.incoming.drain(..discard);
        self.fed -= discard;
        match next.map_err(|error| TlsFailure::of(error, &self.authorities))? {
            // rustls lets a server write before the client's Finished. The peer is not authenticated before that, so it
            // is awaited here.
            Next::Done if handshaking => Ok(Next::Record),
            next => Ok(next),
        }
    }

    /// Gives rustls one more record; false if none is complete.
    fn feed(&mut self) -> Result<bool, TlsFailure> {
        let rest = &self.incoming[self.fed..];
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
            self.fed += HEADER + length;
        }
        Ok(there)
    }

    /// Queues the alert that tells the peer about a failure.
    fn queue_alert(&mut self, failure: &TlsFailure) {
        match failure {
            // rustls has not seen these bytes.
            TlsFailure::NotTls => self.outgoing.extend_from_slice(&UNEXPECTED_MESSAGE),
            // rustls emits its alert before anything else.
            _ => drop(self.step()),
        }
    }

    /// Sends the queued bytes without waiting; returns whether all went out.
    fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        while let Some(rest) = self.outgoing.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match send(socket, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => self.sent += sent,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                // The peer's alert may have arrived before; reading finds it.
                Err(Errno::CONNRESET | Errno::PIPE) => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        self.outgoing.clear();
        self.sent = 0;
        Ok(true)
    }

    /// Reads available bytes without waiting; returns whether there were any.
    fn fill(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        let have = self.incoming.len();
        if have >= INCOMING_MAX {
            return Err(TlsFailure::Protocol("the handshake is too long".into()).into());
        }
        self.incoming.resize(have + READ_LEN, 0);
        let got = loop {
            let room = &mut self.incoming[have..];
            match recv(socket, room, RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                answer => break answer.map(|(got, _)| got),
            }
        };
        self.incoming.truncate(got.map_or(have, |got| have + got));
        match got {
            Ok(0) | Err(Errno::CONNRESET | Errno::PIPE) => Err(TlsFailure::HandshakeClosed.into()),
            Ok(_) => Ok(true),
            Err(Errno::AGAIN) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    fn finish(&mut self) -> Result<Established, TlsFailure> {
        let wrong = |error: Error| TlsFailure::Protocol(error.to_string());
        let over = || TlsFailure::Protocol("the handshake is over".into());
        let (secrets, keys, suite) = match self.connection.take().ok_or_else(over)? {
            Connection::Client(client) => {
                let (secrets, updates) = client.dangerous_into_kernel_connection().map_err(wrong)?;
                let suite = updates.negotiated_cipher_suite();
                (secrets, Keys::Client(updates), suite)
            }
            Connection::Server(server) => {
                let (secrets, updates) = server.dangerous_into_kernel_connection().map_err(wrong)?;
                let suite = updates.negotiated_cipher_suite();
                (secrets, Keys::Server(updates), suite)
            }
        };
        let ExtractedSecrets { tx, rx } = secrets;
        let cipher = record::cipher(suite)?;
        let rest = self.incoming.split_off(self.fed);
        let encrypter = Encrypter::new(cipher, tx)?.key_update_after(self.key_update_after);
        Ok(Established { encrypter, decrypter: Decrypter::new(cipher, rx)?, keys, rest })
    }
}

/// Executes the step that rustls requests; returns the number of processed bytes, and the next step.
fn execute<D>(status: UnbufferedStatus<'_, '_, D>, outgoing: &mut Vec<u8>) -> (usize, Result<Next, Error>) {
    let UnbufferedStatus { discard, state } = status;
    let next = state.and_then(|state| match state {
        ConnectionState::EncodeTlsData(mut data) => {
            let begin = outgoing.len();
            // Room for a record of any length.
            outgoing.resize(begin + HEADER + BODY_MAX, 0);
            let encoded = data.encode(&mut outgoing[begin..]);
            outgoing.truncate(begin + *encoded.as_ref().unwrap_or(&0));
            encoded.map(|_| Next::Again).map_err(|error| Error::General(error.to_string()))
        }
        // Sent by `flush`, before anything is waited for.
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            Ok(Next::Again)
        }
        ConnectionState::BlockedHandshake => Ok(Next::Record),
        ConnectionState::WriteTraffic(_) => Ok(Next::Done),
        _ => Err(Error::General("the peer sent more than a handshake".into())),
    });
    (discard, next)
}
