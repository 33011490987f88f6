//! What the kernel opens.
//!
//! The law: data goes straight to its place, by calls without room for a record's type: those the kernel refuses
//! (`EIO`) when the next record is something else, which it keeps (kernel docs: networking/tls). That one is received
//! into a buffer of this process's own.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustls::ContentType;

use super::key::Key;
use super::option::{self, KeyDirection};
use super::{of_record, record_type};
use crate::tls::failure::{KernelTlsFailure, TlsFailure};
use crate::tls::record::{NewKeys, Opened, Reader, RecordContent};
use crate::transport;
use crate::vector::{Batch, In};

/// The direction of a socket that the kernel opens.
#[derive(Debug)]
pub(crate) struct Input {
    reader: Reader,
}

/// What was received into a buffer.
#[derive(Debug)]
pub(crate) enum Received {
    /// Bytes or words, from its beginning on.
    Record(Opened),
    /// The end of the connection.
    Ended,
}

impl Input {
    /// Gives the kernel the key of the next record, with which everything begins that was not read yet. `reader` has
    /// read what was.
    pub(crate) fn over(socket: &OwnedFd, key: &Key, reader: &mut Reader) -> Result<Self, Errno> {
        option::set(socket.as_fd(), KeyDirection::Receiving, key)?;
        Ok(Self { reader: std::mem::take(reader) })
    }

    /// Receives some of the batch, or all of it (`whole`); `None` if what is next has to be
    /// [received](Self::receive_record).
    pub(crate) fn get(&mut self, socket: &OwnedFd, batch: &Batch<'_, In>, whole: bool) -> io::Result<Option<usize>> {
        if self.reader.is_amid() {
            return Ok(None);
        }
        match transport::receive(socket, batch, if whole { libc::MSG_WAITALL } else { 0 }) {
            // The end, or an empty record in front of one that is no data.
            Ok(0) => Ok(None),
            Ok(got) => {
                self.reader.heard();
                Ok(Some(got))
            }
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::IO) => Ok(None),
                Some(errno) => Err(of_record(errno).map_or(error, io::Error::from)),
                None => Err(error),
            },
        }
    }

    /// Receives what is next into a buffer that holds any record.
    pub(crate) fn receive_record(
        &mut self,
        socket: &OwnedFd,
        room: &mut [u8],
        flags: RecvFlags,
        keys: &mut dyn NewKeys,
    ) -> io::Result<Received> {
        let received = record_type::receive(socket.as_fd(), room, flags.bits().cast_signed());
        let (got, typ) =
            received.map_err(|errno| of_record(errno).map_or_else(|| io::Error::from(errno), io::Error::from))?;
        let typ = match typ {
            Some(typ) => typ,
            None if got == 0 => return Ok(Received::Ended),
            None => ContentType::ApplicationData,
        };
        let content = self.reader.take(typ, &room[..got])?;
        Ok(Received::Record(match content {
            RecordContent::Bytes => Opened::Bytes(got),
            RecordContent::Nothing => Opened::Control { renew: false },
            RecordContent::Close => Opened::Close,
            RecordContent::NewKey { answer } => {
                let refused = || TlsFailure::Kernel(KernelTlsFailure::KeyRenewed);
                let key = Key::new(&keys.next_receiving()?, 0).ok_or_else(refused)?;
                option::set(socket.as_fd(), KeyDirection::Receiving, &key).map_err(|_| refused())?;
                Opened::Control { renew: answer }
            }
        }))
    }
}
