//! Names of images: a file's name, `json:{...}`, or a list of options.
//!
//! Law: every option is taken or refused; none is ignored. Images are files and block devices; network protocols are
//! not supported.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use limosa_storage::{CacheMode, FileOptions, Io, LockPolicy};
use serde_json::Value;

pub use crate::error::ReferenceError;
use crate::probe::Format;
use crate::qemu_json::to_json;
use crate::setters::setters;

/// An image by its name: the file, and how it is interpreted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reference {
    /// The file or block device.
    pub path: PathBuf,
    /// Its format, if given.
    pub format: Option<Format>,
    /// Offset of the disk in the file, in bytes: only of a raw image.
    pub offset: u64,
    /// The disk's length in bytes: only of a raw image.
    pub size: Option<u64>,
    /// Its backing image.
    pub backing: BackingOverride,
    /// The external data file, in place of the one that the image names.
    pub data_file: Option<PathBuf>,
    /// The name of the secret that opens an encrypted image: `key-secret`, of qcow2 `encrypt.key-secret`.
    pub key_secret: Option<String>,
    /// How the file is opened.
    pub settings: Settings,
}

setters!(Reference {
    format: Option<Format>,
    offset: u64,
    size: Option<u64>,
    backing: BackingOverride,
    data_file: Option<PathBuf>,
    key_secret: Option<String>,
    settings: Settings,
});

/// The backing image of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum BackingOverride {
    /// The one that the image names.
    #[default]
    AsWritten,
    /// None, even if the image names one.
    Nothing,
    /// This one, in place of the one that the image names.
    Other(Box<Reference>),
}

/// Options of a file that were given with its name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settings {
    /// `read-only`: nothing is written. `off` does not allow more than the caller does.
    pub read_only: bool,
    /// `cache.direct`: past the page cache.
    pub direct: Option<bool>,
    /// `cache.no-flush`: flushing does nothing.
    pub no_flush: Option<bool>,
    /// `locking=off`: others are not asked.
    pub unlocked: bool,
    /// `aio`: what carries requests out.
    pub io: Option<Io>,
}

impl Settings {
    /// Returns the options of a file, with these in place of the caller's `usual` ones.
    #[must_use]
    pub fn override_options(&self, usual: FileOptions) -> FileOptions {
        let synchronous = usual.cache.is_synchronous();
        let direct = self.direct.unwrap_or(usual.cache.is_direct());
        let no_flush = self.no_flush.unwrap_or(usual.cache.ignores_flush());
        let cache = match (direct, no_flush, synchronous) {
            (_, true, _) if self.no_flush.is_some() || !direct => CacheMode::Unsafe,
            (true, _, true) => CacheMode::Directsync,
            (true, _, false) => CacheMode::None,
            (false, _, true) => CacheMode::Writethrough,
            (false, _, false) => CacheMode::Writeback,
        };
        FileOptions {
            cache,
            io: self.io.unwrap_or(usual.io),
            read_only: usual.read_only || self.read_only,
            lock: if self.unlocked { LockPolicy::None } else { usual.lock },
            ..usual
        }
    }
}

impl Reference {
    /// A file, by its path and nothing else.
    #[must_use]
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            format: None,
            offset: 0,
            size: None,
            backing: BackingOverride::AsWritten,
            data_file: None,
            key_secret: None,
            settings: Settings::default(),
        }
    }

    /// By a name: a path, `file:PATH`, or `json:{...}`.
    ///
    /// # Errors
    /// It names a protocol, or options that limosa does not have.
    pub fn from_name(name: impl AsRef<OsStr>) -> Result<Self, ReferenceError> {
        Self::beside(name.as_ref(), None)
    }

    /// By the name that an image has for its backing file: a path is one from the folder of the image's own file; what
    /// is said otherwise is as in [`from_name`](Self::from_name).
    ///
    /// # Errors
    /// As [`from_name`](Self::from_name).
    pub fn from_image(name: &OsStr, image: &Path) -> Result<Self, ReferenceError> {
        Self::beside(name, image.parent())
    }

    /// The path of a file that is created, by its name.
    ///
    /// # Errors
    /// As [`from_name`](Self::from_name); it is `json:{...}`.
    pub fn path_from_name(name: impl AsRef<OsStr>) -> Result<PathBuf, ReferenceError> {
        let name = name.as_ref();
        if name.as_bytes().starts_with(b"json:") {
            let why = "a new image must be given by the path of its file".to_owned();
            return Err(ReferenceError { name: name.to_string_lossy().into_owned(), why });
        }
        Ok(Self::from_name(name)?.path)
    }

    fn beside(name: &OsStr, folder: Option<&Path>) -> Result<Self, ReferenceError> {
        let fault = |why: String| ReferenceError { name: name.to_string_lossy().into_owned(), why };
        let bytes = name.as_bytes();
        if let Some(json) = bytes.strip_prefix(b"json:") {
            let json: Value =
                serde_json::from_slice(&to_json(json)).map_err(|error| fault(format!("not valid JSON: {error}")))?;
            let mut options = Options::default();
            options.flatten("", &json).map_err(fault)?;
            return options.image("").and_then(|image| options.all_taken(image)).map_err(fault);
        }
        if let Some((protocol, path)) = protocol(bytes) {
            let path = Path::new(OsStr::from_bytes(path));
            return match protocol {
                b"file" | b"host_device" if !path.as_os_str().is_empty() => Ok(Self::file(path)),
                _ => {
                    let protocol = String::from_utf8_lossy(protocol);
                    Err(fault(format!(
                        "protocol {protocol:?} is not supported, only files; write ./NAME for a file of that name"
                    )))
                }
            };
        }
        if bytes.is_empty() {
            return Err(fault("the file name is missing".into()));
        }
        let path = Path::new(name);
        Ok(Self::file(folder.map_or_else(|| path.to_owned(), |folder| folder.join(path))))
    }

    /// By a list of options, `driver=qcow2,file.filename=NAME`; a comma in a value is written twice.
    ///
    /// # Errors
    /// Options that limosa does not have, or that contradict each other.
    pub fn from_options(list: &str) -> Result<Self, ReferenceError> {
        let fault = |why: String| ReferenceError { name: list.to_owned(), why };
        let mut options = Options::default();
        for option in split_options(list) {
            let (name, value) = option
                .split_once('=')
                .ok_or_else(|| fault(format!("{option:?} is not an option; use file.filename=NAME to name a file")))?;
            options.0.insert(name.to_owned(), Some(value.to_owned()));
        }
        options.image("").and_then(|image| options.all_taken(image)).map_err(fault)
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.display().fmt(f)
    }
}

/// The protocol of a name, and what is behind it: there is a colon, and no slash before it.
fn protocol(name: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut parts = name.splitn(2, |byte| *byte == b':');
    let (protocol, rest) = parts.next().zip(parts.next())?;
    (!protocol.contains(&b'/')).then_some((protocol, rest))
}

/// Cuts a list of options at commas; two of them are one that belongs to the value.
#[must_use]
pub fn split_options(list: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut letters = list.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter == ',' && letters.next_if_eq(&',').is_none() {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(letter);
        }
    }
    parts.retain(|part| !part.is_empty());
    parts
}

/// Options by their names, those of inner nodes behind a dot; `None`: null.
#[derive(Debug, Default)]
struct Options(BTreeMap<String, Option<String>>);

impl Options {
    fn flatten(&mut self, name: &str, value: &Value) -> Result<(), String> {
        let inner = |key: &str| if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
        let text = match value {
            Value::Object(object) => {
                return object.iter().try_for_each(|(key, value)| self.flatten(&inner(key), value));
            }
            Value::Array(array) => {
                return array
                    .iter()
                    .enumerate()
                    .try_for_each(|(at, value)| self.flatten(&inner(&at.to_string()), value));
            }
            _ if name.is_empty() => return Err("the options of an image must be in braces".into()),
            Value::Null => None,
            Value::Bool(on) => Some(if *on { "on" } else { "off" }.to_owned()),
            Value::Number(number) => Some(number.to_string()),
            Value::String(text) => Some(text.clone()),
        };
        match self.0.insert(name.to_owned(), text) {
            Some(_) => Err(format!("{name} is given twice")),
            None => Ok(()),
        }
    }

    fn take(&mut self, node: &str, name: &str) -> Result<Option<String>, String> {
        match self.0.remove(&format!("{node}{name}")) {
            Some(None) => Err(format!("{node}{name} is null")),
            Some(text) => Ok(text),
            None => Ok(None),
        }
    }

    fn take_on(&mut self, node: &str, name: &str) -> Result<Option<bool>, String> {
        match self.take(node, name)?.as_deref() {
            None => Ok(None),
            Some("on" | "true" | "yes" | "y") => Ok(Some(true)),
            Some("off" | "false" | "no" | "n") => Ok(Some(false)),
            Some(other) => Err(format!("{node}{name} must be on or off, not {other:?}")),
        }
    }

    fn take_number(&mut self, node: &str, name: &str) -> Result<Option<u64>, String> {
        let parse =
            |text: String| bytes(&text).ok_or_else(|| format!("{node}{name} must be a number of bytes, not {text:?}"));
        self.take(node, name)?.map(parse).transpose()
    }

    fn has(&self, node: &str) -> bool {
        self.0.keys().any(|name| name.starts_with(node))
    }

    /// The file of a node: `driver`, `filename`.
    fn file(&mut self, node: &str, settings: &mut Settings) -> Result<PathBuf, String> {
        if let Some(name) = node.strip_suffix('.')
            && self.0.contains_key(name)
        {
            return Err(format!("{name} is the name of a node, which is not supported; use {node}filename=NAME"));
        }
        match self.take(node, "driver")?.as_deref() {
            None | Some("file" | "host_device") => {}
            Some(other) => return Err(format!("{node}driver={other}: not supported; use file or host_device")),
        }
        self.settings(node, settings)?;
        let name = self.take(node, "filename")?.ok_or_else(|| format!("{node}filename is missing"))?;
        if name.is_empty() { Err(format!("{node}filename is empty")) } else { Ok(name.into()) }
    }

    fn settings(&mut self, node: &str, settings: &mut Settings) -> Result<(), String> {
        settings.read_only |= self.take_on(node, "read-only")?.unwrap_or_default();
        settings.direct = self.take_on(node, "cache.direct")?.or(settings.direct);
        settings.no_flush = self.take_on(node, "cache.no-flush")?.or(settings.no_flush);
        match self.take(node, "locking")?.as_deref() {
            None | Some("auto" | "on") => {}
            Some("off") => settings.unlocked = true,
            Some(other) => return Err(format!("{node}locking must be auto, on or off, not {other:?}")),
        }
        match self.take(node, "aio")?.as_deref() {
            None => {}
            Some("threads") => settings.io = Some(Io::Threads),
            Some("io_uring") => settings.io = Some(Io::Uring),
            Some("native") => settings.io = Some(Io::Auto),
            Some(other) => return Err(format!("{node}aio must be threads, io_uring or native, not {other:?}")),
        }
        Ok(())
    }

    /// An image: `driver`, `file`, `backing`, and so on. `node`: what its options' names begin with.
    fn image(&mut self, node: &str) -> Result<Reference, String> {
        let format = match self.take(node, "driver")?.as_deref() {
            None => None,
            Some(driver @ ("file" | "host_device")) => {
                self.0.insert(format!("{node}driver"), Some(driver.to_owned()));
                let mut settings = Settings::default();
                let path = self.file(node, &mut settings)?;
                return Ok(Reference { format: Some(Format::Raw), settings, ..Reference::file(path) });
            }
            Some(driver) => Some(driver.parse::<Format>().map_err(|error| format!("{node}driver: {error}"))?),
        };
        let mut settings = Settings::default();
        self.settings(node, &mut settings)?;
        let path = match self.take(node, "filename")? {
            Some(name) if !self.has(&format!("{node}file.")) => {
                Reference::from_name(name).map_err(|error| error.to_string())?.path
            }
            Some(_) => return Err(format!("{node}filename and {node}file exclude each other")),
            None => self.file(&format!("{node}file."), &mut settings)?,
        };
        let mut image = Reference { format, settings, ..Reference::file(path) };
        image.key_secret = self.key_secret(node, format)?;
        let offset = self.take_number(node, "offset")?;
        image.size = self.take_number(node, "size")?;
        if (offset.is_some() || image.size.is_some()) && format != Some(Format::Raw) {
            return Err(format!("{node}offset and {node}size are for {node}driver=raw"));
        }
        image.offset = offset.unwrap_or(0);
        image.backing = self.below(node)?;
        let data_file = format!("{node}data-file.");
        if self.has(data_file.trim_end_matches('.')) {
            image.data_file = Some(self.file(&data_file, &mut Settings::default())?);
        }
        if let Some(format @ (Format::Raw | Format::Luks)) = format
            && (image.backing != BackingOverride::AsWritten || image.data_file.is_some())
        {
            return Err(format!("{node}driver={format} has neither a backing nor a data file"));
        }
        Ok(image)
    }

    /// The secret of an encrypted image.
    fn key_secret(&mut self, node: &str, format: Option<Format>) -> Result<Option<String>, String> {
        match format {
            Some(Format::Luks) => self.take(node, "key-secret"),
            Some(Format::Qcow2) => {
                if let Some(kind) = self.take(node, "encrypt.format")?.filter(|kind| kind != "luks") {
                    return Err(format!("{node}encrypt.format={kind}: not supported; use luks"));
                }
                self.take(node, "encrypt.key-secret")
            }
            Some(Format::Raw) | None => Ok(None),
        }
    }

    fn below(&mut self, node: &str) -> Result<BackingOverride, String> {
        match self.0.remove(&format!("{node}backing")) {
            Some(None) => Ok(BackingOverride::Nothing),
            Some(Some(name)) if name.is_empty() => Ok(BackingOverride::Nothing),
            Some(Some(_)) => Err(format!(
                "{node}backing is the name of a node, which is not supported; use {node}backing.file.filename=NAME"
            )),
            None => {
                let inner = format!("{node}backing.");
                // Names are as long as nodes are deep.
                if node.len() > 1024 {
                    return Err("too many backing files".into());
                }
                if self.has(&inner) {
                    Ok(BackingOverride::Other(Box::new(self.image(&inner)?)))
                } else {
                    Ok(BackingOverride::AsWritten)
                }
            }
        }
    }

    fn all_taken(&self, image: Reference) -> Result<Reference, String> {
        match self.0.keys().next() {
            None => Ok(image),
            Some(name) => Err(format!("unknown option {name:?}")),
        }
    }
}

/// `512`, `64k`, `1M`, ...
fn bytes(text: &str) -> Option<u64> {
    let end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (number, suffix) = text.split_at_checked(end)?;
    let shift = match suffix {
        "" | "b" | "B" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refused(name: &str) -> String {
        Reference::from_name(name).unwrap_err().to_string()
    }

    #[test]
    fn a_name_is_a_path_unless_it_says_otherwise() {
        for (name, path) in
            [("a.img", "a.img"), ("/a/b:c", "/a/b:c"), ("./a:b", "./a:b"), ("file:a", "a"), ("file:/a", "/a")]
        {
            assert_eq!(Reference::from_name(name), Ok(Reference::file(path)), "{name}");
        }
        assert!(refused("nbd://host/disk").contains(r#"protocol "nbd" is not supported"#));
        assert!(refused("a:b").contains("./NAME"));
        assert!(refused("").contains("the file name is missing"));
    }

    #[test]
    fn a_backing_file_is_looked_for_beside_the_image() {
        let from =
            |name: &str, image: &str| Reference::from_image(name.as_ref(), Path::new(image)).map(|found| found.path);
        assert_eq!(from("base", "dir/top"), Ok("dir/base".into()));
        assert_eq!(from("../base", "/dir/top"), Ok("/dir/../base".into()));
        assert_eq!(from("/base", "dir/top"), Ok("/base".into()));
        assert_eq!(from("base", "top"), Ok("base".into()));
        assert_eq!(from("file:base", "dir/top"), Ok("base".into()));
        assert_eq!(from(r#"json:{"driver":"raw","file.filename":"base"}"#, "dir/top"), Ok("base".into()));
        assert!(from("http://host/base", "dir/top").is_err());
    }

    #[test]
    fn options_are_understood_or_refused_by_name() {
        let raw = Reference { format: Some(Format::Raw), offset: 512, size: Some(1024), ..Reference::file("a,b") };
        assert_eq!(
            Reference::from_options("driver=raw,offset=512,size=1k,file.driver=file,file.filename=a,,b"),
            Ok(raw)
        );
        let json = r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"top","locking":"off","aio":"threads"},
                      "backing":{"driver":"raw","read-only":true,"file":{"filename":"base"}},"data-file":{"filename":"data"}}"#;
        let base = Reference { format: Some(Format::Raw), ..Reference::file("base") };
        let base = Reference { settings: Settings { read_only: true, ..Settings::default() }, ..base };
        let top = Reference {
            format: Some(Format::Qcow2),
            backing: BackingOverride::Other(Box::new(base)),
            data_file: Some("data".into()),
            settings: Settings { unlocked: true, io: Some(Io::Threads), ..Settings::default() },
            ..Reference::file("top")
        };
        assert_eq!(Reference::from_name(json), Ok(top));
        assert_eq!(Reference::from_name(json.replace('"', "'")), Ok(Reference::from_name(json).unwrap()));
        let alone = Reference::from_name(r#"json:{"file.filename":"top","backing":null}"#).unwrap();
        assert_eq!(alone.backing, BackingOverride::Nothing);

        let said = |list: &str| Reference::from_options(list).unwrap_err().why;
        assert_eq!(said("driver=qcow2"), "file.filename is missing");
        assert_eq!(said("file.filename=a,l2-size=1"), r#"unknown option "l2-size""#);
        assert_eq!(
            said("driver=vmdk,file.filename=a"),
            r#"driver: format "vmdk" is not supported; use raw, qcow2 or luks"#
        );
        assert_eq!(
            said("driver=raw,file.driver=nbd,file.host=a"),
            "file.driver=nbd: not supported; use file or host_device"
        );
        assert_eq!(said("driver=qcow2,offset=1,file.filename=a"), "offset and size are for driver=raw");
        assert_eq!(said("disk.img"), r#""disk.img" is not an option; use file.filename=NAME to name a file"#);
        assert!(said("driver=qcow2,file=node0").contains("name of a node"));
        assert!(refused("json:[1]").contains("unknown option") || refused("json:[1]").contains("missing"));
        assert!(refused("json:7").contains("braces"));
        assert!(refused(r#"json:{"file":{"filename":"a"},"file.filename":"b"}"#).contains("twice"));
    }

    #[test]
    fn settings_say_more_than_who_opens() {
        let usual = FileOptions { cache: CacheMode::Writethrough, ..FileOptions::default() };
        let cache = |settings: Settings| settings.override_options(usual).cache;
        assert_eq!(cache(Settings::default()), CacheMode::Writethrough);
        assert_eq!(cache(Settings { direct: Some(true), ..Settings::default() }), CacheMode::Directsync);
        assert_eq!(cache(Settings { no_flush: Some(true), ..Settings::default() }), CacheMode::Unsafe);
        for cache in CacheMode::ALL {
            let usual = FileOptions { cache, ..usual };
            assert_eq!(Settings::default().override_options(usual), usual);
        }
        assert!(Settings { read_only: true, ..Settings::default() }.override_options(usual).read_only);
    }

    proptest! {
        #[test]
        fn any_name_is_taken_or_refused(name in any::<Vec<u8>>(), list: String) {
            let _ = Reference::from_name(OsStr::from_bytes(&name));
            let _ = Reference::from_name(OsStr::from_bytes(&[b"json:", &name[..]].concat()));
            let _ = Reference::from_options(&list);
        }
    }
}
