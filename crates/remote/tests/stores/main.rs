//! Objects of real servers, through a proxy that makes trouble.

mod caching;
mod credentials;
mod failures;
mod followed;
mod reading;
mod tls;
mod uploads;

use std::sync::Arc;
use std::time::Duration;

use limosa_remote::{
    Environment, ObjectUrl, RemoteCounters, RemoteObject, RemoteOptions, StoreOptions, UploadOptions, Uploaded, upload,
};
use limosa_storage::{Buffer, MemoryStorage, Storage, StorageError, block_on};
use limosa_testkit::{HttpFault, HttpProxy, ObjectServer, ObjectServerKind};

/// A server, and a proxy before it.
pub(crate) struct Bed {
    pub(crate) server: ObjectServer,
    pub(crate) proxy: HttpProxy,
}

impl Bed {
    pub(crate) fn new(kind: ObjectServerKind) -> Self {
        let server = ObjectServer::start(kind).unwrap();
        let proxy = HttpProxy::start(server.address()).unwrap();
        Self { server, proxy }
    }

    /// Through the proxy.
    pub(crate) fn store(&self) -> StoreOptions {
        store(self.proxy.address())
    }

    pub(crate) fn options(&self) -> RemoteOptions {
        let mut options = RemoteOptions::default().store(self.store());
        // So that what is fetched is what is read.
        options.read_ahead = 0;
        options
    }

    pub(crate) fn uploading(&self) -> UploadOptions {
        let mut options = UploadOptions::default().store(self.store());
        options.part_size = 5 << 20;
        options
    }

    /// Has the store see the completion of an upload, and be gone from then on.
    pub(crate) fn lose_completion(&self) {
        let mut is_gone = false;
        self.proxy.set_faults(move |request| {
            if is_gone {
                return HttpFault::Drop;
            }
            is_gone = request.method == "POST" && request.target.contains("uploadId=");
            if is_gone { HttpFault::LoseAnswer } else { HttpFault::None }
        });
    }

    /// Makes an object, without the proxy.
    pub(crate) fn put(&self, key: &str, bytes: &[u8]) -> Uploaded {
        let mut options = UploadOptions::default().store(store(self.server.address()));
        options.existing = limosa_remote::Existing::Replace;
        upload(&memory(bytes), &url(key), &options).unwrap()
    }
}

pub(crate) fn store(address: std::net::SocketAddr) -> StoreOptions {
    let environment = ObjectServer::environment(address);
    let environment = environment.into_iter().fold(Environment::empty(), |all, (name, value)| all.with(name, value));
    let mut store = StoreOptions::default();
    store.environment = environment;
    store.budget = Duration::from_secs(60);
    store
}

pub(crate) fn url(key: &str) -> ObjectUrl {
    format!("s3://{}/{key}", limosa_testkit::BUCKET).parse().unwrap()
}

/// Returns the bytes of an object, read without the proxy; `None`: it does not exist.
pub(crate) fn contents(bed: &Bed, key: &str) -> Option<Vec<u8>> {
    match try_contents(bed, key) {
        Ok(contents) => Some(contents),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => panic!("{}", said(&error)),
    }
}

pub(crate) fn try_contents(bed: &Bed, key: &str) -> Result<Vec<u8>, StorageError> {
    let options = RemoteOptions::default().store(store(bed.server.address()));
    let object = RemoteObject::open(&url(key), &options)?;
    read(&*object, 0, usize::try_from(object.length()?).unwrap())
}

pub(crate) fn memory(bytes: &[u8]) -> Arc<dyn Storage> {
    Arc::new(MemoryStorage::with_contents(bytes.to_vec(), bytes.len() as u64))
}

/// Bytes that differ everywhere.
pub(crate) fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed * 2 + 1;
    let words = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 16).to_le_bytes()
    });
    words.flatten().take(length).collect()
}

pub(crate) fn read(object: &dyn Storage, offset: u64, length: usize) -> Result<Vec<u8>, StorageError> {
    let buffer = Buffer::from_slice(&vec![0xaa; length]);
    block_on(object.read(offset, buffer.clone().into()))?;
    Ok(buffer.to_vec())
}

/// The message of an error with its causes.
pub(crate) fn said(error: &StorageError) -> String {
    limosa_page::error_with_causes(error)
}

/// Waits until an object's figures are so: a read ends before its request is counted.
pub(crate) fn counted(object: &RemoteObject, is_so: impl Fn(&RemoteCounters) -> bool) -> RemoteCounters {
    limosa_testkit::wait_for("the figures", || Some(object.counters()).filter(&is_so))
}
