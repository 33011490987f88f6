//! qcow2 images in memory, for tests of what reads and writes them (feature `image`).
//!
//! The one part of the testkit that uses crates of limosa: it sets up what such a test works on, and never decides
//! whether the image is right. A function that fails panics, as a test does.
//!
//! ```
//! use limosa_image::Disk as _;
//! use limosa_image::qcow2::CreateOptions;
//! use limosa_storage::block_on;
//! use limosa_testkit::image::{self, TestImage};
//!
//! let made = TestImage::new(&CreateOptions::default().size(1 << 20));
//! let disk = made.open();
//! image::write(&*disk, 4096, &[7; 512]);
//! assert_eq!(image::read(&*disk, 4096, 512), [7; 512]);
//! block_on(disk.close()).unwrap();
//! assert_eq!(image::leaks(&*made.file), 0);
//! ```

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use limosa_image::luks::SectorCipher;
use limosa_image::qcow2::{CheckOptions, CreateOptions, Header, ImageParts, Qcow2, Qcow2Options, check, create};
use limosa_image::raw::{Raw, RawOptions};
use limosa_image::{Disk, GuestOffset, ImageError, Pending};
use limosa_storage::testing::SparseMemory;
use limosa_storage::{Buffer, Storage, block_on};

/// The storages of a qcow2 image.
#[derive(Debug, Clone)]
pub struct TestImage {
    /// The image file.
    pub file: Arc<dyn Storage>,
    /// The external data file, if it has one.
    pub data_file: Option<Arc<dyn Storage>>,
    /// The cipher of its contents, if they are encrypted.
    pub cipher: Option<Arc<SectorCipher>>,
}

impl TestImage {
    /// A new image in [`memory_file`]s called `image` and, if the options name a data file, `data`.
    #[must_use]
    pub fn new(options: &CreateOptions) -> Self {
        let data_file = options.data_file.as_ref().map(|_| memory_file("data"));
        let image = Self { file: memory_file("image"), data_file, cipher: None };
        block_on(create(&*image.file, image.data_file.as_deref(), options)).unwrap();
        image
    }

    /// A new image without a data file in `file`.
    #[must_use]
    pub fn create_in(file: Arc<dyn Storage>, options: &CreateOptions) -> Self {
        block_on(create(&*file, None, options)).unwrap();
        Self::existing(file)
    }

    /// The image without a data file that is in `file`.
    #[must_use]
    pub fn existing(file: Arc<dyn Storage>) -> Self {
        Self { file, data_file: None, cipher: None }
    }

    /// The same image, every storage of it wrapped.
    #[must_use]
    pub fn over(&self, wrap: impl Fn(Arc<dyn Storage>) -> Arc<dyn Storage>) -> Self {
        let data_file = self.data_file.clone().map(&wrap);
        Self { file: wrap(Arc::clone(&self.file)), data_file, cipher: self.cipher.clone() }
    }

    /// Its header, as it is in the file.
    #[must_use]
    pub fn header(&self) -> Header {
        block_on(Header::read(&*self.file)).unwrap()
    }

    /// Opens it without a backing image, with the usual options.
    #[must_use]
    pub fn open(&self) -> Arc<Qcow2> {
        self.open_with(Qcow2Options::default())
    }

    /// Opens it without a backing image, to read it.
    #[must_use]
    pub fn open_read_only(&self) -> Arc<Qcow2> {
        self.open_with(Qcow2Options::default().read_only(true))
    }

    /// Opens it without a backing image.
    #[must_use]
    pub fn open_with(&self, options: Qcow2Options) -> Arc<Qcow2> {
        self.try_open(None, options).unwrap()
    }

    /// Opens it over a backing image, if there is one.
    #[must_use]
    pub fn open_over(&self, backing: Option<Arc<dyn Disk>>, options: Qcow2Options) -> Arc<Qcow2> {
        self.try_open(backing, options).unwrap()
    }

    /// Opens it over a backing image, if there is one.
    ///
    /// # Errors
    /// Those of reading its header, and of [`Qcow2::open`].
    pub fn try_open(&self, backing: Option<Arc<dyn Disk>>, options: Qcow2Options) -> Result<Arc<Qcow2>, ImageError> {
        block_on(async {
            let header = Header::read(&*self.file).await?;
            let (file, data_file) = (Arc::clone(&self.file), self.data_file.clone());
            let parts = ImageParts::new(file, header).data_file(data_file).backing(backing);
            Qcow2::open(parts.cipher(self.cipher.clone()), options).await
        })
    }
}

/// An empty file in memory with holes, which becomes at most 1 GiB long.
#[must_use]
pub fn memory_file(name: &str) -> Arc<dyn Storage> {
    Arc::new(SparseMemory::file(name, 1 << 30))
}

/// The raw image in `file`, opened to read it: the backing of a qcow2 image.
#[must_use]
pub fn raw(file: Arc<dyn Storage>) -> Arc<dyn Disk> {
    Raw::open(file, &RawOptions::default().read_only(true)).unwrap()
}

/// A read-only raw image of `length` bytes, each of them `byte`.
#[must_use]
pub fn raw_filled(byte: u8, length: u64) -> Arc<dyn Disk> {
    raw(Arc::new(SparseMemory::file_with("below", vec![byte; index(length)], length)))
}

/// A buffer of `length` bytes, each of them `byte`.
#[must_use]
pub fn filled(byte: u8, length: u64) -> Buffer {
    Buffer::from_slice(&vec![byte; index(length)])
}

/// Returns what a guest reads at an offset.
#[must_use]
pub fn read(disk: &dyn Disk, at: u64, length: u64) -> Vec<u8> {
    try_read(disk, at, length).unwrap()
}

/// Returns what a guest reads at an offset. Bytes that the read leaves out are not zero.
///
/// # Errors
/// Those of the disk.
pub fn try_read(disk: &dyn Disk, at: u64, length: u64) -> Result<Vec<u8>, ImageError> {
    let found = filled(0xee, length);
    block_on(disk.read(GuestOffset(at), found.clone().into()))?;
    Ok(found.to_vec())
}

/// All of the disk.
#[must_use]
pub fn read_all(disk: &dyn Disk) -> Vec<u8> {
    read(disk, 0, disk.len())
}

/// Writes at an offset as a guest does.
pub fn write(disk: &dyn Disk, at: u64, bytes: &[u8]) {
    block_on(disk.write(GuestOffset(at), Buffer::from_slice(bytes).into())).unwrap();
}

/// Polls a request once: whether it succeeded, if it has completed.
pub fn poll_once<T>(request: &mut Pending<'_, T>) -> Poll<bool> {
    request.as_mut().poll(&mut Context::from_waker(Waker::noop())).map(|done| done.is_ok())
}

/// All bytes of a storage.
#[must_use]
pub fn contents(file: &dyn Storage) -> Vec<u8> {
    let all = Buffer::zeroed(index(file.length().unwrap()));
    block_on(file.read(0, all.clone().into())).unwrap();
    all.to_vec()
}

/// Overwrites bytes of a storage: a field of an image, for instance.
pub fn put(file: &dyn Storage, at: u64, bytes: &[u8]) {
    block_on(file.write(at, Buffer::from_slice(bytes).into())).unwrap();
}

/// The big-endian number of eight bytes at an offset of a storage.
#[must_use]
pub fn number(file: &dyn Storage, at: u64) -> u64 {
    let field = Buffer::zeroed(8);
    block_on(file.read(at, field.clone().into())).unwrap();
    u64::from_be_bytes(field.to_vec().try_into().unwrap())
}

/// Checks the qcow2 image in `file`: how many clusters are leaked. Anything worse is a panic.
#[must_use]
pub fn leaks(file: &dyn Storage) -> u64 {
    let report = block_on(check(file, CheckOptions::default())).unwrap();
    assert_eq!((report.corruptions, report.check_errors), (0, 0), "{:#?}", report.findings);
    report.leaks
}

fn index(at: u64) -> usize {
    usize::try_from(at).unwrap()
}
