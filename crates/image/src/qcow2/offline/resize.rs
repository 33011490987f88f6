//! Making an image's disk longer or shorter.
//!
//! Law: the header's size changes last when the disk grows, and after the entries behind the new end are gone when it
//! shrinks. New tables have refcounts before anything refers to them. A growth that fails is undone. A cut at any write
//! leaves a whole image of one size or the other; of one that was to shrink, what lies behind the new end may be zeros
//! already; bitmaps may be lost.

use std::ops::Range;
use std::sync::Arc;

use limosa_page::{broken_invariant, to_usize};
use limosa_storage::{Storage, ZeroOptions};

use super::check::extend::{extend, release};
use super::check::{CheckOptions, Repair, discard_free, fit_bitmaps, repair, repair_with, tables};
use crate::disk::Disk;
use crate::error::ImageError;
use crate::luks::EncryptedStorage;
use crate::offset::{GuestOffset, HostOffset};
use crate::preallocation::Preallocation;
use crate::qcow2::engine::grow;
use crate::qcow2::engine::image::{ImageParts, Qcow2};
use crate::qcow2::engine::options::Qcow2Options;
use crate::qcow2::format::entry::{COPIED, OFFSET, ZERO};
use crate::qcow2::format::geometry::Geometry;
use crate::qcow2::format::header::Header;
use crate::setters::setters;

/// How a disk is made longer or shorter.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct ResizeOptions {
    /// Whether contents past the new end may be lost. Without it a disk does not become shorter.
    pub shrink: bool,
    /// The part of the added space that is allocated at once.
    pub preallocation: Preallocation,
    /// Limits of the check that finds space to give back.
    pub check: CheckOptions,
}

setters!(ResizeOptions { shrink: bool, preallocation: Preallocation, check: CheckOptions });

/// Makes the disk of an image `size` bytes long. The image is not used by anything else meanwhile, and is not open as a
/// disk: one that is in use becomes longer by [`Disk::grow`](crate::Disk::grow). Its backing image and its data file
/// have to be there if it has any. Added bytes read as zeros, even if the backing image has contents there. An image
/// that was not closed is repaired first.
///
/// # Errors
/// [`ImageError::Unsupported`]: shorter without [`ResizeOptions::shrink`]; sizes that are no multiple of 512; images of
/// version 2 with snapshots, images with bitmaps that were not put away, corrupt images. What the storage says: if
/// there is no space for the preallocation ([`ResizeOptions::preallocation`]) the disk keeps its length, and the space
/// taken until then is given back.
pub async fn resize(parts: ImageParts, size: u64, options: ResizeOptions) -> Result<(), ImageError> {
    let ImageParts { file, data_file, backing, mut header, cipher, .. } = parts;
    if header.features.dirty() && !header.features.corrupt() {
        repair_with(&*file, cipher.as_deref(), Repair::Refcounts, options.check).await?;
        header = Header::read(&*file).await?;
    }
    let old = header.size;
    refuse(&*file, &header, size, options)?;
    if size == old {
        return Ok(());
    }
    let data_length = data_file.as_ref().map(|data_file| data_file.length()).transpose()?;
    header.prepare_autoclear(&*file, true).await?;
    let bitmaps = fit_bitmaps::lay_aside(&*file, &mut header, size).await?;
    let parts = ImageParts::new(Arc::clone(&file), header).data_file(data_file.clone());
    let parts = parts.backing(backing).cipher(cipher);
    let mut resized = if size < old {
        shrink(parts, size).await
    } else if options.preallocation == Preallocation::Off && !parts.header.features.raw_data_file() {
        grow_in_use(parts, size).await
    } else {
        grow(parts, size, options.preallocation).await
    };
    if bitmaps && resized.is_ok() {
        resized = match Header::read(&*file).await {
            Ok(mut header) => fit_bitmaps::put_back(&*file, &mut header, old).await,
            Err(error) => Err(error),
        };
    }
    if let Err(error) = resized {
        // Best effort: why it failed is the better error. Bitmaps that cannot be put back are lost.
        let _ = undo(&*file, data_file.as_deref().zip(data_length), old..size, bitmaps, options).await;
        return Err(error);
    }
    if size < old {
        let header = Header::read(&*file).await?;
        cut_off(&*file, data_file.as_deref(), &header, options).await?;
    }
    Ok(())
}

fn refuse(storage: &dyn Storage, header: &Header, size: u64, options: ResizeOptions) -> Result<(), ImageError> {
    let what = if header.features.dirty() || header.features.corrupt() {
        "it is damaged: check and repair it before it is resized".into()
    } else if size < header.size && !options.shrink {
        "what lies behind its new end would be lost; shrinking has to be asked for".into()
    } else if let Some(fault) = grow::fault(header, size) {
        fault
    } else {
        return Ok(());
    };
    Err(ImageError::Unsupported { image: storage.name().clone(), what })
}

/// The image as a disk, which takes no more space than it needs.
async fn in_use(parts: ImageParts) -> Result<Arc<Qcow2>, ImageError> {
    Qcow2::open(parts, Qcow2Options { allocate_ahead: 0, ..Qcow2Options::default() }).await
}

/// Makes the disk longer, with no space for what is new.
async fn grow_in_use(parts: ImageParts, size: u64) -> Result<(), ImageError> {
    let disk = in_use(parts).await?;
    disk.grow(size).await?;
    disk.close().await
}

/// Gives back what a growth that failed has taken; of any resize, bitmaps are put back. The range: from the old size to
/// the new one. `bitmaps` were laid aside. `data_file`: with its length before.
async fn undo(
    storage: &dyn Storage,
    data_file: Option<(&dyn Storage, u64)>,
    Range { start: old, end: new }: Range<u64>,
    bitmaps: bool,
    options: ResizeOptions,
) -> Result<(), ImageError> {
    let mut header = Header::read(storage).await?;
    if header.size > old {
        header.size = old;
        header.write_fields(storage).await?;
        storage.flush().await?;
    }
    if bitmaps {
        // Until then their clusters belong to nothing.
        let other = if header.size == old { new } else { old };
        fit_bitmaps::put_back(storage, &mut header, other).await?;
    }
    // What was cut off of a disk that was to become shorter is gone. Refcounts of an image that is marked as dirty are
    // stale: the next open rebuilds them.
    if header.size != old || new < old || header.features.dirty() {
        return Ok(());
    }
    cut_tables(storage, &mut header, old).await?;
    storage.flush().await?;
    if let Some((data_file, length)) = data_file.filter(|(file, before)| file.length().is_ok_and(|now| now > *before)) {
        data_file.set_len(length).await?;
    }
    cut_off_file(storage, &header, options.check).await
}

/// Makes the disk longer, with space for what is new.
async fn grow(parts: ImageParts, size: u64, how: Preallocation) -> Result<(), ImageError> {
    let (file, data_file, old) = (Arc::clone(&parts.file), parts.data_file.clone(), parts.header.size);
    let cipher = parts.cipher.clone();
    let end = old.next_multiple_of(parts.header.geometry().cluster_size()).min(size);
    let disk = in_use(parts).await?;
    disk.zero_tail(end).await?;
    disk.close().await?;
    let mut header = Header::read(&*file).await?;
    let contents = cipher.map(|cipher| EncryptedStorage::new(Arc::clone(&file), cipher, 0));
    Growth { storage: &*file, data_file: data_file.as_deref(), contents, old, size }.grow(&mut header, how).await
}

/// A disk that becomes longer.
struct Growth<'a> {
    storage: &'a dyn Storage,
    data_file: Option<&'a dyn Storage>,
    /// The decrypted contents of the file, if they are encrypted: zeros in the file are none in them.
    contents: Option<EncryptedStorage>,
    old: u64,
    size: u64,
}

impl Growth<'_> {
    async fn grow(&self, header: &mut Header, how: Preallocation) -> Result<(), ImageError> {
        let geometry = header.geometry();
        let entries = geometry.l1_entries(self.size);
        let old_l1 = header.l1;
        if entries > u64::from(header.l1.1) {
            let clusters = geometry.clusters(entries * 8);
            let first = extend(self.storage, header, clusters).await?;
            let mut table = Vec::new();
            for (from, length) in tables::pieces(old_l1.0.0, u64::from(old_l1.1) * 8, self.storage.length()?) {
                table.extend(tables::bytes(self.storage, from, length).await?);
            }
            table.resize(to_usize(clusters << geometry.cluster_bits), 0);
            let at = first << geometry.cluster_bits;
            tables::put(self.storage, at, &table).await?;
            self.storage.flush().await?;
            header.l1 = (HostOffset(at), tables::narrow(entries)?);
            header.write_fields(self.storage).await?;
            self.storage.flush().await?;
            if old_l1.1 > 0 {
                release(self.storage, header, old_l1.0.0, u64::from(old_l1.1) * 8).await?;
            }
        }
        if let Some(data_file) = self.data_file {
            let cluster = header.geometry().cluster_size();
            self.grow_data(data_file, cluster, how).await?;
        }
        self.fill(header, how).await?;
        header.size = self.size;
        header.write_fields(self.storage).await?;
        Ok(self.storage.flush().await?)
    }

    /// Makes the data file as long as the disk; what is new of it becomes zeros.
    async fn grow_data(&self, data_file: &dyn Storage, cluster: u64, how: Preallocation) -> Result<(), ImageError> {
        let length = data_file.length()?;
        // Encrypted zeros fill the old last cluster, and zeros in their place would be decrypted to something else.
        let end = if self.contents.is_some() { self.old.next_multiple_of(cluster) } else { self.old };
        let new = end.min(self.size)..self.size;
        if length > new.start {
            let how = ZeroOptions { unmap: how != Preallocation::Falloc, only_fast: false };
            data_file.write_zeroes(new.start..length.min(self.size), how).await?;
        }
        if length < self.size {
            data_file.set_len(self.size).await?;
        }
        if how == Preallocation::Falloc {
            data_file.allocate(new.clone()).await?;
        }
        if how == Preallocation::Full {
            zeros(data_file, new).await?;
        }
        Ok(data_file.flush().await?)
    }

    /// Gives the clusters of a part that is new space.
    async fn fill(&self, header: &mut Header, how: Preallocation) -> Result<(), ImageError> {
        let geometry = header.geometry();
        let range = self.old..self.size;
        // A cluster that the end lay in has been there before.
        let clusters = range.start.div_ceil(geometry.cluster_size())..geometry.clusters(range.end);
        let each = geometry.l2_entries();
        for number in clusters.start / each..clusters.end.div_ceil(each) {
            let part = clusters.start.max(number * each)..clusters.end.min((number + 1) * each);
            if !part.is_empty() {
                self.fill_table(header, number, part, how).await?;
            }
        }
        Ok(())
    }

    /// The part of it that one L2 table is about.
    async fn fill_table(
        &self,
        header: &mut Header,
        number: u64,
        part: Range<u64>,
        how: Preallocation,
    ) -> Result<(), ImageError> {
        let geometry = header.geometry();
        let (bits, size) = (geometry.cluster_bits, geometry.cluster_size());
        let place = header.l1.0.0 + number * 8;
        let entry = tables::number(self.storage, place).await?;
        let old = entry & OFFSET;
        let in_place = old != 0 && entry & COPIED != 0;
        // In a data file contents lie where the guest sees them.
        let data = if self.data_file.is_none() { part.end - part.start } else { 0 };
        let taken = data + u64::from(!in_place);
        let first = if taken > 0 { extend(self.storage, header, taken).await? } else { 0 };
        let at = if in_place { old } else { (first + data) << bits };
        let mut table = match old {
            0 => vec![0; to_usize(size)],
            old => tables::bytes(self.storage, old, size).await?,
        };
        let width = to_usize(geometry.l2_entry_size());
        // What is there is decrypted to something else than zeros. Version 2 has no entry for that.
        let zero_flag = self.contents.is_some() && header.version > 2;
        for (index, cluster) in part.clone().enumerate() {
            let offset = to_usize(cluster % geometry.l2_entries()) * width;
            let slot = table
                .get_mut(offset..offset + width)
                .ok_or_else(|| broken_invariant("an entry is within its L2 table"))?;
            if slot.iter().all(|byte| *byte == 0) {
                let host = if data == 0 { cluster } else { first + index as u64 };
                let (bits, bitmap) = new_entry(host << bits, &geometry, zero_flag);
                slot.copy_from_slice(&[bits.to_be_bytes(), bitmap.to_be_bytes()].concat()[..width]);
            }
        }
        let range = first << bits..(first + data) << bits;
        match how {
            _ if let Some(contents) = self.contents.as_ref().filter(|_| !zero_flag) => {
                contents.write_zeroes(range, ZeroOptions { unmap: false, only_fast: false }).await?;
            }
            Preallocation::Full => zeros(self.storage, range).await?,
            // What was there before must not come to light.
            how if !range.is_empty() => {
                let unmap = how != Preallocation::Falloc;
                self.storage.write_zeroes(range.clone(), ZeroOptions { unmap, only_fast: false }).await?;
                if !unmap {
                    self.storage.allocate(range).await?;
                }
            }
            _ => {}
        }
        if in_place && data > 0 {
            // The file reaches to where the entries lead.
            self.storage.flush().await?;
        }
        tables::put(self.storage, at, &table).await?;
        self.storage.flush().await?;
        if !in_place {
            tables::put(self.storage, place, &(at | COPIED).to_be_bytes()).await?;
            self.storage.flush().await?;
            if old != 0 {
                release(self.storage, header, old, size).await?;
            }
        }
        Ok(())
    }
}

/// Writes zeros.
async fn zeros(storage: &dyn Storage, range: Range<u64>) -> Result<(), ImageError> {
    let zeros = vec![0; 1 << 20];
    for from in range.clone().step_by(1 << 20) {
        let length = to_usize(range.end - from).min(zeros.len());
        tables::put(storage, from, &zeros[..length]).await?;
    }
    Ok(())
}

/// An entry for a cluster that is new, at `host`; `zero`: it reads as zeros.
const fn new_entry(host: u64, geometry: &Geometry, zero: bool) -> (u64, u64) {
    match (geometry.extended_l2, zero) {
        (true, true) => (host | COPIED, 0xffff_ffff << 32),
        (true, false) => (host | COPIED, 0xffff_ffff),
        (false, true) => (host | COPIED | ZERO, 0),
        (false, false) => (host | COPIED, 0),
    }
}

/// Makes the disk shorter. Space that nothing refers to any more is not given back yet.
async fn shrink(parts: ImageParts, size: u64) -> Result<(), ImageError> {
    let (file, old) = (Arc::clone(&parts.file), parts.header.size);
    let storage = &*file;
    let inside = size.next_multiple_of(parts.header.geometry().cluster_size()).min(old) - size;
    let mut header = if inside == 0 {
        parts.header
    } else {
        // What is behind the end in the last cluster must not come back when the disk grows again: it is a write like
        // any other, which leaves to snapshots what they have.
        let disk = in_use(parts).await?;
        disk.write_zeroes(GuestOffset(size), inside, false).await?;
        disk.close().await?;
        Header::read(storage).await?
    };
    cut_tables(storage, &mut header, size).await?;
    storage.flush().await?;
    header.size = size;
    header.write_fields(storage).await?;
    Ok(storage.flush().await?)
}

/// Removes the entries of all that is behind a size.
async fn cut_tables(storage: &dyn Storage, header: &mut Header, size: u64) -> Result<(), ImageError> {
    let geometry = header.geometry();
    // L2 tables that are only about what goes.
    let kept = geometry.l1_entries(size);
    let mut place = header.l1.0.0 + kept * 8;
    let end = header.l1.0.0 + u64::from(header.l1.1) * 8;
    while place < end {
        let length = (end - place).min(1 << 20);
        tables::put(storage, place, &vec![0; to_usize(length)]).await?;
        place += length;
    }
    // The table of the new last cluster.
    let clusters = geometry.clusters(size);
    if !size.is_multiple_of(geometry.l2_covers()) {
        cut_table(storage, header, kept - 1, clusters % geometry.l2_entries()).await?;
    }
    Ok(())
}

/// Gives back what is behind the new end.
async fn cut_off(
    storage: &dyn Storage,
    data_file: Option<&dyn Storage>,
    header: &Header,
    options: ResizeOptions,
) -> Result<(), ImageError> {
    cut_off_file(storage, header, options.check).await?;
    if let Some(data_file) = data_file.filter(|file| file.length().is_ok_and(|length| length > header.size)) {
        let _ = data_file.set_len(header.size).await;
    }
    Ok(())
}

/// Gives back all space of the image's file to which nothing refers.
pub(super) async fn cut_off_file(
    storage: &dyn Storage,
    header: &Header,
    options: CheckOptions,
) -> Result<(), ImageError> {
    let report = repair(storage, Repair::Leaks, options).await?;
    if report.is_clean() {
        discard_free(storage, options).await?;
    }
    let end = report.image_end_offset.max(header.geometry().cluster_size());
    // Where it cannot be cut off, as on a block device, it stays: the image is whole either way.
    if storage.length()? > end && report.is_clean() {
        let _ = storage.set_len(end).await;
    }
    Ok(())
}

/// Removes the entries from number `from` on from the L2 table of the new last cluster.
async fn cut_table(storage: &dyn Storage, header: &mut Header, number: u64, from: u64) -> Result<(), ImageError> {
    let geometry = header.geometry();
    let cluster_size = geometry.cluster_size();
    let place = header.l1.0.0 + number * 8;
    let entry = tables::number(storage, place).await?;
    let old = entry & OFFSET;
    if old == 0 {
        return Ok(());
    }
    let mut table = tables::bytes(storage, old, cluster_size).await?;
    let width = to_usize(geometry.l2_entry_size());
    let cut = if from == 0 { table.len() } else { to_usize(from) * width };
    let gone = table.get_mut(cut..).ok_or_else(|| broken_invariant("a table is cut off within it"))?;
    if gone.iter().all(|byte| *byte == 0) {
        return Ok(());
    }
    gone.fill(0);
    if entry & COPIED != 0 {
        return Ok(tables::put(storage, old, &table).await?);
    }
    let at = extend(storage, header, 1).await? << geometry.cluster_bits;
    tables::put(storage, at, &table).await?;
    storage.flush().await?;
    Ok(tables::put(storage, place, &(at | COPIED).to_be_bytes()).await?)
}
