//! /proc/PID/pagemap: the pages of a process's memory that exist, and those that were written.
//!
//! Existing pages are found in two ways: the ioctl `PAGEMAP_SCAN` (Linux 6.7), which reports runs and can omit pages
//! mapped to the kernel's zero page, and the file itself, a word for each page, on older kernels. Facts: the kernel's
//! admin-guide/mm/pagemap.rst.
#![allow(unsafe_code, reason = "the ioctl PAGEMAP_SCAN")]

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use limosa_page::{PAGE_SIZE, to_usize};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};

/// `struct pm_scan_arg`
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    region_count: u64,
    max_pages: u64,
    inverted: u64,
    all_of: u64,
    any_of: u64,
    returned: u64,
}

/// `struct page_region`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

// Categories of pages (`PAGE_IS_*`).
const WRITTEN: u64 = 1 << 1;
const FILE: u64 = 1 << 2;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
const ZERO_PAGE: u64 = 1 << 5;

// `PM_SCAN_WP_MATCHING`, `PM_SCAN_CHECK_WPASYNC`
const PROTECT_MATCHING: u64 = 1 << 0;
const CHECK_ASYNC: u64 = 1 << 1;

/// Regions that one call can report. The kernel collects 512 before it copies them out.
const REGIONS: usize = 4096;
/// Words of the file that one read takes.
const WORDS: usize = 8192;

struct Scan<'a>(&'a mut ScanArgument);

// SAFETY: the argument is of the type that the operation takes; its result is how many regions it has filled in.
unsafe impl Ioctl for Scan<'_> {
    type Output = usize;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::read_write::<ScanArgument>(b'f', 16)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut c_void) -> rustix::io::Result<usize> {
        usize::try_from(output).map_err(|_| rustix::io::Errno::RANGE)
    }
}

/// The file, and room for the result of one call.
#[derive(Debug)]
pub(crate) struct PageMap {
    file: File,
    regions: Vec<Region>,
}

impl PageMap {
    /// # Errors
    /// /proc is not mounted.
    pub(crate) fn open() -> io::Result<Self> {
        Self::of("self")
    }

    fn of(process: &str) -> io::Result<Self> {
        Ok(Self { file: File::open(format!("/proc/{process}/pagemap"))?, regions: vec![Region::default(); REGIONS] })
    }

    /// Calls `found` with the addresses of all pages in memory or in swap, ascending. Before Linux 6.7 this includes
    /// the kernel's zero page.
    ///
    /// # Errors
    /// An error of the kernel.
    pub(crate) fn present(&mut self, addresses: Range<u64>, mut found: impl FnMut(Range<u64>)) -> io::Result<()> {
        let query = ScanArgument {
            inverted: ZERO_PAGE,
            all_of: ZERO_PAGE,
            any_of: PRESENT | SWAPPED,
            returned: PRESENT | SWAPPED,
            ..ScanArgument::default()
        };
        match self.scan(&query, addresses.clone(), &mut found) {
            Err(error) if is_no_such_call(&error) => read(&self.file, addresses, |word| word >> 62 != 0, found),
            done => done,
        }
    }

    /// Calls `found` with the addresses of copied pages of a private file mapping, ascending.
    ///
    /// # Errors
    /// An error of the kernel.
    fn copied(&mut self, addresses: Range<u64>, mut found: impl FnMut(Range<u64>)) -> io::Result<()> {
        let query = ScanArgument {
            inverted: FILE,
            all_of: FILE,
            any_of: PRESENT | SWAPPED,
            returned: PRESENT | SWAPPED,
            ..ScanArgument::default()
        };
        match self.scan(&query, addresses.clone(), &mut found) {
            Err(error) if is_no_such_call(&error) => read(&self.file, addresses, is_copied, found),
            done => done,
        }
    }

    /// Calls `written` with addresses that are not write-protected, and protects them again in the same atomic step: a
    /// write before that is reported now, and a later one by the next call. The memory is registered with an
    /// asynchronous userfaultfd.
    ///
    /// # Errors
    /// An error of the kernel; the addresses reported before it are protected.
    pub(crate) fn take_written(
        &mut self,
        addresses: Range<u64>,
        mut written: impl FnMut(Range<u64>),
    ) -> io::Result<()> {
        // With this mask alone the kernel also reports empty entries without a protection mark: pages of shared memory
        // that were written and unmapped since, for swapping.
        let query = ScanArgument {
            flags: PROTECT_MATCHING | CHECK_ASYNC,
            all_of: WRITTEN,
            returned: WRITTEN,
            ..ScanArgument::default()
        };
        self.scan(&query, addresses, &mut written)
    }

    /// As [`take_written`](Self::take_written), for private memory without a file. An empty entry there is a page that
    /// was never written, or was discarded: those are not reported, and get no mark.
    ///
    /// # Errors
    /// As [`take_written`](Self::take_written).
    pub(crate) fn take_written_private(
        &mut self,
        addresses: Range<u64>,
        mut written: impl FnMut(Range<u64>),
    ) -> io::Result<()> {
        // The zero page is reported: the kernel also maps it where zeros were written (same-page merging, split huge
        // pages).
        let query = ScanArgument {
            flags: PROTECT_MATCHING | CHECK_ASYNC,
            all_of: WRITTEN,
            any_of: PRESENT | SWAPPED,
            returned: WRITTEN,
            ..ScanArgument::default()
        };
        self.scan(&query, addresses, &mut written)
    }

    /// Calls `found` with addresses of empty entries without a protection mark.
    ///
    /// # Errors
    /// An error of the kernel.
    pub(crate) fn unmarked(&mut self, addresses: Range<u64>, mut found: impl FnMut(Range<u64>)) -> io::Result<()> {
        let neither = PRESENT | SWAPPED;
        let query = ScanArgument { inverted: neither, all_of: neither, returned: PRESENT, ..ScanArgument::default() };
        self.scan(&query, addresses, &mut found)
    }

    fn scan(
        &mut self,
        query: &ScanArgument,
        addresses: Range<u64>,
        found: &mut impl FnMut(Range<u64>),
    ) -> io::Result<()> {
        let mut from = addresses.start;
        while from < addresses.end {
            let mut argument = ScanArgument {
                size: size_of::<ScanArgument>() as u64,
                start: from,
                end: addresses.end,
                regions: self.regions.as_mut_ptr().expose_provenance() as u64,
                region_count: self.regions.len() as u64,
                ..*query
            };
            // SAFETY: the argument names `regions`, which lives and is as long as it says; memory is not changed.
            let count = unsafe { ioctl(&self.file, Scan(&mut argument)) }?;
            for region in self.regions.iter().take(count) {
                found(region.start..region.end.min(addresses.end));
            }
            if argument.walk_end <= from {
                return Err(io::Error::other("PAGEMAP_SCAN makes no progress"));
            }
            from = argument.walk_end;
        }
        Ok(())
    }
}

fn is_no_such_call(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL | libc::ENOSYS | libc::EPERM))
}

/// The page tables of another process, for questions about its private mappings of files. Addresses are the process's
/// own, in bytes.
#[derive(Debug)]
pub struct ProcessPagemap(PageMap);

impl ProcessPagemap {
    /// Opens the page tables of a process. They stay its own, also when its number is used again.
    ///
    /// # Errors
    /// There is no such process, or it is another user's.
    pub fn of(pid: u32) -> io::Result<Self> {
        PageMap::of(&pid.to_string()).map(Self)
    }

    /// Calls `found` with the addresses of pages that were copied out of a private mapping of a file because the
    /// process wrote to them, ascending. Every other page still reads as the file.
    ///
    /// # Errors
    /// The kernel's.
    pub fn copied_ranges(&mut self, addresses: Range<u64>, found: impl FnMut(Range<u64>)) -> io::Result<()> {
        self.0.copied(addresses, found)
    }

    /// Calls `found` with the addresses of all pages that the process has in memory or in swap, ascending. Of a
    /// file's mapping these are the pages that it has read or written, and their neighbours: a fault also maps those
    /// that are in the page cache, usually up to 64 KiB around it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn present(&mut self, addresses: Range<u64>, found: impl FnMut(Range<u64>)) -> io::Result<()> {
        self.0.present(addresses, found)
    }
}

/// Whether a word of the file says that a page is there (bit 63) or swapped (bit 62), and is not a file's (bit 61).
fn is_copied(word: u64) -> bool {
    word >> 62 != 0 && word & (1 << 61) == 0
}

/// Finds runs of pages in the words of the file: bit 63 says present, bit 62 swapped.
fn read(
    map: &File,
    addresses: Range<u64>,
    is_wanted: fn(u64) -> bool,
    mut found: impl FnMut(Range<u64>),
) -> io::Result<()> {
    let mut words = vec![0_u8; WORDS * 8];
    let mut from = addresses.start;
    while from < addresses.end {
        let pages = (addresses.end - from).div_ceil(PAGE_SIZE).min(WORDS as u64);
        let wanted = to_usize(pages) * 8;
        let Some(words) = words.get_mut(..wanted) else { break };
        map.read_exact_at(words, from / PAGE_SIZE * 8)?;
        let mut run: Option<Range<u64>> = None;
        for (word, address) in words.as_chunks::<8>().0.iter().zip((from..).step_by(4096)) {
            let there = is_wanted(u64::from_ne_bytes(*word));
            match &mut run {
                Some(run) if there && run.end == address => run.end = address + PAGE_SIZE,
                _ if there => {
                    run.replace(address..address + PAGE_SIZE).into_iter().for_each(&mut found);
                }
                _ => {}
            }
        }
        run.into_iter().for_each(&mut found);
        from += pages * PAGE_SIZE;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use limosa_page::{PageBitmap, PageNumber, PageRange};
    use proptest::prelude::*;

    use super::*;
    use crate::BlockOptions;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn both_ways_name_exactly_the_pages_that_were_written(written in prop::collection::btree_set(0u64..9000, 0..200)) {
            let block = BlockOptions::anonymous("ram", 9000 * PAGE_SIZE).map().unwrap();
            for page in &written {
                block.write(page * PAGE_SIZE + 5, &[0]).unwrap();
            }
            let start = block.host_address().expose_provenance() as u64;
            let mut map = PageMap::open().unwrap();
            let expected: Vec<u64> = written.into_iter().collect();
            for old in [false, true] {
                let mut named = Vec::new();
                let note = |run: Range<u64>| {
                    named.extend(PageRange::inside_bytes(&(run.start - start..run.end - start)).iter().map(|page| page.0));
                };
                let all = start..start + block.len();
                if old { read(&map.file, all, |word| word >> 62 != 0, note) } else { map.present(all, note) }.unwrap();
                prop_assert_eq!(&named, &expected, "old way: {}", old);
            }
        }
    }

    #[test]
    fn pages_that_were_written_in_a_private_mapping_of_a_file_are_not_the_files() {
        use std::io::Write as _;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; 64 << 12]).unwrap();
        // SAFETY: a new private mapping of a file that is not truncated.
        let memory = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                64 << 12,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::PRIVATE,
                &file,
                0,
            )
        }
        .unwrap()
        .cast::<u8>();
        for page in [3, 4, 40] {
            // SAFETY: inside the mapping, which this test alone uses.
            unsafe { memory.add(page << 12).write_volatile(1) };
        }
        // SAFETY: as above. Pages that are only read stay the file's.
        assert_eq!(unsafe { memory.add(20 << 12).read_volatile() }, 7);
        let start = memory.expose_provenance() as u64;
        let pages = |runs: &[Range<u64>]| {
            runs.iter().map(|run| (run.start - start) >> 12..(run.end - start) >> 12).collect::<Vec<_>>()
        };
        let mut process = ProcessPagemap::of(std::process::id()).unwrap();
        let (mut found, mut present) = (Vec::new(), PageBitmap::new(64));
        process.copied_ranges(start..start + (64 << 12), |run| found.push(run)).unwrap();
        assert_eq!(pages(&found), [3..5, 40..41]);
        let note = |run: Range<u64>| present.set_range(PageRange::inside_bytes(&(run.start - start..run.end - start)));
        process.present(start..start + (64 << 12), note).unwrap();
        for page in [3, 4, 20, 40] {
            assert!(present.get(PageNumber(page)), "page {page}");
        }
        let mut old = Vec::new();
        let map = PageMap::open().unwrap();
        read(&map.file, start..start + (64 << 12), is_copied, |run| old.push(run)).unwrap();
        assert_eq!(old, found);
        // SAFETY: the mapping of above, unused from here on.
        unsafe { rustix::mm::munmap(memory.cast(), 64 << 12) }.unwrap();
        assert!(ProcessPagemap::of(0).is_err());
    }

    #[test]
    fn pages_that_were_only_read_are_zeros_of_the_kernel_and_not_named() {
        let block = BlockOptions::anonymous("ram", 64 * PAGE_SIZE).map().unwrap();
        block.read(0, &mut vec![0; 1 << 18]).unwrap();
        let start = block.host_address().expose_provenance() as u64;
        PageMap::open().unwrap().present(start..start + block.len(), |run| panic!("{run:?}")).unwrap();
    }
}
