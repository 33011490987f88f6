//! A connection: bytes and descriptors of a socket, as messages to a [`Session`] and its answers.
//!
//! Law: whatever the other end does, at most one message and its descriptors are held, and whoever stops the server does not wait
//! for a message.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::fault::{Fault, Faults};
use crate::message::{HEADER, Header, MAX_BODY, MAX_DESCRIPTORS, Request, reply};
use crate::session::{Answer, Session};

/// Why a connection is over.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Disconnect {
    /// The front end has gone.
    Closed,
    /// Somebody has stopped the server.
    Stopped,
    /// The front end says what cannot be understood, or cannot be told that it asks for what is not there.
    Refused,
}

/// Answers messages until the connection is over; `stop` is readable when it is to be.
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
    let mut header = [0; HEADER];
    incoming.get(&mut header)?;
    let header = Header::decode(&header).map_err(|error| {
        faults.note(Fault::Message, &error);
        Disconnect::Refused
    })?;
    // `decode` has seen to it that it fits.
    let body = body.get_mut(..header.length).ok_or(Disconnect::Refused)?;
    incoming.get(body)?;
    let descriptors = incoming.descriptors;

    let mut done = Err(());
    match Request::from_number(header.request) {
        None => faults.note(Fault::Unknown, &format_args!("request {} is not known", header.request)),
        Some(request) => match session.handle(request, body, descriptors) {
            Ok(Answer::Done) => done = Ok(()),
            Ok(Answer::Body(body)) => return put(socket, stop, &reply(header.request, &body), None),
            Ok(Answer::WithDescriptor(body, descriptor)) => {
                return put(socket, stop, &reply(header.request, &body), Some(descriptor.as_fd()));
            }
            Err(refusal) => {
                faults.note(Fault::Refused, &format_args!("{request}: {refusal}"));
                // It waits for an answer of another kind, which there is not.
                if request.is_answered() {
                    return Err(Disconnect::Refused);
                }
            }
        },
    }
    // Asked only now: who negotiates acknowledgements may want one for just that (user-mode Linux does).
    if header.needs_reply && session.acknowledges() {
        return put(socket, stop, &reply(header.request, &u64::from(done.is_err()).to_le_bytes()), None);
    }
    // Who cannot be told would go on as if all were well, and its guest would wait for ever.
    done.map_err(|()| Disconnect::Refused)
}

struct Incoming<'a> {
    socket: &'a OwnedFd,
    stop: BorrowedFd<'a>,
    faults: &'a Faults,
    descriptors: Vec<OwnedFd>,
}

impl Incoming<'_> {
    /// Fills the buffer; what comes beside the bytes is kept.
    fn get(&mut self, buffer: &mut [u8]) -> Result<(), Disconnect> {
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            // Room for one more than there may be, so that too many are seen.
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
                            Fault::Message,
                            &format_args!(
                                "a message with more than {MAX_DESCRIPTORS} descriptors, or none left for them"
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
                bytes = bytes.get(sent..).unwrap_or_default();
                control.clear();
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(socket, stop, PollFlags::OUT)?,
            Err(_) => return Err(Disconnect::Closed),
        }
    }
    Ok(())
}

/// Waits until the socket is ready, or somebody stops the server.
fn wait(socket: &OwnedFd, stop: BorrowedFd<'_>, what: PollFlags) -> Result<(), Disconnect> {
    let mut both = [PollFd::new(socket, what), PollFd::from_borrowed_fd(stop, PollFlags::IN)];
    match poll(&mut both, None) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(_) => return Err(Disconnect::Closed),
    }
    let [_, stop] = &both;
    if stop.revents().is_empty() { Ok(()) } else { Err(Disconnect::Stopped) }
}
