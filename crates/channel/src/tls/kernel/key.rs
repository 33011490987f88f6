//! A key in the kernel's form: `struct tls12_crypto_info_*` of include/uapi/linux/tls.h.
//!
//! The law: a key is wiped when it is dropped.

use rustls::ConnectionTrafficSecrets;
use zeroize::Zeroizing;

/// TLS 1.3 on the wire.
const VERSION: u16 = 0x0304;
const AES_GCM_128: u16 = 51;
const AES_GCM_256: u16 = 52;
const CHACHA20_POLY1305: u16 = 54;
/// Bytes of the initialization vector in a separate field, for AES-GCM.
const SALT: usize = 4;
/// Bytes of a record's number, the last field.
const NUMBER: usize = 8;
/// Size of the longest structure.
const LONGEST: usize = 56;

/// A key, and the number of the next record for it.
pub(crate) struct Key {
    /// Never grows: reallocation would leave a second copy.
    bytes: Zeroizing<Vec<u8>>,
}

impl Key {
    /// Converts a key; `None` if the kernel does not support its cipher.
    pub(crate) fn new(secrets: &ConnectionTrafficSecrets, number: u64) -> Option<Self> {
        let (cipher, key, iv, salt) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (AES_GCM_128, key, iv, SALT),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (AES_GCM_256, key, iv, SALT),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (CHACHA20_POLY1305, key, iv, 0),
            _ => return None,
        };
        let (salt, iv) = iv.as_ref().split_at_checked(salt)?;
        let mut bytes = Zeroizing::new(Vec::with_capacity(LONGEST));
        for field in [&VERSION.to_ne_bytes()[..], &cipher.to_ne_bytes(), iv, key.as_ref(), salt, &number.to_be_bytes()]
        {
            bytes.extend_from_slice(field);
        }
        Some(Self { bytes })
    }

    /// Returns room for a key of `length` bytes that the kernel reports.
    pub(super) fn room(length: usize) -> Self {
        Self { bytes: Zeroizing::new(vec![0; length]) }
    }

    /// Returns the whole structure.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the whole structure, to be filled.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Returns the number of the next record.
    pub(super) fn number(&self) -> u64 {
        self.bytes.last_chunk::<NUMBER>().map_or(0, |number| u64::from_be_bytes(*number))
    }

    /// Returns the same key with another record number.
    pub(crate) fn at(mut self, number: u64) -> Self {
        if let Some(place) = self.bytes.last_chunk_mut::<NUMBER>() {
            *place = number.to_be_bytes();
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cipher_has_the_kernels_layout() {
        let iv = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
        let short = Key::new(&ConnectionTrafficSecrets::Aes128Gcm { key: [7; 32].into(), iv: iv.into() }, 0).unwrap();
        // rustls keeps keys in 32 bytes, and says how many of them are one.
        assert_eq!(short.bytes.len(), 4 + 8 + 32 + 4 + 8);
        let long = Key::new(&ConnectionTrafficSecrets::Aes256Gcm { key: [7; 32].into(), iv: iv.into() }, 9).unwrap();
        let mut wanted = vec![4, 3, 52, 0, 5, 6, 7, 8, 9, 10, 11, 12];
        wanted.extend([7; 32]);
        wanted.extend([1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 9]);
        assert_eq!((long.bytes(), long.number()), (&wanted[..], 9));
        let other =
            Key::new(&ConnectionTrafficSecrets::Chacha20Poly1305 { key: [7; 32].into(), iv: iv.into() }, 1).unwrap();
        let mut wanted = vec![4, 3, 54, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
        wanted.extend([7; 32]);
        wanted.extend([0, 0, 0, 0, 0, 0, 1, 0]);
        assert_eq!(other.at(256).bytes(), wanted);
    }
}
