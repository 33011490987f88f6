//! The secrets that `--object` defines.
//!
//! Law: a secret is never printed, and wiped when it is no longer used. Other objects are refused by their kind,
//! properties that secrets do not have by their name.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::PathBuf;
use std::sync::OnceLock;

use anyhow::{Context as _, bail};
use limosa_image::luks::{Passphrase, Secrets};
use limosa_image::reference::split_options;
use serde_json::Value;

/// The most bytes of a secret in a file.
const LONGEST: u64 = 1 << 20;
/// Kinds of objects that only QEMU has a use for.
const OTHERS: [&str; 9] = [
    "authz-list",
    "authz-list-file",
    "authz-pam",
    "authz-simple",
    "main-loop",
    "pr-manager-helper",
    "secret_keyring",
    "thread-context",
    "throttle-group",
];

/// All that were defined; set once, before a command runs.
static SECRETS: OnceLock<Secrets> = OnceLock::new();

/// Returns the secrets that were defined.
pub(crate) fn secrets() -> Secrets {
    SECRETS.get().cloned().unwrap_or_default()
}

/// Returns the secret that an option names.
///
/// # Errors
/// No secret has that name.
pub(crate) fn named(option: &str, id: &str) -> anyhow::Result<Passphrase> {
    let missing = || format!("-o {option}={id}: no such secret; define it with --object secret,id={id}");
    secrets().get(id).cloned().with_context(missing)
}

/// A secret: `secret,id=NAME,data=TEXT|file=PATH[,format=raw|base64][,keyid=NAME,iv=BASE64]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Secret {
    id: String,
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
    /// Understands a definition, as a list of properties or as JSON.
    ///
    /// # Errors
    /// The reason.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut properties = if text.starts_with('{') { from_json(text)? } else { from_list(text)? };
        let kind = properties.remove("qom-type").ok_or("kind of object not given; write secret,id=NAME,data=TEXT")?;
        if kind != "secret" {
            return Err(if OTHERS.contains(&kind.as_str()) {
                format!("{kind:?}: not used by images; only secret is supported")
            } else {
                format!("{kind:?}: unknown kind of object; only secret is supported")
            });
        }
        let id = properties.remove("id").ok_or("a secret needs a name: id=NAME")?;
        let mut letters = id.chars();
        let begins = letters.next().is_some_and(|first| first.is_ascii_alphabetic());
        if !begins || !letters.all(|letter| letter.is_ascii_alphanumeric() || "-._".contains(letter)) {
            return Err(format!("id={id}: must begin with a letter and have only letters, digits, '-', '.' and '_'"));
        }
        let is_base64 = match properties.remove("format").as_deref() {
            None | Some("raw") => false,
            Some("base64") => true,
            Some(other) => return Err(format!("format={other}: must be raw or base64")),
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
                Some((name, iv.bytes().to_vec()))
            }
            (Some(_), None) | (None, Some(_)) => return Err(format!("secret {id}: keyid and iv need each other")),
        };
        match properties.keys().next().map(String::as_str) {
            None => Ok(Self { id, source, is_base64, key }),
            Some(name) => Err(format!("secret {id}: unknown property {name:?}")),
        }
    }

    /// Returns its value. `known`: those that were defined before it.
    fn value(&self, known: &Secrets) -> anyhow::Result<Passphrase> {
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
        let key = known.get(name).with_context(|| format!("--object: secret {id}: no secret {name:?} before it"))?;
        Passphrase::decrypt(key, iv, decoded.bytes()).with_context(|| {
            format!(
                "--object: secret {id}: cannot be decrypted: keyid must name 32 bytes, iv have 16, and both be right"
            )
        })
    }
}

/// Reads all that were defined, for the commands to use. Once there is one, the process writes no core dump.
///
/// # Errors
/// One is unavailable, or defined twice.
pub(crate) fn define(secrets: &[Secret]) -> anyhow::Result<()> {
    if !secrets.is_empty() {
        // A kernel that refuses has none to write, either.
        let _ = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable);
    }
    let values = values(secrets)?;
    SECRETS.set(values).map_err(|_| anyhow::anyhow!("--object: secrets are defined once"))
}

fn values(secrets: &[Secret]) -> anyhow::Result<Secrets> {
    let mut known = Secrets::default();
    for secret in secrets {
        if known.get(&secret.id).is_some() {
            bail!("--object: duplicate id {}", secret.id);
        }
        known.insert(secret.id.clone(), secret.value(&known)?);
    }
    Ok(known)
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

/// `KIND,NAME=VALUE,...`; the last value of a name counts.
fn from_list(text: &str) -> Result<BTreeMap<String, String>, String> {
    let mut properties = BTreeMap::new();
    for (index, item) in split_options(text).iter().enumerate() {
        let (name, value) = match item.split_once('=') {
            Some(pair) => pair,
            None if index == 0 => ("qom-type", item.as_str()),
            None => return Err(format!("{item:?}: must be NAME=VALUE")),
        };
        properties.insert(name.to_owned(), value.to_owned());
    }
    Ok(properties)
}

/// `{"qom-type": KIND, NAME: VALUE, ...}`.
fn from_json(text: &str) -> Result<BTreeMap<String, String>, String> {
    let properties: BTreeMap<String, Value> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let texts = properties.into_iter().map(|(name, value)| match value {
        Value::String(value) => Ok((name, value)),
        _ => Err(format!("{name:?}: must be a string")),
    });
    texts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_has_a_name_and_a_place() {
        let secret = |id: &str, source, is_base64| Ok(Secret { id: id.into(), source, is_base64, key: None });
        let data = |text: &str| SecretSource::Data(Passphrase::new(text.into()));
        assert_eq!(Secret::parse("secret,id=a,data=b"), secret("a", data("b"), false));
        assert_eq!(Secret::parse("qom-type=secret,data=x,,y,data=,id=a.b-c_1"), secret("a.b-c_1", data(""), false));
        assert_eq!(
            Secret::parse("secret,id=a,file=b,format=base64"),
            secret("a", SecretSource::File("b".into()), true)
        );
        assert_eq!(Secret::parse(r#"{"qom-type":"secret","id":"a","data":"b"}"#), secret("a", data("b"), false));
    }

    #[test]
    fn what_is_no_secret_is_refused_by_name() {
        for (text, says) in [
            ("", "kind of object not given"),
            ("secret", "id=NAME"),
            ("secret,id=1,data=x", "must begin with a letter"),
            ("secret,id=a", "data=TEXT or file=PATH"),
            ("secret,id=a,data", "NAME=VALUE"),
            ("secret,id=a,data=x,file=y", "exclude"),
            ("secret,id=a,data=x,format=hex", "raw or base64"),
            ("secret,id=a,data=x,frob=y", "\"frob\""),
            ("secret,id=a,data=x,keyid=y", "keyid and iv"),
            ("secret,id=a,data=x,keyid=y,iv=!", "iv is not valid base64"),
            ("id=a,data=x", "kind of object not given"),
            ("throttle-group,id=a", "not used by images"),
            ("frob,id=a", "\"frob\": unknown kind"),
            ("{\"qom-type\":\"secret\",\"id\":7}", "must be a string"),
            ("{", "EOF"),
        ] {
            let said = Secret::parse(text).unwrap_err();
            assert!(said.contains(says), "{text}: {said}");
        }
    }

    fn value(texts: &[&str]) -> Result<Vec<u8>, String> {
        let secrets: Vec<_> = texts.iter().map(|text| Secret::parse(text).unwrap()).collect();
        let values = values(&secrets).map_err(|error| format!("{error:#}"))?;
        Ok(values.get("a").unwrap().bytes().to_vec())
    }

    #[test]
    fn secrets_are_read_and_decoded() {
        assert_eq!(value(&["secret,id=a,data=YWJj,format=base64", "secret,id=b,data=!"]), Ok(b"abc".to_vec()));
        assert_eq!(value(&["secret,id=a,data=YQ==,format=base64"]), Ok(b"a".to_vec()));
        assert_eq!(value(&["secret,id=a,data=YWI="]), Ok(b"YWI=".to_vec()));
        assert!(value(&["secret,id=a,data=x", "secret,id=a,data=x"]).unwrap_err().contains("duplicate id"));
        for wrong in ["!", "YQ=", "Y===", "YQ==YQ=="] {
            let said = value(&[&format!("secret,id=a,data={wrong},format=base64")]).unwrap_err();
            assert!(said.contains("not valid base64"), "{wrong}: {said}");
        }
        assert!(value(&["secret,id=a,file=/nowhere/at/all"]).unwrap_err().contains("/nowhere/at/all"));
    }

    #[test]
    fn encrypted_secrets_are_decrypted() {
        // openssl enc -aes-256-cbc -a -K 6b..6b -iv 00..01, of "correct horse"
        let key = "secret,id=k,data=kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk";
        let text = "secret,id=a,data=bwakVzuEmD/scXdMC3pwKA==,format=base64,keyid=k,iv=AAAAAAAAAAAAAAAAAAAAAQ==";
        assert_eq!(value(&[key, text]), Ok(b"correct horse".to_vec()));
        assert!(value(&[text]).unwrap_err().contains("no secret \"k\" before it"));
        let wrong = "secret,id=k,data=kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkj";
        assert!(value(&[wrong, text]).unwrap_err().contains("cannot be decrypted"));
    }
}
