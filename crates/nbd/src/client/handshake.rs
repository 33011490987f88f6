//! The handshake, from the client's end.
//!
//! Law: nothing that a server says is believed before it was checked: lengths before memory is allocated, sizes before
//! they are used. The number of its replies and their time are bounded.

use std::time::{Duration, Instant};

use limosa_channel::{Channel, ChannelError, Tls};

use super::error::NbdError;
use crate::protocol::handshake::{
    ClientFlags, OPTION_REPLY_HEADER_LEN, OptionCode, OptionReply, OptionReplyHeader, decode_greeting, info, option,
    transmission,
};
use crate::protocol::option_data::{ContextQuery, ExportQuery};
use crate::protocol::{Headers, MAX_PAYLOAD, MAX_STRING, allocation, split_u16, split_u32, split_u64};

/// The longest data of a reply to an option, in bytes: a few strings of the protocol.
const REPLY_MAX: usize = 4 * MAX_STRING;
/// The most replies to an option.
const REPLIES_MAX: usize = 64;
/// The longest text of a server in a message, in characters.
const TEXT_MAX: usize = 200;
/// The largest unit that a server may ask for, in bytes (doc/proto.md).
const MINIMUM_MAX: u32 = 64 << 10;

/// The result of a handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Agreement {
    pub(super) headers: Headers,
    /// Length of the export in bytes.
    pub(super) size: u64,
    /// Transmission flags.
    pub(super) flags: u16,
    /// The number of the metadata context, if the server has it.
    pub(super) context: Option<u32>,
    /// Requests are multiples of it, in bytes: a power of two.
    pub(super) minimum: u32,
    /// The longest payload, in bytes.
    pub(super) payload: u32,
}

/// The replies to an option: those before the acknowledgement, or why it was refused.
type Replies = Result<Vec<(u32, Vec<u8>)>, Refusal>;

struct Refusal {
    reply: u32,
    text: String,
}

impl Refusal {
    fn error(&self, export: &str) -> NbdError {
        let line = self.line(export);
        if self.reply == OptionReply::TlsRequired as u32 {
            NbdError::TlsRequired(line)
        } else {
            NbdError::Refused(line)
        }
    }

    /// Returns the behaviour of the server, for a message.
    fn line(&self, export: &str) -> String {
        let what = match OptionReply::from_repr(self.reply) {
            Some(OptionReply::TlsRequired) => "requires TLS".to_owned(),
            Some(OptionReply::Unknown) => format!("has no export {export:?}"),
            Some(OptionReply::Policy) => format!("does not let this client use export {export:?}"),
            Some(OptionReply::Shutdown) => "is shutting down".to_owned(),
            _ => format!("refuses export {export:?}"),
        };
        if self.text.is_empty() { what } else { format!("{what} ({:?})", self.text) }
    }
}

/// A handshake under way.
pub(super) struct Handshake {
    channel: Channel,
    until: Instant,
    within: Duration,
}

impl Handshake {
    pub(super) fn new(channel: Channel, within: Duration) -> Self {
        Self { channel, until: Instant::now() + within, within }
    }

    /// Agrees on an export, and on a metadata context if the server has it; with TLS, encrypted before anything is said
    /// about an export. Returns the channel, too.
    pub(super) fn run(
        mut self,
        export: &str,
        context: &str,
        tls: Option<&Tls>,
    ) -> Result<(Channel, Agreement), NbdError> {
        let client = self.greet()?;
        if let Some(tls) = tls {
            self = self.encrypt(client, tls)?;
        }
        let agreed = self.agree(client, export, context)?;
        Ok((self.channel, agreed))
    }

    /// Exchanges greetings and flags.
    fn greet(&self) -> Result<ClientFlags, NbdError> {
        let greeting = decode_greeting(self.read()?);
        let flags =
            greeting.ok_or_else(|| NbdError::protocol("its greeting is not that of a server that can choose"))?;
        let client = ClientFlags::answering(flags);
        self.channel.write_all(&client.encode())?;
        Ok(client)
    }

    /// Begins TLS. A server that does not offer it is refused: an attacker on the path could have removed the offer.
    fn encrypt(self, client: ClientFlags, tls: &Tls) -> Result<Self, NbdError> {
        let has_none = |text: &str| {
            let text = if text.is_empty() { String::new() } else { format!(" ({text:?})") };
            NbdError::Refused(format!("has no TLS{text}"))
        };
        if !client.fixed {
            return Err(has_none(""));
        }
        if let Err(refusal) = self.option(OptionCode::StartTls, &[])? {
            return Err(has_none(&refusal.text));
        }
        let left = self.until.saturating_duration_since(Instant::now());
        Ok(Self { channel: self.channel.encrypt(tls, Some(left))?, ..self })
    }

    fn agree(&self, client: ClientFlags, export: &str, context: &str) -> Result<Agreement, NbdError> {
        if !client.fixed {
            return self.export_name(export, client, Headers::Simple, None);
        }
        let headers = self.headers(export)?;
        let number = if headers.has_chunks() { self.context(export, context)? } else { None };
        if number.is_none() && context != allocation::NAME {
            return Err(NbdError::Refused(format!("has no metadata context {context:?} for export {export:?}")));
        }
        let query = ExportQuery { name: export, wanted: vec![info::BLOCK_SIZE] };
        match self.option(OptionCode::Go, &query.encode())? {
            Ok(replies) => chosen(&replies, headers, number),
            Err(refusal) if refusal.reply == OptionReply::Unsupported as u32 => {
                self.export_name(export, client, headers, number)
            }
            Err(refusal) => Err(refusal.error(export)),
        }
    }

    /// Agrees on the form of requests and replies.
    fn headers(&self, export: &str) -> Result<Headers, NbdError> {
        for (code, headers) in
            [(OptionCode::ExtendedHeaders, Headers::Extended), (OptionCode::StructuredReply, Headers::Structured)]
        {
            match self.option(code, &[])? {
                Ok(_) => return Ok(headers),
                Err(refusal) if refusal.reply == OptionReply::TlsRequired as u32 => {
                    return Err(refusal.error(export));
                }
                Err(_) => {}
            }
        }
        Ok(Headers::Simple)
    }

    /// Chooses a metadata context. Returns its number.
    fn context(&self, export: &str, context: &str) -> Result<Option<u32>, NbdError> {
        let query = ContextQuery { name: export, queries: vec![context.as_bytes()] };
        // If the export is unknown, the next option says it.
        let Ok(replies) = self.option(OptionCode::SetMetaContext, &query.encode())? else { return Ok(None) };
        let mut numbers = replies.iter().filter(|(reply, _)| *reply == OptionReply::MetaContext as u32);
        Ok(numbers.find_map(|(_, data)| {
            let mut data = data.as_slice();
            let number = split_u32(&mut data)?;
            (data == context.as_bytes()).then_some(number)
        }))
    }

    /// Uses an export in the way of old servers, which answer no error.
    fn export_name(
        &self,
        export: &str,
        client: ClientFlags,
        headers: Headers,
        context: Option<u32>,
    ) -> Result<Agreement, NbdError> {
        self.send(&option(OptionCode::ExportName, export.as_bytes()))?;
        let reply: [u8; 10] = self.read()?;
        let mut reply = reply.as_slice();
        let export = split_u64(&mut reply).zip(split_u16(&mut reply));
        let (size, flags) = export.ok_or_else(|| NbdError::protocol("it does not describe the export"))?;
        self.fill(&mut vec![0; client.zeroes()])?;
        checked(Agreement { headers, size, flags, context, minimum: 1, payload: MAX_PAYLOAD })
    }

    /// Sends an option, and receives all replies to it.
    fn option(&self, code: OptionCode, data: &[u8]) -> Result<Replies, NbdError> {
        self.send(&option(code, data))?;
        let mut replies = Vec::new();
        while replies.len() < REPLIES_MAX {
            let bytes: [u8; OPTION_REPLY_HEADER_LEN] = self.read()?;
            let header = OptionReplyHeader::decode(bytes)
                .filter(|header| header.option == code as u32)
                .ok_or_else(|| NbdError::protocol("a reply to an option does not begin as one"))?;
            let length = usize::try_from(header.length).ok().filter(|length| *length <= REPLY_MAX);
            let length = length.ok_or_else(|| NbdError::protocol("a reply to an option is too long"))?;
            let mut data = vec![0; length];
            self.fill(&mut data)?;
            if header.is_error() {
                let text = String::from_utf8_lossy(&data).chars().take(TEXT_MAX).collect();
                return Ok(Err(Refusal { reply: header.reply, text }));
            }
            if header.reply == OptionReply::Ack as u32 {
                return Ok(Ok(replies));
            }
            replies.push((header.reply, data));
        }
        Err(NbdError::protocol("an option has too many replies"))
    }

    fn send(&self, bytes: &[u8]) -> Result<(), NbdError> {
        let Err(error) = self.channel.write_all(bytes) else { return Ok(()) };
        // In TLS 1.3 a client's handshake ends before the server judges its certificate: the reason is in an alert.
        if self.channel.is_encrypted()
            && let Err(alert @ ChannelError::Tls { .. }) = self.channel.read(&mut [0])
        {
            return Err(alert.into());
        }
        Err(error.into())
    }

    fn read<const N: usize>(&self) -> Result<[u8; N], NbdError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Receives all of these bytes. The time is that of the whole handshake, however slowly they come.
    fn fill(&self, mut bytes: &mut [u8]) -> Result<(), NbdError> {
        while !bytes.is_empty() {
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(NbdError::HandshakeTime(self.within));
            }
            self.channel.set_timeouts(Some(left), Some(left))?;
            let read = self.channel.read(bytes)?;
            if read == 0 {
                // It says how the connection has ended.
                return Ok(self.channel.read_exact(bytes)?);
            }
            bytes = bytes.get_mut(read..).unwrap_or_default();
        }
        Ok(())
    }
}

/// Takes the properties of the export from the replies to `GO`.
fn chosen(replies: &[(u32, Vec<u8>)], headers: Headers, context: Option<u32>) -> Result<Agreement, NbdError> {
    let mut found = Agreement { headers, size: 0, flags: 0, context, minimum: 1, payload: MAX_PAYLOAD };
    let mut described = false;
    for (_, data) in replies.iter().filter(|(reply, _)| *reply == OptionReply::Info as u32) {
        let mut data = data.as_slice();
        match split_u16(&mut data) {
            Some(info::EXPORT) => {
                let export = split_u64(&mut data).zip(split_u16(&mut data));
                (found.size, found.flags) =
                    export.ok_or_else(|| NbdError::protocol("its description of the export is cut off"))?;
                described = true;
            }
            Some(info::BLOCK_SIZE) => {
                let sizes = split_u32(&mut data).zip(split_u32(&mut data)).zip(split_u32(&mut data));
                let ((minimum, _), most) = sizes.ok_or_else(|| NbdError::protocol("its block sizes are cut off"))?;
                (found.minimum, found.payload) = (minimum, most.min(MAX_PAYLOAD));
            }
            _ => {}
        }
    }
    if described { checked(found) } else { Err(NbdError::protocol("it does not describe the export")) }
}

fn checked(found: Agreement) -> Result<Agreement, NbdError> {
    let Agreement { size, minimum, payload, flags, .. } = found;
    if i64::try_from(size).is_err() {
        return Err(NbdError::protocol(format!("the export has {size} bytes, more than files can have")));
    }
    if !minimum.is_power_of_two() || minimum > MINIMUM_MAX || payload < minimum.max(512) {
        return Err(NbdError::protocol(format!("requests of {minimum} to {payload} bytes are impossible")));
    }
    if !size.is_multiple_of(minimum.into()) {
        let why = format!("the export has {size} bytes, which are no whole units of {minimum}");
        return Err(NbdError::protocol(why));
    }
    // Without the flag that flags are there, none is.
    let flags = if flags & transmission::HAS_FLAGS == 0 { 0 } else { flags };
    Ok(Agreement { payload: payload - payload % minimum, flags, ..found })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export(size: u64, flags: u16) -> (u32, Vec<u8>) {
        (3, [&info::EXPORT.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat())
    }

    fn sizes(minimum: u32, most: u32) -> (u32, Vec<u8>) {
        let numbers = [minimum.to_be_bytes(), 4096_u32.to_be_bytes(), most.to_be_bytes()].concat();
        (3, [&info::BLOCK_SIZE.to_be_bytes()[..], &numbers].concat())
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        let choose = |replies: &[(u32, Vec<u8>)]| chosen(replies, Headers::Extended, Some(7));
        let found = choose(&[export(1 << 40, 0x4d), sizes(512, 1 << 20)]).unwrap();
        assert_eq!((found.size, found.flags, found.context), (1 << 40, 0x4d, Some(7)));
        assert_eq!((found.minimum, found.payload), (512, 1 << 20));
        // A flag that flags are there is missing.
        assert_eq!(choose(&[export(0, 0x4c)]).unwrap().flags, 0);
        assert_eq!(choose(&[export(0, 1), sizes(1, u32::MAX)]).unwrap().payload, MAX_PAYLOAD);
        let refused = |replies: &[(u32, Vec<u8>)]| choose(replies).unwrap_err().to_string();
        assert!(refused(&[]).contains("does not describe"));
        assert!(refused(&[export(4097, 1), sizes(4096, 8192)]).contains("no whole units of 4096"));
        assert!(refused(&[export(u64::MAX, 1)]).contains("18446744073709551615 bytes"));
        for (minimum, most) in [(0, 4096), (3, 4096), (128 << 10, 1 << 20), (4096, 512), (1, 0), (1, 511)] {
            assert!(refused(&[export(1, 1), sizes(minimum, most)]).contains("impossible"), "{minimum} {most}");
        }
        let (kind, mut data) = export(1, 1);
        data.pop();
        assert!(refused(&[(kind, data)]).contains("cut off"));
    }
}
