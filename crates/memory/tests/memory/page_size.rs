//! The page size of memory in files. Needs root, for a file system of its own and for 2 MiB pages.
#![allow(missing_docs, reason = "a test")]
#![allow(unsafe_code, reason = "makes a file system that is mounted nowhere")]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use limosa_memory::{BlockOptions, MemoryBlock};
use limosa_testkit::HugePages;

fn descriptor(number: libc::c_long) -> OwnedFd {
    let number = i32::try_from(number).unwrap();
    assert!(number >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the call that gave it succeeded, and it has no other owner.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// A file in a tmpfs that has transparent huge pages.
fn file_of_huge_tmpfs(length: i64) -> OwnedFd {
    const SET_STRING: libc::c_int = 1;
    const CREATE: libc::c_int = 6;
    let none = std::ptr::null::<libc::c_char>();
    let set = |fs: &OwnedFd, what: libc::c_int, key: Option<&CStr>, value: Option<&CStr>| {
        let [key, value] = [key, value].map(|text| text.map_or(none, CStr::as_ptr));
        // SAFETY: the texts live through the call.
        let done = unsafe { libc::syscall(libc::SYS_fsconfig, fs.as_raw_fd(), what, key, value, 0) };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
    };
    // SAFETY: the texts live through the calls, which touch no other memory.
    unsafe {
        let fs = descriptor(libc::syscall(libc::SYS_fsopen, c"tmpfs".as_ptr(), 0));
        set(&fs, SET_STRING, Some(c"huge"), Some(c"always"));
        set(&fs, CREATE, None, None);
        let mount = descriptor(libc::syscall(libc::SYS_fsmount, fs.as_raw_fd(), 0, 0));
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_CLOEXEC;
        let file = descriptor(libc::openat(mount.as_raw_fd(), c"ram".as_ptr(), flags, 0o600).into());
        assert_eq!(libc::ftruncate(file.as_raw_fd(), length), 0);
        file
    }
}

fn map(file: OwnedFd, length: u64) -> MemoryBlock {
    BlockOptions::file("pc.ram", length, file, 0).map().unwrap()
}

#[test]
fn a_file_system_with_transparent_huge_pages_is_mapped_by_small_ones() {
    // Not a whole number of huge pages either.
    let block = map(file_of_huge_tmpfs(3 << 20), 3 << 20);
    assert_eq!(block.page_size(), 4096);
}

#[test]
fn a_file_of_the_pool_has_the_pools_page_size() {
    let _reserved = HugePages::reserve(4 << 20).unwrap();
    let block = BlockOptions::memfd("pc.ram", 4 << 20).huge_pages(2 << 20).map().unwrap();
    let file = block.file().unwrap().0.try_clone_to_owned().unwrap();
    assert_eq!(map(file, 4 << 20).page_size(), 2 << 20);
}
