//! Files that may be mapped: a RAM block's part of the file *is* the block's memory.
//!
//! A process that maps a block sees the file's bytes and not its bitmap. So the law of this module: **a page that is
//! not stored reads as zero**, wherever in the file its place is. limosa's own writer leaves holes there. QEMU (10.0)
//! may leave what the page held earlier in the save, because its loader goes by the bitmap and never reads such places.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use limosa_page::holes::data_pages;
use limosa_page::{PAGE_SIZE, PageRange};
use limosa_stream::mapped_ram::Layout;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

use crate::error::SnapshotError;
use crate::layout::Memory;
use crate::lock;
use crate::manifest::{Manifest, PageStatistics, Transport};
use crate::reader::Snapshot;
use crate::seal::{self, write_trailer};
use crate::store::StoreFile;

/// The bits of a file's mode that let it be written.
const WRITABLE: Mode = Mode::WUSR.union(Mode::WGRP).union(Mode::WOTH);

/// The result of [`seal_snapshot`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sealed {
    /// Whether the file was marked as mappable before: only its mode was changed.
    pub was_mappable: bool,
    /// Pages whose older contents were taken out of the file.
    pub cleared: u64,
    /// Zero pages of small blocks whose bit was set, over a hole.
    pub explicit_zero: u64,
}

/// Makes a snapshot mappable, in place: one of an older version, or one that QEMU wrote by itself. Nobody may write to
/// it afterwards (mode 0400 instead of 0600).
///
/// At any moment the file is whole for every reader: places that no loader reads are cleared first, and a new trailer
/// goes behind the old one. After a crash it is sealed, or can be sealed again.
///
/// # Errors
/// [`SnapshotError::Locked`] while it is served or replaced; a file that is not a whole snapshot, or would restore to a
/// broken guest; a trailer of a later version; that it cannot be written.
pub fn seal_snapshot(path: &Path) -> Result<Sealed, SnapshotError> {
    let path = &std::fs::canonicalize(path).map_err(|error| SnapshotError::io("find it", path, None, error))?;
    let held = lock::open_for_exclusive(CWD, path.as_path())
        .map_err(|errno| SnapshotError::io("open it", path, None, errno))?;
    lock::exclusive(&held, path)?;
    let snapshot =
        Snapshot::from_file(File::open(path).map_err(|e| SnapshotError::io("open it", path, None, e))?, path)?;
    snapshot.check_same_file(&held)?;
    snapshot.check_restorable()?;
    let mut sealed = Sealed { was_mappable: snapshot.is_mappable(), cleared: 0, explicit_zero: 0 };
    if !sealed.was_mappable {
        snapshot.check_extensible()?;
        let file = writable(&held, path)?;
        lock::writing(&file, path)?;
        let file = StoreFile::new(file, path);
        let sync = || file.sync();
        let (layout, mut memory) = (snapshot.layout(), snapshot.memory().clone());
        sealed.cleared = clear_unstored(&file, &memory)?;
        // A bit that is set over old contents would bring them back.
        sync()?;
        sealed.explicit_zero = make_zeros_explicit(&file, layout, &mut memory)?;
        sync()?;
        let mut manifest = snapshot.manifest().cloned().unwrap_or_else(|| of_qemu(&snapshot));
        manifest.pages.explicit_zero += sealed.explicit_zero;
        manifest.pages.punched += sealed.cleared;
        seal::complete(&mut manifest, &layout.configuration, &memory, snapshot.device_bytes());
        write_trailer(&file, snapshot.length(), &manifest, snapshot.recorded_checksums().as_ref())?;
        sync()?;
    }
    make_read_only(&held, path)?;
    lock::release(&held);
    Ok(sealed)
}

/// The record of a file that has none: QEMU wrote it.
fn of_qemu(snapshot: &Snapshot) -> Manifest {
    let normal = snapshot.stored_pages();
    let zero = snapshot.ram_bytes() / PAGE_SIZE - normal;
    let pages = PageStatistics { normal, zero, ..PageStatistics::default() };
    Manifest { transport: Some(Transport::File), pages, ..Manifest::new() }
}

/// A description of the file to write with. One that its owner may not write, because it was mapped before, is made
/// writable.
fn writable(held: &File, path: &Path) -> Result<File, SnapshotError> {
    let failed = |errno: Errno| SnapshotError::io("open it to write", path, None, errno);
    let open = || {
        let name = format!("/proc/self/fd/{}", held.as_raw_fd());
        rustix::fs::open(name, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map(File::from)
    };
    match open() {
        Err(Errno::ACCESS) => {
            let mode = Mode::from_raw_mode(rustix::fs::fstat(held).map_err(failed)?.st_mode);
            rustix::fs::fchmod(held, mode | Mode::WUSR).map_err(failed)?;
            open().map_err(failed)
        }
        opened => opened.map_err(failed),
    }
}

/// Takes the right to write away from all users: a file that is mapped is memory.
pub(crate) fn make_read_only(file: impl AsFd, path: &Path) -> Result<(), SnapshotError> {
    let failed = |errno: Errno| SnapshotError::io("make it read-only", path, None, errno);
    let mode = Mode::from_raw_mode(rustix::fs::fstat(&file).map_err(failed)?.st_mode);
    if !mode.intersects(WRITABLE) {
        return Ok(());
    }
    rustix::fs::fchmod(file, mode - WRITABLE).map_err(failed)
}

/// Takes all data out of the places of pages that are not stored; returns how many pages that were.
///
/// Changes nothing for a reader that goes by the bitmap, so it may end at any moment and begin again.
pub(crate) fn clear_unstored(file: &StoreFile, memory: &Memory) -> Result<u64, SnapshotError> {
    let mut cleared = 0;
    for (place, stored) in memory.places.iter().zip(&memory.stored) {
        let failed = |error| file.io(format!("find the holes in RAM block {}", place.name), None, error);
        let data = data_pages(file.fd(), place.pages_offset, PageRange::whole_block(place.pages)).map_err(failed)?;
        for data in data {
            for stale in stored.gaps_in(data.map_err(failed)?) {
                file.punch(place, stale)?;
                cleared += stale.len();
            }
        }
    }
    Ok(cleared)
}

/// Sets the bits of zero pages in blocks that a destination may fill before it loads, whose places are holes; returns
/// how many they are.
pub(crate) fn make_zeros_explicit(
    file: &StoreFile,
    layout: &Layout,
    memory: &mut Memory,
) -> Result<u64, SnapshotError> {
    let mut count = 0;
    for ((block, place), stored) in layout.blocks.iter().zip(&memory.places).zip(&mut memory.stored) {
        let zero = place.pages - stored.count();
        if zero == 0 || !place.may_be_prefilled() {
            continue;
        }
        stored.set_range(PageRange::whole_block(place.pages));
        seal::write_bitmap(file, block, stored)?;
        count += zero;
    }
    Ok(count)
}
