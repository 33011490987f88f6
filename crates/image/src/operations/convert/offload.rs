//! Contents that the kernel copies from file to file, past our memory.
//!
//! Only what lies as it is in a source's file, and will lie so in the target's, can be copied like that. A piece of
//! which some part cannot is copied plainly as a whole; once the kernel has said no, it is not asked again.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::plan::{Content, Span};
use super::source::HostRange;
use super::{Conversion, ConvertCounters};
use crate::offset::GuestOffset;
use crate::operations::operation::{DiskOperation, OperationError};

/// A run of contents, and where it lies.
pub(super) type Run = (Range<u64>, HostRange);

impl Conversion<'_> {
    /// The places of the contents of a piece; `None`: they have to be read and written.
    pub(super) async fn runs(&self, spans: &[Span]) -> Result<Option<Vec<Run>>, OperationError> {
        if !self.options.copy_range || self.plainly.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let mut runs = Vec::new();
        for span in spans.iter().filter(|span| span.content == Content::Data) {
            let mut at = span.range.start;
            while at < span.range.end {
                let place = self.source.place(&(at..span.range.end)).await;
                let Some(place) = place.map_err(OperationError::at(DiskOperation::Mapping, at))? else {
                    return Ok(None);
                };
                let end = at + place.length;
                runs.push((at..end, place));
                at = end;
            }
        }
        Ok(Some(runs))
    }

    /// Has the kernel copy runs of contents, and makes zero what is between them: false if it could not, and what is
    /// there is anything. Why it could not, if that is more than its not having such a thing, is found out by the plain
    /// copy: whether it was the source that could not be read or the target that could not be written, and where.
    pub(super) async fn offload(
        &self,
        runs: Vec<Run>,
        spans: &[Span],
        counters: &mut ConvertCounters,
    ) -> Result<bool, OperationError> {
        for (range, place) in runs {
            let (at, length) = (range.start, range.end - range.start);
            let copied = self.target.copy_from(GuestOffset(at), &place.storage, place.at, length).await;
            if !copied.unwrap_or(false) {
                self.plainly.store(true, Ordering::Relaxed);
                return Ok(false);
            }
            counters.copies += 1;
            counters.bytes_copied += length;
            self.written.fetch_add(length, Ordering::Relaxed);
        }
        for span in spans.iter().filter(|span| span.content == Content::Zero) {
            self.zero(&span.range, counters, &self.rules, false).await?;
        }
        Ok(true)
    }
}
