//! A disk that is its storage, byte by byte: the bottom of a chain, and, with a defect, what the bed has to find.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use limosa_image::{BlockStatus, Disk, GuestOffset, HostOffset, ImageError, MapEntry, Pending};
use limosa_storage::{Buffer, IoVector, Storage, ZeroOptions};

/// A fault of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Defect {
    /// Every 20th write is not written.
    LosesWrites,
    /// Every 20th write is followed by a sector of zeros.
    RunsOver,
    /// Writes a request by halves, so that others come in between.
    Tears,
    /// Says that a write is done before it is.
    SpeaksTooEarly,
    /// Flushes nothing.
    KeepsNothing,
}

#[derive(Debug)]
pub(crate) struct Plain {
    storage: Arc<dyn Storage>,
    len: u64,
    defect: Option<Defect>,
    writes: AtomicU64,
}

impl Plain {
    pub(crate) fn disk(storage: Arc<dyn Storage>, len: u64, defect: Option<Defect>) -> Arc<dyn Disk> {
        Arc::new(Self { storage, len, defect, writes: AtomicU64::new(0) })
    }

    fn inside(&self, at: GuestOffset, wanted: u64) -> Result<(), ImageError> {
        if at.0.checked_add(wanted).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        Err(ImageError::PastEnd { image: Arc::clone(self.name()), length: self.len, at, wanted })
    }
}

impl Disk for Plain {
    fn name(&self) -> &Arc<str> {
        self.storage.name()
    }

    fn format(&self) -> &'static str {
        "raw"
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, at: GuestOffset, into: IoVector) -> Pending<'_> {
        Box::pin(async move {
            self.inside(at, into.len() as u64)?;
            Ok(self.storage.read(at.0, into).await?)
        })
    }

    fn write(&self, at: GuestOffset, from: IoVector) -> Pending<'_> {
        Box::pin(async move {
            self.inside(at, from.len() as u64)?;
            let number = self.writes.fetch_add(1, Ordering::Relaxed);
            let end = at.0 + from.len() as u64;
            match self.defect {
                Some(Defect::LosesWrites) if number % 20 == 19 => return Ok(()),
                Some(Defect::RunsOver) if number % 20 == 19 && end + 512 <= self.len => {
                    self.storage.write(end, Buffer::zeroed(512).into()).await?;
                }
                Some(Defect::Tears) if from.len() >= 1024 => {
                    let half = from.len() / 2 / 512 * 512 + 7;
                    self.storage.write(at.0, from.slice(0..half)).await?;
                    return Ok(self.storage.write(at.0 + half as u64, from.slice(half..from.len())).await?);
                }
                Some(Defect::SpeaksTooEarly) => {
                    drop(self.storage.write(at.0, from));
                    return Ok(());
                }
                _ => {}
            }
            Ok(self.storage.write(at.0, from).await?)
        })
    }

    fn write_zeroes(&self, at: GuestOffset, length: u64, unmap: bool) -> Pending<'_> {
        Box::pin(async move {
            self.inside(at, length)?;
            let how = ZeroOptions { unmap, only_fast: false };
            Ok(self.storage.write_zeroes(at.0..at.0 + length, how).await?)
        })
    }

    fn discard(&self, at: GuestOffset, length: u64) -> Pending<'_> {
        self.write_zeroes(at, length, true)
    }

    fn flush(&self) -> Pending<'_> {
        Box::pin(async move {
            if self.defect != Some(Defect::KeepsNothing) {
                self.storage.flush().await?;
            }
            Ok(())
        })
    }

    fn map(&self, at: GuestOffset, length: u64) -> Pending<'_, MapEntry> {
        Box::pin(async move {
            self.inside(at, length)?;
            let extents = self.storage.extents(at.0..at.0 + length)?;
            let first = extents.first().map(|extent| (extent.range.end.min(at.0 + length) - at.0, extent.kind));
            let (length, zero) = first.map_or((length, false), |(length, kind)| (length, kind.is_zero()));
            let host = Some((Arc::clone(self.name()), HostOffset(at.0)));
            let kind = if zero { BlockStatus::Zero } else { BlockStatus::Data };
            Ok(MapEntry::new(length, kind).host(host))
        })
    }

    fn close(&self) -> Pending<'_> {
        self.flush()
    }
}
