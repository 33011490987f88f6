//! `-o`: the options of a format that is created.
//!
//! Law: an option that a format has is taken or refused with one line; none is ignored.

use std::ffi::{OsStr, OsString};
use std::fmt;

use anyhow::Context as _;
use limosa_image::Format;
use limosa_image::reference::split_options;

use super::size::parse_size;

/// The type of an option's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Size,
    Number,
    OnOff,
}

/// An option that a format has.
#[derive(Debug, PartialEq, Eq)]
struct Known {
    name: &'static str,
    kind: Kind,
    what: &'static str,
    /// The default.
    usual: Option<&'static str>,
}

const fn known(name: &'static str, kind: Kind, what: &'static str) -> Known {
    Known { name, kind, what, usual: None }
}

const fn usually(name: &'static str, kind: Kind, what: &'static str, usual: &'static str) -> Known {
    Known { name, kind, what, usual: Some(usual) }
}

/// The descriptions of the options that `luks` has, and qcow2 behind `encrypt.`.
const CIPHER_ALG: &str = "Cipher: aes-256 (default), aes-128, serpent-256, twofish-256, ...";
const CIPHER_MODE: &str = "Mode of the cipher: xts (default), cbc, ecb";
const IVGEN_ALG: &str = "Generator of initialization vectors: plain64 (default), plain, essiv";
const IVGEN_HASH_ALG: &str = "Hash of essiv: sha256 (default), ...";
const HASH_ALG: &str = "Hash of the passphrases: sha256 (default), sha1, sha512, ripemd160, ...";
const ITER_TIME: &str = "Milliseconds that the passphrase takes to check (default: 2000)";

const EXTENT_SIZE_HINT: Known =
    known("extent_size_hint", Kind::Size, "Bytes that the filesystem should allocate at a time; 0: its default");

const RAW: [Known; 3] = [
    known("size", Kind::Size, "Virtual size"),
    known("preallocation", Kind::Text, "Preallocation: off, falloc, full"),
    EXTENT_SIZE_HINT,
];

/// In the order of the printed line.
const QCOW2: [Known; 21] = [
    known("encrypt.format", Kind::Text, "Encryption of the contents: luks"),
    known("encrypt.key-secret", Kind::Text, "Secret with the passphrase of key slot 0"),
    known("encrypt.cipher-alg", Kind::Text, CIPHER_ALG),
    known("encrypt.cipher-mode", Kind::Text, CIPHER_MODE),
    known("encrypt.ivgen-alg", Kind::Text, IVGEN_ALG),
    known("encrypt.ivgen-hash-alg", Kind::Text, IVGEN_HASH_ALG),
    known("encrypt.hash-alg", Kind::Text, HASH_ALG),
    known("encrypt.iter-time", Kind::Number, ITER_TIME),
    usually("cluster_size", Kind::Size, "Cluster size: 512 to 2M, a power of two", "64k"),
    usually("extended_l2", Kind::OnOff, "Extended L2 entries: clusters have 32 subclusters", "off"),
    known("preallocation", Kind::Text, "Preallocation: off, metadata, falloc, full"),
    usually("compression_type", Kind::Text, "Compression method: zlib, zstd", "zlib"),
    known("size", Kind::Size, "Virtual size"),
    known("compat", Kind::Text, "Version of the format: v2 (or 0.10), v3 (or 1.1)"),
    known("backing_file", Kind::Text, "File that provides contents not yet written"),
    known("backing_fmt", Kind::Text, "Format of the backing file"),
    known("data_file", Kind::Text, "External data file for the contents"),
    known("data_file_raw", Kind::OnOff, "The external data file is kept valid as a raw image"),
    usually("lazy_refcounts", Kind::OnOff, "Postpone refcount updates until the image is closed", "off"),
    usually("refcount_bits", Kind::Number, "Bits of a refcount: 1 to 64, a power of two", "16"),
    EXTENT_SIZE_HINT,
];

/// In the order of the printed line.
const LUKS: [Known; 11] = [
    known("key-secret", Kind::Text, "Secret with the passphrase of key slot 0"),
    known("cipher-alg", Kind::Text, CIPHER_ALG),
    known("cipher-mode", Kind::Text, CIPHER_MODE),
    known("ivgen-alg", Kind::Text, IVGEN_ALG),
    known("ivgen-hash-alg", Kind::Text, IVGEN_HASH_ALG),
    known("hash-alg", Kind::Text, HASH_ALG),
    known("iter-time", Kind::Number, ITER_TIME),
    known("detached-header", Kind::OnOff, "The file is the header alone; the disk is in another one"),
    known("preallocation", Kind::Text, "Preallocation: off, metadata, falloc, full"),
    known("size", Kind::Size, "Virtual size"),
    EXTENT_SIZE_HINT,
];

/// Options that images have when they exist, in the order of the printed line.
const AMEND_QCOW2: [Known; 13] = [
    known("encrypt.state", Kind::Text, STATE),
    known("encrypt.new-secret", Kind::Text, NEW_SECRET),
    known("encrypt.old-secret", Kind::Text, OLD_SECRET),
    known("encrypt.keyslot", Kind::Number, KEYSLOT),
    known("encrypt.iter-time", Kind::Number, ITER_TIME),
    known("compat", Kind::Text, "Version of the format: v2 (or 0.10), v3 (or 1.1)"),
    known("lazy_refcounts", Kind::OnOff, "Postpone refcount updates until the image is closed"),
    known("size", Kind::Size, "Virtual size; what is behind a new end is lost"),
    known("refcount_bits", Kind::Number, "Bits of a refcount: 1 to 64, a power of two"),
    known("backing_file", Kind::Text, "File that provides contents not yet written: use rebase"),
    known("backing_fmt", Kind::Text, "Format of the backing file: use rebase"),
    known("data_file", Kind::Text, "Name of the external data file, of an image that has one"),
    known("data_file_raw", Kind::OnOff, "off: the external data file is not kept valid as a raw image any more"),
];

/// Options that qemu-img refuses by name, and limosa refuses.
const NOT_AMENDED: [&str; 2] = ["backing_file", "backing_fmt"];

/// In the order of the printed line.
const AMEND_LUKS: [Known; 5] = [
    known("state", Kind::Text, STATE),
    known("new-secret", Kind::Text, NEW_SECRET),
    known("old-secret", Kind::Text, OLD_SECRET),
    known("keyslot", Kind::Number, KEYSLOT),
    known("iter-time", Kind::Number, ITER_TIME),
];

/// The descriptions of options of key slots.
const STATE: &str = "New state of key slots: active, inactive";
const NEW_SECRET: &str = "Secret with the passphrase that a key slot gets";
const OLD_SECRET: &str = "Secret with the passphrase of the key slots that lose it";
const KEYSLOT: &str = "The key slot: 0 to 7";

/// Options of QEMU that are refused, each with the reason.
const REFUSED: [(&str, &str); 2] = [
    ("encryption", "the old encryption with AES is only read; use -o encrypt.format=luks"),
    ("nocow", "file attributes are not supported; set it on the directory before (chattr +C)"),
];

/// A value that was given.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Value {
    Text(OsString),
    /// A size in bytes, or another number.
    Number(u64),
    OnOff(bool),
}

impl Value {
    fn parse(known: &Known, given: &OsStr) -> anyhow::Result<Self> {
        let text = given.to_str().unwrap_or_default();
        let value = match (known.kind, text) {
            (Kind::Text, _) => return Ok(Self::Text(given.to_owned())),
            (Kind::Size, _) => parse_size(text).map(Self::Number),
            (Kind::Number, _) => text.parse().map(Self::Number).map_err(|_| format!("{given:?} is not a number")),
            (Kind::OnOff, "on" | "yes" | "true" | "y") => Ok(Self::OnOff(true)),
            (Kind::OnOff, "off" | "no" | "false" | "n") => Ok(Self::OnOff(false)),
            (Kind::OnOff, _) => Err(format!("{given:?} must be on or off")),
        };
        value.map_err(anyhow::Error::msg).with_context(|| format!("-o {}", known.name))
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(&text.display().to_string().replace(',', ",,")),
            Self::Number(number) => number.fmt(f),
            Self::OnOff(on) => f.write_str(if *on { "on" } else { "off" }),
        }
    }
}

/// The options of a format that were given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FormatOptions {
    format: Format,
    title: &'static str,
    /// Options that only a new image has.
    creating: &'static [Known],
    known: &'static [Known],
    given: Vec<(&'static str, Value)>,
}

impl FormatOptions {
    /// No options of a format.
    ///
    /// # Errors
    /// limosa has no such format.
    pub(crate) fn of(format: &str) -> anyhow::Result<Self> {
        let format = format.parse()?;
        let known: &[Known] = match format {
            Format::Raw => &RAW,
            Format::Qcow2 => &QCOW2,
            Format::Luks => &LUKS,
        };
        Ok(Self { format, title: "Supported", creating: &[], known, given: Vec::new() })
    }

    /// Parses the options of an image that exists, as [`parse`](Self::parse).
    ///
    /// # Errors
    /// As of [`parse`](Self::parse); the format has no such options.
    pub(crate) fn to_amend(format: Format, text: &str) -> anyhow::Result<Self> {
        let (known, creating): (&[Known], &[Known]) = match format {
            Format::Raw => anyhow::bail!("format raw has no options that can be amended"),
            Format::Qcow2 => (&AMEND_QCOW2, &QCOW2),
            Format::Luks => (&AMEND_LUKS, &LUKS),
        };
        let mut options = Self { format, title: "Amend", creating, known, given: Vec::new() };
        options.set_all(text)?;
        Ok(options)
    }

    /// Parses `NAME=VALUE,NAME=VALUE`; a comma in a value is written twice. The last value of a name counts.
    ///
    /// # Errors
    /// An option that the format does not have, or a value that it cannot have.
    pub(crate) fn parse(format: &str, text: &str) -> anyhow::Result<Self> {
        let mut options = Self::of(format)?;
        options.set_all(text)?;
        Ok(options)
    }

    fn set_all(&mut self, text: &str) -> anyhow::Result<()> {
        for option in split_options(text) {
            let (name, value) = option.split_once('=').unwrap_or((&option, "on"));
            self.set(name, value)?;
        }
        Ok(())
    }

    /// Returns the format.
    pub(crate) const fn format(&self) -> Format {
        self.format
    }

    /// Sets an option, in place of an earlier value.
    ///
    /// # Errors
    /// As of [`parse`](Self::parse).
    pub(crate) fn set(&mut self, name: &str, value: impl AsRef<OsStr>) -> anyhow::Result<()> {
        let Some(known) = self.known.iter().find(|known| known.name == name) else {
            if let Some((_, why)) = REFUSED.iter().find(|(refused, _)| name.starts_with(refused)) {
                anyhow::bail!("-o {name}: {why}");
            }
            if self.creating.iter().any(|known| known.name == name) {
                anyhow::bail!("-o {name}: can only be chosen when an image is created");
            }
            anyhow::bail!("-o {name}: unknown option of format {}; -o help lists them", self.format);
        };
        let value = Value::parse(known, value.as_ref())?;
        self.given.retain(|(given, _)| *given != name);
        self.given.push((known.name, value));
        Ok(())
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.given.iter().find_map(|(given, value)| (*given == name).then_some(value))
    }

    /// Returns the first option that was given whose name begins like this.
    pub(crate) fn first_of(&self, prefix: &str) -> Option<&'static str> {
        self.given.iter().map(|(name, _)| *name).find(|name| name.starts_with(prefix))
    }

    /// Returns a text, if it was given. A path need not be UTF-8: see [`path`](Self::path).
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.path(name)?.to_str()
    }

    /// Returns a path, if it was given.
    pub(crate) fn path(&self, name: &str) -> Option<&OsStr> {
        match self.get(name) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// Returns a size in bytes or a number, if it was given.
    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        match self.get(name) {
            Some(Value::Number(number)) => Some(*number),
            _ => None,
        }
    }

    /// Returns whether it is on, if it was given.
    pub(crate) fn on_off(&self, name: &str) -> Option<bool> {
        match self.get(name) {
            Some(Value::OnOff(on)) => Some(*on),
            _ => None,
        }
    }

    /// Describes the new image in one line for people.
    pub(crate) fn line(&self) -> String {
        let mut line = format!("fmt={}", self.format);
        for known in self.known {
            let usual = known.usual.and_then(|usual| Value::parse(known, usual.as_ref()).ok());
            if let Some(value) = self.get(known.name).or(usual.as_ref()) {
                line.push_str(&format!(" {}={value}", known.name));
            }
        }
        line
    }

    /// The text of `-o help`.
    pub(crate) fn help(&self) -> String {
        let is_amended = !self.creating.is_empty();
        let mut known: Vec<_> =
            self.known.iter().filter(|known| !is_amended || !NOT_AMENDED.contains(&known.name)).collect();
        known.sort_by_key(|known| known.name);
        let mut help = format!("{} {} options:", self.title, self.format);
        for Known { name, kind, what, usual } in known {
            let kind = match kind {
                Kind::Text => "<str>",
                Kind::Size => "<size>",
                Kind::Number => "<num>",
                Kind::OnOff => "<bool (on/off)>",
            };
            let usual = usual.map(|usual| format!(" (default: {usual})")).unwrap_or_default();
            help.push_str(&format!("\n  {:<22} - {what}{usual}", format!("{name}={kind}")));
        }
        help
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_is_printed_with_its_defaults() {
        let options = FormatOptions::parse("qcow2", "compat=v3,size=1M,lazy_refcounts").unwrap();
        assert_eq!(
            options.line(),
            "fmt=qcow2 cluster_size=65536 extended_l2=off compression_type=zlib size=1048576 compat=v3 \
             lazy_refcounts=on refcount_bits=16"
        );
        assert_eq!((options.text("compat"), options.number("size")), (Some("v3"), Some(1 << 20)));
        assert_eq!((options.on_off("lazy_refcounts"), options.on_off("extended_l2")), (Some(true), None));
    }

    #[test]
    fn a_comma_in_a_value_is_written_twice() {
        let options = FormatOptions::parse("qcow2", "backing_file=a,,b,backing_fmt=raw").unwrap();
        assert_eq!((options.text("backing_file"), options.text("backing_fmt")), (Some("a,b"), Some("raw")));
        assert!(options.line().contains("backing_file=a,,b backing_fmt=raw"));
    }

    #[test]
    fn the_last_value_of_a_name_counts() {
        let options = FormatOptions::parse("qcow2", "cluster_size=64k,cluster_size=128k").unwrap();
        assert_eq!(options.number("cluster_size"), Some(131_072));
    }

    #[test]
    fn what_a_format_does_not_have_is_refused_by_name() {
        let refused = |format, text| FormatOptions::parse(format, text).unwrap_err().to_string();
        assert!(refused("qcow2", "foo=1").contains("-o foo"));
        assert!(refused("raw", "cluster_size=1M").contains("raw"));
        assert!(refused("qcow2", "encryption=on").contains("encrypt"));
        assert!(refused("vmdk", "").contains("vmdk"));
        for wrong in ["lazy_refcounts=maybe", "size", "cluster_size=x", "refcount_bits=1k"] {
            assert!(refused("qcow2", wrong).starts_with("-o "), "{wrong}");
        }
    }

    #[test]
    fn help_lists_every_option_in_order() {
        let help = FormatOptions::of("qcow2").unwrap().help();
        let lines: Vec<_> = help.lines().collect();
        assert_eq!((lines[0], lines.len()), ("Supported qcow2 options:", 22));
        assert!(lines[1].starts_with("  backing_file=<str>     - "), "{}", lines[1]);
        assert!(lines[1..].is_sorted());
    }
}
