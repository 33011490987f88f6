//! Messages of the vhost-user protocol, decoded and encoded without I/O.
//!
//! A message is a header of 12 bytes (request, flags, length of the body; all little-endian here, native by the
//! letter), a body, and descriptors that come with it (QEMU's docs/interop/vhost-user.rst). The contents of a body are
//! decoded here, not validated.

use std::fmt;

/// Bytes of a header.
pub const HEADER_LENGTH: usize = 12;

/// Maximum length of a body: a configuration (256 bytes and their header) and a table of eight regions both fit.
pub const MAX_BODY: usize = 4096;

/// Maximum number of descriptors of one message.
pub const MAX_DESCRIPTORS: usize = 8;

/// Maximum number of regions in one `SET_MEM_TABLE`.
pub const MAX_TABLE_REGIONS: usize = 8;

/// Maximum number of bytes of configuration that one message reads or writes.
pub const MAX_CONFIG: usize = 256;

/// The version that every message carries in its flags.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`
const BACKEND_CONFIG_CHANGE: u32 = 2;

/// A request of a front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
#[allow(missing_docs, reason = "they are the protocol's own names")]
pub enum Request {
    GetFeatures = 1,
    SetFeatures = 2,
    SetOwner = 3,
    ResetOwner = 4,
    SetMemTable = 5,
    SetLogBase = 6,
    SetLogFd = 7,
    SetVringNum = 8,
    SetVringAddr = 9,
    SetVringBase = 10,
    GetVringBase = 11,
    SetVringKick = 12,
    SetVringCall = 13,
    SetVringErr = 14,
    GetProtocolFeatures = 15,
    SetProtocolFeatures = 16,
    GetQueueNum = 17,
    SetVringEnable = 18,
    SetBackendReqFd = 21,
    GetConfig = 24,
    SetConfig = 25,
    PostcopyAdvise = 28,
    PostcopyListen = 29,
    PostcopyEnd = 30,
    GetInflightFd = 31,
    SetInflightFd = 32,
    ResetDevice = 34,
    GetMaxMemSlots = 36,
    AddMemReg = 37,
    RemMemReg = 38,
}

impl Request {
    /// All requests that are supported.
    pub const ALL: &[Self] = &[
        Self::GetFeatures,
        Self::SetFeatures,
        Self::SetOwner,
        Self::ResetOwner,
        Self::SetMemTable,
        Self::SetLogBase,
        Self::SetLogFd,
        Self::SetVringNum,
        Self::SetVringAddr,
        Self::SetVringBase,
        Self::GetVringBase,
        Self::SetVringKick,
        Self::SetVringCall,
        Self::SetVringErr,
        Self::GetProtocolFeatures,
        Self::SetProtocolFeatures,
        Self::GetQueueNum,
        Self::SetVringEnable,
        Self::SetBackendReqFd,
        Self::GetConfig,
        Self::SetConfig,
        Self::PostcopyAdvise,
        Self::PostcopyListen,
        Self::PostcopyEnd,
        Self::GetInflightFd,
        Self::SetInflightFd,
        Self::ResetDevice,
        Self::GetMaxMemSlots,
        Self::AddMemReg,
        Self::RemMemReg,
    ];

    /// The request with that number, if it is supported.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|request| request.number() == number)
    }

    /// Its number on the wire.
    pub fn number(self) -> u32 {
        self as u32
    }

    /// Whether the protocol defines a reply to it, other than the one that `REPLY_ACK` adds.
    pub fn is_answered(self) -> bool {
        matches!(
            self,
            Self::GetFeatures
                | Self::SetLogBase
                | Self::GetVringBase
                | Self::GetProtocolFeatures
                | Self::GetQueueNum
                | Self::GetConfig
                | Self::PostcopyAdvise
                | Self::GetInflightFd
                | Self::GetMaxMemSlots
        )
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?} (request {})", self.number())
    }
}

/// Why a message cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// A version, or flags, that a front end does not send.
    #[error("message {request} has flags {flags:#x}: not a version 1 message of a front end")]
    Flags {
        /// Number of the request.
        request: u32,
        /// The flags as received.
        flags: u32,
    },
    /// A body that is too long.
    #[error("message {request} has a body of {length} bytes, at most {MAX_BODY} are possible")]
    Long {
        /// Number of the request.
        request: u32,
        /// Its length according to the header, in bytes.
        length: u32,
    },
    /// A body of the wrong length.
    #[error("a body has {got} bytes, expected {wanted}")]
    Length {
        /// Its length in bytes.
        got: usize,
        /// The expected length in bytes.
        wanted: usize,
    },
    /// Too many regions in a table.
    #[error("{regions} memory regions in one table, at most {MAX_TABLE_REGIONS} are possible")]
    Regions {
        /// Their number.
        regions: u32,
    },
    /// A piece of configuration that is too long.
    #[error("{size} bytes of configuration, 1 to {MAX_CONFIG} are possible")]
    ConfigSize {
        /// Its length in bytes.
        size: u32,
    },
}

/// A header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Number of the request; see [`Request::from_number`].
    pub request: u32,
    /// Whether the front end asks for an acknowledgement.
    pub needs_reply: bool,
    /// Length of the body in bytes.
    pub length: usize,
}

impl Header {
    /// Decodes a header.
    ///
    /// # Errors
    /// Flags that a front end does not send, or a body that is too long.
    pub fn decode(bytes: &[u8; HEADER_LENGTH]) -> Result<Self, MessageError> {
        let mut fields = Fields(bytes);
        let (request, flags, length) = (fields.u32()?, fields.u32()?, fields.u32()?);
        if flags & VERSION_MASK != VERSION || flags & REPLY != 0 {
            return Err(MessageError::Flags { request, flags });
        }
        let length = usize::try_from(length)
            .ok()
            .filter(|&length| length <= MAX_BODY)
            .ok_or(MessageError::Long { request, length })?;
        Ok(Self { request, needs_reply: flags & NEED_REPLY != 0, length })
    }

    /// Encodes a header.
    pub fn encode(&self) -> [u8; HEADER_LENGTH] {
        let flags = VERSION | if self.needs_reply { NEED_REPLY } else { 0 };
        header(self.request, flags, self.length)
    }
}

fn header(request: u32, flags: u32, length: usize) -> [u8; HEADER_LENGTH] {
    let mut bytes = [0; HEADER_LENGTH];
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    for (place, field) in bytes.chunks_exact_mut(4).zip([request, flags, length]) {
        place.copy_from_slice(&field.to_le_bytes());
    }
    bytes
}

/// An answer to a request, header and body.
pub fn reply(request: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = header(request, VERSION | REPLY, body.len()).to_vec();
    bytes.extend_from_slice(body);
    bytes
}

/// The message that the configuration has changed, for the socket of `SET_BACKEND_REQ_FD`.
pub fn config_change() -> [u8; HEADER_LENGTH] {
    header(BACKEND_CONFIG_CHANGE, VERSION, 0)
}

/// Little-endian fields, one after the other.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], MessageError> {
        let (first, rest) = self.0.split_first_chunk().ok_or(MessageError::Length { got: self.0.len(), wanted: N })?;
        self.0 = rest;
        Ok(*first)
    }

    fn u16(&mut self) -> Result<u16, MessageError> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, MessageError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, MessageError> {
        self.take().map(u64::from_le_bytes)
    }
}

fn exactly(body: &[u8], wanted: usize) -> Result<Fields<'_>, MessageError> {
    if body.len() == wanted { Ok(Fields(body)) } else { Err(MessageError::Length { got: body.len(), wanted }) }
}

/// A body of one number.
///
/// # Errors
/// It is of another length.
pub fn decode_u64(body: &[u8]) -> Result<u64, MessageError> {
    exactly(body, 8)?.u64()
}

/// A ring and a value: `SET_VRING_NUM`, `SET_VRING_BASE`, `GET_VRING_BASE`, `SET_VRING_ENABLE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringState {
    /// Index of the ring.
    pub index: u32,
    /// Its size, its base, whether it is enabled.
    pub value: u32,
}

impl VringState {
    /// Decodes it.
    ///
    /// # Errors
    /// A body of another length.
    pub fn decode(body: &[u8]) -> Result<Self, MessageError> {
        let mut fields = exactly(body, 8)?;
        Ok(Self { index: fields.u32()?, value: fields.u32()? })
    }

    /// Encodes it.
    pub fn encode(&self) -> Vec<u8> {
        [self.index.to_le_bytes(), self.value.to_le_bytes()].concat()
    }
}

/// The addresses of a ring in the front end's address space: `SET_VRING_ADDR`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringAddress {
    /// Index of the ring.
    pub index: u32,
    /// Flags, among them whether writes to it are logged.
    pub flags: u32,
    /// Address of the descriptor table.
    pub descriptors: u64,
    /// Address of the used ring.
    pub used: u64,
    /// Address of the available ring.
    pub available: u64,
    /// Address at which writes to the used ring are logged.
    pub log: u64,
}

impl VringAddress {
    /// Decodes it.
    ///
    /// # Errors
    /// A body of another length.
    pub fn decode(body: &[u8]) -> Result<Self, MessageError> {
        let mut fields = exactly(body, 40)?;
        Ok(Self {
            index: fields.u32()?,
            flags: fields.u32()?,
            descriptors: fields.u64()?,
            used: fields.u64()?,
            available: fields.u64()?,
            log: fields.u64()?,
        })
    }
}

/// The ring of a descriptor, and whether a descriptor is sent: `SET_VRING_KICK`, `SET_VRING_CALL`, `SET_VRING_ERR`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringFd {
    /// Index of the ring.
    pub index: u8,
    /// The message has no descriptor.
    pub no_fd: bool,
}

impl VringFd {
    /// Decodes it.
    ///
    /// # Errors
    /// A body of another length.
    pub fn decode(body: &[u8]) -> Result<Self, MessageError> {
        let value = decode_u64(body)?;
        let [index, ..] = value.to_le_bytes();
        Ok(Self { index, no_fd: value & (1 << 8) != 0 })
    }
}

/// A region of memory in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableRegion {
    /// Guest-physical address of its first byte.
    pub guest_address: u64,
    /// Bytes.
    pub length: u64,
    /// Address of its first byte in the front end's address space.
    pub user_address: u64,
    /// Offset of its first byte in the file.
    pub file_offset: u64,
}

impl TableRegion {
    const LENGTH: usize = 32;

    fn take(fields: &mut Fields<'_>) -> Result<Self, MessageError> {
        Ok(Self {
            guest_address: fields.u64()?,
            length: fields.u64()?,
            user_address: fields.u64()?,
            file_offset: fields.u64()?,
        })
    }

    /// One region: `ADD_MEM_REG`, `REM_MEM_REG`.
    ///
    /// # Errors
    /// A body of another length.
    pub fn decode(body: &[u8]) -> Result<Self, MessageError> {
        let mut fields = exactly(body, 8 + Self::LENGTH)?;
        fields.u64()?;
        Self::take(&mut fields)
    }

    /// Returns the body of a message of regions with these user addresses in place of theirs, in order. A body that is
    /// too short stays as it is.
    pub fn with_user_addresses(body: &[u8], addresses: impl IntoIterator<Item = u64>) -> Vec<u8> {
        let mut body = body.to_vec();
        for (region, address) in body.get_mut(8..).unwrap_or_default().chunks_exact_mut(Self::LENGTH).zip(addresses) {
            if let Some(field) = region.get_mut(16..24) {
                field.copy_from_slice(&address.to_le_bytes());
            }
        }
        body
    }

    /// The regions of a whole table: `SET_MEM_TABLE`. Space in the body for more regions than it announces is ignored:
    /// user-mode Linux always sends space for two.
    ///
    /// # Errors
    /// More than [`MAX_TABLE_REGIONS`] regions, or a body that is too short for them or too long for a table.
    pub fn decode_table(body: &[u8]) -> Result<Vec<Self>, MessageError> {
        let mut fields = Fields(body);
        let regions = fields.u32()?;
        fields.u32()?;
        let count = usize::try_from(regions)
            .ok()
            .filter(|&count| count <= MAX_TABLE_REGIONS)
            .ok_or(MessageError::Regions { regions })?;
        if body.len() > 8 + MAX_TABLE_REGIONS * Self::LENGTH {
            return Err(MessageError::Length { got: body.len(), wanted: 8 + count * Self::LENGTH });
        }
        (0..count).map(|_| Self::take(&mut fields)).collect()
    }
}

/// A piece of configuration: `GET_CONFIG`, `SET_CONFIG`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigPiece<'a> {
    /// Its first byte.
    pub offset: u32,
    /// Flags as received; bit 0 of `SET_CONFIG`: a migration writes.
    pub flags: u32,
    /// As many bytes as are requested, or their new contents.
    pub bytes: &'a [u8],
}

impl<'a> ConfigPiece<'a> {
    /// Decodes it.
    ///
    /// # Errors
    /// No bytes, more than [`MAX_CONFIG`], or another number than announced.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut fields = Fields(body);
        let (offset, size, flags) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let wanted = usize::try_from(size)
            .ok()
            .filter(|size| (1..=MAX_CONFIG).contains(size))
            .ok_or(MessageError::ConfigSize { size })?;
        if fields.0.len() != wanted {
            return Err(MessageError::Length { got: body.len(), wanted: HEADER_LENGTH + wanted });
        }
        Ok(Self { offset, flags, bytes: fields.0 })
    }

    /// Encodes it.
    pub fn encode(&self) -> Vec<u8> {
        let size = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        let mut body = [self.offset, size, self.flags].map(u32::to_le_bytes).concat();
        body.extend_from_slice(self.bytes);
        body
    }
}

/// A dirty log: `SET_LOG_BASE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogArea {
    /// Its length in bytes.
    pub length: u64,
    /// Its offset in the file.
    pub offset: u64,
}

impl LogArea {
    /// Decodes it.
    ///
    /// # Errors
    /// A body of another length.
    pub fn decode(body: &[u8]) -> Result<Self, MessageError> {
        let mut fields = exactly(body, 16)?;
        Ok(Self { length: fields.u64()?, offset: fields.u64()? })
    }
}

/// An inflight area: `GET_INFLIGHT_FD`, `SET_INFLIGHT_FD`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightArea {
    /// Its length in bytes.
    pub length: u64,
    /// Its offset in the file.
    pub offset: u64,
    /// Number of rings that it has room for.
    pub queues: u16,
    /// Number of descriptors of each of them.
    pub queue_size: u16,
}

impl InflightArea {
    /// Decodes it. Front ends written in C send four more bytes of padding.
    ///
    /// # Errors
    /// A body of another length.
    pub fn decode(body: &[u8]) -> Result<Self, MessageError> {
        if body.len() != 20 && body.len() != 24 {
            return Err(MessageError::Length { got: body.len(), wanted: 20 });
        }
        let mut fields = Fields(body);
        Ok(Self { length: fields.u64()?, offset: fields.u64()?, queues: fields.u16()?, queue_size: fields.u16()? })
    }

    /// Encodes it, in as many bytes as the request had.
    pub fn encode(&self, length: usize) -> Vec<u8> {
        let mut body = [self.length.to_le_bytes(), self.offset.to_le_bytes()].concat();
        body.extend_from_slice(&self.queues.to_le_bytes());
        body.extend_from_slice(&self.queue_size.to_le_bytes());
        body.resize(length, 0);
        body
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_config_change_is_twelve_bytes() {
        assert_eq!(config_change(), [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_table_of_one_region_may_have_room_for_two() {
        let mut body = vec![0; 72];
        body[0] = 1;
        body[8..16].copy_from_slice(&0x6000_0000_u64.to_le_bytes());
        let region = TableRegion { guest_address: 0x6000_0000, length: 0, user_address: 0, file_offset: 0 };
        assert_eq!(TableRegion::decode_table(&body), Ok(vec![region]));
        assert_eq!(TableRegion::decode_table(&body[..40]), Ok(vec![region]));
        assert!(TableRegion::decode_table(&body[..39]).is_err());
        body[0] = 9;
        assert_eq!(TableRegion::decode_table(&body), Err(MessageError::Regions { regions: 9 }));
    }

    #[test]
    fn a_piece_of_configuration_has_as_many_bytes_as_it_says() {
        let piece = ConfigPiece { offset: 4, flags: 1, bytes: &[1, 2, 3] };
        let body = piece.encode();
        assert_eq!(ConfigPiece::decode(&body), Ok(piece));
        assert!(ConfigPiece::decode(&body[..14]).is_err());
        assert!(ConfigPiece::decode(&[0; 12]).is_err());
    }

    #[test]
    fn the_numbers_of_requests_are_unambiguous() {
        for request in Request::ALL {
            assert_eq!(Request::from_number(request.number()), Some(*request));
        }
        assert_eq!(Request::from_number(23), None);
    }

    proptest! {
        #[test]
        fn what_was_decoded_encodes_to_the_same_bytes(bytes in any::<[u8; HEADER_LENGTH]>(), body in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
            }
            if let Ok(state) = VringState::decode(&body) {
                prop_assert_eq!(state.encode(), body.clone());
            }
            if let Ok(piece) = ConfigPiece::decode(&body) {
                prop_assert_eq!(piece.encode(), body.clone());
            }
            if let Ok(area) = InflightArea::decode(&body) {
                prop_assert_eq!(InflightArea::decode(&area.encode(body.len())), Ok(area));
            }
            let regions = TableRegion::decode_table(&body).map_or(0, |regions| regions.len());
            prop_assert!(regions <= MAX_TABLE_REGIONS);
        }
    }
}
