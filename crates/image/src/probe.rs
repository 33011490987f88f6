//! Probing the format of a file by its first bytes.
//!
//! Law: a guess is never better than what was said. It decides only where nothing was said; what other tools take for a
//! format that limosa does not have is not taken for raw, and a raw image whose format was guessed never begins like
//! anything else afterwards (see [`Raw`](crate::raw::Raw)).

use limosa_storage::{Buffer, Storage};

use crate::error::ImageError;
use crate::luks;
use crate::qcow2::MAGIC;

/// A format that limosa has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::EnumString)]
#[strum(serialize_all = "lowercase", parse_err_ty = UnknownFormat, parse_err_fn = unknown)]
pub enum Format {
    /// The bytes of the disk, as they are.
    Raw,
    /// qcow2, version 2 or 3.
    Qcow2,
    /// LUKS, version 1: an encrypted disk.
    Luks,
}

impl Format {
    /// `raw`, `qcow2`, `luks`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Luks => "luks",
        }
    }
}

/// limosa does not have this format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("format {0:?} is not supported; use raw, qcow2 or luks")]
pub struct UnknownFormat(pub String);

fn unknown(name: &str) -> UnknownFormat {
    UnknownFormat(name.to_owned())
}

/// Bytes that are looked at.
pub(crate) const LOOKED_AT: usize = 512;

/// A format whose disks only the kernel decrypts.
const LUKS2: &str = "luks2";

/// Signatures of other formats, with their offsets and QEMU's names.
const FOREIGN: [(usize, &[u8], &str); 11] = [
    (0, b"QFI\xfb\0\0\0\x01", "qcow"),
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (0, b"# Disk DescriptorFile", "vmdk"),
    (0x40, b"\x7f\x10\xda\xbe", "vdi"),
    (0, b"vhdxfile", "vhdx"),
    (0, b"conectix", "vpc"),
    (0, b"QED\0", "qed"),
    (0, b"WithoutFreeSpace", "parallels"),
    (0, b"WithouFreSpacExt", "parallels"),
    (0, b"LUKS\xba\xbe\0\x02", LUKS2),
];

/// The format that a file looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guess {
    /// One of limosa's formats; [`Format::Raw`] if it looks like nothing.
    Known(Format),
    /// A format that limosa does not have, by QEMU's name.
    Foreign(&'static str),
}

/// Returns the format of a file that begins with these bytes: the first 512, with zeros past its end.
#[must_use]
pub fn guess(start: &[u8]) -> Guess {
    let there = |at: usize, bytes: &[u8]| start.get(at..).is_some_and(|rest| rest.starts_with(bytes));
    if let Some((_, _, name)) = FOREIGN.iter().find(|(at, bytes, _)| there(*at, bytes)) {
        return Guess::Foreign(name);
    }
    Guess::Known(match () {
        () if there(0, &MAGIC) => Format::Qcow2,
        () if there(0, &luks::MAGIC) => Format::Luks,
        () => Format::Raw,
    })
}

/// Guesses the format of the image in a storage.
///
/// # Errors
/// [`ImageError::Unsupported`]: it looks like a format that limosa does not have; what the storage says.
pub async fn probe(storage: &dyn Storage) -> Result<Format, ImageError> {
    let start = Buffer::zeroed(LOOKED_AT);
    storage.read(0, start.clone().into()).await?;
    match guess(&start.to_vec()) {
        Guess::Known(format) => Ok(format),
        Guess::Foreign(name) => {
            let remedy = if name == LUKS2 { "decrypt it with cryptsetup" } else { "convert it with qemu-img" };
            let what = format!("it looks like {name}, which is not supported; {remedy}, or open it as raw");
            Err(ImageError::Unsupported { image: storage.name().clone(), what })
        }
    }
}

#[cfg(test)]
mod tests {
    use limosa_storage::{MemoryStorage, block_on};

    use super::*;

    #[test]
    fn what_looks_like_nothing_is_raw_and_what_looks_foreign_is_not() {
        let probe = |bytes: &[u8]| block_on(probe(&MemoryStorage::with_contents(bytes.to_vec(), 1 << 20)));
        assert_eq!(probe(b"").unwrap(), Format::Raw);
        assert_eq!(probe(b"QFI\xfb\0\0\0\x03").unwrap(), Format::Qcow2);
        // Of any version: other tools try to open it.
        assert_eq!(probe(b"QFI\xfb\0\0\0\x09").unwrap(), Format::Qcow2);
        assert_eq!(probe(b"LUKS\xba\xbe\0\x01").unwrap(), Format::Luks);
        assert!(probe(b"LUKS\xba\xbe\0\x02").unwrap_err().to_string().contains("luks2"));
        let said = probe(b"KDMV and so on").unwrap_err().to_string();
        assert!(said.starts_with("memory: it looks like vmdk, "), "{said}");
        let mut vdi = vec![0; 0x40];
        vdi.extend_from_slice(b"\x7f\x10\xda\xbe");
        assert_eq!(guess(&vdi), Guess::Foreign("vdi"));
    }

    #[test]
    fn formats_have_qemus_names() {
        for format in [Format::Raw, Format::Qcow2, Format::Luks] {
            assert_eq!(format.name().parse(), Ok(format));
        }
        assert_eq!(
            "vmdk".parse::<Format>().unwrap_err().to_string(),
            r#"format "vmdk" is not supported; use raw, qcow2 or luks"#
        );
    }
}
