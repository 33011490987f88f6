//! The sockets of a server, bound before it starts a thread.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use limosa_channel::{Channel, Listener, Options, Uri};
use limosa_control::BoundControlSocket;
use serde_json::Value;

use super::address;
use crate::args::ServeArgs;
use crate::metrics;
use crate::remedy::without_control;

/// Where clients connect.
pub(super) enum Clients {
    /// At listeners.
    Listeners(Vec<Listener>),
    /// One is connected.
    Connected(Channel),
}

impl Clients {
    /// Returns the addresses at which they connect, for programs.
    pub(super) fn addresses(&self) -> Vec<Value> {
        match self {
            Self::Listeners(listeners) => listeners.iter().filter_map(address::description).collect(),
            Self::Connected(_) => Vec::new(),
        }
    }
}

/// The sockets of a server.
pub(super) struct Ends {
    pub(super) clients: Clients,
    pub(super) control: Option<BoundControlSocket>,
    pub(super) metrics: Option<Listener>,
}

impl Ends {
    /// Binds all of them.
    ///
    /// # Errors
    /// An address is in use, or cannot be one.
    pub(super) fn bind(args: &ServeArgs, addresses: &[Uri]) -> anyhow::Result<Self> {
        let options = Options::default();
        let clients = if addresses == [Uri::Stdio] {
            Clients::Connected(address::standard_streams(&options)?)
        } else {
            let access = args.socket_access();
            let bind = |uri| Listener::bind_with(uri, access, &options).context("--nbd");
            Clients::Listeners(addresses.iter().map(bind).collect::<anyhow::Result<_>>()?)
        };
        let control = args
            .control
            .as_deref()
            .map(|path| BoundControlSocket::bind(path).map_err(|error| without_control(path, &error)));
        let metrics = args.metrics.as_ref().map(|uri| metrics::bind(uri, args.socket_access()));
        Ok(Self { clients, control: control.transpose()?, metrics: metrics.transpose()? })
    }

    /// Returns the folders of the files that unix sockets have.
    pub(super) fn socket_folders(args: &ServeArgs, addresses: &[Uri]) -> Vec<PathBuf> {
        let paths = addresses.iter().chain(&args.metrics).filter_map(|uri| match uri {
            Uri::Unix(path) => Some(path.as_path()),
            _ => None,
        });
        let folder = |path: &Path| match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        let devices = args.vhost_user_blk.iter().map(PathBuf::as_path);
        let mut folders: Vec<_> = paths.chain(devices).chain(args.control.as_deref()).map(folder).collect();
        folders.sort();
        folders.dedup();
        folders
    }
}
