//! Names of ciphers, modes and generators of initialization vectors.

use std::fmt;

use super::LuksError;
use super::hash::HashAlgorithm;

/// A block cipher with the length of its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::EnumString)]
#[strum(serialize_all = "kebab-case")]
pub enum CipherAlgorithm {
    /// AES with a key of 128 bits.
    #[strum(serialize = "aes-128")]
    Aes128,
    /// AES with a key of 192 bits.
    #[strum(serialize = "aes-192")]
    Aes192,
    /// AES with a key of 256 bits.
    #[strum(serialize = "aes-256")]
    Aes256,
    /// Serpent with a key of 128 bits.
    #[strum(serialize = "serpent-128")]
    Serpent128,
    /// Serpent with a key of 192 bits.
    #[strum(serialize = "serpent-192")]
    Serpent192,
    /// Serpent with a key of 256 bits.
    #[strum(serialize = "serpent-256")]
    Serpent256,
    /// Twofish with a key of 128 bits.
    #[strum(serialize = "twofish-128")]
    Twofish128,
    /// Twofish with a key of 192 bits.
    #[strum(serialize = "twofish-192")]
    Twofish192,
    /// Twofish with a key of 256 bits.
    #[strum(serialize = "twofish-256")]
    Twofish256,
}

impl CipherAlgorithm {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Aes128,
        Self::Aes192,
        Self::Aes256,
        Self::Serpent128,
        Self::Serpent192,
        Self::Serpent256,
        Self::Twofish128,
        Self::Twofish192,
        Self::Twofish256,
    ];

    /// Returns its name in a header, without the length of the key.
    #[must_use]
    pub const fn family(self) -> &'static str {
        match self {
            Self::Aes128 | Self::Aes192 | Self::Aes256 => "aes",
            Self::Serpent128 | Self::Serpent192 | Self::Serpent256 => "serpent",
            Self::Twofish128 | Self::Twofish192 | Self::Twofish256 => "twofish",
        }
    }

    /// Returns the length of its key in bytes.
    #[must_use]
    pub const fn key_length(self) -> usize {
        match self {
            Self::Aes128 | Self::Serpent128 | Self::Twofish128 => 16,
            Self::Aes192 | Self::Serpent192 | Self::Twofish192 => 24,
            Self::Aes256 | Self::Serpent256 | Self::Twofish256 => 32,
        }
    }

    /// Returns the cipher of this name with a key of this length.
    pub(crate) fn of(family: &str, key_length: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|cipher| cipher.family() == family && cipher.key_length() == key_length)
    }
}

/// A mode of operation of a block cipher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub enum CipherMode {
    /// XTS: two keys, one for the tweak.
    Xts,
    /// CBC: each block depends on those before it in the sector.
    Cbc,
    /// ECB: equal blocks are equal when they are encrypted.
    Ecb,
}

impl CipherMode {
    /// Returns the number of keys of its cipher.
    #[must_use]
    pub const fn keys(self) -> usize {
        match self {
            Self::Xts => 2,
            Self::Cbc | Self::Ecb => 1,
        }
    }
}

/// A generator of the initialization vectors of sectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IvGenerator {
    /// The low 32 bits of the sector's number.
    Plain,
    /// The sector's number.
    Plain64,
    /// The sector's number, encrypted with a hash of the key.
    Essiv(HashAlgorithm),
}

impl IvGenerator {
    /// Returns its name, without the hash.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Plain64 => "plain64",
            Self::Essiv(_) => "essiv",
        }
    }

    /// Returns the hash of `essiv`.
    #[must_use]
    pub const fn hash(self) -> Option<HashAlgorithm> {
        match self {
            Self::Essiv(hash) => Some(hash),
            Self::Plain | Self::Plain64 => None,
        }
    }
}

impl fmt::Display for IvGenerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Essiv(hash) => write!(f, "essiv:{hash}"),
            other => f.write_str(other.name()),
        }
    }
}

/// Parses the mode of a header: `xts-plain64`, `cbc-essiv:sha256`, `ecb`.
pub(super) fn parse_mode(text: &str) -> Result<(CipherMode, IvGenerator), LuksError> {
    let unsupported = || LuksError::Unsupported(format!("cipher mode {text:?} is not supported"));
    let (mode, generator) = text.split_once('-').unwrap_or((text, "plain64"));
    let mode = mode.parse().map_err(|_| unsupported())?;
    let generator = match (generator.split_once(':'), generator) {
        (Some(("essiv", hash)), _) => IvGenerator::Essiv(hash.parse().map_err(|_| unsupported())?),
        // A hash of the others has no use.
        (Some(("plain", _)), _) | (None, "plain") => IvGenerator::Plain,
        (Some(("plain64", _)), _) | (None, "plain64") => IvGenerator::Plain64,
        _ => return Err(unsupported()),
    };
    Ok((mode, generator))
}
