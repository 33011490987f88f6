//! The COPIED flag: clusters whose refcount is one, and whose entry has the flag, may be written in place.
//!
//! Law: it is the refcounts that the image keeps which are compared with, not those that were counted: they are what a
//! writer goes by.

use super::counts::Flags;
use super::examine::{self, Kind};
use super::report::Findings;
use super::stored::Stored;
use super::tables::{self, Reader};
use super::walk::{Image, l2_entries};
use crate::error::ImageError;
use crate::qcow2::format::entry::{COPIED, OFFSET};

impl Image<'_> {
    /// Checks which entries of the active state say that their cluster may be written in place: those whose refcount is
    /// one.
    pub(super) async fn check_copied(
        &self,
        flags: &Flags,
        first: bool,
        stored: &mut Stored<'_>,
        findings: &mut Findings,
    ) -> Result<(), ImageError> {
        let geometry = &self.bounds.geometry;
        let (mut batches, mut reader) = (self.l2_batches(), Reader::default());
        while let Some(batch) = batches.next().await? {
            let mut wanted = Vec::new();
            for (at, uses) in batch.iter().filter(|(at, uses)| **at != 0 && uses.active > 0) {
                // What cannot be known is not compared, nor is what depends on it.
                if stored.get(at >> geometry.cluster_bits).await?.is_some() {
                    wanted.push((*at, uses.active));
                }
            }
            for group in wanted.chunks(tables::together(geometry.cluster_size())) {
                let places: Vec<_> = group.iter().map(|(at, _)| *at).collect();
                reader.read(self.storage, &places, geometry.cluster_size()).await?;
                for (place, (at, times)) in group.iter().enumerate() {
                    for (number, bits, bitmap) in l2_entries(reader.table(place)?, geometry.extended_l2) {
                        let Kind::Cluster(host) = examine::l2(bits, bitmap, &self.bounds).kind else { continue };
                        let one = self.is_one(host, flags, first, stored).await?;
                        if let Some(why) = copied_fault(bits, one) {
                            findings
                                .corruption(*times, || (format!("L2 table at {at:#x}, entry {number}"), why.into()));
                        }
                    }
                }
            }
        }
        if first && let Some(l1) = self.l1.first() {
            for (from, length) in tables::pieces(l1.at, l1.bytes(), self.bounds.file) {
                let piece = tables::bytes(self.storage, from, length).await?;
                for (number, bits) in ((from - l1.at) / 8..).zip(tables::numbers(&piece)) {
                    if bits & OFFSET != 0 {
                        let one =
                            stored.get((bits & OFFSET) >> geometry.cluster_bits).await?.map(|refcount| refcount == 1);
                        if let Some(why) = copied_fault(bits, one) {
                            findings.corruption(1, || (format!("{}, entry {number}", l1.name()), why.into()));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether the refcount of the cluster at `host` is one; `None` if it is not known, or the turn of another window.
    pub(super) async fn is_one(
        &self,
        host: u64,
        flags: &Flags,
        first: bool,
        stored: &mut Stored<'_>,
    ) -> Result<Option<bool>, ImageError> {
        let cluster = host >> self.bounds.geometry.cluster_bits;
        if self.bounds.data_file {
            // Clusters of a data file are not shared.
            return Ok(first.then_some(true));
        }
        if cluster <= self.clusters {
            return Ok(flags.is_one(cluster));
        }
        if !first {
            return Ok(None);
        }
        Ok(stored.get(cluster).await?.map(|refcount| refcount == 1))
    }
}

/// The fault of an entry's flag, by whether its cluster's refcount is one.
pub(super) fn copied_fault(bits: u64, one: Option<bool>) -> Option<&'static str> {
    match (bits & COPIED != 0, one?) {
        (true, false) => Some("it may be written in place, it says, and its refcount is not one"),
        (false, true) => Some("it may not be written in place, it says, and its refcount is one"),
        _ => None,
    }
}
