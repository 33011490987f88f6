//! The handshake: greeting, options, replies to options.

use super::{split_u16, split_u32, split_u64};

/// `NBDMAGIC`.
const GREETING: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`: the second half of the greeting, and the beginning of each option.
const OPTION: u64 = 0x4948_4156_454f_5054;
/// The beginning of a reply to an option.
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;

/// Bytes of an option's header.
pub const OPTION_HEADER_LEN: usize = 16;
/// Bytes of the client's flags.
pub const CLIENT_FLAGS_LEN: usize = 4;
/// Zeros behind the reply to `EXPORT_NAME`, unless the client declines them.
const ZEROES: usize = 124;

/// Returns the server's greeting: fixed newstyle, and no need for zeroes.
#[must_use]
pub fn greeting() -> [u8; 18] {
    let mut bytes = [0; 18];
    let (magic, flags) = bytes.split_at_mut(16);
    magic.copy_from_slice(&[GREETING.to_be_bytes(), OPTION.to_be_bytes()].concat());
    flags.copy_from_slice(&3_u16.to_be_bytes());
    bytes
}

/// Decodes a server's greeting. Returns its flags; `None`: it is not one, or one of the protocol's old form.
#[must_use]
pub fn decode_greeting(bytes: [u8; 18]) -> Option<u16> {
    let mut bytes = bytes.as_slice();
    let magic = (split_u64(&mut bytes)?, split_u64(&mut bytes)?);
    let flags = split_u16(&mut bytes)?;
    (magic == (GREETING, OPTION)).then_some(flags)
}

/// The flags of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientFlags {
    /// It knows fixed newstyle, and so options other than `EXPORT_NAME`.
    pub fixed: bool,
    /// It wants no zeroes behind the reply to `EXPORT_NAME`.
    pub no_zeroes: bool,
}

impl ClientFlags {
    /// Decodes them. `None`: a flag is unknown, so the client expects something that this server does not do.
    #[must_use]
    pub fn decode(bytes: [u8; CLIENT_FLAGS_LEN]) -> Option<Self> {
        let flags = u32::from_be_bytes(bytes);
        (flags & !3 == 0).then_some(Self { fixed: flags & 1 != 0, no_zeroes: flags & 2 != 0 })
    }

    /// Returns those of a client that takes up what a server with these flags offers.
    #[must_use]
    pub const fn answering(server: u16) -> Self {
        Self { fixed: server & 1 != 0, no_zeroes: server & 2 != 0 }
    }

    /// Encodes them, for clients.
    #[must_use]
    pub fn encode(self) -> [u8; CLIENT_FLAGS_LEN] {
        (u32::from(self.fixed) | u32::from(self.no_zeroes) << 1).to_be_bytes()
    }

    /// Returns how many bytes follow the size and the flags in the reply to `EXPORT_NAME`.
    #[must_use]
    pub const fn zeroes(self) -> usize {
        if self.no_zeroes { 0 } else { ZEROES }
    }
}

/// An option.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::FromRepr)]
#[repr(u32)]
pub enum OptionCode {
    /// Use an export; no error can be answered.
    ExportName = 1,
    /// End the connection.
    Abort = 2,
    /// List the exports.
    List = 3,
    /// Begin TLS.
    StartTls = 5,
    /// Describe an export.
    Info = 6,
    /// Describe an export and use it.
    Go = 7,
    /// Use structured replies.
    StructuredReply = 8,
    /// List metadata contexts.
    ListMetaContext = 9,
    /// Choose metadata contexts.
    SetMetaContext = 10,
    /// Use extended headers.
    ExtendedHeaders = 11,
}

/// The header of an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHeader {
    /// Its number: an [`OptionCode`], or one that is unknown.
    pub option: u32,
    /// Bytes of its data.
    pub length: u32,
}

impl OptionHeader {
    /// Decodes one. `None`: it does not begin as an option does.
    #[must_use]
    pub fn decode(bytes: [u8; OPTION_HEADER_LEN]) -> Option<Self> {
        let mut bytes = bytes.as_slice();
        let magic = split_u64(&mut bytes)?;
        let header = Self { option: split_u32(&mut bytes)?, length: split_u32(&mut bytes)? };
        (magic == OPTION).then_some(header)
    }
}

/// Returns an option, for clients.
#[must_use]
pub fn option(option: OptionCode, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION.to_be_bytes().to_vec();
    bytes.extend_from_slice(&(option as u32).to_be_bytes());
    // Data is a few strings of the protocol, which are bounded.
    bytes.extend_from_slice(&u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes());
    bytes.extend_from_slice(data);
    bytes
}

/// The kind of a reply to an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::FromRepr)]
#[repr(u32)]
pub enum OptionReply {
    /// Done.
    Ack = 1,
    /// An export of a list.
    Server = 2,
    /// Information about an export.
    Info = 3,
    /// A metadata context.
    MetaContext = 4,
    /// The option is unknown.
    Unsupported = 0x8000_0001,
    /// The option is not allowed here.
    Policy = 0x8000_0002,
    /// The option's data is wrong, or its time.
    Invalid = 0x8000_0003,
    /// TLS must come first.
    TlsRequired = 0x8000_0005,
    /// The export is unknown.
    Unknown = 0x8000_0006,
    /// The server is about to end.
    Shutdown = 0x8000_0007,
    /// The option's data is too long.
    TooBig = 0x8000_0009,
    /// Extended headers were negotiated, and replace it.
    ExtendedHeadersRequired = 0x8000_000a,
}

/// Appends a reply to an option.
pub fn push_option_reply(into: &mut Vec<u8>, option: u32, reply: OptionReply, data: &[u8]) {
    // Data is a few strings of the protocol, which are bounded.
    let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
    into.extend_from_slice(&OPTION_REPLY.to_be_bytes());
    for number in [option, reply as u32, length] {
        into.extend_from_slice(&number.to_be_bytes());
    }
    into.extend_from_slice(data);
}

/// Bytes of the header of a reply to an option.
pub const OPTION_REPLY_HEADER_LEN: usize = 20;

/// The header of a reply to an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The option that it replies to.
    pub option: u32,
    /// Its kind: an [`OptionReply`], or one that is unknown.
    pub reply: u32,
    /// Bytes of its data.
    pub length: u32,
}

impl OptionReplyHeader {
    /// Decodes one. `None`: it does not begin as a reply to an option does.
    #[must_use]
    pub fn decode(bytes: [u8; OPTION_REPLY_HEADER_LEN]) -> Option<Self> {
        let mut bytes = bytes.as_slice();
        let magic = split_u64(&mut bytes)?;
        let (option, reply) = (split_u32(&mut bytes)?, split_u32(&mut bytes)?);
        (magic == OPTION_REPLY).then_some(Self { option, reply, length: split_u32(&mut bytes)? })
    }

    /// Returns whether the option failed.
    #[must_use]
    pub const fn is_error(&self) -> bool {
        self.reply >> 31 == 1
    }
}

/// Appends the reply to `EXPORT_NAME`.
pub fn push_export_name_reply(into: &mut Vec<u8>, size: u64, flags: u16, client: ClientFlags) {
    into.extend_from_slice(&size.to_be_bytes());
    into.extend_from_slice(&flags.to_be_bytes());
    if !client.no_zeroes {
        into.extend_from_slice(&[0; ZEROES]);
    }
}

/// Transmission flags: the commands and flags that an export supports.
pub mod transmission {
    /// The flags are there.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `FLUSH`.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The flag `FUA`.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `TRIM`.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `WRITE_ZEROES`.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The flag `DF`.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush covers all connections.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `CACHE`.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The flag `FAST_ZERO`.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    /// `BLOCK_STATUS` with a payload.
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Information about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Its name.
    pub const NAME: u16 = 1;
    /// Its description.
    pub const DESCRIPTION: u16 = 2;
    /// Block sizes.
    pub const BLOCK_SIZE: u16 = 3;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_greeting_is_that_of_the_document() {
        let mut expected = b"NBDMAGICIHAVEOPT".to_vec();
        expected.extend_from_slice(&[0, 3]);
        assert_eq!(greeting().to_vec(), expected);
    }

    #[test]
    fn a_client_with_unknown_flags_is_refused() {
        let flags = |number: u32| ClientFlags::decode(number.to_be_bytes());
        assert_eq!(flags(1), Some(ClientFlags { fixed: true, no_zeroes: false }));
        assert_eq!(flags(3), Some(ClientFlags { fixed: true, no_zeroes: true }));
        assert_eq!(flags(0), Some(ClientFlags { fixed: false, no_zeroes: false }));
        assert_eq!((flags(4), flags(0x8000_0001)), (None, None));
    }

    #[test]
    fn an_option_begins_with_its_magic() {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(b"IHAVEOPT");
        bytes[8..].copy_from_slice(&[0, 0, 0, 7, 0, 0, 1, 0]);
        assert_eq!(OptionHeader::decode(bytes), Some(OptionHeader { option: 7, length: 256 }));
        bytes[0] = 0;
        assert_eq!(OptionHeader::decode(bytes), None);
    }

    #[test]
    fn replies_to_options_have_a_header_of_twenty_bytes() {
        let mut bytes = Vec::new();
        push_option_reply(&mut bytes, 3, OptionReply::Unknown, b"why");
        let expected = [0, 3, 0xe8, 0x89, 4, 0x55, 0x65, 0xa9, 0, 0, 0, 3, 0x80, 0, 0, 6, 0, 0, 0, 3];
        assert_eq!((&bytes[..20], &bytes[20..]), (&expected[..], &b"why"[..]));
        for (no_zeroes, length) in [(true, 10), (false, 134)] {
            let mut bytes = Vec::new();
            push_export_name_reply(&mut bytes, 1 << 40, 0x101, ClientFlags { fixed: true, no_zeroes });
            assert_eq!((bytes.len(), &bytes[..10]), (length, &[0, 0, 1, 0, 0, 0, 0, 0, 1, 1][..]));
        }
    }
}
