//! Lists of raw memory, as guest memory is: mapped, shared, never a slice.
#![allow(unsafe_code, reason = "makes the memory that the raw calls are for")]

use std::ptr::NonNull;

use limosa_channel::{Channel, ChannelError, FileChannel};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

const LENGTH: usize = 64 * 4096;

/// A shared mapping of 64 pages.
struct Mapping(NonNull<u8>);

impl Mapping {
    fn new() -> Self {
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let address = unsafe {
            mmap_anonymous(std::ptr::null_mut(), LENGTH, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED)
        };
        Self(NonNull::new(address.unwrap().cast()).unwrap())
    }

    /// Every second page.
    fn even_pages(&self) -> Vec<libc::iovec> {
        (0..LENGTH)
            .step_by(8192)
            .map(|offset| libc::iovec { iov_base: self.0.as_ptr().wrapping_add(offset).cast(), iov_len: 4096 })
            .collect()
    }

    fn set(&self, offset: usize, value: u8) {
        assert!(offset < LENGTH);
        // SAFETY: inside the mapping, which is writable.
        unsafe { self.0.as_ptr().add(offset).write_volatile(value) }
    }

    fn at(&self, offset: usize) -> u8 {
        assert!(offset < LENGTH);
        // SAFETY: inside the mapping, which is readable.
        unsafe { self.0.as_ptr().add(offset).read_volatile() }
    }

    fn fill(&self) {
        for offset in 0..LENGTH {
            self.set(offset, offset.wrapping_mul(0x9e37_79b9).to_le_bytes()[2]);
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own and nothing refers to it any more.
        unsafe { munmap(self.0.as_ptr().cast(), LENGTH) }.unwrap();
    }
}

fn assert_even_pages_equal(a: &Mapping, b: &Mapping) {
    for offset in 0..LENGTH {
        let expected = if (offset / 4096) % 2 == 0 { a.at(offset) } else { 0 };
        assert_eq!(b.at(offset), expected, "at {offset}");
    }
}

#[test]
fn mapped_pages_pass_through_a_channel_into_a_mapping() {
    let (source, destination) = (Mapping::new(), Mapping::new());
    source.fill();
    let (near, far) = Channel::pair().unwrap();
    let far = Channel::from_fd(far).unwrap();
    // SAFETY: both mappings live on, and there is no reference into them.
    unsafe {
        near.write_all_raw(&source.even_pages()).unwrap();
        far.read_exact_raw(&destination.even_pages()).unwrap();
    }
    assert_even_pages_equal(&source, &destination);
}

#[test]
fn mapped_pages_pass_through_a_file_into_a_mapping() {
    let (source, destination) = (Mapping::new(), Mapping::new());
    source.fill();
    let file = FileChannel::from_file(tempfile::tempfile().unwrap(), 0);
    // SAFETY: both mappings live on, and there is no reference into them.
    unsafe {
        file.write_all_raw_at(&source.even_pages(), 12_345).unwrap();
        file.read_exact_raw_at(&destination.even_pages(), 12_345).unwrap();
    }
    assert_even_pages_equal(&source, &destination);
}

#[test]
fn memory_that_cannot_be_accessed_is_an_error_and_no_crash() {
    let (near, far) = Channel::pair().unwrap();
    let far = Channel::from_fd(far).unwrap();
    let mapping = Mapping::new();
    // SAFETY: there is no reference into the mapping, and from here on only the kernel touches it.
    unsafe { mprotect(mapping.0.as_ptr().cast(), LENGTH, MprotectFlags::empty()) }.unwrap();
    far.write_all(&[1; 4096]).unwrap();
    // SAFETY: the memory is this test's own; that it is inaccessible is what the kernel is to find out.
    let (write, read) =
        unsafe { (near.write_all_raw(&mapping.even_pages()), near.read_exact_raw(&mapping.even_pages())) };
    for error in [write.unwrap_err(), read.unwrap_err()] {
        assert!(matches!(&error, ChannelError::Io { source, .. } if source.raw_os_error() == Some(libc::EFAULT)));
    }
}
