//! Images on what cannot change its length, and has contents of its own: block devices.

use std::ops::Range;
use std::sync::Arc;

use limosa_image::Preallocation;
use limosa_image::qcow2::{CreateOptions, create};
use limosa_storage::{
    Alignment, Extent, IoVector, MemoryStorage, Operation, Request, Storage, StorageError, ZeroOptions, block_on,
};
use limosa_testkit::image::{TestImage, read_all};

/// Memory of a fixed length.
#[derive(Debug, Clone)]
struct Device(MemoryStorage);

impl Storage for Device {
    fn name(&self) -> &Arc<str> {
        self.0.name()
    }

    fn length(&self) -> Result<u64, StorageError> {
        self.0.length()
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn alignment(&self) -> Alignment {
        self.0.alignment()
    }

    fn read(&self, offset: u64, into: IoVector) -> Request {
        self.0.read(offset, into)
    }

    fn write(&self, offset: u64, from: IoVector) -> Request {
        self.0.write(offset, from)
    }

    fn write_zeroes(&self, range: Range<u64>, how: ZeroOptions) -> Request {
        self.0.write_zeroes(range, how)
    }

    fn discard(&self, _range: Range<u64>) -> Request {
        Box::pin(std::future::ready(Ok(())))
    }

    fn flush(&self) -> Request {
        self.0.flush()
    }

    fn set_len(&self, _len: u64) -> Request {
        let error = StorageError::for_storage(
            Operation::SetLength,
            self.name(),
            std::io::Error::from(std::io::ErrorKind::InvalidInput),
        );
        Box::pin(std::future::ready(Err(error)))
    }

    fn allocate(&self, _range: Range<u64>) -> Request {
        Box::pin(std::future::ready(Ok(())))
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, StorageError> {
        self.0.extents(range)
    }

    fn clone_range(&self, _offset: u64, _from: &Arc<dyn Storage>, _from_offset: u64, _length: u64) -> Request<bool> {
        Box::pin(std::future::ready(Ok(false)))
    }
}

fn device(length: usize) -> Device {
    Device(MemoryStorage::with_contents(vec![0xaa; length], length as u64))
}

#[test]
fn nothing_that_lay_on_a_device_is_seen_through_a_new_image() {
    const SIZE: usize = 1 << 20;
    for preallocation in Preallocation::ALL {
        for (version, extended_l2, data_file_raw) in
            [(2, false, None), (3, false, None), (3, true, None), (3, false, Some(false)), (3, false, Some(true))]
        {
            let options = CreateOptions::default()
                .size(SIZE as u64)
                .version(version)
                .extended_l2(extended_l2)
                .preallocation(preallocation)
                .data_file(data_file_raw.map(|_| "data".into()))
                .data_file_raw(data_file_raw.unwrap_or_default());
            let (file, data) = (device(4 << 20), device(1 << 20));
            let data_file = data_file_raw.map(|_| &data as &dyn Storage);
            block_on(create(&file, data_file, &options)).unwrap();
            let image = TestImage {
                file: Arc::new(file),
                data_file: data_file_raw.map(|_| Arc::new(data.clone()) as Arc<dyn Storage>),
                cipher: None,
            };
            let found = read_all(&*image.open_read_only());
            assert!(found.iter().all(|byte| *byte == 0), "{options:?}");
            if data_file_raw == Some(true) {
                assert_eq!(data.0.contents(), [0; SIZE]);
            }
        }
    }
}

#[test]
fn a_device_that_is_too_small_is_refused_and_keeps_what_it_has() {
    let small = device(200 << 10);
    let options = CreateOptions::default().size(1 << 20);
    assert!(block_on(create(&small, None, &options)).is_err());
    assert_eq!(small.0.contents(), vec![0xaa; 200 << 10]);
}
