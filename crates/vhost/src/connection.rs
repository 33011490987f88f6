//! A connection: bytes and descriptors of a socket, as messages to a [`Session`] and its answers.
//!
//! Law: at most one message and its descriptors are held, and stopping the server does not wait for a message,
//! regardless of what the front end does.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::fault::{FaultKind, Faults, WithCauses};
use crate::message::{HEADER_LENGTH, Header, MAX_BODY, MAX_DESCRIPTORS, Request, reply};
use crate::session::{Answer, Session};

/// Why a connection is over.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Disconnect {
    /// The front end has closed the connection.
    Closed,
    /// The server was stopped.
    Stopped,
    /// A message could not be parsed, or a refused one has no reply that could report it.
    Refused,
}

/// Answers messages until the connection ends; `stop` is readable when the server must stop.
pub(crate) fn serve(socket: &OwnedFd, stop: BorrowedFd<'_>, session: &mut Session, faults: &Faults) -> Disconnect {
    let mut body = [0; MAX_BODY];
    loop {
        if let Err(disconnect) = answer_one(socket, stop, session, faults, &mut body) {
            return disconnect;
        }
    }
}

fn answer_one(
    socket: &OwnedFd,
    stop: BorrowedFd<'_>,
    session: &mut Session,
    faults: &Faults,
    body: &mut [u8; MAX_BODY],
) -> Result<(), Disconnect> {
    let mut incoming = Incoming { socket, stop, faults, descriptors: Vec::new() };
    let mut header = [0; HEADER_LENGTH];
    incoming.get(&mut header)?;
    let header = Header::decode(&header).map_err(|error| {
        faults.note(FaultKind::Message, &error);
        Disconnect::Refused
    })?;
    // `decode` has checked that it fits.
    let body = body.get_mut(..header.length).ok_or(Disconnect::Refused)?;
    incoming.get(body)?;
    let descriptors = incoming.descriptors;

    let mut done = Err(());
    match Request::from_number(header.request) {
        None => faults.note(FaultKind::Unknown, &format_args!("request {} is not known", header.request)),
        Some(request) => match session.handle(request, body, descriptors) {
            Ok(Answer::Done) => done = Ok(()),
            Ok(Answer::Body(body)) => return put(socket, stop, &reply(header.request, &body), None),
            Ok(Answer::WithDescriptor(body, descriptor)) => {
                return put(socket, stop, &reply(header.request, &body), Some(descriptor.as_fd()));
            }
            Err(refusal) => {
                faults.note(FaultKind::Refused, &format_args!("{request}: {}", WithCauses(&refusal)));
                // The front end waits for a reply with contents, which does not exist.
                if request.is_answered() {
                    return Err(Disconnect::Refused);
                }
            }
        },
    }
    // Checked only now: the request that negotiates acknowledgements may ask for one itself (user-mode Linux does).
    if header.needs_reply && session.acknowledges() {
        return put(socket, stop, &reply(header.request, &u64::from(done.is_err()).to_le_bytes()), None);
    }
    // Without an acknowledgement the front end would continue as if the request had succeeded, and its guest would wait
    // forever.
    done.map_err(|()| Disconnect::Refused)
}

struct Incoming<'a> {
    socket: &'a OwnedFd,
    stop: BorrowedFd<'a>,
    faults: &'a Faults,
    descriptors: Vec<OwnedFd>,
}

impl Incoming<'_> {
    /// Fills the buffer; descriptors that come with the bytes are kept.
    fn get(&mut self, buffer: &mut [u8]) -> Result<(), Disconnect> {
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            // Room for one more than is allowed, so that too many are detected.
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS + 1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            match recvmsg(self.socket, &mut [IoSliceMut::new(rest)], &mut control, flags) {
                Ok(got) => {
                    for message in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                            self.descriptors.extend(descriptors);
                        }
                    }
                    if self.descriptors.len() > MAX_DESCRIPTORS || got.flags.contains(ReturnFlags::CTRUNC) {
                        self.faults.note(
                            FaultKind::Message,
                            &format_args!(
                                "a message has more than {MAX_DESCRIPTORS} descriptors, or this process has none left"
                            ),
                        );
                        return Err(Disconnect::Refused);
                    }
                    if got.bytes == 0 {
                        return Err(Disconnect::Closed);
                    }
                    filled += got.bytes;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => wait(self.socket, self.stop, PollFlags::IN)?,
                Err(_) => return Err(Disconnect::Closed),
            }
        }
        Ok(())
    }
}

fn put(
    socket: &OwnedFd,
    stop: BorrowedFd<'_>,
    mut bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<(), Disconnect> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let rights: Vec<_> = descriptor.into_iter().collect();
    if !rights.is_empty() {
        // There is room for one.
        control.push(SendAncillaryMessage::ScmRights(&rights));
    }
    while !bytes.is_empty() {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => {
                bytes = &bytes[sent..];
                control.clear();
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(socket, stop, PollFlags::OUT)?,
            Err(_) => return Err(Disconnect::Closed),
        }
    }
    Ok(())
}

/// Waits until the socket is ready or the server is stopped.
fn wait(socket: &OwnedFd, stop: BorrowedFd<'_>, what: PollFlags) -> Result<(), Disconnect> {
    let mut both = [PollFd::new(socket, what), PollFd::from_borrowed_fd(stop, PollFlags::IN)];
    match poll(&mut both, None) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(_) => return Err(Disconnect::Closed),
    }
    let [_, stop] = &both;
    if stop.revents().is_empty() { Ok(()) } else { Err(Disconnect::Stopped) }
}
