//! libvirt's save images: the parts before the migration stream in a file of `virsh save` or `managedsave`.
//!
//! The layout (facts of libvirt's `qemu_saveimage`, versions 1 and 2, and of files that libvirt 9.0 wrote): 92 bytes of
//! header, then `data_len` bytes with the domain's XML, a NUL, a cookie with a NUL of its own, and padding; then the
//! stream. The header's words have the byte order of the machine that wrote them.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 16 | `LibvirtQemudSave`, or `LibvirtQemudPart` until the save is complete |
//! | 16 | 4 | version, 2 |
//! | 20 | 4 | `data_len` |
//! | 24 | 4 | whether the VM ran |
//! | 28 | 4 | format: 0 raw, 1 gzip, 2 bzip2, 3 xz, 4 lzop, 5 zstd, 6 sparse (mapped-ram, libvirt 11.2) |
//! | 32 | 4 | where the cookie begins in the data, or 0 |
//! | 36 | 56 | 0 |
//!
//! Law of this module: no I/O; a length is believed only after it was compared with the file's length and with a bound.

use serde::Serialize;
use uuid::Uuid;

use super::decompressor::Decompressor;
use super::domain_xml;

/// Bytes of the header.
pub const SAVE_IMAGE_HEADER_LENGTH: usize = 92;
/// Longest XML with cookie and padding that is accepted, in bytes.
pub const SAVE_IMAGE_XML_LIMIT: u32 = 16 << 20;

const MAGIC: &[u8; 16] = b"LibvirtQemudSave";
const MAGIC_PARTIAL: &[u8; 16] = b"LibvirtQemudPart";
/// The newest version that is known.
const VERSION: u32 = 2;

/// The byte order of a header's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ByteOrder {
    /// Least significant byte first, as x86 writes it.
    Little,
    /// Most significant byte first.
    Big,
}

/// How the VM's memory and devices are stored in an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveImageFormat {
    /// A migration stream.
    Raw,
    /// A migration stream that a program has packed.
    Compressed(Decompressor),
    /// A mapped-ram stream, whose pages have places of their own in the file.
    Sparse,
}

impl SaveImageFormat {
    /// The name that libvirt gives it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Compressed(decompressor) => decompressor.program(),
            Self::Sparse => "sparse",
        }
    }
}

impl Serialize for SaveImageFormat {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// The header of a save image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SaveHeader {
    /// 1 or 2.
    pub version: u32,
    /// The byte order of the machine that wrote it.
    pub byte_order: ByteOrder,
    /// Whether the VM ran when it was saved: then it is to run when it comes back.
    pub was_running: bool,
    /// How the VM is stored.
    pub format: SaveImageFormat,
    /// Bytes of XML, cookie and padding behind the header.
    pub data_length: u32,
    /// Where the cookie begins in them, if there is one.
    #[serde(skip)]
    pub cookie_offset: Option<u32>,
}

/// The reason why a file is not a valid save image of libvirt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidSaveImage(String);

/// Whether a file that begins so is a save image, whole or not.
pub(super) fn is_image(head: &[u8]) -> bool {
    head.starts_with(MAGIC) || head.starts_with(MAGIC_PARTIAL)
}

impl SaveHeader {
    /// Decodes the first [`SAVE_IMAGE_HEADER_LENGTH`] bytes of a file.
    ///
    /// # Errors
    /// Not a save image, one that was never completed, lengths that are out of range, or an unknown format.
    pub fn decode(bytes: &[u8]) -> Result<Self, InvalidSaveImage> {
        Self::decoded(bytes).map_err(InvalidSaveImage)
    }

    fn decoded(bytes: &[u8]) -> Result<Self, String> {
        if bytes.starts_with(MAGIC_PARTIAL) {
            return Err("a libvirt save image that was never completed: the save was broken off".to_owned());
        }
        if !bytes.starts_with(MAGIC) {
            return Err("not a libvirt save image: it does not begin with LibvirtQemudSave".to_owned());
        }
        let Some(words) = bytes.get(MAGIC.len()..SAVE_IMAGE_HEADER_LENGTH) else {
            return Err(format!("a libvirt save image cut off in its header, after {} bytes", bytes.len()));
        };
        let word = |index: usize, byte_order: ByteOrder| {
            let bytes = std::array::from_fn(|byte| words[4 * index + byte]);
            match byte_order {
                ByteOrder::Little => u32::from_le_bytes(bytes),
                ByteOrder::Big => u32::from_be_bytes(bytes),
            }
        };
        // A version is a small number; in the wrong byte order it is not.
        let known = |order: &ByteOrder| (1..=VERSION).contains(&word(0, *order));
        let Some(byte_order) = [ByteOrder::Little, ByteOrder::Big].into_iter().find(known) else {
            return Err(format!(
                "a libvirt save image of version {}; versions 1 and 2 are known",
                word(0, ByteOrder::Little).min(word(0, ByteOrder::Big))
            ));
        };
        let word = |index| word(index, byte_order);
        let (version, data_length, cookie) = (word(0), word(1), word(4));
        // Before version 2 there was nothing but streams as they are.
        let format = match if version == 1 { 0 } else { word(3) } {
            0 => SaveImageFormat::Raw,
            1 => SaveImageFormat::Compressed(Decompressor::Gzip),
            2 => SaveImageFormat::Compressed(Decompressor::Bzip2),
            3 => SaveImageFormat::Compressed(Decompressor::Xz),
            4 => SaveImageFormat::Compressed(Decompressor::Lzop),
            5 => SaveImageFormat::Compressed(Decompressor::Zstd),
            6 => SaveImageFormat::Sparse,
            other => {
                return Err(format!(
                    "a libvirt save image of format {other}, which is not known (0 raw, 1 gzip, 2 bzip2, 3 xz, 4 lzop, 5 zstd, \
                     6 sparse are)"
                ));
            }
        };
        if data_length == 0 || data_length > SAVE_IMAGE_XML_LIMIT {
            return Err(format!(
                "a libvirt save image whose domain XML is said to take {data_length} bytes: expected 1 to {SAVE_IMAGE_XML_LIMIT}"
            ));
        }
        if cookie >= data_length {
            return Err(format!(
                "a libvirt save image whose cookie is said to begin at byte {cookie} of {data_length} bytes of XML"
            ));
        }
        let cookie_offset = (cookie > 0).then_some(cookie);
        Ok(Self { version, byte_order, was_running: word(2) != 0, format, data_length, cookie_offset })
    }
}

/// A save image but for its stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveImage {
    /// The header.
    pub header: SaveHeader,
    /// The domain's name.
    pub name: Option<String>,
    /// The domain's uuid.
    pub uuid: Option<Uuid>,
    /// The domain's definition.
    pub xml: String,
    /// libvirt's own record, XML too.
    pub cookie: Option<String>,
}

impl SaveImage {
    /// Takes the image apart: `head` is its beginning, `data` reads bytes behind the header.
    pub(super) fn read(head: &[u8], data: impl FnOnce(u32) -> Result<Vec<u8>, String>) -> Result<Self, String> {
        let header = SaveHeader::decoded(head)?;
        let data = data(header.data_length)?;
        Self::decoded(header, &data)
    }

    /// Decodes the parts behind the header.
    ///
    /// # Errors
    /// Too few bytes, or XML that does not end, is not text or does not describe a domain.
    pub fn decode(header: SaveHeader, data: &[u8]) -> Result<Self, InvalidSaveImage> {
        Self::decoded(header, data).map_err(InvalidSaveImage)
    }

    fn decoded(header: SaveHeader, data: &[u8]) -> Result<Self, String> {
        let length = header.data_length as usize;
        let Some(data) = data.get(..length) else {
            return Err(format!(
                "a libvirt save image cut off in its domain XML: {} bytes of {length} are there",
                data.len()
            ));
        };
        let cookie_at = header.cookie_offset.and_then(|offset| usize::try_from(offset).ok());
        let (xml, cookie) = data.split_at(cookie_at.unwrap_or(length).min(length));
        let xml = text(xml).map_err(|why| format!("a libvirt save image whose domain XML {why}"))?;
        let cookie = match cookie_at {
            Some(_) => Some(text(cookie).map_err(|why| format!("a libvirt save image whose cookie {why}"))?.to_owned()),
            None => None,
        };
        let identity = domain_xml::identity(xml)
            .map_err(|why| format!("a libvirt save image whose domain XML cannot be read: {why}"))?;
        Ok(Self { header, name: identity.name, uuid: identity.uuid, xml: xml.to_owned(), cookie })
    }

    /// Where the VM's stream begins in the file.
    pub fn payload_offset(&self) -> u64 {
        SAVE_IMAGE_HEADER_LENGTH as u64 + u64::from(self.header.data_length)
    }

    /// The state in which the VM is to come back. In the stream itself it is always paused: libvirt stops it before.
    pub fn run_state(&self) -> &'static str {
        if self.header.was_running { "running" } else { "paused" }
    }
}

/// A text up to its NUL.
fn text(bytes: &[u8]) -> Result<&str, String> {
    let Some(end) = bytes.iter().position(|byte| *byte == 0) else {
        return Err(format!("has no end (a NUL) within its {} bytes", bytes.len()));
    };
    std::str::from_utf8(&bytes[..end]).map_err(|error| format!("is not valid UTF-8 at byte {}", error.valid_up_to()))
}
