//! Images in memory, with requests to them.
//!
//! An input is a number of requests, the requests, six bytes each, and the image.

use limosa_image::GuestOffset;
use limosa_image::qcow2::{CreateOptions, Header, ImageParts, Qcow2, Qcow2Options, create};
use limosa_storage::{MemoryStorage, block_on};
use std::sync::{Arc, OnceLock};

/// How long the image may become, in bytes.
pub const MOST: u64 = 4 << 20;

/// A request of an input.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// The kind of request; its meaning is up to the target.
    pub kind: u8,
    /// 256ths of the disk.
    part: u8,
    /// Bytes behind that.
    more: u16,
    /// Bytes.
    length: u16,
}

impl Request {
    /// The offset and the length in bytes on a disk of `size` bytes; mostly inside it.
    pub fn place(&self, size: u64) -> (GuestOffset, u64) {
        let at = (size / 256 * u64::from(self.part)).saturating_add(u64::from(self.more));
        (GuestOffset(at), u64::from(self.length))
    }
}

/// An input, made of the fuzzer's bytes.
#[derive(Debug)]
pub struct Input {
    /// The image.
    pub storage: MemoryStorage,
    /// The requests to it.
    pub requests: Vec<Request>,
}

impl Input {
    /// `None`: too short.
    pub fn of(data: &[u8]) -> Option<Self> {
        let (&count, rest) = data.split_first()?;
        let (requests, image) = rest.split_at_checked(usize::from(count % 64) * 6)?;
        let requests = requests.as_chunks::<6>().0.iter().map(|&[kind, part, a, b, c, d]| Request {
            kind,
            part,
            more: u16::from_le_bytes([a, b]),
            length: u16::from_le_bytes([c, d]),
        });
        let most = MOST.max(image.len() as u64);
        Some(Self { requests: requests.collect(), storage: MemoryStorage::with_contents(image.to_vec(), most) })
    }
}

/// Opens it as qcow2, without other files.
pub fn open(storage: &MemoryStorage, read_only: bool) -> Option<Arc<Qcow2>> {
    block_on(async {
        let header = Header::read(storage).await.ok()?;
        let parts = ImageParts::new(Arc::new(storage.clone()), header);
        let options = Qcow2Options::default().read_only(read_only).cache_size(64 << 10);
        Qcow2::open(parts, options).await.ok()
    })
}

/// An image without contents, of a disk of 1 MiB.
pub fn empty() -> MemoryStorage {
    static IMAGE: OnceLock<Vec<u8>> = OnceLock::new();
    let bytes = IMAGE.get_or_init(|| {
        let storage = MemoryStorage::growing_to(8 << 20);
        let options = CreateOptions::default().size(1 << 20).cluster_size(4096);
        block_on(create(&storage, None, &options)).expect("an image");
        storage.contents()
    });
    MemoryStorage::with_contents(bytes.clone(), 8 << 20)
}
