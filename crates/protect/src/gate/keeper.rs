//! The keeper's side of a gate: the socket that orders come from.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use super::message::{Answer, Order};
use super::vm::is_passing;

/// Most bytes of answers that a keeper may leave unread.
const UNREAD_MAX: usize = 1 << 20;
/// Most connections that have not said anything yet; one more ends the oldest of them.
const VISITORS_MAX: usize = 4;

/// A keeper or a failover that is connected.
#[derive(Debug)]
pub(super) struct Connected {
    stream: UnixStream,
    orders: Vec<u8>,
    answers: Vec<u8>,
}

impl Connected {
    /// Reads what has come.
    ///
    /// # Errors
    /// It is gone.
    fn read(&mut self) -> io::Result<()> {
        let mut room = [0; 4096];
        match (&self.stream).read(&mut room) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.orders.extend_from_slice(room.get(..count).unwrap_or_default());
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
    fn next_order(&mut self) -> io::Result<Option<Order>> {
        let decoded = Order::decode(&self.orders);
        let decoded = decoded.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok(decoded.map(|(order, length)| {
            self.orders.drain(..length);
            order
        }))
    }

    /// Answers, and closes the connection. One that does not get it sees the end.
    pub(super) fn dismiss(mut self, answer: Answer) {
        answer.encode(&mut self.answers);
        let _ = (&self.stream).write(&self.answers);
    }
}

/// The listening socket, the keeper that is connected, and those who have not said yet what they are.
#[derive(Debug)]
pub(super) struct KeeperPort {
    listener: UnixListener,
    visitors: Vec<Connected>,
    keeper: Option<Connected>,
}

impl KeeperPort {
    pub(super) const fn new(listener: UnixListener) -> Self {
        Self { listener, visitors: Vec::new(), keeper: None }
    }

    pub(super) fn listener_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    pub(super) fn keeper_fd(&self) -> Option<BorrowedFd<'_>> {
        self.keeper.as_ref().map(|keeper| keeper.stream.as_fd())
    }

    pub(super) fn visitor_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.visitors.iter().map(|visitor| visitor.stream.as_fd())
    }

    /// Whether there is a keeper.
    pub(super) const fn has_keeper(&self) -> bool {
        self.keeper.is_some()
    }

    /// Whether answers wait for it.
    pub(super) fn has_answers(&self) -> bool {
        self.keeper.as_ref().is_some_and(|keeper| !keeper.answers.is_empty())
    }

    /// Accepts a keeper or a failover that waits.
    pub(super) fn accept(&mut self) -> io::Result<()> {
        match self.listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(true)?;
                if self.visitors.len() >= VISITORS_MAX {
                    self.visitors.remove(0);
                }
                self.visitors.push(Connected { stream, orders: Vec::new(), answers: Vec::new() });
                Ok(())
            }
            Err(error) if is_passing(&error) || error.kind() == io::ErrorKind::ConnectionAborted => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Returns a visitor that has given its first order, and that. Those who say something else are gone.
    pub(super) fn next_visitor(&mut self) -> Option<(Connected, Order)> {
        let mut at = 0;
        while let Some(visitor) = self.visitors.get_mut(at) {
            match visitor.read().and_then(|()| visitor.next_order()) {
                Ok(None) => at += 1,
                Ok(Some(order)) => return Some((self.visitors.remove(at), order)),
                Err(_) => drop(self.visitors.remove(at)),
            }
        }
        None
    }

    /// Takes a visitor as the keeper.
    pub(super) fn admit(&mut self, keeper: Connected) {
        debug_assert!(self.keeper.is_none(), "there is one keeper at a time");
        self.keeper = Some(keeper);
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
        self.keeper.as_mut().map_or(Ok(()), Connected::read)
    }

    /// Returns the next order that has been read.
    ///
    /// # Errors
    /// It cannot be an order.
    pub(super) fn next_order(&mut self) -> io::Result<Option<Order>> {
        self.keeper.as_mut().map_or(Ok(None), Connected::next_order)
    }

    /// Says that its VM was failed over, and closes the connection.
    pub(super) fn refuse(&mut self) {
        if let Some(keeper) = self.keeper.take() {
            keeper.dismiss(Answer::Refused);
        }
    }

    /// Closes the connection.
    pub(super) fn close(&mut self) {
        self.keeper = None;
    }
}
