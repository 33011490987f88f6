//! The direction that the kernel decrypts.
//!
//! The law: data goes straight to its place, by calls without room for a record's type. The kernel refuses such a call
//! (`EIO`) if the next record is a control record, and keeps the record (kernel docs: networking/tls). It is then
//! received into a buffer of this process.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustls::ContentType;

use super::key::Key;
use super::option::{self, KeyDirection};
use super::{record_failure, record_type};
use crate::system_call;
use crate::tls::failure::{KernelTlsFailure, TlsFailure};
use crate::tls::record::{Decrypted, NewKeys, Reader, RecordContent};
use crate::vector::{Batch, In};

/// The direction of a socket that the kernel decrypts.
#[derive(Debug)]
pub(crate) struct Input {
    reader: Reader,
}

/// A record that was received into a buffer.
#[derive(Debug)]
pub(crate) enum Received {
    /// Data or a control record, at the beginning of the buffer.
    Record(Decrypted),
    /// The end of the connection.
    Ended,
}

impl Input {
    /// Gives the kernel the key for the next record, the first one not read yet. `reader` has interpreted the records
    /// before.
    pub(crate) fn over(socket: &OwnedFd, key: &Key, reader: &mut Reader) -> Result<Self, Errno> {
        option::set(socket.as_fd(), KeyDirection::Receiving, key)?;
        Ok(Self { reader: std::mem::take(reader) })
    }

    /// Receives some of the batch, or all of it (`whole`); `None` if the next record must be
    /// [received](Self::receive_record) into a buffer.
    pub(crate) fn read(&mut self, socket: &OwnedFd, batch: &Batch<'_, In>, whole: bool) -> io::Result<Option<usize>> {
        if self.reader.is_inside_message() {
            return Ok(None);
        }
        match system_call::receive(socket, batch, if whole { libc::MSG_WAITALL } else { 0 }) {
            // The end, or an empty record before a control record.
            Ok(0) => Ok(None),
            Ok(got) => {
                self.reader.reset_idle();
                Ok(Some(got))
            }
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::IO) => Ok(None),
                Some(errno) => Err(record_failure(errno).map_or(error, io::Error::from)),
                None => Err(error),
            },
        }
    }

    /// Receives the next record into a buffer that holds any record.
    pub(crate) fn receive_record(
        &mut self,
        socket: &OwnedFd,
        room: &mut [u8],
        flags: RecvFlags,
        keys: &mut dyn NewKeys,
    ) -> io::Result<Received> {
        let received = record_type::receive(socket.as_fd(), room, flags.bits().cast_signed());
        let (got, typ) =
            received.map_err(|errno| record_failure(errno).map_or_else(|| io::Error::from(errno), io::Error::from))?;
        let typ = match typ {
            Some(typ) => typ,
            None if got == 0 => return Ok(Received::Ended),
            None => ContentType::ApplicationData,
        };
        let content = self.reader.take(typ, &room[..got])?;
        Ok(Received::Record(match content {
            RecordContent::Bytes => Decrypted::Bytes(got),
            RecordContent::Nothing => Decrypted::Control { update_key: false },
            RecordContent::Close => Decrypted::Close,
            RecordContent::NewKey { answer } => {
                let refused = || TlsFailure::Kernel(KernelTlsFailure::PeerRekeyUnsupported);
                let key = Key::new(&keys.next_receiving()?, 0).ok_or_else(refused)?;
                option::set(socket.as_fd(), KeyDirection::Receiving, &key).map_err(|_| refused())?;
                Decrypted::Control { update_key: answer }
            }
        }))
    }
}
