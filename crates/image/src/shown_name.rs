//! Names of images as messages show them.
//!
//! Law: a message shows no password. Of options only the values that are known to be none are shown, and of an address
//! neither a user nor a password.

use std::ffi::OsStr;

use serde_json::Value;

use crate::qemu_json::to_json;
use crate::reference::split_options;

/// In place of a value.
const HIDDEN: &str = "***";

/// The last parts of the names of options whose values are shown.
const SHOWN: [&str; 19] = [
    "aio",
    "backing",
    "cid",
    "driver",
    "export",
    "file",
    "filename",
    "format",
    "host",
    "key-secret",
    "locking",
    "offset",
    "path",
    "port",
    "read-only",
    "size",
    "tls-creds",
    "type",
    "x-dirty-bitmap",
];

fn is_shown(name: &str) -> bool {
    SHOWN.contains(&name.rsplit('.').next().unwrap_or(name))
}

/// Returns a name without passwords: a path, the address of a protocol, or `json:{...}`.
pub(crate) fn shown(name: &OsStr) -> String {
    let name = name.to_string_lossy();
    match name.strip_prefix("json:") {
        None => address(&name),
        Some(json) => match serde_json::from_slice(&to_json(json.as_bytes())) {
            Ok(json) => format!("json:{}", value("", json)),
            Err(_) => format!("json:{HIDDEN}"),
        },
    }
}

/// Returns a list of options without passwords.
pub(crate) fn shown_options(list: &str) -> String {
    let one = |(number, option): (usize, &String)| match option.split_once('=') {
        Some((name, value)) if is_shown(name) => format!("{name}={}", address(value)),
        Some((name, _)) => format!("{name}={HIDDEN}"),
        None if number == 0 => option.clone(),
        // What follows a comma may be the rest of a value.
        None => HIDDEN.into(),
    };
    split_options(list).iter().enumerate().map(one).collect::<Vec<_>>().join(",")
}

/// Without what is between `//` and `@`, in front of a host.
fn address(name: &str) -> String {
    let Some((protocol, rest)) = name.split_once("://") else { return name.to_owned() };
    let host_end = rest.find('/').unwrap_or(rest.len());
    // A password may have a slash that is not escaped.
    match rest.rfind('@') {
        Some(at) if at < host_end || rest.get(..host_end).is_some_and(|host| host.contains(':')) => {
            format!("{protocol}://{HIDDEN}{}", rest.get(at..).unwrap_or_default())
        }
        _ => name.to_owned(),
    }
}

fn value(name: &str, json: Value) -> Value {
    match json {
        Value::Object(object) => {
            Value::Object(object.into_iter().map(|(name, inner)| (name.clone(), value(&name, inner))).collect())
        }
        Value::Array(array) => Value::Array(array.into_iter().map(|inner| value(name, inner)).collect()),
        Value::String(text) if is_shown(name) => Value::String(address(&text)),
        Value::Null | Value::Bool(_) => json,
        Value::Number(_) if is_shown(name) => json,
        Value::Number(_) | Value::String(_) => Value::String(HIDDEN.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_shows_no_password() {
        for (name, says) in [
            ("disk.img", "disk.img"),
            ("dir/a@b:c", "dir/a@b:c"),
            ("nbd://host/disk@2", "nbd://host/disk@2"),
            ("https://user:hunter2@host/disk", "https://***@host/disk"),
            ("ssh://user:hun/ter2@host/disk", "ssh://***@host/disk"),
            ("json:{\"driver\":\"https\",\"password\":\"hunter2\"", "json:***"),
            ("json:{'driver':'luks','file':{'filename':'a','password':'hunter2','pin':7}}", {
                r#"json:{"driver":"luks","file":{"filename":"a","password":"***","pin":"***"}}"#
            }),
        ] {
            assert_eq!(shown(OsStr::new(name)), says);
        }
        for (list, says) in [
            ("disk.img", "disk.img"),
            ("driver=raw,offset=512,file.filename=a", "driver=raw,offset=512,file.filename=a"),
            ("driver=https,password=hun,ter2,url=https://host", "driver=https,password=***,***,url=***"),
            ("file.filename=https://u:hunter2@host/d", "file.filename=https://***@host/d"),
        ] {
            assert_eq!(shown_options(list), says);
        }
    }
}
