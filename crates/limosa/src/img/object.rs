//! The secrets that `--object` defines.
//!
//! Law: a secret is read and checked, and none is kept: nothing needs one before images are encrypted. Other objects
//! are refused by their kind, properties that secrets do not have by their name.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
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

/// A secret: `secret,id=NAME,data=TEXT|file=PATH[,format=raw|base64]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Secret {
    id: String,
    source: SecretSource,
    is_base64: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum SecretSource {
    Data(String),
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
                format!("{kind:?}: not used by limosa img; only secret is supported")
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
            (Some(data), None) => SecretSource::Data(data),
            (None, Some(path)) => SecretSource::File(path.into()),
            (Some(_), Some(_)) => return Err(format!("secret {id}: data and file exclude each other")),
            (None, None) => return Err(format!("secret {id}: value not given; use data=TEXT or file=PATH")),
        };
        match properties.keys().next().map(String::as_str) {
            None => Ok(Self { id, source, is_base64 }),
            Some(name @ ("keyid" | "iv")) => Err(format!("secret {id}: {name}: encrypted secrets are not supported")),
            Some(name) => Err(format!("secret {id}: unknown property {name:?}")),
        }
    }

    /// Whether it is available, and is of its declared type.
    fn check(&self) -> anyhow::Result<()> {
        let id = &self.id;
        let bytes = match &self.source {
            SecretSource::Data(text) => text.clone().into_bytes(),
            SecretSource::File(path) => {
                let mut bytes = Vec::new();
                let read = File::open(path).and_then(|file| file.take(LONGEST + 1).read_to_end(&mut bytes));
                read.with_context(|| format!("--object: secret {id}: cannot read {}", path.display()))?;
                bytes
            }
        };
        if bytes.len() as u64 > LONGEST {
            bail!("--object: secret {id}: longer than {LONGEST} bytes");
        }
        let fits = |byte: &u8| byte.is_ascii_alphanumeric() || b"+/=\r\n".contains(byte);
        if self.is_base64 && !bytes.iter().all(fits) {
            bail!("--object: secret {id}: not valid base64");
        }
        Ok(())
    }
}

/// Checks all that were defined.
///
/// # Errors
/// One is unavailable, or defined twice.
pub(crate) fn check(secrets: &[Secret]) -> anyhow::Result<()> {
    for (index, secret) in secrets.iter().enumerate() {
        if secrets.iter().take(index).any(|before| before.id == secret.id) {
            bail!("--object: duplicate id {}", secret.id);
        }
        secret.check()?;
    }
    Ok(())
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
        let secret = |id: &str, source, is_base64| Ok(Secret { id: id.into(), source, is_base64 });
        let data = |text: &str| SecretSource::Data(text.into());
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
            ("secret,id=a,data=x,keyid=y,iv=z", "encrypted secrets"),
            ("id=a,data=x", "kind of object not given"),
            ("throttle-group,id=a", "not used by limosa img"),
            ("frob,id=a", "\"frob\": unknown kind"),
            ("{\"qom-type\":\"secret\",\"id\":7}", "must be a string"),
            ("{", "EOF"),
        ] {
            let said = Secret::parse(text).unwrap_err();
            assert!(said.contains(says), "{text}: {said}");
        }
    }

    #[test]
    fn secrets_are_had_and_what_they_say() {
        let check = |texts: &[&str]| {
            let secrets: Vec<_> = texts.iter().map(|text| Secret::parse(text).unwrap()).collect();
            check(&secrets).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(check(&["secret,id=a,data=YWJj,format=base64", "secret,id=b,data=!"]), Ok(()));
        assert!(check(&["secret,id=a,data=x", "secret,id=a,data=x"]).unwrap_err().contains("duplicate id"));
        assert!(check(&["secret,id=a,data=!,format=base64"]).unwrap_err().contains("not valid base64"));
        assert!(check(&["secret,id=a,file=/nowhere/at/all"]).unwrap_err().contains("/nowhere/at/all"));
    }
}
