//! The keeper's side of a gate: the socket that orders come from.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use super::message::{Answer, Order};
use super::vm::is_passing;

/// Most bytes of answers that a keeper may leave unread.
const UNREAD_MAX: usize = 1 << 20;

/// A keeper that is connected.
#[derive(Debug)]
struct Connected {
    stream: UnixStream,
    orders: Vec<u8>,
    answers: Vec<u8>,
}

/// The listening socket, and the keeper that is connected; another one is refused.
#[derive(Debug)]
pub(super) struct KeeperPort {
    listener: UnixListener,
    keeper: Option<Connected>,
}

impl KeeperPort {
    pub(super) const fn new(listener: UnixListener) -> Self {
        Self { listener, keeper: None }
    }

    pub(super) fn listener_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    pub(super) fn keeper_fd(&self) -> Option<BorrowedFd<'_>> {
        self.keeper.as_ref().map(|keeper| keeper.stream.as_fd())
    }

    /// Whether answers wait for it.
    pub(super) fn has_answers(&self) -> bool {
        self.keeper.as_ref().is_some_and(|keeper| !keeper.answers.is_empty())
    }

    /// Accepts a keeper that waits, or refuses it.
    pub(super) fn accept(&mut self) -> io::Result<()> {
        match self.listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(true)?;
                let mut keeper = Connected { stream, orders: Vec::new(), answers: Vec::new() };
                if self.keeper.is_some() {
                    Answer::Busy.encode(&mut keeper.answers);
                    // A keeper that does not get it sees the end.
                    let _ = (&keeper.stream).write(&keeper.answers);
                } else {
                    self.keeper = Some(keeper);
                }
                Ok(())
            }
            Err(error) if is_passing(&error) || error.kind() == io::ErrorKind::ConnectionAborted => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Appends an answer, to be [written](Self::write).
    pub(super) fn answer(&mut self, answer: Answer) {
        if let Some(keeper) = &mut self.keeper {
            answer.encode(&mut keeper.answers);
        }
    }

    /// Writes the answers.
    ///
    /// # Errors
    /// The keeper is gone, or reads nothing.
    pub(super) fn write(&mut self) -> io::Result<()> {
        let Some(keeper) = &mut self.keeper else { return Ok(()) };
        while !keeper.answers.is_empty() {
            match (&keeper.stream).write(&keeper.answers) {
                Ok(count) => drop(keeper.answers.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && keeper.answers.len() <= UNREAD_MAX => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads what has come.
    ///
    /// # Errors
    /// The keeper is gone.
    pub(super) fn read(&mut self) -> io::Result<()> {
        let Some(keeper) = &mut self.keeper else { return Ok(()) };
        let mut room = [0; 4096];
        match (&keeper.stream).read(&mut room) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                keeper.orders.extend_from_slice(room.get(..count).unwrap_or_default());
                Ok(())
            }
            Err(error) if is_passing(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Returns the next order that has been read.
    ///
    /// # Errors
    /// It cannot be an order.
    pub(super) fn next_order(&mut self) -> io::Result<Option<Order>> {
        let Some(keeper) = &mut self.keeper else { return Ok(None) };
        let decoded = Order::decode(&keeper.orders);
        let decoded = decoded.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok(decoded.map(|(order, length)| {
            keeper.orders.drain(..length);
            order
        }))
    }

    /// Closes the connection.
    pub(super) fn close(&mut self) {
        self.keeper = None;
    }
}
