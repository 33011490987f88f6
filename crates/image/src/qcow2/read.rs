//! Reading: what the guest's bytes are is looked up, and everything is read at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures_util::future::{BoxFuture, FutureExt, join_all};
use limosa_storage::{Buffer, IoVector};

use super::compressed::unpack;
use super::counters::Purpose;
use super::image::Inner;
use super::look::{Kind, Look, Piece};
use crate::ends::{LOST, ended};
use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset};

impl Inner {
    /// What the bytes from `at` on are, reading tables as need be.
    pub(super) async fn piece(self: &Arc<Self>, at: u64, end: u64) -> Result<Piece, ImageError> {
        loop {
            match self.look(at, end)? {
                Look::Piece(piece) => return Ok(piece),
                Look::Load(key) => self.load(key).await?,
            }
        }
    }

    /// Fills `into` with what is at `at`.
    pub(super) async fn read(self: &Arc<Self>, at: u64, into: IoVector) -> Result<(), ImageError> {
        loop {
            let zeroings = self.zeroings.load(Ordering::Acquire);
            self.read_once(at, into.clone()).await?;
            // A cluster that was zeroed and kept may have been written anew meanwhile, and nobody is to see that before the table
            // says so: else who reads later would see the zeros again.
            if self.zeroings.load(Ordering::Acquire) == zeroings {
                return Ok(());
            }
        }
    }

    async fn read_once(self: &Arc<Self>, at: u64, into: IoVector) -> Result<(), ImageError> {
        let _guard = self.epochs.enter();
        let end = at + into.len() as u64;
        let mut parts = Vec::new();
        let mut pos = at;
        while pos < end {
            let Piece { length, kind } = self.piece(pos, end).await?;
            if pos == at && length == into.len() as u64 {
                return self.read_piece(pos, kind, into).await;
            }
            let part = part_of(&into, pos - at, length);
            match kind {
                Kind::Zero { .. } => part.clear(),
                Kind::Backing { .. } if self.backing.is_none() => part.clear(),
                _ => parts.push(self.read_piece(pos, kind, part)),
            }
            pos += length;
        }
        all(parts).await
    }

    fn read_piece<'a>(
        self: &'a Arc<Self>,
        at: u64,
        kind: Kind,
        into: IoVector,
    ) -> BoxFuture<'a, Result<(), ImageError>> {
        let length = into.len() as u64;
        match kind {
            Kind::Zero { .. } => {
                into.clear();
                std::future::ready(Ok(())).boxed()
            }
            Kind::Own { host, .. } => {
                self.counters.add(Purpose::DataRead, length);
                self.read_own(at, host, into).boxed()
            }
            Kind::Backing { .. } => {
                if self.backing_holds(at) > 0 {
                    self.counters.add(Purpose::DataRead, length);
                }
                self.read_backing(at, into).boxed()
            }
            Kind::Compressed { host, packed } => {
                self.counters.add(Purpose::DataRead, u64::from(packed));
                self.read_compressed(at, host, packed, into).boxed()
            }
        }
    }

    /// Fills `into` with what lies at `host`, which is the disk's at `at`. An error if the file ends before it.
    pub(super) async fn read_own(&self, at: u64, host: u64, into: IoVector) -> Result<(), ImageError> {
        // Before its length is looked at: others may make it longer meanwhile.
        let longest = if self.has_data_file { &self.longest_data } else { &self.longest };
        let before = longest.load(Ordering::Acquire);
        self.data.read(host, into.clone()).await?;
        if into.is_empty() {
            return Ok(());
        }
        let end = host.saturating_add(into.len() as u64);
        let Some(length) = ended(&*self.data, &into, end)? else { return Ok(()) };
        longest.fetch_max(length, Ordering::AcqRel);
        // Nothing fills up the last cluster of a file: it may have ended there from the beginning.
        let last = (end - 1) & !(self.geometry.cluster_size() - 1);
        if length > last && length >= before {
            return Ok(());
        }
        Err(ImageError::Corrupt {
            image: Arc::clone(self.data.name()),
            table: format!("contents at {} of guest offset {}", HostOffset(host), GuestOffset(at)),
            why: format!("the file ends at {length:#x}, before they do; {LOST}"),
        })
    }

    /// How many bytes the backing image has from `at` on.
    pub(super) fn backing_holds(&self, at: u64) -> u64 {
        self.backing.as_ref().map_or(0, |backing| backing.len().saturating_sub(at))
    }

    /// Fills `into` with what the backing image has at `at`, and with zeros where it ends.
    pub(super) async fn read_backing(&self, at: u64, into: IoVector) -> Result<(), ImageError> {
        let holds = usize::try_from(self.backing_holds(at)).unwrap_or(usize::MAX).min(into.len());
        into.slice(holds..into.len()).clear();
        match &self.backing {
            Some(backing) if holds > 0 => backing.read(GuestOffset(at), into.slice(0..holds)).await,
            _ => Ok(()),
        }
    }

    /// Fills `into` with what is at `at`, in the cluster that is compressed in `packed` bytes at `host`.
    pub(super) async fn read_compressed(
        &self,
        at: u64,
        host: HostOffset,
        packed: u32,
        into: IoVector,
    ) -> Result<(), ImageError> {
        let named = || format!("compressed cluster at {host} of guest offset {}", GuestOffset(at));
        if self.has_data_file {
            return Err(self.corrupt(named(), "there are none in an image with a data file"));
        }
        if host.0 >= self.file.length()? {
            let length = self.file.length()?;
            return Err(self.corrupt(named(), format!("the file ends at {length:#x}, before it; {LOST}")));
        }
        let buffer = Buffer::zeroed(usize::try_from(packed).unwrap_or(0));
        self.file.read(host.0, buffer.clone().into()).await?;
        let size = usize::try_from(self.geometry.cluster_size()).unwrap_or(0);
        let bytes = unpack(self.compression, &buffer.to_vec(), size).map_err(|why| self.corrupt(named(), why))?;
        let inside = usize::try_from(at & (self.geometry.cluster_size() - 1)).unwrap_or(usize::MAX);
        into.copy_from(0, bytes.get(inside..).unwrap_or_default());
        Ok(())
    }
}

/// `length` bytes of a vector, from `from` on.
pub(super) fn part_of(vector: &IoVector, from: u64, length: u64) -> IoVector {
    // A request's length came from a vector's, so it is an index.
    let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
    vector.slice(index(from)..index(from + length))
}

/// All of them at once, to their ends; the first error.
pub(super) async fn all<F: Future<Output = Result<(), ImageError>>>(parts: Vec<F>) -> Result<(), ImageError> {
    join_all(parts).await.into_iter().collect()
}
