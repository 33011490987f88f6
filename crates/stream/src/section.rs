//! Section framing: the bytes around a body.
//!
//! START and FULL carry the section's name, PART and END only its id; each body is followed by a footer that repeats
//! the id. No length travels with a body: a reader that cannot decode a body cannot skip it.

use limosa_page::to_u64;

use crate::cursor::{Cursor, Stop, put_name};
use crate::error::EncodeError;

/// Type byte: end of a section loop.
pub const EOF: u8 = 0x00;
/// Type byte of an optional part of a device body or of the configuration.
pub const SUBSECTION: u8 = 0x05;
/// Type byte of the JSON description behind the end of the sections.
pub const DESCRIPTION: u8 = 0x06;
/// Type byte of the configuration record.
pub const CONFIGURATION: u8 = 0x07;
/// Type byte of a command.
pub const COMMAND: u8 = 0x08;
/// First byte of a footer.
pub const FOOTER: u8 = 0x7e;
/// Bytes of a footer.
pub const FOOTER_LENGTH: usize = 5;

/// The four kinds of sections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SectionKind {
    /// First section of an iterable handler.
    Start,
    /// One of its further sections.
    Part,
    /// Its last section.
    End,
    /// The only section of a device.
    Full,
}

impl SectionKind {
    /// The type byte on the wire.
    pub const fn byte(self) -> u8 {
        match self {
            Self::Start => 0x01,
            Self::Part => 0x02,
            Self::End => 0x03,
            Self::Full => 0x04,
        }
    }

    /// The kind whose type byte is `byte`.
    pub const fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            0x01 => Some(Self::Start),
            0x02 => Some(Self::Part),
            0x03 => Some(Self::End),
            0x04 => Some(Self::Full),
            _ => None,
        }
    }
}

/// Header of a START or FULL section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SectionHeader {
    /// START or FULL.
    pub kind: SectionKind,
    /// The source's number for this section; not constant from VM to VM.
    pub id: u32,
    /// QEMU's idstr, e.g. `ram` or `0000:00:03.0/e1000`.
    pub name: String,
    /// Tells apart sections of one name.
    pub instance: u32,
    /// Version of the body.
    pub version: u32,
}

impl SectionHeader {
    /// Appends the header.
    ///
    /// # Errors
    /// A name that is empty or longer than 255 bytes. `out` is then as before.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let begin = out.len();
        out.push(self.kind.byte());
        out.extend_from_slice(&self.id.to_be_bytes());
        put_name("section", &self.name, out).inspect_err(|_| out.truncate(begin))?;
        out.extend_from_slice(&self.instance.to_be_bytes());
        out.extend_from_slice(&self.version.to_be_bytes());
        Ok(())
    }

    /// Reads what follows the type byte `kind`.
    pub(crate) fn read(kind: SectionKind, cursor: &mut Cursor<'_>) -> Result<Self, Stop> {
        let id = cursor.be32()?;
        let name = cursor.name("a section name")?;
        let instance = cursor.be32()?;
        let version = cursor.be32()?;
        Ok(Self { kind, id, name: name.to_owned(), instance, version })
    }
}

/// Appends the header of a START section.
///
/// # Errors
/// A name that is empty or longer than 255 bytes.
pub fn encode_start(id: u32, name: &str, instance: u32, version: u32, out: &mut Vec<u8>) -> Result<(), EncodeError> {
    SectionHeader { kind: SectionKind::Start, id, name: name.to_owned(), instance, version }.encode(out)
}

/// Appends the header of a PART section.
pub fn encode_part(id: u32, out: &mut Vec<u8>) {
    out.push(SectionKind::Part.byte());
    out.extend_from_slice(&id.to_be_bytes());
}

/// Appends the header of an END section.
pub fn encode_end(id: u32, out: &mut Vec<u8>) {
    out.push(SectionKind::End.byte());
    out.extend_from_slice(&id.to_be_bytes());
}

/// Appends the footer of section `id`.
pub fn encode_footer(id: u32, out: &mut Vec<u8>) {
    out.push(FOOTER);
    out.extend_from_slice(&id.to_be_bytes());
}

/// Appends the byte that ends the sections.
pub fn encode_eof(out: &mut Vec<u8>) {
    out.push(EOF);
}

/// Appends the description of the devices, which follows the byte that ends the sections.
///
/// # Errors
/// It has 4 GiB or more. `out` is then as before.
pub fn encode_description(description: &[u8], out: &mut Vec<u8>) -> Result<(), EncodeError> {
    let value = to_u64(description.len());
    let what = "length of the description of the devices";
    let length = u32::try_from(value).map_err(|_| EncodeError::Number { what, value, rule: "at most 4 GiB" })?;
    out.push(DESCRIPTION);
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(description);
    Ok(())
}
