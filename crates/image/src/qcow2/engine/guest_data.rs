//! The guest's data: in the data storage, in compressed clusters, in the backing image.
//!
//! Everything that the guest's bytes are read from or written to goes through here, except what moves them without a
//! look: clones (`writer/clones.rs`) and copies that a storage makes (`Disk::storage`). What is between the guest's
//! bytes and the storage's belongs here.

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use limosa_page::{BrokenInvariant, invariant, to_u64, to_usize};
use limosa_storage::{Buffer, IoVector, Request};

use super::context::Context;
use super::counters::OperationKind;
use super::lengths::Lengths;
use super::lookup::Kind;
use super::seams;
use crate::error::ImageError;
use crate::offset::{GuestOffset, HostOffset};
use crate::qcow2::format::compressed::{UnpackFault, unpack};
use crate::truncation::truncated_to;

pub(super) struct GuestData {
    context: Arc<Context>,
    lengths: Arc<Lengths>,
}

impl GuestData {
    pub(super) const fn new(context: Arc<Context>, lengths: Arc<Lengths>) -> Self {
        Self { context, lengths }
    }

    /// Writes to a place in the data storage.
    pub(super) fn write(
        &self,
        purpose: OperationKind,
        host: HostOffset,
        bytes: IoVector,
    ) -> Result<Request, BrokenInvariant> {
        seams::in_the_file(host, to_u64(bytes.len()), 1)?;
        self.context.counters().add(purpose, to_u64(bytes.len()));
        Ok(self.context.data().write(host.0, bytes))
    }

    /// Reads `into.len()` bytes at `at`, which are of this kind.
    pub(super) fn read(&self, at: GuestOffset, kind: Kind, into: IoVector) -> BoxFuture<'_, Result<(), ImageError>> {
        let length = into.len() as u64;
        let counters = self.context.counters();
        match kind {
            Kind::Zero { .. } => {
                into.clear();
                std::future::ready(Ok(())).boxed()
            }
            Kind::Own { host, .. } => {
                counters.add(OperationKind::DataRead, length);
                self.read_own(at, host, into).boxed()
            }
            Kind::Backing { .. } => {
                if self.backing_holds(at) > 0 {
                    counters.add(OperationKind::DataRead, length);
                }
                self.read_backing(at, into).boxed()
            }
            Kind::Compressed { host, packed } => {
                counters.add(OperationKind::DataRead, u64::from(packed));
                self.read_compressed(at, host, packed, into).boxed()
            }
        }
    }

    /// Reads `into.len()` bytes at `host`, which are the disk's at `at`. Fails if the file ends before them.
    pub(super) async fn read_own(&self, at: GuestOffset, host: HostOffset, into: IoVector) -> Result<(), ImageError> {
        let data = self.context.data_of(at, host);
        // Before its length is looked at: others may make it longer meanwhile.
        let before = self.lengths.data_before();
        data.read(host.0, into.clone()).await?;
        if into.is_empty() {
            return Ok(());
        }
        let end = host.0.saturating_add(into.len() as u64);
        let Some(length) = truncated_to(&*data, &into, end)? else { return Ok(()) };
        self.lengths.data_is_at_least(length);
        // Nothing fills up the last cluster of a file: it may have ended there from the beginning.
        let last = (end - 1) & !(self.context.geometry().cluster_size() - 1);
        if length > last && length >= before {
            return Ok(());
        }
        let what = format!("contents at {host} of guest offset {at}");
        Err(ImageError::Truncated { image: Arc::clone(data.name()), what, end: length })
    }

    /// Returns how many bytes the backing image has from `at` on.
    pub(super) fn backing_holds(&self, at: GuestOffset) -> u64 {
        self.context.backing().map_or(0, |backing| backing.len().saturating_sub(at.0))
    }

    /// Reads `into.len()` bytes at `at` from the backing image; bytes past its end are zero.
    pub(super) async fn read_backing(&self, at: GuestOffset, into: IoVector) -> Result<(), ImageError> {
        let holds = to_usize(self.backing_holds(at)).min(into.len());
        into.slice(holds..into.len()).clear();
        match self.context.backing() {
            Some(backing) if holds > 0 => backing.read(at, into.slice(0..holds)).await,
            _ => Ok(()),
        }
    }

    /// Reads `into.len()` bytes at `at` from the cluster that is compressed in `packed` bytes at `host`.
    pub(super) async fn read_compressed(
        &self,
        at: GuestOffset,
        host: HostOffset,
        packed: u32,
        into: IoVector,
    ) -> Result<(), ImageError> {
        let context = &self.context;
        let named = || format!("compressed cluster at {host} of guest offset {at}");
        if context.has_data_file() {
            return Err(context.corrupt(named(), "there are none in an image with a data file"));
        }
        let truncated = |end| {
            let what = format!("compressed contents at {host} of guest offset {at}");
            ImageError::Truncated { image: Arc::clone(context.file().name()), what, end }
        };
        let length = context.file().length()?;
        if host.0 >= length {
            return Err(truncated(length));
        }
        let buffer = Buffer::zeroed(to_usize(u64::from(packed)));
        context.file().read(host.0, buffer.clone().into()).await?;
        let cluster = context.geometry().cluster_size();
        let size = to_usize(cluster);
        let inside = to_usize(at.within(cluster));
        let copy = |bytes: &[u8]| {
            // Anything less would leave bytes of the buffer as they were, and be taken for the disk's.
            let wanted = bytes.get(inside..inside.saturating_add(into.len()));
            wanted.is_some_and(|wanted| into.copy_from(0, wanted) == into.len())
        };
        let unpacked = unpack(context.compression(), &buffer.to_vec(), size, copy);
        let (is_copied, taken) = unpacked.map_err(|fault| match fault {
            UnpackFault::Internal(broken) => broken.into(),
            fault => context.corrupt(named(), fault.to_string()),
        })?;
        // Its last sector need not be whole. But zeros, which are read behind the end of a file, can pass for the rest
        // of a stream; and where the end is of a pipe is known only now.
        let length = context.file().length()?;
        if host.0.saturating_add(taken as u64) > length {
            return Err(truncated(length));
        }
        Ok(invariant(is_copied, "a read of a compressed cluster is within it, and fills its buffer")?)
    }
}
