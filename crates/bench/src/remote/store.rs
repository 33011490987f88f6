//! The object store of the bench, behind a line of 1 Gbit/s: a server on this machine, and a proxy that delays every
//! answer and limits the rate of all bodies together.
//!
//! The proxy is a part of this process. Every request has a connection of its own and pays the latency once, so nothing
//! is measured of handshakes. Objects are written to an object server, and read from a web server that has the same
//! files: the object server reads all of an object for each request for a part of it, to have its digest.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use limosa_testkit::{BUCKET, FileServer, HttpProxy, ObjectServer, ObjectServerKind};
use rustix::fs::syncfs;
use serde_json::Value;

use crate::limosa::Prepared;
use crate::measure::Measured;
use crate::options::Options;
use crate::scratch::Scratch;

/// Bytes that the line carries in a second.
pub(super) const LINE: u64 = 125_000_000;

/// The store, and room for files of the runs on the disk that it is on.
pub(super) struct Store {
    // Before the directory that has its objects.
    server: ObjectServer,
    proxy: HttpProxy,
    /// The same objects for readers.
    _files: FileServer,
    /// The proxy before that.
    read_proxy: HttpProxy,
    folder: Scratch,
}

/// A store at a distance, for one run.
#[derive(Clone, Copy)]
pub(super) struct Far<'a> {
    pub(super) options: &'a Options,
    pub(super) store: &'a Store,
    /// Of its line, in milliseconds.
    pub(super) latency: u32,
}

impl Store {
    /// Starts an empty one.
    pub(super) fn start(options: &Options) -> Result<Self> {
        let folder = Scratch::new_in(&options.dir.clone().unwrap_or_else(std::env::temp_dir))?;
        let server = ObjectServer::start_in(ObjectServerKind::S3s, folder.path())?;
        let proxy = HttpProxy::start(server.address())?;
        let files = FileServer::start(&server.folder())?;
        let read_proxy = HttpProxy::start(files.address())?;
        Ok(Self { server, proxy, _files: files, read_proxy, folder })
    }

    /// The directory for files of the runs.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The file of an object.
    pub(super) fn object(&self, name: &str) -> PathBuf {
        self.server.folder().join(name)
    }

    /// Copies a file into the store, past the line. Returns the URL that it is read by.
    pub(super) fn put(&self, file: &Path, name: &str) -> Result<String> {
        fs::copy(file, self.object(name)).with_context(|| format!("{}: copying it into the store", file.display()))?;
        Ok(format!("http://{}/{name}", self.read_proxy.address()))
    }

    /// Sets the line for a run, which begins with nothing on its way and nothing to write back of the runs before.
    pub(super) fn begin_run(&self, latency: Duration) -> Result<()> {
        syncfs(File::open(self.folder())?).context("syncfs")?;
        for proxy in [&self.proxy, &self.read_proxy] {
            proxy.set_latency(latency);
            proxy.set_rate(Some(LINE));
            // The proxy would keep those of all runs.
            drop(proxy.take_requests());
            proxy.take_slowest_answer();
        }
        Ok(())
    }

    /// The longest time that the store itself took for one answer to a writer in this run, without the line.
    pub(super) fn slowest_answer(&self) -> Duration {
        self.proxy.take_slowest_answer()
    }

    /// Points limosa at the store, over the line. `cache`: the directory of its cache; `None`: it keeps nothing.
    pub(super) fn at_line(&self, limosa: Prepared, cache: Option<&Path>) -> Prepared {
        let cache = cache.map_or_else(OsString::new, |cache| cache.as_os_str().to_owned());
        let limosa = limosa.variables(ObjectServer::environment(self.proxy.address()));
        limosa.variables([("LIMOSA_CACHE_DIR", cache)])
    }

    /// A limosa that downloads an object as it is.
    pub(super) fn download(&self, options: &Options, url: &str, to: &Path, cache: Option<&Path>) -> Result<Prepared> {
        let mut target = OsString::from("of=");
        target.push(to);
        let limosa = Prepared::without_report(options, "img")?
            .arguments(&["dd", "--json", "-f", "raw", "-O", "raw", "bs=16M", &format!("if={url}")])
            .path(None, target.as_ref());
        Ok(self.at_line(limosa, cache))
    }
}

/// The URL of an object that is written.
pub(super) fn url(name: &str) -> String {
    format!("s3://{BUCKET}/{name}")
}

/// Returns a figure of what the store has cost, from limosa's report.
pub(super) fn cost(said: &Value, figure: &str) -> Result<u64> {
    let found = said.pointer(&format!("/remote/{figure}")).and_then(Value::as_u64);
    found.with_context(|| format!("no {figure} of a store in limosa's report: {said}"))
}

/// Adds the requests of a run, and the bytes that came.
pub(super) fn with_cost(measured: Measured, said: &Value) -> Result<Measured> {
    Ok(measured.with("requests", cost(said, "requests")?).with("bytes_received", cost(said, "bytes-received")?))
}
