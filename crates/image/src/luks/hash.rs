//! The hash functions of a header, and keys derived from passphrases (PBKDF2).

use pbkdf2::pbkdf2_hmac;
use ripemd::Ripemd160;
use sha1::Sha1;
use sha2::{Digest, Sha224, Sha256, Sha384, Sha512};

/// A hash function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub enum HashAlgorithm {
    /// SHA-1.
    Sha1,
    /// SHA-224.
    Sha224,
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
    /// RIPEMD-160.
    Ripemd160,
}

/// Calls a generic function with the type of a hash.
macro_rules! with_hash {
    ($hash:expr, $function:ident($($argument:expr),*)) => {
        match $hash {
            HashAlgorithm::Sha1 => $function::<Sha1>($($argument),*),
            HashAlgorithm::Sha224 => $function::<Sha224>($($argument),*),
            HashAlgorithm::Sha256 => $function::<Sha256>($($argument),*),
            HashAlgorithm::Sha384 => $function::<Sha384>($($argument),*),
            HashAlgorithm::Sha512 => $function::<Sha512>($($argument),*),
            HashAlgorithm::Ripemd160 => $function::<Ripemd160>($($argument),*),
        }
    };
}

impl HashAlgorithm {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Sha1, Self::Sha224, Self::Sha256, Self::Sha384, Self::Sha512, Self::Ripemd160];

    /// Returns the length of its digests in bytes.
    #[must_use]
    pub fn length(self) -> usize {
        with_hash!(self, output_length())
    }

    /// Returns the digest of these parts, joined.
    pub(super) fn digest(self, parts: &[&[u8]]) -> Vec<u8> {
        with_hash!(self, digest(parts))
    }

    /// Derives a key from a passphrase, of the length of `key`.
    pub(super) fn derive(self, passphrase: &[u8], salt: &[u8], iterations: u32, key: &mut [u8]) {
        with_hash!(self, pbkdf2_hmac(passphrase, salt, iterations, key));
    }
}

fn output_length<D: Digest>() -> usize {
    <D as Digest>::output_size()
}

fn digest<D: Digest>(parts: &[&[u8]]) -> Vec<u8> {
    let mut hash = D::new();
    parts.iter().for_each(|part| hash.update(part));
    hash.finalize().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_the_published_vectors() {
        // RFC 6070.
        let mut key = [0; 20];
        HashAlgorithm::Sha1.derive(b"password", b"salt", 4096, &mut key);
        assert_eq!(key[..4], [0x4b, 0x00, 0x79, 0x01]);
        // RFC 7914, section 11.
        let mut key = [0; 64];
        HashAlgorithm::Sha256.derive(b"passwd", b"salt", 1, &mut key);
        assert_eq!(
            (key[..4].to_vec(), key[60..].to_vec()),
            (vec![0x55, 0xac, 0x04, 0x6e], vec![0xd3, 0xa1, 0x97, 0x83])
        );
    }

    #[test]
    fn names_are_those_of_headers() {
        for hash in HashAlgorithm::ALL {
            assert_eq!(hash.to_string().parse(), Ok(hash));
            assert_eq!(hash.digest(&[b"a", b"b"]), hash.digest(&[b"ab"]));
            assert_eq!(hash.digest(&[]).len(), hash.length());
        }
    }
}
