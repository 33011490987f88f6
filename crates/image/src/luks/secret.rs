//! Passphrases, by the names that images are opened with.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use aes::Aes256;
use cipher::array::Array;
use cipher::consts::U16;
use cipher::{BlockCipherDecrypt as _, KeyInit as _};
use subtle::ConstantTimeEq as _;
use zeroize::Zeroizing;

/// A passphrase. It is wiped when the last clone is dropped, and never printed.
#[derive(Clone)]
pub struct Passphrase(Arc<Zeroizing<Vec<u8>>>);

impl Passphrase {
    /// These bytes.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Zeroizing::new(bytes)))
    }

    /// Returns its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Decrypts a passphrase that is encrypted with AES-256 in CBC mode, and padded as in PKCS #7; `None`: the key is
    /// not one of 32 bytes, the initialization vector not one of 16, or the padding is wrong.
    #[must_use]
    pub fn decrypt(key: &Self, iv: &[u8], encrypted: &[u8]) -> Option<Self> {
        let cipher = Aes256::new_from_slice(key.bytes()).ok()?;
        let mut before: [u8; 16] = iv.try_into().ok()?;
        let mut plain = Zeroizing::new(Vec::with_capacity(encrypted.len()));
        if !encrypted.len().is_multiple_of(before.len()) {
            return None;
        }
        for encrypted in encrypted.chunks_exact(before.len()) {
            let mut block: Array<u8, U16> = Array::try_from(encrypted).ok()?;
            cipher.decrypt_block(&mut block);
            plain.extend(block.iter().zip(before).map(|(byte, before)| byte ^ before));
            before.copy_from_slice(encrypted);
        }
        let padding = usize::from(*plain.last()?);
        let length = plain.len().checked_sub(padding).filter(|_| (1..=16).contains(&padding))?;
        let (bytes, rest) = plain.split_at(length);
        rest.iter().all(|byte| usize::from(*byte) == padding).then(|| Self::new(bytes.to_vec()))
    }
}

impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passphrase")
    }
}

impl PartialEq for Passphrase {
    fn eq(&self, other: &Self) -> bool {
        self.bytes().ct_eq(other.bytes()).into()
    }
}

impl Eq for Passphrase {}

/// Passphrases by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Secrets(BTreeMap<String, Passphrase>);

impl Secrets {
    /// Adds one, in place of an earlier one of the name.
    pub fn insert(&mut self, name: impl Into<String>, passphrase: Passphrase) {
        self.0.insert(name.into(), passphrase);
    }

    /// Returns the one of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Passphrase> {
        self.0.get(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_shows_a_passphrase() {
        let mut secrets = Secrets::default();
        secrets.insert("disk", Passphrase::new(b"correct horse".to_vec()));
        assert_eq!(format!("{secrets:?}"), r#"Secrets({"disk": Passphrase})"#);
        assert_eq!(secrets.get("disk").unwrap().bytes(), b"correct horse");
        assert_eq!(secrets.get("disc"), None);
    }

    #[test]
    fn wrong_padding_and_lengths_are_refused() {
        let key = Passphrase::new(vec![1; 32]);
        assert_eq!(Passphrase::decrypt(&key, &[0; 16], &[7; 15]), None);
        assert_eq!(Passphrase::decrypt(&key, &[0; 16], &[]), None);
        assert_eq!(Passphrase::decrypt(&key, &[0; 15], &[7; 16]), None);
        assert_eq!(Passphrase::decrypt(&key, &[0; 16], &[7; 16]), None);
        assert_eq!(Passphrase::decrypt(&Passphrase::new(vec![1; 16]), &[0; 16], &[7; 16]), None);
    }
}
