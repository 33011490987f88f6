//! The stand-in for the client of object stores in a program without it.

use std::convert::Infallible;
use std::ffi::OsStr;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use limosa_image::convert::OutputStream;
use limosa_image::reference::ObjectStores;
use serde_json::Value;

use super::Sent;

pub(crate) fn stores() -> ObjectStores {
    ObjectStores::default()
}

pub(crate) fn is_in_use() -> bool {
    false
}

pub(crate) fn stay_out() {}

pub(crate) fn content(_: &str) -> Option<String> {
    None
}

pub(crate) fn expect(_: &str, _: &str) {}

pub(crate) fn check(_: &Infallible) -> anyhow::Result<()> {
    Ok(())
}

pub(crate) fn cost() -> Option<Value> {
    None
}

pub(crate) fn target(_: &OsStr) -> anyhow::Result<Option<Infallible>> {
    Ok(None)
}

#[derive(Debug)]
pub(crate) struct Staging(Infallible);

pub(crate) type Url = Infallible;

impl Staging {
    pub(crate) fn new() -> anyhow::Result<Self> {
        anyhow::bail!("this program has no client of object stores")
    }

    pub(crate) fn path(&self) -> PathBuf {
        match self.0 {}
    }

    pub(crate) fn file(&self) -> &File {
        match self.0 {}
    }

    pub(crate) fn follow(&self, _: &Url, _: u64, _: bool, _: Arc<AtomicBool>) -> anyhow::Result<Followed> {
        match self.0 {}
    }
}

pub(crate) struct Followed(Infallible);

impl Followed {
    pub(crate) fn finish(self) -> anyhow::Result<Sent> {
        match self.0 {}
    }

    pub(crate) fn has_failed(&self) -> bool {
        match self.0 {}
    }

    pub(crate) fn give_up(self) -> bool {
        match self.0 {}
    }
}

pub(crate) struct ObjectStream(Infallible);

impl ObjectStream {
    pub(crate) fn new(url: &Url) -> Self {
        match *url {}
    }

    pub(crate) fn output(&self, _: fn() -> Arc<AtomicBool>) -> OutputStream {
        match self.0 {}
    }

    pub(crate) fn finish(self, _: anyhow::Result<()>) -> anyhow::Result<Sent> {
        match self.0 {}
    }
}
