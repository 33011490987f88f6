//! Files that a process maps, and where (`/proc/PID/maps`, `proc_pid_maps(5)`).
//!
//! The device number in that file is the one of the file system's superblock. On btrfs and overlayfs it is not the one
//! that stat(2) reports, so it is learned from a mapping that this process makes of the same file ([`MappedFile`]).

#![allow(unsafe_code, reason = "a mapping is made, and removed without a look at it")]

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt as _;

use limosa_page::{to_u64, to_usize};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::file_identity::FileId;

/// Bytes of a line that are looked at. The columns before the file's name are shorter, and the name, which another
/// process chooses, is not needed.
const COLUMNS: usize = 128;

/// A file by the numbers in `/proc/PID/maps`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MappedFile {
    /// Major and minor device number.
    device: (u32, u32),
    inode: u64,
}

impl MappedFile {
    /// Returns the numbers that `/proc/PID/maps` shows for an open file, by mapping its first page for a moment.
    ///
    /// # Errors
    /// The kernel's, for example if the file system has no mappings.
    pub(super) fn of(file: BorrowedFd<'_>) -> io::Result<Self> {
        let length = to_usize(limosa_page::PAGE_SIZE);
        // SAFETY: a new mapping at an address of the kernel's choice, which no other code knows. Nothing is read
        // through it, so a file that is cut short meanwhile raises no signal.
        let address = unsafe { mmap(std::ptr::null_mut(), length, ProtFlags::READ, MapFlags::PRIVATE, file, 0) }?;
        let start = to_u64(address.addr());
        let mut found = None;
        let listed = for_each_line("self", |line| {
            // A neighbour of the same file may have been joined to it.
            if line.range.contains(&start) {
                found = Some(line.file);
            }
        });
        // SAFETY: the mapping made above, which nothing refers to.
        unsafe { munmap(address, length) }?;
        listed?;
        found.ok_or_else(|| io::Error::other("the mapping of the file is not in /proc/self/maps"))
    }
}

/// A part of a file that a process maps and may write to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mapping {
    /// The file.
    pub(super) file: MappedFile,
    /// Where the mapping begins in memory.
    pub(super) address: u64,
    /// Where it begins in the file, in bytes.
    pub(super) offset: u64,
    /// Its length in bytes.
    pub(super) length: u64,
    /// Whether what is written there reaches the file.
    pub(super) is_shared: bool,
}

impl Mapping {
    /// Whether memory from `address` on is the file from `offset` on, for `length` bytes.
    pub(super) fn holds(&self, address: u64, offset: u64, length: u64) -> bool {
        let Some(before) = address.checked_sub(self.address) else { return false };
        self.offset.checked_add(before) == Some(offset)
            && before.checked_add(length).is_some_and(|end| end <= self.length)
    }
}

/// The writable mappings of a file by a process, neighbours joined.
///
/// # Errors
/// There is no such process, or it is another user's.
pub(super) fn mappings(pid: u32, file: MappedFile) -> io::Result<Vec<Mapping>> {
    let mut found = Vec::new();
    for_each_line(&pid.to_string(), |line| {
        if let Some(mapping) = writable(line).filter(|mapping| mapping.file == file) {
            join(&mut found, mapping);
        }
    })?;
    Ok(found)
}

/// Calls `each` with the lines about files in a process's list, which is read in pieces and never held.
fn for_each_line(process: &str, mut each: impl FnMut(Line<'_>)) -> io::Result<()> {
    for_each_head(BufReader::new(File::open(format!("/proc/{process}/maps"))?), |head| {
        // A name need not be UTF-8, and may be cut within a character.
        let columns = head.utf8_chunks().next().map_or("", |chunk| chunk.valid());
        if let Some(line) = line(columns) {
            each(line);
        }
    })
}

/// Calls `each` with the first bytes of each line, [`COLUMNS`] at most.
fn for_each_head(mut text: impl BufRead, mut each: impl FnMut(&[u8])) -> io::Result<()> {
    let mut head = Vec::with_capacity(COLUMNS);
    loop {
        let piece = text.fill_buf()?;
        if piece.is_empty() {
            break;
        }
        let line_end = piece.iter().position(|byte| *byte == b'\n');
        let part = piece.get(..line_end.unwrap_or(piece.len())).unwrap_or(piece);
        head.extend(part.iter().take(COLUMNS - head.len()));
        let used = part.len() + usize::from(line_end.is_some());
        text.consume(used);
        if line_end.is_some() {
            each(&head);
            head.clear();
        }
    }
    if !head.is_empty() {
        each(&head);
    }
    Ok(())
}

/// Whether a process has this very file open. Two subvolumes of a btrfs have one device number in its mappings, and may
/// have one inode number; the numbers of its descriptors distinguish them.
///
/// # Errors
/// As [`mappings`].
pub(super) fn has_open(pid: u32, file: FileId) -> io::Result<bool> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor may be closed meanwhile.
        let Ok(found) = entry.and_then(|entry| fs::metadata(entry.path())) else { continue };
        if (FileId { device: found.dev(), inode: found.ino() }) == file {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns a process and its descendants: a script that starts QEMU and waits for it is not QEMU itself. Processes that
/// end meanwhile, and those past a bound, are left out.
pub(super) fn with_descendants(pid: u32) -> Vec<u32> {
    const PROCESSES: usize = 256;
    let mut found = vec![pid];
    let mut at = 0;
    while let Some(pid) = found.get(at).copied().filter(|_| found.len() < PROCESSES) {
        at += 1;
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
        for task in tasks.filter_map(Result::ok) {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(children.split_ascii_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
    }
    found
}

/// Adds a mapping, to the last one if it continues that.
fn join(found: &mut Vec<Mapping>, mapping: Mapping) {
    match found.last_mut() {
        Some(last)
            if last.file == mapping.file
                && last.is_shared == mapping.is_shared
                && last.address.checked_add(last.length) == Some(mapping.address)
                && last.offset.checked_add(last.length) == Some(mapping.offset) =>
        {
            last.length = last.length.saturating_add(mapping.length);
        }
        _ => found.push(mapping),
    }
}

/// A line of `/proc/PID/maps` that is about a file.
struct Line<'a> {
    range: Range<u64>,
    rights: &'a str,
    offset: u64,
    file: MappedFile,
}

/// Reads `ADDRESS-END rw-p OFFSET MAJOR:MINOR INODE  PATH`; `None` for memory without a file.
fn line(line: &str) -> Option<Line<'_>> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?;
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let (major, minor) = words.next()?.split_once(':')?;
    let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    let inode = words.next()?.parse().ok().filter(|inode| *inode != 0)?;
    let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
    (range.start <= range.end).then_some(Line { range, rights, offset, file: MappedFile { device, inode } })
}

fn writable(Line { range, rights, offset, file }: Line<'_>) -> Option<Mapping> {
    let (is_shared, is_private) = (rights.ends_with('s'), rights.ends_with('p'));
    let (address, length) = (range.start, range.end - range.start);
    (rights.starts_with("rw") && (is_shared || is_private)).then_some(Mapping {
        file,
        address,
        offset,
        length,
        is_shared,
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    fn parse(text: &str) -> Vec<Mapping> {
        let mut found = Vec::new();
        text.lines().filter_map(line).filter_map(writable).for_each(|mapping| join(&mut found, mapping));
        found
    }

    #[test]
    fn writable_mappings_are_found_and_neighbours_of_one_kind_joined() {
        let text = "\
7f0000000000-7f0000100000 rw-p 00100000 fe:01 77                         /srv/vm with spaces.limosa
7f0000100000-7f0000300000 rw-p 00200000 fe:01 77                         /srv/vm with spaces.limosa
7f0000300000-7f0000400000 rw-p 00900000 fe:01 77                         /srv/vm with spaces.limosa
7f0000400000-7f0000500000 rw-s 00a00000 fe:01 77                         /srv/vm with spaces.limosa
7f0000500000-7f0000600000 r--p 00b00000 fe:01 77                         /srv/vm with spaces.limosa
7f0000600000-7f0000700000 rw-p 00000000 00:00 0                          [heap]
7f0000700000-7f0000800000 rw-p 00100000 fd:01 77                         /mnt/another device's file of that number
";
        let at = |file, address, offset, length, is_shared| Mapping { file, address, offset, length, is_shared };
        let file = |major| MappedFile { device: (major, 1), inode: 77 };
        let found = parse(text);
        assert_eq!(
            found,
            [
                at(file(0xfe), 0x7f00_0000_0000, 0x10_0000, 0x30_0000, false),
                at(file(0xfe), 0x7f00_0030_0000, 0x90_0000, 0x10_0000, false),
                at(file(0xfe), 0x7f00_0040_0000, 0xa0_0000, 0x10_0000, true),
                at(file(0xfd), 0x7f00_0070_0000, 0x10_0000, 0x10_0000, false)
            ]
        );
        assert!(found[0].holds(0x7f00_0010_0000, 0x20_0000, 0x20_0000));
        assert!(!found[0].holds(0x7f00_0010_0000, 0x20_0000, 0x20_1000), "past its end");
        assert!(!found[0].holds(0x7f00_0010_0000, 0x10_0000, 0x1000), "another place of the file");
        assert!(!found[1].holds(0x7f00_0020_0000, 0x80_0000, 0x1000), "before its beginning");
    }

    #[test]
    fn a_process_below_another_is_found() {
        let mut shell = std::process::Command::new("sh").args(["-c", "sleep 60 & wait"]).spawn().unwrap();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let below = loop {
            let found = with_descendants(shell.id());
            assert_eq!(found[0], shell.id());
            match found.get(1) {
                Some(below) => break *below,
                None => assert!(std::time::Instant::now() < end, "no process below {}", shell.id()),
            }
        };
        let pid = rustix::process::Pid::from_raw(below.cast_signed()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        shell.wait().unwrap();
    }

    #[test]
    fn nonsense_is_no_mapping_and_no_panic() {
        for text in ["", "a-b rw-p", "2-1 rw-p 0 0:0 7", "1-2 rw-p x 0:0 7", "1-2 rw-p 0 0:0", "zz rw-p 0 0:0 7 /x"] {
            assert_eq!(parse(text), [], "{text}");
        }
    }

    #[test]
    fn a_file_has_the_numbers_in_the_list_that_its_mappings_have() {
        let (one, other) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        for file in [&one, &other] {
            file.set_len(4096).unwrap();
        }
        let [found, again, another] = [&one, &one, &other].map(|file| MappedFile::of(file.as_fd()).unwrap());
        assert_eq!(found, again);
        assert_ne!(found, another);
        assert_eq!(found.inode, rustix::fs::fstat(&one).unwrap().st_ino);
    }

    #[test]
    fn a_process_has_open_what_it_has_open() {
        let file = tempfile::tempfile().unwrap();
        let id = FileId::of_descriptor(&file).unwrap();
        let own = std::process::id();
        assert!(has_open(own, id).unwrap());
        drop(file);
        assert!(!has_open(own, id).unwrap());
        assert!(has_open(0, id).is_err());
    }

    #[test]
    fn lines_of_any_length_and_any_bytes_have_their_columns_read() {
        let long = vec![0xff; 300];
        let text = [&b"1-2 rw-p 0 0:0 7 /"[..], &long, b"\n\nrest ", &long[..7]].concat();
        for capacity in [1, 7, 128, 4096] {
            let mut heads = Vec::new();
            for_each_head(BufReader::with_capacity(capacity, &text[..]), |head| heads.push(head.to_vec())).unwrap();
            assert_eq!(heads, [&text[..COLUMNS], b"", &text[320..]]);
        }
    }
}
