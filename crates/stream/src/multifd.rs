//! Packets of a multifd channel, which carries pages.
//!
//! A channel begins with one [`InitialPacket`], which has its number; then come [`Packet`]s, each a header of fixed
//! length and its pages. The law of this module: **a decoded packet is consistent** (pages, offsets and payload length
//! agree), so the reader of the payload knows its length and contents before the first byte arrives. Only the main
//! channel knows whether the block exists and has the pages; the caller checks that.
//!
//! Facts: magic 0x11223344, version 1, big-endian; 128 pages of 4 KiB at most, offsets always sent in full.

use std::fmt;
use std::str::FromStr;

use limosa_page::to_u64;
use thiserror::Error;

use crate::cursor::{Cursor, Stop};
use crate::error::{EncodeError, ErrorKind, StreamError, UnsupportedFeature};
use crate::ram::PAGE_SIZE;

/// The first bytes of both kinds of packets.
pub const MAGIC: [u8; 4] = [0x11, 0x22, 0x33, 0x44];
/// The version of both kinds of packets.
pub const VERSION: u32 = 1;
/// Length of an initial packet in bytes.
pub const INITIAL_LEN: usize = 64;
/// Length of a RAM packet's header in bytes.
pub const PACKET_LEN: usize = 1344;
/// Most pages in a packet.
pub const PACKET_PAGES: usize = ALLOCATED as usize;
/// The same, as packets say it.
const ALLOCATED: u32 = 128;
/// Bytes at the beginning of a packet that determine its kind.
pub const PREFIX_LEN: usize = 12;
/// Longest payload of a packet in bytes: that is QEMU's buffer for compressed pages.
pub const PAYLOAD_LIMIT: u32 = 1 << 20;

const FLAG_SYNC: u32 = 0x01;
const FLAG_DEVICE_STATE: u32 = 0x40;
const COMPRESSION_MASK: u32 = 0x3e;
const KNOWN_FLAGS: u32 = FLAG_SYNC | COMPRESSION_MASK | FLAG_DEVICE_STATE;
const NAME_AT: usize = 64;
const NAME_LEN: usize = 256;
const OFFSETS_AT: usize = NAME_AT + NAME_LEN;
const INITIAL_PLACE: &str = "initial packet of a multifd channel";
const PLACE: &str = "packet of a multifd channel";

/// The first packet of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct InitialPacket {
    /// The VM's UUID; zeros if it has none. QEMU compares it with its own.
    pub uuid: [u8; 16],
    /// Number of the channel, counted from 0.
    pub id: u8,
}

impl InitialPacket {
    /// The packet's bytes.
    pub fn encode(&self) -> [u8; INITIAL_LEN] {
        let mut out = [0; INITIAL_LEN];
        out[..4].copy_from_slice(&MAGIC);
        out[4..8].copy_from_slice(&VERSION.to_be_bytes());
        out[8..24].copy_from_slice(&self.uuid);
        out[24] = self.id;
        out
    }

    /// Reads a packet; whether the id is below the number of channels is the caller's to check.
    ///
    /// # Errors
    /// Another magic or version.
    pub fn decode(input: &[u8; INITIAL_LEN]) -> Result<Self, StreamError> {
        let read = |cursor: &mut Cursor<'_>| {
            begin(cursor)?;
            Ok(Self { uuid: cursor.array()?, id: cursor.u8()? })
        };
        read(&mut Cursor::new(input)).map_err(|stop: Stop| stop.into_error(0, INITIAL_PLACE, INITIAL_LEN))
    }
}

/// How the pages of a channel are compressed: QEMU's `multifd-compression`. The state of the compressor lives as long
/// as the channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Compression {
    /// 4096 bytes a page.
    #[default]
    None,
    /// One deflate stream with zlib header a channel, flushed (`Z_SYNC_FLUSH`) at the end of every packet.
    Zlib,
    /// One zstd frame a channel, never ended, flushed at the end of every packet.
    Zstd,
}

impl Compression {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::None, Self::Zlib, Self::Zstd];

    /// QEMU's name of it, as [`FromStr`] reads it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
        }
    }

    fn flags(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Zlib => 0x02,
            Self::Zstd => 0x04,
        }
    }

    fn from_flags(flags: u32) -> Result<Self, ErrorKind> {
        match flags & COMPRESSION_MASK {
            0 => Ok(Self::None),
            0x02 => Ok(Self::Zlib),
            0x04 => Ok(Self::Zstd),
            0x08 => Err(ErrorKind::Unsupported(UnsupportedFeature::MultifdCompression { method: "qpl" })),
            0x10 => Err(ErrorKind::Unsupported(UnsupportedFeature::MultifdCompression { method: "uadk" })),
            0x20 => Err(ErrorKind::Unsupported(UnsupportedFeature::MultifdCompression { method: "qatzip" })),
            other => Err(ErrorKind::expected("at most one compression method", format_args!("flags {other:#x}"))),
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no compression has.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("compression {name:?}: expected none, zlib or zstd")]
pub struct UnknownCompression {
    /// The name.
    pub name: String,
}

impl FromStr for Compression {
    type Err = UnknownCompression;

    fn from_str(name: &str) -> Result<Self, UnknownCompression> {
        let found = Self::ALL.into_iter().find(|compression| compression.name() == name);
        found.ok_or_else(|| UnknownCompression { name: name.to_owned() })
    }
}

/// Header of a RAM packet, as it is read or to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet<'a> {
    /// The channel waits behind this packet until the main channel has come to its join point.
    pub sync: bool,
    /// How the payload is compressed; means nothing where there are no pages.
    pub compression: Compression,
    /// A count over all channels, for information.
    pub packet_num: u64,
    /// Name of the RAM block of all pages in the packet; empty where there are none.
    pub block: &'a str,
    /// Byte offsets in the block, page aligned, of the pages in the payload, in their order there.
    pub normal: &'a [u64],
    /// Byte offsets in the block, page aligned, of pages that are zero.
    pub zero: &'a [u64],
    /// Bytes that follow the header: 4096 for each normal page, or what they were compressed to.
    pub payload_len: u32,
}

impl<'a> Packet<'a> {
    /// A packet that carries no pages: the channel has come to the join point.
    pub fn sync(packet_num: u64) -> Self {
        Self {
            sync: true,
            compression: Compression::None,
            packet_num,
            block: "",
            normal: &[],
            zero: &[],
            payload_len: 0,
        }
    }

    /// Writes the header over `out`.
    ///
    /// # Errors
    /// More than 128 pages, an offset that is no page's, a name of no or more than 255 bytes, a payload length that
    /// does not go with the pages.
    pub fn encode(&self, out: &mut [u8; PACKET_LEN]) -> Result<(), EncodeError> {
        out.fill(0);
        let flags = if self.sync { FLAG_SYNC } else { 0 } | self.compression.flags();
        out[..4].copy_from_slice(&MAGIC);
        out[4..8].copy_from_slice(&VERSION.to_be_bytes());
        out[8..12].copy_from_slice(&flags.to_be_bytes());
        out[24..32].copy_from_slice(&self.packet_num.to_be_bytes());
        let pages = self.normal.len().saturating_add(self.zero.len());
        let too_many =
            || EncodeError::Number { what: "number of pages in a packet", value: to_u64(pages), rule: "at most 128" };
        if pages > PACKET_PAGES {
            return Err(too_many());
        }
        let count = |pages: &[u64]| u32::try_from(pages.len()).map_err(|_| too_many());
        let (normal, zero) = (count(self.normal)?, count(self.zero)?);
        if payload_error(self.compression, normal, self.payload_len).is_some() {
            let (what, value) = ("payload length of a packet", self.payload_len.into());
            return Err(EncodeError::Number { what, value, rule: "must be that of the normal pages, at most 1 MiB" });
        }
        if pages == 0 {
            return Ok(());
        }
        out[12..16].copy_from_slice(&ALLOCATED.to_be_bytes());
        out[16..20].copy_from_slice(&normal.to_be_bytes());
        out[20..24].copy_from_slice(&self.payload_len.to_be_bytes());
        out[32..36].copy_from_slice(&zero.to_be_bytes());
        let name = self.block.as_bytes();
        if name.is_empty() || name.len() >= NAME_LEN || name.contains(&0) {
            return Err(EncodeError::Name { what: "RAM block", name: self.block.to_owned(), limit: NAME_LEN - 1 });
        }
        out[NAME_AT..NAME_AT + name.len()].copy_from_slice(name);
        for (place, &offset) in out[OFFSETS_AT..].chunks_exact_mut(8).zip(self.normal.iter().chain(self.zero)) {
            if offset % PAGE_SIZE != 0 {
                let rule = "must be the beginning of a page";
                return Err(EncodeError::Number { what: "offset in a RAM block", value: offset, rule });
            }
            place.copy_from_slice(&offset.to_be_bytes());
        }
        Ok(())
    }

    /// Reads the header at the beginning of `input`, which is at `offset` in its channel. `None` while there are fewer
    /// than [`PACKET_LEN`] bytes; what is wrong in the first [`PREFIX_LEN`] of them is found as soon as they are there.
    /// `offsets` takes the page offsets.
    ///
    /// # Errors
    /// Anything that is not a RAM packet whose counts, offsets, name and lengths agree; a packet of device state.
    pub fn decode(
        input: &'a [u8],
        offset: u64,
        offsets: &'a mut [u64; PACKET_PAGES],
    ) -> Result<Option<Self>, StreamError> {
        match Self::read(&mut Cursor::new(input), offsets) {
            Ok(packet) => Ok(Some(packet)),
            Err(Stop::Need(_)) => Ok(None),
            Err(stop) => Err(stop.into_error(offset, PLACE, input.len())),
        }
    }

    fn read(cursor: &mut Cursor<'a>, offsets: &'a mut [u64; PACKET_PAGES]) -> Result<Self, Stop> {
        begin(cursor)?;
        let flags = cursor.be32()?;
        let fail = |at, error_kind| Err(Stop::Fail { at, error_kind });
        if flags & !KNOWN_FLAGS != 0 {
            return fail(8, ErrorKind::expected("flags of a packet (0x01, 0x3e, 0x40)", format_args!("{flags:#x}")));
        }
        if flags & FLAG_DEVICE_STATE != 0 {
            return fail(8, ErrorKind::Unsupported(UnsupportedFeature::MultifdDeviceState));
        }
        let compression = Compression::from_flags(flags).map_err(|error_kind| Stop::Fail { at: 8, error_kind })?;
        let [allocated, normal, length] = [cursor.be32()?, cursor.be32()?, cursor.be32()?];
        let packet_num = cursor.be64()?;
        let zero = cursor.be32()?;
        cursor.take(4 + 24)?;
        let name = cursor.take(NAME_LEN)?;
        let places = cursor.take(PACKET_PAGES * 8)?;
        let count = |at, what, value: u32, limit: u32| match usize::try_from(value) {
            Ok(count) if value <= limit => Ok(count),
            _ => Err(Stop::Fail {
                at,
                error_kind: ErrorKind::TooLarge { what, value: value.into(), limit: limit.into() },
            }),
        };
        count(12, "room for pages in a packet", allocated, ALLOCATED)?;
        let normals = count(16, "number of normal pages in a packet", normal, allocated)?;
        let zeros = count(32, "number of zero pages in a packet", zero, allocated.saturating_sub(normal))?;
        let sync = flags & FLAG_SYNC != 0;
        if normals == 0 && zeros == 0 {
            // Here alone the length means nothing: versions before 9.0 leave that of the packet before in it.
            let none = &offsets[..0];
            return Ok(Self { sync, compression, packet_num, block: "", normal: none, zero: none, payload_len: 0 });
        }
        if let Some(error_kind) = payload_error(compression, normal, length) {
            return fail(20, error_kind);
        }
        let name = name.split(|byte| *byte == 0).next().unwrap_or(name);
        let block = match std::str::from_utf8(name) {
            Ok(block) if !block.is_empty() && name.len() < NAME_LEN => block,
            _ => {
                let found = format_args!("{:?}", name.escape_ascii().to_string()).to_string();
                return fail(NAME_AT, ErrorKind::expected("a RAM block name with a NUL behind it", found));
            }
        };
        for (number, (place, bytes)) in offsets.iter_mut().zip(places.chunks_exact(8)).take(normals + zeros).enumerate()
        {
            let value = bytes.first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
            if value % PAGE_SIZE != 0 {
                let error_kind =
                    ErrorKind::expected("the offset of a page (a multiple of 4096)", format_args!("{value:#x}"));
                return fail(OFFSETS_AT + number * 8, error_kind);
            }
            *place = value;
        }
        let (normal, rest) = offsets.split_at(normals);
        // Both counts were compared with ALLOCATED: they fit.
        let zero = &rest[..zeros];
        Ok(Self { sync, compression, packet_num, block, normal, zero, payload_len: length })
    }
}

/// Magic and version.
fn begin(cursor: &mut Cursor<'_>) -> Result<(), Stop> {
    let found = cursor.array::<4>()?;
    if found != MAGIC {
        let error_kind =
            ErrorKind::expected("the magic 11 22 33 44 of a multifd channel", format_args!("{found:02x?}"));
        return Err(Stop::Fail { at: 0, error_kind });
    }
    let version = cursor.be32()?;
    if version != VERSION {
        return Err(Stop::Fail { at: 4, error_kind: ErrorKind::expected("multifd version 1", version) });
    }
    Ok(())
}

/// Checks `length` as the payload of `normal` pages; returns the error, if any.
fn payload_error(compression: Compression, normal: u32, length: u32) -> Option<ErrorKind> {
    match (compression, normal) {
        (_, 0) if length != 0 => Some(ErrorKind::expected("no payload in a packet without normal pages", length)),
        (_, 0) => None,
        (Compression::None, _) if u64::from(length) != u64::from(normal) * PAGE_SIZE => {
            Some(ErrorKind::expected(format!("a payload of {normal} pages of 4096 bytes"), length))
        }
        (Compression::None, _) => None,
        (_, _) if length == 0 => Some(ErrorKind::expected("a payload of compressed pages", "one of 0 bytes")),
        (_, _) if length > PAYLOAD_LIMIT => Some(ErrorKind::TooLarge {
            what: "length of the compressed pages of a packet",
            value: length.into(),
            limit: PAYLOAD_LIMIT.into(),
        }),
        (_, _) => None,
    }
}
