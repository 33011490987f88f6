//! Secrets: passphrases of encrypted images.
//!
//! Law: a secret is never printed, and wiped when it is no longer used.

use std::fs::File;
use std::io::Read as _;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use limosa_image::luks::{Passphrase, Secrets};

use super::{Properties, is_id};

/// The most bytes of a secret in a file.
const LONGEST: u64 = 1 << 20;

/// A secret: `secret,id=NAME,data=TEXT|file=PATH[,format=raw|base64][,keyid=NAME,iv=BASE64]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Secret {
    pub(super) id: String,
    source: SecretSource,
    is_base64: bool,
    /// The name of the secret that it is encrypted with, and the initialization vector.
    key: Option<(String, Vec<u8>)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum SecretSource {
    Data(Passphrase),
    File(PathBuf),
}

impl Secret {
    /// Takes its properties.
    ///
    /// # Errors
    /// The reason.
    pub(super) fn new(id: &str, properties: &mut Properties) -> Result<Self, String> {
        let is_base64 = match properties.remove("format").as_deref() {
            None | Some("raw") => false,
            Some("base64") => true,
            Some(_) => return Err(format!("secret {id}: format must be raw or base64")),
        };
        let source = match (properties.remove("data"), properties.remove("file")) {
            (Some(data), None) => SecretSource::Data(Passphrase::new(data.into_bytes())),
            (None, Some(path)) => SecretSource::File(path.into()),
            (Some(_), Some(_)) => return Err(format!("secret {id}: data and file exclude each other")),
            (None, None) => return Err(format!("secret {id}: value not given; use data=TEXT or file=PATH")),
        };
        let key = match (properties.remove("keyid"), properties.remove("iv")) {
            (None, None) => None,
            (Some(name), Some(iv)) => {
                let iv = base64(iv.as_bytes()).ok_or_else(|| format!("secret {id}: iv is not valid base64"))?;
                if !is_id(&name) {
                    return Err(format!("secret {id}: keyid must be the name of a secret"));
                }
                Some((name, iv.bytes().to_vec()))
            }
            (Some(_), None) | (None, Some(_)) => return Err(format!("secret {id}: keyid and iv need each other")),
        };
        Ok(Self { id: id.to_owned(), source, is_base64, key })
    }

    /// Returns its value. `known`: those that were defined before it.
    pub(super) fn value(&self, known: &Secrets) -> anyhow::Result<Passphrase> {
        let id = &self.id;
        let stored = match &self.source {
            SecretSource::Data(text) => text.clone(),
            SecretSource::File(path) => {
                // As long as it may get: made longer, it would leave a copy that is not wiped.
                let length = std::fs::metadata(path).map_or(0, |metadata| metadata.len().min(LONGEST));
                let mut bytes = Vec::with_capacity(usize::try_from(length)?.saturating_add(64));
                let read = File::open(path).and_then(|file| file.take(LONGEST + 1).read_to_end(&mut bytes));
                let stored = Passphrase::new(bytes);
                read.with_context(|| format!("--object: secret {id}: cannot read {}", path.display()))?;
                stored
            }
        };
        if stored.bytes().len() as u64 > LONGEST {
            bail!("--object: secret {id}: longer than {LONGEST} bytes");
        }
        let decoded = if self.is_base64 {
            base64(stored.bytes()).with_context(|| format!("--object: secret {id}: not valid base64"))?
        } else {
            stored
        };
        let Some((name, iv)) = &self.key else { return Ok(decoded) };
        let key = known.get(name).with_context(|| {
            format!("--object: secret {id}: keyid={name}: define secret {name} with an --object before it")
        })?;
        Passphrase::decrypt(key, iv, decoded.bytes()).with_context(|| {
            format!(
                "--object: secret {id}: cannot be decrypted: keyid must name 32 bytes, iv have 16, and both be right"
            )
        })
    }
}

/// Decodes base64, with line ends between its letters; `None`: it is something else.
fn base64(text: &[u8]) -> Option<Passphrase> {
    let letters = text.iter().filter(|letter| !b"\r\n".contains(letter));
    let padding = letters.clone().rev().take_while(|letter| **letter == b'=').count();
    let count = letters.clone().count();
    if padding > 2 || !count.is_multiple_of(4) {
        return None;
    }
    let (mut bytes, mut held, mut bits) = (Vec::with_capacity(count / 4 * 3), 0_u32, 0);
    for letter in letters.take(count - padding) {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        held = held << 6 | u32::from(value);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            let [.., byte] = (held >> bits).to_be_bytes();
            bytes.push(byte);
        }
    }
    Some(Passphrase::new(bytes))
}
