//! A handshake over a channel.
//!
//! Laws: it takes a bounded time, which the server watches over: it cuts the connection. Nothing is received ahead of
//! what is needed, so bytes behind a request for TLS are TLS, or break it.

use std::sync::Arc;

use limosa_channel::{Channel, ChannelError, Tls};
use limosa_page::to_usize;

use super::connection::Connection;
use super::negotiation::{Agreement, Encryption, Negotiation, OPTION_MAX, Step};
use crate::exports::Exports;
use limosa_nbd::protocol::handshake::{CLIENT_FLAGS_LEN, ClientFlags, OPTION_HEADER_LEN, OptionHeader, greeting};

/// The most options of a handshake.
const OPTIONS_MAX: usize = 1024;
/// The most bytes of an option that is too long and is answered all the same: more are cut off.
const SKIPPED_MAX: u32 = 4 << 20;

/// Why a handshake led to no requests.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    /// The client has ended it.
    #[error("the client ended the handshake")]
    Aborted,
    /// The client broke the protocol, or asked for what cannot be refused in another way.
    #[error("{0}")]
    Protocol(&'static str),
    /// The channel failed.
    #[error(transparent)]
    Channel(#[from] ChannelError),
}

/// A channel whose client has agreed on an export.
pub(super) struct Established {
    pub(super) channel: Channel,
    pub(super) agreement: Agreement,
}

/// Runs the handshake.
pub(super) fn shake_hands(
    mut channel: Channel,
    exports: &Exports,
    tls: Option<(&Tls, Encryption)>,
    connection: &Connection,
) -> Result<Established, HandshakeError> {
    channel.write_all(&greeting())?;
    let mut flags = [0; CLIENT_FLAGS_LEN];
    channel.read_exact(&mut flags)?;
    let client = ClientFlags::decode(flags).ok_or(HandshakeError::Protocol("the client has unknown flags"))?;
    let encryption = tls.map_or(Encryption::Off, |(_, encryption)| encryption);
    let mut negotiation = Negotiation::new((exports.clone(), Arc::clone(connection.peer())), client, encryption);
    for _ in 0..OPTIONS_MAX {
        let mut header = [0; OPTION_HEADER_LEN];
        channel.read_exact(&mut header)?;
        let OptionHeader { option, length } =
            OptionHeader::decode(header).ok_or(HandshakeError::Protocol("an option does not begin as one"))?;
        let mut replies = Vec::new();
        let step = if length > OPTION_MAX {
            skip(&channel, length)?;
            negotiation.too_long(option, &mut replies)
        } else {
            // At most `OPTION_MAX`.
            let mut data = vec![0; to_usize(length.into())];
            channel.read_exact(&mut data)?;
            negotiation.option(option, &data, &mut replies)
        };
        if let Step::Disconnect(why) = step {
            return Err(HandshakeError::Protocol(why));
        }
        if !replies.is_empty() {
            channel.write_all(&replies)?;
        }
        match step {
            Step::Next | Step::Disconnect(_) => {}
            Step::Abort => return Err(HandshakeError::Aborted),
            Step::Transmit(agreement) => return Ok(Established { channel, agreement }),
            Step::StartTls => {
                let (tls, _) = tls.ok_or(HandshakeError::Protocol("TLS is not available"))?;
                channel = channel.encrypt(tls, Some(connection.limits().handshake))?;
                channel.complete_handshake()?;
                negotiation.encrypted();
            }
        }
    }
    Err(HandshakeError::Protocol("the client sends options without end"))
}

/// Receives the data of an option that is too long. Its buffer is not on the stack of other connections.
#[inline(never)]
fn skip(channel: &Channel, length: u32) -> Result<(), HandshakeError> {
    if length > SKIPPED_MAX {
        return Err(HandshakeError::Protocol("the data of an option is too long"));
    }
    let mut left = to_usize(length.into());
    let mut room = [0; 4096];
    while left > 0 {
        let piece = left.min(room.len());
        channel.read_exact(&mut room[..piece])?;
        left -= piece;
    }
    Ok(())
}
