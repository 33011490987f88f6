//! The state of a virtual machine is put into a new internal snapshot, where QEMU's `loadvm` finds it.
//!
//! Law: that of `snapshots`. The state's clusters, then the tables that lead to them, are durable before the header
//! leads to a snapshot that has them. What is written before that belongs to nobody: a cut leaves leaked clusters.

use limosa_page::{to_u64, to_usize};
use limosa_storage::{Buffer, Storage};

use super::check::extend::{extend, release};
use super::check::{CheckOptions, tables};
use super::snapshots::Work;
use crate::error::ImageError;
use crate::offset::HostOffset;
use crate::qcow2::format::header::{Encryption, L1_MOST};

/// Bytes of clusters that are taken first, then twice as many each time, up to the most: refcounts are made durable
/// each time.
const TAKEN_FIRST: u64 = 1 << 20;
const TAKEN_MOST: u64 = 64 << 20;
/// Bytes that are written at once, at least.
const PIECE: usize = 1 << 20;

/// Writes the state of a virtual machine into an image that nothing else uses. Without [`VmStateWriter::finish`] the
/// image is as it was, apart from space that was taken: [`VmStateWriter::undo`] gives that back.
pub struct VmStateWriter<'a> {
    work: Work<'a>,
    /// The clusters that were taken: the first one of each run, and their number.
    runs: Vec<(u64, u64)>,
    /// Clusters of the runs that were written.
    written: u64,
    /// Bytes that are not written yet.
    pending: Vec<u8>,
    length: u64,
}

impl<'a> VmStateWriter<'a> {
    /// Begins. An image that was not closed is repaired first.
    ///
    /// # Errors
    /// As of [`change_snapshots`](super::snapshots::change_snapshots) that takes a snapshot of this name;
    /// [`ImageError::Unsupported`]: the image is encrypted.
    pub async fn begin(storage: &'a dyn Storage, name: &str, options: CheckOptions) -> Result<Self, ImageError> {
        let mut work = Work::begin(storage, options).await?;
        work.admit_new(name)?;
        if work.header.encryption != Encryption::None {
            // In the clear it would give away the guest's memory; encrypted, QEMU 10.0 fails an assertion when it loads
            // it (savevm fails there, too).
            return Err(work.unsupported("it is encrypted, and QEMU cannot load the state of a VM from it".into()));
        }
        work.prepare(true).await?;
        Ok(Self { work, runs: Vec::new(), written: 0, pending: Vec::new(), length: 0 })
    }

    /// Adds bytes of the state.
    ///
    /// # Errors
    /// There is no room for it; what the storage says.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), ImageError> {
        self.pending.extend_from_slice(bytes);
        self.length += to_u64(bytes.len());
        if self.pending.len() >= PIECE { self.write_clusters().await } else { Ok(()) }
    }

    /// Writes the whole clusters of what is pending.
    async fn write_clusters(&mut self) -> Result<(), ImageError> {
        let geometry = self.work.header.geometry();
        let mut from = 0;
        loop {
            let left = to_u64(self.pending.len() - from) >> geometry.cluster_bits;
            if left == 0 {
                break;
            }
            let (at, room) = self.room().await?;
            let bytes = to_usize(left.min(room) << geometry.cluster_bits);
            let piece = self.pending.get(from..from + bytes).unwrap_or_default();
            self.work.storage.write(at.0, Buffer::from_slice(piece).into()).await?;
            self.written += left.min(room);
            from += bytes;
        }
        self.pending.drain(..from);
        Ok(())
    }

    /// The place of the next cluster, and how many can be written there.
    async fn room(&mut self) -> Result<(HostOffset, u64), ImageError> {
        let geometry = self.work.header.geometry();
        let taken: u64 = self.runs.iter().map(|(_, count)| count).sum();
        if self.written == taken {
            let more = TAKEN_FIRST << self.runs.len().min(6);
            let count = (more.min(TAKEN_MOST) >> geometry.cluster_bits).max(1);
            self.work.begun = true;
            let first = extend(self.work.storage, &mut self.work.header, count).await?;
            self.runs.push((first, count));
            return Ok((HostOffset(first << geometry.cluster_bits), count));
        }
        let (first, count) = self.runs.last().copied().unwrap_or_default();
        let left = taken - self.written;
        Ok((HostOffset((first + count - left) << geometry.cluster_bits), left))
    }

    /// Has a new snapshot of the disk, as it is now, with this state, durably. `taken`: seconds since 1970, and
    /// nanoseconds.
    ///
    /// # Errors
    /// As of [`VmStateWriter::begin`].
    pub async fn finish(mut self, name: &str, taken: (u32, u32)) -> Result<(), ImageError> {
        let done = self.finish_now(name, taken).await;
        if done.is_err() {
            self.undo().await;
        }
        done
    }

    async fn finish_now(&mut self, name: &str, taken: (u32, u32)) -> Result<(), ImageError> {
        let geometry = self.work.header.geometry();
        let rest = self.pending.len().next_multiple_of(to_usize(geometry.cluster_size()));
        self.pending.resize(rest, 0);
        self.write_clusters().await?;
        self.give_back_rest().await?;
        self.work.storage.flush().await?;

        // The L2 tables, and a copy of the L1 table that leads to them behind the disk's.
        let hosts = self.runs.iter().flat_map(|(first, count)| *first..first + count).take(to_usize(self.written));
        let entries: Vec<u8> = hosts
            .flat_map(|cluster| {
                let entry = (cluster << geometry.cluster_bits).to_be_bytes();
                entry.into_iter().chain(std::iter::repeat_n(0, to_usize(geometry.l2_entry_size()) - 8))
            })
            .collect();
        let mut entries = entries;
        if geometry.extended_l2 {
            // All subclusters are there.
            entries.as_chunks_mut::<16>().0.iter_mut().for_each(|entry| entry[12..].fill(0xff));
        }
        let count = to_u64(entries.len()).div_ceil(geometry.cluster_size());
        entries.resize(to_usize(count << geometry.cluster_bits), 0);
        let disk = geometry.l1_entries(self.work.header.size);
        let wanted = u32::try_from(disk + count).ok().filter(|entries| *entries <= L1_MOST);
        let wanted = wanted.ok_or_else(|| {
            self.work.unsupported(format!("a state of {} bytes is too large for its clusters", self.length))
        })?;
        let at = extend(self.work.storage, &mut self.work.header, count).await? << geometry.cluster_bits;
        tables::put(self.work.storage, at, &entries).await?;
        let (l1, had) = self.work.header.l1;
        let copy = self.work.copy_l1((l1, had.min(tables::narrow(disk)?)), wanted).await?;
        let leads: Vec<u8> =
            (0..count).flat_map(|table| (at + (table << geometry.cluster_bits)).to_be_bytes()).collect();
        tables::put(self.work.storage, copy.0.0 + disk * 8, &leads).await?;
        self.work.storage.flush().await?;
        self.work.add(copy, name, taken, self.length).await
    }

    /// Gives back the clusters that were taken and not written.
    async fn give_back_rest(&mut self) -> Result<(), ImageError> {
        let bits = self.work.header.geometry().cluster_bits;
        let taken: u64 = self.runs.iter().map(|(_, count)| count).sum();
        let left = taken - self.written;
        let Some((first, count)) = self.runs.last_mut().filter(|_| left > 0) else { return Ok(()) };
        *count -= left;
        let unused = *first + *count;
        release(self.work.storage, &self.work.header, unused << bits, left << bits).await
    }

    /// Gives back what was taken.
    pub async fn undo(&mut self) {
        self.work.undo().await;
    }
}
