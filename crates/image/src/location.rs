//! Where the bytes of an image are: in a file, at an NBD server, in an object store, or nowhere.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use limosa_channel::{Tls, Uri};
use limosa_nbd::{ConnectOptions, NbdAddress, NbdStorage};
use limosa_storage::{FileIdentity, FileOptions, FileStorage, NullStorage, Operation, Storage, StorageError};
use serde_json::{Value, json};

/// The length of a disk without contents, unless another is given: QEMU's.
pub(crate) const NULL_SIZE: u64 = 1 << 30;

/// Where the bytes of an image are.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Location {
    /// A file or block device.
    File(PathBuf),
    /// An export of an NBD server.
    Nbd {
        /// The export.
        address: NbdAddress,
        /// The metadata context that tells about holes, in place of the usual one: `x-dirty-bitmap`.
        context: Option<String>,
        /// The encryption of the connection; `None`: it has none.
        tls: Option<ExportTls>,
    },
    /// An object of a store, or a file of a web server. It is only read.
    Object(String),
    /// Nowhere: writes are lost, reads return zeros.
    Null {
        /// Its length in bytes.
        size: u64,
        /// Whether it says that it reads as zeros: `read-zeroes`.
        zeroes: bool,
    },
}

/// Schemes of the URLs of objects ([`Location::Object`]).
pub(crate) const OBJECT_SCHEMES: [&str; 5] = ["s3", "gs", "az", "http", "https"];

/// A client of object stores, which this crate has none of.
pub trait OpenObject: fmt::Debug + Send + Sync {
    /// Opens an object, to be read only.
    ///
    /// # Errors
    /// The URL is not valid; the store's.
    fn open(&self, url: &str) -> Result<Arc<dyn Storage>, StorageError>;

    /// Returns the objects of a folder; those of folders below are left out.
    ///
    /// # Errors
    /// It is no folder of a store; the store's.
    fn list(&self, folder: &str) -> Result<Vec<ObjectEntry>, StorageError> {
        Err(StorageError::for_storage(Operation::List, &folder.into(), io::Error::from(io::ErrorKind::Unsupported)))
    }

    /// Removes an object.
    ///
    /// # Errors
    /// The store's.
    fn remove(&self, url: &str) -> Result<(), StorageError> {
        Err(StorageError::for_storage(Operation::Remove, &url.into(), io::Error::from(io::ErrorKind::Unsupported)))
    }
}

/// An object of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectEntry {
    /// Its URL.
    pub url: String,
    /// Its length in bytes.
    pub length: u64,
    /// When it was written.
    pub modified: SystemTime,
    /// The store's mark of its contents, if it has one: other contents have another.
    pub tag: Option<String>,
}

/// The client of object stores that a program has, if it has one.
#[derive(Debug, Clone, Default)]
pub struct ObjectStores(Option<Arc<dyn OpenObject>>);

impl ObjectStores {
    /// With this client.
    #[must_use]
    pub fn new(client: Arc<dyn OpenObject>) -> Self {
        Self(Some(client))
    }

    /// Opens an object, to be read only.
    ///
    /// # Errors
    /// There is no client; else the client's.
    pub fn open(&self, url: &str) -> Result<Arc<dyn Storage>, StorageError> {
        self.client(Operation::Open, url)?.open(url)
    }

    /// As [`OpenObject::list`].
    ///
    /// # Errors
    /// There is no client; else the client's.
    pub fn list(&self, folder: &str) -> Result<Vec<ObjectEntry>, StorageError> {
        self.client(Operation::List, folder)?.list(folder)
    }

    /// As [`OpenObject::remove`].
    ///
    /// # Errors
    /// There is no client; else the client's.
    pub fn remove(&self, url: &str) -> Result<(), StorageError> {
        self.client(Operation::Remove, url)?.remove(url)
    }

    fn client(&self, operation: Operation, url: &str) -> Result<&dyn OpenObject, StorageError> {
        let none = || io::Error::new(io::ErrorKind::Unsupported, "this program has no client of object stores");
        self.0.as_deref().ok_or_else(|| StorageError::for_storage(operation, &shown_object(url).into(), none()))
    }

    fn open_image(&self, url: &str, options: &FileOptions) -> Result<Arc<dyn Storage>, StorageError> {
        if !options.read_only {
            let why = io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "objects of stores are only read");
            return Err(StorageError::for_storage(Operation::Open, &url.into(), why));
        }
        self.open(url)
    }
}

/// Returns the URL of an object without what may be a secret in it: a user's name and password, and of a web server's
/// the query.
#[must_use]
pub fn shown_object(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let authority = authority.rsplit_once('@').map_or_else(|| authority.to_owned(), |(_, host)| format!("***@{host}"));
    let (path, more) = match path.find(['?', '#']).filter(|_| scheme.starts_with("http")) {
        Some(end) => (path.get(..end).unwrap_or_default(), "?***"),
        None => (path, ""),
    };
    format!("{scheme}://{authority}{path}{more}")
}

/// Returns whether a name is that of an object ([`Location::Object`]).
#[must_use]
pub fn is_object(name: &Path) -> bool {
    let name = name.as_os_str().as_encoded_bytes();
    OBJECT_SCHEMES
        .iter()
        .any(|scheme| name.strip_prefix(scheme.as_bytes()).is_some_and(|rest| rest.starts_with(b"://")))
}

/// The means to reach images that are not in files.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Connections<'a> {
    pub(crate) tls: &'a TlsCredentials,
    pub(crate) objects: &'a ObjectStores,
}

/// The encryption of a connection to an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportTls {
    /// The name of the credentials: `tls-creds`.
    pub credentials: String,
    /// The name that the server's certificate must have, in place of its host's: `tls-hostname`.
    pub hostname: Option<String>,
}

/// Credentials of clients, by the names that exports give ([`ExportTls::credentials`]).
#[derive(Debug, Clone, Default)]
pub struct TlsCredentials(BTreeMap<String, Tls>);

impl TlsCredentials {
    /// Adds some, in place of earlier ones of the name.
    pub fn insert(&mut self, name: impl Into<String>, credentials: Tls) {
        self.0.insert(name.into(), credentials);
    }

    /// Returns whether there are some of this name.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Returns those of an export.
    fn of(&self, export: &ExportTls) -> io::Result<Tls> {
        let ExportTls { credentials, hostname } = export;
        let missing =
            || io::Error::new(io::ErrorKind::NotFound, format!("there are no TLS credentials {credentials:?}"));
        let tls = self.0.get(credentials).ok_or_else(missing)?;
        Ok(hostname.as_deref().map_or_else(|| tls.clone(), |hostname| tls.to_host(hostname)))
    }
}

/// The identity of bytes, regardless of the name that leads to them. One export may still have several: of two names of
/// a host or of an export only the server knows that they are one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Identity {
    File(FileIdentity),
    /// A server, and its export.
    Export(Server, String),
    /// A URL.
    Object(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Server {
    /// The file of its socket.
    Socket(FileIdentity),
    Other(Uri),
}

impl Location {
    /// Returns its identity; `None`: it has no bytes, or not yet.
    pub(crate) fn identity(&self) -> Option<Identity> {
        let of = |path: &Path| fs::metadata(path).ok().map(|metadata| FileIdentity::of(&metadata));
        match self {
            Self::File(path) => of(path).map(Identity::File),
            Self::Nbd { address, .. } => {
                let socket = match &address.server {
                    Uri::Unix(path) => of(path).map(Server::Socket),
                    _ => None,
                };
                let server = socket.unwrap_or_else(|| Server::Other(address.server.clone()));
                Some(Identity::Export(server, address.export.clone()))
            }
            Self::Object(url) => Some(Identity::Object(url.clone())),
            Self::Null { .. } => None,
        }
    }

    /// Returns the path of a file.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Nbd { .. } | Self::Object(_) | Self::Null { .. } => None,
        }
    }

    /// Opens it. Only files have locks and a page cache. An export is flushed in every cache mode: what its server
    /// keeps in memory would be lost with that, not only with this machine's power.
    pub(crate) fn open(
        &self,
        options: &FileOptions,
        connections: Connections<'_>,
    ) -> Result<Arc<dyn Storage>, StorageError> {
        Ok(match self {
            Self::File(path) => FileStorage::open(path, options)?,
            Self::Nbd { address, context, tls } => {
                let failed = |error| StorageError::for_storage(Operation::Open, &self.to_string().into(), error);
                let tls = tls.as_ref().map(|tls| connections.tls.of(tls)).transpose().map_err(failed)?;
                let mut connect = ConnectOptions::default()
                    .read_only(options.read_only)
                    .synchronous(options.cache.is_synchronous())
                    .tls(tls);
                if let Some(context) = context {
                    connect = connect.context(context);
                }
                NbdStorage::connect(address, &connect)?
            }
            Self::Object(url) => connections.objects.open_image(url, options)?,
            Self::Null { size, zeroes } => Arc::new(NullStorage::new(self.to_string(), *size, *zeroes)),
        })
    }

    /// QEMU's name of the driver that has such bytes, but for files; of objects that QEMU has no driver for, their
    /// scheme.
    pub(crate) fn protocol(&self) -> Option<&'static str> {
        match self {
            Self::File(_) => None,
            Self::Object(url) => OBJECT_SCHEMES.into_iter().find(|scheme| url.split(':').next() == Some(scheme)),
            Self::Nbd { .. } => Some("nbd"),
            Self::Null { .. } => Some("null-co"),
        }
    }
}

impl Location {
    /// Returns its name, if the name alone leads to it.
    pub(crate) fn plain_name(&self) -> Option<String> {
        let is_plain = match self {
            Self::File(_) | Self::Object(_) => true,
            Self::Nbd { context, tls, .. } => context.is_none() && tls.is_none(),
            Self::Null { size, zeroes } => (*size, *zeroes) == (NULL_SIZE, false),
        };
        is_plain.then(|| self.to_string())
    }

    /// Returns the options that lead to it.
    pub(crate) fn node(&self) -> Value {
        match self {
            Self::File(path) => json!({ "driver": "file", "filename": path.to_string_lossy() }),
            Self::Nbd { address, context, tls } => {
                let server = match &address.server {
                    Uri::Tcp { host, port } => json!({ "type": "inet", "host": host, "port": port.to_string() }),
                    Uri::Unix(path) => json!({ "type": "unix", "path": path.to_string_lossy() }),
                    Uri::Vsock { cid, port } => {
                        json!({ "type": "vsock", "cid": cid.to_string(), "port": port.to_string() })
                    }
                    other => json!({ "type": other.to_string() }),
                };
                let mut node = json!({ "driver": "nbd", "server": server, "export": address.export });
                if let Some(context) = context {
                    node["x-dirty-bitmap"] = context.as_str().into();
                }
                if let Some(ExportTls { credentials, hostname }) = tls {
                    node["tls-creds"] = credentials.as_str().into();
                    if let Some(hostname) = hostname {
                        node["tls-hostname"] = hostname.as_str().into();
                    }
                }
                node
            }
            Self::Object(url) => json!({ "driver": self.protocol(), "url": url }),
            Self::Null { size, zeroes } => json!({ "driver": "null-co", "size": size, "read-zeroes": zeroes }),
        }
    }
}

impl From<PathBuf> for Location {
    fn from(path: PathBuf) -> Self {
        Self::File(path)
    }
}

impl From<&Path> for Location {
    fn from(path: &Path) -> Self {
        Self::File(path.to_owned())
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Nbd { address, .. } => address.fmt(f),
            Self::Object(url) => f.write_str(url),
            Self::Null { .. } => f.write_str("null-co://"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::Reference;

    #[test]
    fn the_options_of_a_place_lead_to_it() {
        let nbd = |address: &str, context: Option<&str>| Location::Nbd {
            address: address.parse().unwrap(),
            context: context.map(str::to_owned),
            tls: None,
        };
        let encrypted = |hostname: Option<&str>| Location::Nbd {
            address: "nbd://host/e".parse().unwrap(),
            context: None,
            tls: Some(ExportTls { credentials: "t".into(), hostname: hostname.map(str::to_owned) }),
        };
        for (location, is_plain) in [
            (Location::File("a".into()), true),
            (nbd("nbd://[::1]:3/e", None), true),
            (nbd("nbd+vsock://2:3/e", None), true),
            (nbd("nbd+unix:///e?socket=/s", Some("qemu:dirty-bitmap:b")), false),
            (encrypted(None), false),
            (encrypted(Some("other")), false),
            (Location::Object("s3://bucket/a b?c".into()), true),
            (Location::Object("https://host:1/a%20b".into()), true),
            (Location::Null { size: NULL_SIZE, zeroes: false }, true),
            (Location::Null { size: 512, zeroes: true }, false),
        ] {
            let by_options = Reference::from_name(format!("json:{}", location.node())).unwrap();
            assert_eq!(by_options.location, location);
            let by_name = location.plain_name().map(|name| Reference::from_name(name).unwrap().location);
            assert_eq!(by_name, is_plain.then_some(location));
        }
    }

    #[test]
    fn objects_are_only_read_and_only_where_there_is_a_client() {
        let location = Location::Object("s3://b/k".into());
        let connections = Connections { tls: &TlsCredentials::default(), objects: &ObjectStores::default() };
        let error = |read_only| {
            let options = FileOptions { read_only, ..FileOptions::default() };
            limosa_page::error_with_causes(&location.open(&options, connections).unwrap_err())
        };
        assert_eq!(error(true), "cannot open s3://b/k: this program has no client of object stores");
        assert_eq!(error(false), "cannot open s3://b/k: objects of stores are only read");
    }

    #[test]
    fn no_secret_of_a_url_is_shown() {
        for (url, shown) in [
            ("https://me:secret@host:1/a@b", "https://***@host:1/a@b"),
            ("https://host/a?signature=secret#x", "https://host/a?***"),
            ("https://secret@host", "https://***@host"),
            ("s3://key:secret@bucket/a?b", "s3://***@bucket/a?b"),
            ("s3://bucket/a@b#c", "s3://bucket/a@b#c"),
        ] {
            assert_eq!(shown_object(url), shown);
        }
    }

    #[test]
    fn names_of_objects_are_known_by_their_scheme() {
        for name in ["s3://b/k", "https://h/k", "az://"] {
            assert!(is_object(Path::new(name)), "{name}");
        }
        for name in ["", "s3:b", "./s3://b/k", "ftp://h/k", "s3"] {
            assert!(!is_object(Path::new(name)), "{name}");
        }
    }

    #[test]
    fn names_of_the_same_bytes_have_one_identity() {
        let folder = tempfile::tempdir().unwrap();
        let (socket, link) = (folder.path().join("s"), folder.path().join("l"));
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        std::os::unix::fs::symlink(&socket, &link).unwrap();
        let of = |path: &Path, export: &str| {
            let address = NbdAddress::new(Uri::Unix(path.into()), export);
            Location::Nbd { address, context: None, tls: None }.identity().unwrap()
        };
        assert_eq!(of(&socket, "e"), of(&link, "e"));
        assert_ne!(of(&socket, "e"), of(&socket, "f"));
        assert_ne!(of(&folder.path().join("none"), "e"), of(&socket, "e"));
        assert_eq!(Location::from(socket).identity(), Location::from(link).identity());
        assert_eq!(Location::from(folder.path().join("none")).identity(), None);
        assert_eq!(Location::Null { size: 1, zeroes: false }.identity(), None);
    }
}
