//! Names of images: a file's name, `json:{...}`, or a list of options.
//!
//! Law: every option is taken or refused; none is ignored. Images are in files and block devices, at NBD servers, or
//! objects of stores; other network protocols are not supported.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use limosa_channel::Uri;
use limosa_nbd::{AddressError, NbdAddress};
use limosa_storage::{CacheMode, FileOptions, Io, LockPolicy};
use serde_json::Value;

pub use crate::error::ReferenceError;
pub use crate::location::{
    ExportTls, Location, ObjectEntry, ObjectStores, OpenObject, TlsCredentials, is_object, shown_object,
};
use crate::location::{NULL_SIZE, OBJECT_SCHEMES};
use crate::probe::Format;
use crate::qcow2::Encryption;
use crate::qemu_json::to_json;
use crate::setters::setters;
use crate::shown_name::{shown, shown_options};

/// An image by its name: the file, and how it is interpreted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reference {
    /// Where its bytes are.
    pub location: Location,
    /// Its format, if given.
    pub format: Option<Format>,
    /// Offset of the disk in the file, in bytes: only of a raw image.
    pub offset: u64,
    /// The disk's length in bytes: only of a raw image.
    pub size: Option<u64>,
    /// Its backing image.
    pub backing: BackingOverride,
    /// Its external data file.
    pub data_file: DataFileOverride,
    /// The name of the secret that opens an encrypted image: `key-secret`, of qcow2 `encrypt.key-secret`.
    pub key_secret: Option<String>,
    /// The file of the header of an encrypted image, if it is not the image's own: `header`, only of format `luks`.
    pub header: Option<PathBuf>,
    /// How an encrypted qcow2 image must be encrypted, if given: `encrypt.format`.
    pub encryption: Option<Encryption>,
    /// How the file is opened.
    pub settings: Settings,
}

setters!(Reference {
    format: Option<Format>,
    offset: u64,
    size: Option<u64>,
    backing: BackingOverride,
    data_file: DataFileOverride,
    key_secret: Option<String>,
    header: Option<PathBuf>,
    encryption: Option<Encryption>,
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

/// The external data file of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum DataFileOverride {
    /// The one that the image names, if it has one.
    #[default]
    AsWritten,
    /// None: an image that has one is refused.
    Nothing,
    /// This one, in place of the one that the image names.
    Other(PathBuf),
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
        Self::at(Location::File(path.into()))
    }

    /// An image at this location, and nothing else.
    #[must_use]
    pub const fn at(location: Location) -> Self {
        Self {
            location,
            format: None,
            offset: 0,
            size: None,
            backing: BackingOverride::AsWritten,
            data_file: DataFileOverride::AsWritten,
            key_secret: None,
            header: None,
            encryption: None,
            settings: Settings { read_only: false, direct: None, no_flush: None, unlocked: false, io: None },
        }
    }

    /// The path of its file, if it is in one.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.location.path()
    }

    /// By a name: a path, `file:PATH`, the address of an NBD export ([`NbdAddress`]), the URL of an object
    /// ([`Location::Object`]), `null-co://`, or `json:{...}`.
    ///
    /// # Errors
    /// It names another protocol, or options that limosa does not have.
    pub fn from_name(name: impl AsRef<OsStr>) -> Result<Self, ReferenceError> {
        Self::beside(name.as_ref(), None)
    }

    /// By the name that an image has for its backing file: a path is one from the folder of the image's own file; what
    /// is said otherwise is as in [`from_name`](Self::from_name).
    ///
    /// # Errors
    /// As [`from_name`](Self::from_name); a path that has no folder because the image is in no file.
    pub fn from_image(name: &OsStr, image: &Location) -> Result<Self, ReferenceError> {
        let reference = Self::beside(name, image.path().and_then(Path::parent))?;
        if image.path().is_none() && reference.path().is_some_and(Path::is_relative) {
            let why = format!("the path is relative, and {image} has no folder");
            return Err(ReferenceError { name: shown(name), why });
        }
        Ok(reference)
    }

    /// The place of an image that is created, by its name.
    ///
    /// # Errors
    /// As [`from_name`](Self::from_name); it is `json:{...}`.
    pub fn location_from_name(name: impl AsRef<OsStr>) -> Result<Location, ReferenceError> {
        let name = name.as_ref();
        if name.as_bytes().starts_with(b"json:") {
            let why = "a new image must be given by the path of its file".to_owned();
            return Err(ReferenceError { name: shown(name), why });
        }
        Ok(Self::from_name(name)?.location)
    }

    /// The path of a data file, by its name.
    ///
    /// # Errors
    /// As [`location_from_name`](Self::location_from_name); it is in no file.
    pub fn path_from_name(name: impl AsRef<OsStr>) -> Result<PathBuf, ReferenceError> {
        let name = name.as_ref();
        match Self::location_from_name(name)? {
            Location::File(path) => Ok(path),
            other => {
                let why = format!("a data file must be a file, not {other}");
                Err(ReferenceError { name: shown(name), why })
            }
        }
    }

    fn beside(name: &OsStr, folder: Option<&Path>) -> Result<Self, ReferenceError> {
        let fault = |why: String| ReferenceError { name: shown(name), why };
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
                // What looks like a protocol is one when the name is used again, unless a slash comes before it.
                b"file" | b"host_device" if self::protocol(path.as_os_str().as_bytes()).is_some() => {
                    Ok(Self::file(Path::new(".").join(path)))
                }
                b"file" | b"host_device" if !path.as_os_str().is_empty() => Ok(Self::file(path)),
                b"nbd" | b"nbd+tcp" | b"nbd+unix" | b"nbd+vsock" | b"nbds" | b"nbds+tcp" | b"nbds+unix"
                | b"nbds+vsock" => {
                    let text = name.to_str().ok_or_else(|| fault("the address is not valid UTF-8".into()))?;
                    let address = text.parse().map_err(|error: AddressError| match error {
                        AddressError::Tls => fault(format!("{error}; use driver=nbd with tls-creds")),
                        error => fault(error.to_string()),
                    })?;
                    Ok(Self::at(Location::Nbd { address, context: None, tls: None }))
                }
                _ if path.as_os_str().as_bytes().starts_with(b"//")
                    && OBJECT_SCHEMES.iter().any(|scheme| scheme.as_bytes() == protocol) =>
                {
                    let url = name.to_str().ok_or_else(|| fault("the URL is not valid UTF-8".into()))?;
                    Ok(Self::at(Location::Object(url.to_owned())))
                }
                b"null-co" | b"null-aio" if path == Path::new("//") => {
                    Ok(Self::at(Location::Null { size: NULL_SIZE, zeroes: false }))
                }
                _ => {
                    let protocol = String::from_utf8_lossy(protocol);
                    Err(fault(format!(
                        "protocol {protocol:?} is not supported, only files, nbd, s3, gs, az and http; write ./NAME for a file of \
                         that name"
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
        let fault = |why: String| ReferenceError { name: shown_options(list), why };
        let mut options = Options::default();
        for (number, option) in (1..).zip(split_options(list)) {
            let (name, value) = option.split_once('=').ok_or_else(|| {
                fault(match number {
                    1 => format!("{option:?} is not an option; use file.filename=NAME to name a file"),
                    // It may be the rest of a password.
                    _ => {
                        format!("option {number} has no value: must be NAME=VALUE; a comma in a value is written twice")
                    }
                })
            })?;
            options.0.insert(name.to_owned(), Some(value.to_owned()));
        }
        options.image("").and_then(|image| options.all_taken(image)).map_err(fault)
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.location.fmt(f)
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

    /// The bytes of a node: `driver`, and what that driver takes.
    fn location(&mut self, node: &str, settings: &mut Settings) -> Result<Location, String> {
        if let Some(name) = node.strip_suffix('.')
            && self.0.contains_key(name)
        {
            return Err(format!("{name} is the name of a node, which is not supported; use {node}filename=NAME"));
        }
        match self.take(node, "driver")?.as_deref() {
            None | Some("file" | "host_device") => {}
            Some("nbd") => return self.nbd(node, settings),
            Some(driver) if OBJECT_SCHEMES.contains(&driver) => {
                self.common_settings(node, settings)?;
                let url = self.take(node, "url")?.ok_or_else(|| format!("{node}url is missing"))?;
                return match url.split_once("://") {
                    Some((scheme, _)) if scheme == driver => Ok(Location::Object(url)),
                    _ => Err(format!("{node}url must begin with {driver}://")),
                };
            }
            Some("null-co" | "null-aio") => {
                self.common_settings(node, settings)?;
                let size = self.take_number(node, "size")?.unwrap_or(NULL_SIZE);
                let zeroes = self.take_on(node, "read-zeroes")?.unwrap_or_default();
                // How long a request takes is not imitated.
                self.only(node, "latency-ns", "0")?;
                return Ok(Location::Null { size, zeroes });
            }
            Some(other) => {
                return Err(format!("{node}driver={other}: not supported; use file, host_device, nbd or https"));
            }
        }
        self.settings(node, settings)?;
        let name = self.take(node, "filename")?.ok_or_else(|| format!("{node}filename is missing"))?;
        if name.is_empty() { Err(format!("{node}filename is empty")) } else { Ok(Location::File(name.into())) }
    }

    /// An export of an NBD server: `server` or QEMU's older options for it, `export`.
    fn nbd(&mut self, node: &str, settings: &mut Settings) -> Result<Location, String> {
        self.common_settings(node, settings)?;
        let fault = |error: AddressError| format!("{node}driver=nbd: {error}");
        let (new, old) = (format!("{node}server."), node.to_owned());
        let kind = self.take(&new, "type")?;
        let at = if kind.is_some() { &new } else { &old };
        let (path, host, port) = (self.take(at, "path")?, self.take(at, "host")?, self.take(at, "port")?);
        let server = match (kind.as_deref(), path, host) {
            (None | Some("unix"), Some(path), None) if !path.is_empty() => Uri::Unix(path.into()),
            (None | Some("inet"), None, Some(host)) => NbdAddress::tcp(&host, port.as_deref()).map_err(fault)?,
            (Some("vsock"), None, None) => {
                let (cid, vsock_port) = (self.take(&new, "cid")?.unwrap_or_default(), port.unwrap_or_default());
                let fault = |_| format!("{new}type=vsock needs {new}cid and {new}port, numbers");
                Uri::Vsock { cid: cid.parse().map_err(fault)?, port: vsock_port.parse().map_err(fault)? }
            }
            (Some(kind), ..) if kind != "unix" && kind != "inet" => {
                return Err(format!("{new}type={kind}: not supported; use inet, unix or vsock"));
            }
            _ => {
                return Err(format!(
                    "{node}driver=nbd needs {new}type=inet with host and port, or type=unix with path"
                ));
            }
        };
        let tls = match (self.take(node, "tls-creds")?, self.take(node, "tls-hostname")?) {
            (Some(credentials), hostname) => Some(ExportTls { credentials, hostname }),
            (None, None) => None,
            (None, Some(_)) => return Err(format!("{node}tls-hostname needs {node}tls-creds")),
        };
        self.only(node, "reconnect-delay", "0")?;
        self.only(node, "open-timeout", "0")?;
        let address = NbdAddress::new(server, self.take(node, "export")?.unwrap_or_default());
        Ok(Location::Nbd { address, context: self.take(node, "x-dirty-bitmap")?, tls })
    }

    /// An option that has only its default.
    fn only(&mut self, node: &str, name: &str, value: &str) -> Result<(), String> {
        match self.take(node, name)? {
            Some(other) if other != value => Err(format!("{node}{name}={other}: not supported; use {value}")),
            _ => Ok(()),
        }
    }

    /// Settings of what is no file. Past a page cache (`cache.direct`) is where it always is.
    fn common_settings(&mut self, node: &str, settings: &mut Settings) -> Result<(), String> {
        settings.read_only |= self.take_on(node, "read-only")?.unwrap_or_default();
        settings.direct = self.take_on(node, "cache.direct")?.or(settings.direct);
        settings.no_flush = self.take_on(node, "cache.no-flush")?.or(settings.no_flush);
        Ok(())
    }

    fn settings(&mut self, node: &str, settings: &mut Settings) -> Result<(), String> {
        self.common_settings(node, settings)?;
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
            Some(driver)
                if ["file", "host_device", "nbd", "null-co", "null-aio"].contains(&driver)
                    || OBJECT_SCHEMES.contains(&driver) =>
            {
                self.0.insert(format!("{node}driver"), Some(driver.to_owned()));
                let mut settings = Settings::default();
                let location = self.location(node, &mut settings)?;
                return Ok(Reference { format: Some(Format::Raw), settings, ..Reference::at(location) });
            }
            Some(driver) => Some(driver.parse::<Format>().map_err(|error| format!("{node}driver: {error}"))?),
        };
        let mut settings = Settings::default();
        self.settings(node, &mut settings)?;
        let location = match self.take(node, "filename")? {
            Some(name) if !self.has(&format!("{node}file.")) => {
                Reference::from_name(name).map_err(|error| error.to_string())?.location
            }
            Some(_) => return Err(format!("{node}filename and {node}file exclude each other")),
            None => self.location(&format!("{node}file."), &mut settings)?,
        };
        let mut image = Reference { format, settings, ..Reference::at(location) };
        (image.key_secret, image.encryption) = self.encryption(node, format)?;
        if format == Some(Format::Luks) {
            image.header = self.file(&format!("{node}header."), "an encryption header")?;
        }
        let offset = self.take_number(node, "offset")?;
        image.size = self.take_number(node, "size")?;
        if (offset.is_some() || image.size.is_some()) && format != Some(Format::Raw) {
            return Err(format!("{node}offset and {node}size are for {node}driver=raw"));
        }
        image.offset = offset.unwrap_or(0);
        if let Location::Nbd { context: Some(_), .. } = &image.location
            && (format != Some(Format::Raw) || offset.is_some() || image.size.is_some())
        {
            return Err(format!("{node}file.x-dirty-bitmap needs {node}driver=raw, without offset and size"));
        }
        image.backing = self.below(node)?;
        let data_file = format!("{node}data-file.");
        if let Some(path) = self.file(&data_file, "a data file")? {
            image.data_file = DataFileOverride::Other(path);
        }
        if let Some(format @ (Format::Raw | Format::Luks)) = format
            && (image.backing != BackingOverride::AsWritten || image.data_file != DataFileOverride::AsWritten)
        {
            return Err(format!("{node}driver={format} has neither a backing nor a data file"));
        }
        Ok(image)
    }

    /// Another file of an image, if it is given. `node`: what its options' names begin with.
    fn file(&mut self, node: &str, what: &str) -> Result<Option<PathBuf>, String> {
        if !self.has(node.trim_end_matches('.')) {
            return Ok(None);
        }
        match self.location(node, &mut Settings::default())? {
            Location::File(path) => Ok(Some(path)),
            other => Err(format!("{node}driver: {what} must be a file, not {other}")),
        }
    }

    /// The secret of an encrypted image, and its encryption.
    fn encryption(
        &mut self,
        node: &str,
        format: Option<Format>,
    ) -> Result<(Option<String>, Option<Encryption>), String> {
        Ok(match format {
            Some(Format::Luks) => (self.take(node, "key-secret")?, None),
            Some(Format::Qcow2) => {
                let encryption = match self.take(node, "encrypt.format")?.as_deref() {
                    None => None,
                    Some("luks") => Some(Encryption::Luks),
                    Some("aes") => Some(Encryption::Aes),
                    Some(other) => return Err(format!("{node}encrypt.format={other}: must be luks or aes")),
                };
                (self.take(node, "encrypt.key-secret")?, encryption)
            }
            Some(Format::Raw) | None => (None, None),
        })
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
        for (name, path) in [
            ("a.img", "a.img"),
            ("/a/b:c", "/a/b:c"),
            ("./a:b", "./a:b"),
            ("file:a", "a"),
            ("file:/a", "/a"),
            ("file:a:b", "./a:b"),
        ] {
            assert_eq!(Reference::from_name(name), Ok(Reference::file(path)), "{name}");
        }
        assert!(refused("ssh://host/disk").contains(r#"protocol "ssh" is not supported"#));
        assert!(refused("nbd://:1/disk").contains("host or socket is missing"));
        assert!(refused("nbds://host/disk").contains("TLS"));
        let nbd = Reference::from_name("nbd://host/disk").unwrap();
        assert_eq!((nbd.to_string().as_str(), nbd.path()), ("nbd://host/disk", None));
        let null = Location::Null { size: 1 << 30, zeroes: false };
        assert_eq!(Reference::from_name("null-co://"), Ok(Reference::at(null)));
        assert!(Reference::path_from_name("nbd://host/disk").is_err());
        assert!(refused("a:b").contains("./NAME"));
        assert!(refused("").contains("the file name is missing"));
    }

    #[test]
    fn a_backing_file_is_looked_for_beside_the_image() {
        let from = |name: &str, image: &str| {
            Reference::from_image(name.as_ref(), &Location::File(image.into())).map(|found| found.to_string())
        };
        assert_eq!(from("base", "dir/top"), Ok("dir/base".into()));
        assert_eq!(from("../base", "/dir/top"), Ok("/dir/../base".into()));
        assert_eq!(from("/base", "dir/top"), Ok("/base".into()));
        assert_eq!(from("base", "top"), Ok("base".into()));
        assert_eq!(from("file:base", "dir/top"), Ok("base".into()));
        assert_eq!(from("nbd://host/base", "dir/top"), Ok("nbd://host/base".into()));
        assert_eq!(from(r#"json:{"driver":"raw","file.filename":"base"}"#, "dir/top"), Ok("base".into()));
        assert_eq!(from("http://host/base", "dir/top"), Ok("http://host/base".into()));
        assert!(from("ftp://host/base", "dir/top").is_err());
        let nowhere = Location::Null { size: 0, zeroes: false };
        assert!(Reference::from_image("base".as_ref(), &nowhere).unwrap_err().why.contains("has no folder"));
        assert!(Reference::from_image("/base".as_ref(), &nowhere).is_ok());
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
            data_file: DataFileOverride::Other("data".into()),
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
            said("driver=raw,file.driver=ssh,file.host=a"),
            "file.driver=ssh: not supported; use file, host_device, nbd or https"
        );
        assert!(said("driver=nbd,export=a").contains("server.type=inet"));
        assert!(said("driver=nbd,host=a,path=b").contains("server.type=inet"));
        assert!(said("driver=nbd,server.type=fd,server.str=a").contains("type=fd"));
        assert!(said("driver=nbd,host=a,port=99999").contains("port must be"));
        assert!(said("driver=nbd,host=a,tls-hostname=b").contains("needs tls-creds"));
        assert!(said("driver=nbd,host=a,reconnect-delay=3").contains("reconnect-delay=3"));
        assert!(said("driver=qcow2,file.filename=a,data-file.driver=nbd,data-file.host=a").contains("must be a file"));
        assert_eq!(said("driver=null-co,filename=a"), r#"unknown option "filename""#);
        assert_eq!(said("driver=qcow2,offset=1,file.filename=a"), "offset and size are for driver=raw");
        assert_eq!(said("disk.img"), r#""disk.img" is not an option; use file.filename=NAME to name a file"#);
        assert!(said("driver=qcow2,file=node0").contains("name of a node"));
        assert!(said("driver=qcow2,password=hun,ter2").contains("option 3 has no value"));
        assert!(refused("json:[1]").contains("unknown option") || refused("json:[1]").contains("missing"));
        assert!(refused("json:7").contains("braces"));
        assert!(refused(r#"json:{"file":{"filename":"a"},"file.filename":"b"}"#).contains("twice"));
    }

    #[test]
    fn exports_and_nothing_are_named_by_options() {
        let at = |list: &str| Reference::from_options(list).map(|found| (found.format, found.location));
        let nbd = |address: &str, context: Option<&str>| Location::Nbd {
            address: address.parse().unwrap(),
            context: context.map(str::to_owned),
            tls: None,
        };
        for (list, address) in [
            ("driver=nbd,server.type=inet,server.host=h,server.port=1,export=e", "nbd://h:1/e"),
            ("driver=nbd,server.type=unix,server.path=/s", "nbd+unix://?socket=/s"),
            ("driver=nbd,host=::1,port=10809", "nbd://[::1]"),
            ("driver=nbd,path=/s,export=e,open-timeout=0", "nbd+unix:///e?socket=/s"),
        ] {
            assert_eq!(at(list), Ok((Some(Format::Raw), nbd(address, None))), "{list}");
        }
        let named = |hostname: Option<&str>| {
            let tls = ExportTls { credentials: "t".into(), hostname: hostname.map(str::to_owned) };
            Location::Nbd { address: "nbd://h".parse().unwrap(), context: None, tls: Some(tls) }
        };
        assert_eq!(at("driver=nbd,host=h,tls-creds=t"), Ok((Some(Format::Raw), named(None))));
        assert_eq!(at("driver=nbd,host=h,tls-creds=t,tls-hostname=b").unwrap().1, named(Some("b")));
        let bitmap = "driver=raw,file.driver=nbd,file.host=h,file.x-dirty-bitmap=qemu:dirty-bitmap:b";
        assert_eq!(at(bitmap), Ok((Some(Format::Raw), nbd("nbd://h", Some("qemu:dirty-bitmap:b")))));
        for refused in [
            "driver=qcow2,file.driver=nbd,file.host=h,file.x-dirty-bitmap=b",
            "file.driver=nbd,file.host=h,file.x-dirty-bitmap=b",
            "driver=raw,offset=512,file.driver=nbd,file.host=h,file.x-dirty-bitmap=b",
            "driver=nbd,host=h,locking=off",
            "driver=nbd,host=h,aio=threads",
            "driver=null-co,aio=threads",
        ] {
            assert!(at(refused).is_err(), "{refused}");
        }
        let null = Location::Null { size: 1 << 20, zeroes: true };
        assert_eq!(
            at("driver=raw,file.driver=null-aio,file.size=1M,file.read-zeroes=on"),
            Ok((Some(Format::Raw), null))
        );
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
