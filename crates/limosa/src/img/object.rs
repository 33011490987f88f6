//! The objects that `--object` defines: what images need besides their names.
//!
//! Law: a secret is never printed, nor any part of a definition that may be one. Messages name the object and the
//! property; of values only those that can be nothing else.

mod secret;
mod tls;

use std::collections::BTreeMap;
use std::sync::OnceLock;

use anyhow::{Context as _, bail};
use limosa_image::chain::OpenOptions;
use limosa_image::luks::{Passphrase, Secrets};
use limosa_image::reference::{TlsCredentials, split_options};
use serde_json::Value;

use secret::Secret;
use tls::TlsFolder;

/// The text of `--object help`.
pub(crate) const HELP: &str = "List of user creatable objects:\n  secret\n  tls-creds-x509";

/// Kinds of objects of QEMU that are not supported.
const OTHERS: [&str; 12] = [
    "authz-list",
    "authz-list-file",
    "authz-pam",
    "authz-simple",
    "iothread",
    "main-loop",
    "pr-manager-helper",
    "secret_keyring",
    "thread-context",
    "throttle-group",
    "tls-creds-anon",
    "tls-creds-psk",
];

/// All that were defined; set once, before a command runs.
static OBJECTS: OnceLock<Objects> = OnceLock::new();

/// Properties of an object, by name.
type Properties = BTreeMap<String, String>;

/// The objects that were defined, by name.
#[derive(Debug, Clone, Default)]
struct Objects {
    secrets: Secrets,
    tls: TlsCredentials,
}

/// Returns the secrets that were defined.
pub(crate) fn secrets() -> Secrets {
    OBJECTS.get().map(|objects| objects.secrets.clone()).unwrap_or_default()
}

/// Returns the TLS credentials that were defined.
pub(crate) fn tls() -> TlsCredentials {
    OBJECTS.get().map(|objects| objects.tls.clone()).unwrap_or_default()
}

/// Lets images use what was defined.
pub(crate) fn usable(options: OpenOptions) -> OpenOptions {
    options.secrets(secrets()).tls(tls()).objects(crate::remote::stores())
}

/// Returns the secret that an option names.
///
/// # Errors
/// No secret has that name.
pub(crate) fn named(option: &str, id: &str) -> anyhow::Result<Passphrase> {
    let missing = || format!("-o {option}={id}: no such secret; define it with --object secret,id={id}");
    secrets().get(id).cloned().with_context(missing)
}

/// An object as it is defined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Object {
    Secret(Secret),
    Tls(TlsFolder),
}

impl Object {
    /// Understands a definition, as a list of properties or as JSON.
    ///
    /// # Errors
    /// The reason.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut properties = if text.starts_with('{') { from_json(text)? } else { from_list(text)? };
        let kind = properties.remove("qom-type").ok_or("kind of object not given; write secret,id=NAME,data=TEXT")?;
        let is_tls = kind == "tls-creds-x509";
        if !is_tls && kind != "secret" {
            // A kind that is unknown may be a secret in the wrong place.
            let other = OTHERS.into_iter().find(|other| *other == kind);
            let what = other.map_or("unknown kind of object".into(), |kind| format!("{kind} is not supported"));
            return Err(format!("{what}; only secret and tls-creds-x509 are"));
        }
        let id = properties.remove("id").ok_or_else(|| format!("{kind} needs a name: id=NAME"))?;
        if !is_id(&id) {
            return Err(format!(
                "{kind}: id=NAME must begin with a letter and have only letters, digits, '-', '.' and '_'"
            ));
        }
        let object = if is_tls {
            Self::Tls(TlsFolder::new(&id, &mut properties)?)
        } else {
            Self::Secret(Secret::new(&id, &mut properties)?)
        };
        match properties.keys().next() {
            None => Ok(object),
            Some(name) if name.bytes().all(|letter| letter.is_ascii_lowercase() || letter == b'-') => {
                Err(format!("{kind} {id}: unknown property {name:?}"))
            }
            // What follows a comma may be the rest of a secret.
            Some(_) => Err(format!("{kind} {id}: unknown property; {COMMA}")),
        }
    }

    fn id(&self) -> &str {
        match self {
            Self::Secret(secret) => &secret.id,
            Self::Tls(tls) => &tls.id,
        }
    }
}

/// Reads all that were defined, for the commands to use. Once there is one, the process writes no core dump.
///
/// # Errors
/// One is unavailable, or defined twice.
pub(crate) fn define(objects: &[Object]) -> anyhow::Result<()> {
    if !objects.is_empty() {
        // A kernel that refuses has none to write, either.
        let _ = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable);
    }
    let defined = Objects::of(objects)?;
    OBJECTS.set(defined).map_err(|_| anyhow::anyhow!("--object: objects are defined once"))
}

impl Objects {
    fn of(objects: &[Object]) -> anyhow::Result<Self> {
        let mut known = Self::default();
        for object in objects {
            let id = object.id();
            if known.secrets.get(id).is_some() || known.tls.contains(id) {
                bail!("--object: duplicate id {id}");
            }
            match object {
                Object::Secret(secret) => known.secrets.insert(id, secret.value(&known.secrets)?),
                Object::Tls(tls) => known.tls.insert(id, tls.read()?),
            }
        }
        Ok(known)
    }
}

/// A reminder for a value that may have a comma.
const COMMA: &str = "a comma in a value is written twice";

/// Whether an object may have this name.
fn is_id(text: &str) -> bool {
    let mut letters = text.chars();
    let begins = letters.next().is_some_and(|first| first.is_ascii_alphabetic());
    begins && letters.all(|letter| letter.is_ascii_alphanumeric() || "-._".contains(letter))
}

/// `KIND,NAME=VALUE,...`; the last value of a name counts.
fn from_list(text: &str) -> Result<Properties, String> {
    let mut properties = BTreeMap::new();
    for (index, item) in split_options(text).iter().enumerate() {
        let (name, value) = match item.split_once('=') {
            Some(pair) => pair,
            None if index == 0 => ("qom-type", item.as_str()),
            None => return Err(format!("item {} must be NAME=VALUE; {COMMA}", index + 1)),
        };
        properties.insert(name.to_owned(), value.to_owned());
    }
    Ok(properties)
}

/// `{"qom-type": KIND, NAME: VALUE, ...}`.
fn from_json(text: &str) -> Result<Properties, String> {
    let properties: BTreeMap<String, Value> = serde_json::from_str(text)
        .map_err(|error| format!("not valid JSON at line {}, column {}", error.line(), error.column()))?;
    let texts = properties.into_iter().map(|(name, value)| match value {
        Value::String(value) => Ok((name, value)),
        Value::Bool(value) => Ok((name, if value { "on" } else { "off" }.to_owned())),
        _ if is_id(&name) => Err(format!("property {name:?} must be a string, or true or false")),
        _ => Err("a property must be a string, or true or false".into()),
    });
    texts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_lists_of_properties_or_json() {
        let list = Object::parse("secret,id=a.b-c_1,data=x,,y").unwrap();
        assert_eq!(Object::parse("qom-type=secret,data=b,data=x,,y,id=a.b-c_1"), Ok(list.clone()));
        assert_eq!(Object::parse(r#"{"qom-type":"secret","id":"a.b-c_1","data":"x,y"}"#), Ok(list));
        let tls = Object::parse("tls-creds-x509,id=t,dir=pki").unwrap();
        assert_eq!(Object::parse("tls-creds-x509,id=t,dir=pki,endpoint=client,verify-peer=yes"), Ok(tls.clone()));
        assert_eq!(Object::parse(r#"{"qom-type":"tls-creds-x509","id":"t","dir":"pki","verify-peer":true}"#), Ok(tls));
    }

    #[test]
    fn what_is_no_object_is_refused_by_name() {
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
            ("throttle-group,id=a", "throttle-group is not supported"),
            ("tls-creds-psk,id=a", "only secret and tls-creds-x509"),
            ("tls-creds-x509,id=a", "dir=PATH"),
            ("tls-creds-x509,id=a,dir=b,endpoint=server", "endpoint=server"),
            ("tls-creds-x509,id=a,dir=b,verify-peer=off", "an unverified server could be anyone"),
            ("tls-creds-x509,id=a,dir=b,priority=NORMAL", "\"priority\""),
            ("frob,id=a", "unknown kind of object"),
            ("{\"qom-type\":\"secret\",\"id\":7}", "must be a string, or true or false"),
            ("{", "not valid JSON at line 1, column 1"),
        ] {
            let said = Object::parse(text).unwrap_err();
            assert!(said.contains(says), "{text}: {said}");
        }
    }

    #[test]
    fn no_part_of_a_secret_is_in_a_message() {
        for (text, says) in [
            ("secret,id=s,data=hunter2,bogus=1", "secret s: unknown property \"bogus\""),
            ("secret,id=s,file=k,data=hunter2", "secret s: data and file exclude each other"),
            ("secret,id=s,data=hunter2,format=rot13", "secret s: format must be raw or base64"),
            ("secret,data=hunter2", "secret needs a name: id=NAME"),
            ("secrt,id=s,data=hunter2", "unknown kind of object"),
            ("hunter2,id=s", "unknown kind of object"),
            ("secret,id=s,data=hun,ter2", "item 4 must be NAME=VALUE; a comma in a value is written twice"),
            ("secret,id=s,data=hun,t3r2=x", "secret s: unknown property; a comma"),
            ("secret,id=hunter 2,data=x", "id=NAME must begin"),
            ("secret,id=s,data=x,format=hunter2", "format must be"),
            ("secret,id=s,data=hunter2,keyid=ter 2,iv=hunter2", "iv is not valid base64"),
            (r#"{"qom-type":"secret","id":"s","data":"hunter2","format":7}"#, "property \"format\" must be a string"),
            (r#"{"qom-type":"secret","id":"s","data":"hunter2""#, "not valid JSON"),
        ] {
            let said = Object::parse(text).unwrap_err();
            assert!(said.contains(says), "{text}: {said}");
            assert!(
                ["hun", "ter", "t3r2", "rot13"]
                    .iter()
                    .all(|part| !said.replace("letters", "").replace("letter", "").contains(part)),
                "{text}: {said}"
            );
        }
    }

    fn value(texts: &[&str]) -> Result<Vec<u8>, String> {
        let objects: Vec<_> = texts.iter().map(|text| Object::parse(text).unwrap()).collect();
        let defined = Objects::of(&objects).map_err(|error| format!("{error:#}"))?;
        Ok(defined.secrets.get("a").unwrap().bytes().to_vec())
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
        assert!(value(&[text]).unwrap_err().contains("secret a: keyid=k: define secret k with an --object before it"));
        let wrong = "secret,id=k,data=kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkj";
        assert!(value(&[wrong, text]).unwrap_err().contains("cannot be decrypted"));
    }
}
