//! The parts of QEMU's command line that limosa reads: options with their values, `key=value` lists, JSON objects,
//! sizes.
//!
//! Facts (QEMU's documentation, "Invocation" and util/keyval): options have one dash or two; a list's first element may
//! be a value without its key; a comma in a value is written twice; a size without a suffix is in bytes, that of `-m`
//! in MiB.

use std::ffi::OsString;
use std::path::Path;

use serde_json::Value;

/// Options that take no value. All others take the next argument.
const FLAGS: [&str; 39] = [
    "h",
    "help",
    "version",
    "S",
    "s",
    "snapshot",
    "nographic",
    "full-screen",
    "enable-kvm",
    "nodefaults",
    "no-user-config",
    "no-reboot",
    "no-shutdown",
    "no-acpi",
    "no-hpet",
    "no-fd-bootchk",
    "no-quit",
    "no-frame",
    "alt-grab",
    "ctrl-grab",
    "portrait",
    "win2k-hack",
    "rtc-td-hack",
    "usb",
    "mem-prealloc",
    "daemonize",
    "singlestep",
    "one-insn-per-tb",
    "preconfig",
    "only-migratable",
    "enable-sync-profile",
    "semihosting",
    "old-param",
    "xen-attach",
    "xen-domid-restrict",
    "curses",
    "sdl",
    "spice-off",
    "no-kvm",
];

/// An option on a command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandOption<'a> {
    /// Its name without dashes.
    pub name: &'a str,
    /// Its value; empty for one without.
    pub value: &'a str,
    /// Index of the value among all arguments.
    pub index: usize,
}

/// QEMU's own options in a command line that begins with a program. A program before QEMU (taskset, nice, ...) has
/// options of its own. Arguments that are not UTF-8 are skipped.
#[must_use]
pub fn options(args: &[OsString]) -> Vec<CommandOption<'_>> {
    let first = program_index(args) + 1;
    let mut found = Vec::new();
    let mut rest = args.iter().enumerate().skip(first);
    while let Some((at, arg)) = rest.next() {
        let Some(name) = arg.to_str().and_then(|arg| arg.strip_prefix('-')) else { continue };
        let name = name.strip_prefix('-').unwrap_or(name);
        if name.is_empty() {
            continue;
        }
        if FLAGS.contains(&name) {
            found.push(CommandOption { name, value: "", index: at });
        } else if let Some((at, value)) = rest.next() {
            found.push(CommandOption { name, value: value.to_str().unwrap_or_default(), index: at });
        }
    }
    found
}

/// The index of QEMU's own name in a command line; 0 if none looks like it.
#[must_use]
pub fn program_index(args: &[OsString]) -> usize {
    let begins = |arg: &OsString, start: &[u8]| {
        Path::new(arg).file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(start))
    };
    let is_system = |arg: &OsString| begins(arg, b"qemu-system") || begins(arg, b"qemu-kvm");
    // Not the user of `sudo -u qemu`.
    let found = args.iter().position(is_system).or_else(|| args.iter().position(|arg| begins(arg, b"qemu")));
    found.unwrap_or(0)
}

/// A list of `key=value`, or a JSON object of them, in order. JSON values come as text, `true` as `on`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Properties {
    list: Vec<(String, String)>,
    /// Whether it was, and will be, a JSON object.
    json: Option<serde_json::Map<String, Value>>,
}

impl Properties {
    /// Reads a list whose first element may be a value of `first` without its key.
    #[must_use]
    pub fn parse(text: &str, first: &str) -> Self {
        if text.starts_with('{') {
            return Self::read_json(text);
        }
        let mut found = Vec::new();
        for (index, element) in elements(text).into_iter().enumerate() {
            match element.split_once('=') {
                Some((key, value)) => found.push((key.to_owned(), value.to_owned())),
                None if index == 0 => found.push((first.to_owned(), element)),
                // `key` and `nokey`, the old way to say on and off.
                None => match element.strip_prefix("no") {
                    Some(key) if !key.is_empty() => found.push((key.to_owned(), "off".to_owned())),
                    _ => found.push((element, "on".to_owned())),
                },
            }
        }
        Self { list: found, json: None }
    }

    fn read_json(text: &str) -> Self {
        let Ok(Value::Object(object)) = serde_json::from_str::<Value>(text) else { return Self::default() };
        object.into()
    }
}

impl From<serde_json::Map<String, Value>> for Properties {
    fn from(object: serde_json::Map<String, Value>) -> Self {
        let text = |value: Value| match value {
            Value::String(text) => text,
            Value::Bool(on) => if on { "on" } else { "off" }.to_owned(),
            other => other.to_string(),
        };
        let list = object.clone().into_iter().map(|(key, value)| (key, text(value))).collect();
        Self { list, json: Some(object) }
    }
}

impl Properties {
    /// Sets a key to a value, in place of all its values.
    pub fn set(&mut self, key: &str, value: &str) {
        match self.list.iter_mut().rev().find(|(name, _)| name == key) {
            Some((_, old)) => value.clone_into(old),
            None => self.list.push((key.to_owned(), value.to_owned())),
        }
        if let Some(object) = &mut self.json {
            object.insert(key.to_owned(), value.into());
        }
    }

    /// Returns the list as an option's value.
    #[must_use]
    pub fn to_option(&self) -> String {
        if let Some(object) = &self.json {
            return Value::Object(object.clone()).to_string();
        }
        let element = |(key, value): &(String, String)| format!("{key}={}", escaped(value));
        self.list.iter().map(element).collect::<Vec<_>>().join(",")
    }

    /// The JSON object that it is, if it is one.
    #[must_use]
    pub fn json_mut(&mut self) -> Option<&mut serde_json::Map<String, Value>> {
        self.json.as_mut()
    }

    /// The JSON object that it is, if it is one.
    #[must_use]
    pub fn json(&self) -> Option<&serde_json::Map<String, Value>> {
        self.json.as_ref()
    }

    /// Returns keys with their values, in order; of a JSON object those at its top.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.list.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Returns the last value of a key, which is the one that counts.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.list.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// Whether a switch is on.
    #[must_use]
    pub fn is_on(&self, key: &str) -> bool {
        matches!(self.get(key), Some("on" | "yes" | "true" | "y"))
    }

    /// Returns the first key of a set that the list has.
    #[must_use]
    pub fn first_of<'a>(&self, keys: &[&'a str]) -> Option<&'a str> {
        keys.iter().copied().find(|key| self.list.iter().any(|(name, _)| name == key))
    }
}

/// The elements of a list: parts between single commas; two commas are one of the text.
fn elements(text: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    let mut rest = text.chars().peekable();
    while let Some(letter) = rest.next() {
        if letter != ',' {
            if let Some(last) = found.last_mut() {
                last.push(letter);
            }
        } else if rest.next_if_eq(&',').is_some() {
            if let Some(last) = found.last_mut() {
                last.push(',');
            }
        } else {
            found.push(String::new());
        }
    }
    found.retain(|element| !element.is_empty());
    found
}

/// A value as an element of a list.
#[must_use]
pub fn escaped(value: &str) -> String {
    value.replace(',', ",,")
}

/// A size in bytes; `unit` bytes where it has no suffix.
#[must_use]
pub fn parse_size(text: &str, unit: u64) -> Option<u64> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match text.get(digits.len()..)? {
        "" => unit,
        "b" | "B" => 1,
        "k" | "K" => 1 << 10,
        "m" | "M" => 1 << 20,
        "g" | "G" => 1 << 30,
        "t" | "T" => 1 << 40,
        "p" | "P" => 1 << 50,
        _ => return None,
    };
    if let Some(hexadecimal) = text.strip_prefix("0x") {
        return u64::from_str_radix(hexadecimal, 16).ok();
    }
    if let Ok(whole) = digits.parse::<u64>() {
        return whole.checked_mul(unit);
    }
    let value = digits.parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0)?;
    // A fraction as QEMU takes it: 1.5G.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "bounded")]
    Some(value * unit as f64).filter(|bytes| *bytes < (1_u64 << 60) as f64).map(|bytes| bytes as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn args(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn options_are_told_from_their_values_and_from_those_of_other_programs() {
        let line =
            args("taskset -c 1 /usr/bin/qemu-system-x86_64 -nographic --m 1G -append -m -S disk.img -machine q35");
        let found = options(&line);
        let found: Vec<_> = found.iter().map(|option| (option.name, option.value)).collect();
        assert_eq!(found, [("nographic", ""), ("m", "1G"), ("append", "-m"), ("S", ""), ("machine", "q35")]);
        assert_eq!(line[options(&line)[1].index], "1G");
        assert_eq!(program_index(&args("sudo -u qemu /usr/bin/qemu-system-x86_64 -m 1G")), 3);
        assert_eq!((program_index(&args("nice qemu-wrapper -m 1G")), program_index(&args("start-my-vm"))), (1, 0));
    }

    #[test]
    fn lists_have_a_first_value_switches_and_escaped_commas() {
        let list = Properties::parse("memory-backend-file,id=a,mem-path=/x,,y,share,noreadonly,id=b", "qom-type");
        assert_eq!(list.get("qom-type"), Some("memory-backend-file"));
        assert_eq!((list.get("id"), list.get("mem-path")), (Some("b"), Some("/x,y")));
        assert!(list.is_on("share") && !list.is_on("readonly"));
        assert_eq!(list.first_of(&["policy", "share"]), Some("share"));
        let json =
            Properties::parse(r#"{"qom-type":"memory-backend-ram","id":"m","size":1048576,"share":true}"#, "qom-type");
        assert_eq!((json.get("size"), json.is_on("share")), (Some("1048576"), true));
        assert_eq!(Properties::parse("{nonsense", "x"), Properties::default());
    }

    #[test]
    fn sizes_are_read_as_qemu_reads_them() {
        for (text, unit, bytes) in [
            ("1G", 1, Some(1 << 30)),
            ("512", 1 << 20, Some(512 << 20)),
            ("512", 1, Some(512)),
            ("1.5G", 1, Some(3 << 29)),
            ("64MB", 1, None),
            ("0x1000", 1, Some(4096)),
            ("", 1, None),
            ("-1", 1, None),
            ("99999999999999999999T", 1, None),
        ] {
            assert_eq!(parse_size(text, unit), bytes, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(text in ".{0,60}") {
            let _ = (Properties::parse(&text, "first"), parse_size(&text, 1), options(&[text.clone().into(), text.into()]));
        }

        #[test]
        fn what_was_escaped_comes_back(value in "[a-z,=/]{1,20}") {
            let list = Properties::parse(&format!("kind,id=1,path={}", escaped(&value)), "qom-type");
            prop_assert_eq!(list.get("path"), Some(value.as_str()));
        }
    }
}
