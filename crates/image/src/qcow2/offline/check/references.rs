//! How often single clusters are referred to.

use std::collections::{BTreeMap, BTreeSet};

use limosa_storage::Storage;

use super::report::{CheckOptions, Findings};
use super::walk::{Image, What};
use crate::error::ImageError;
use crate::offset::{ClusterCount, HostCluster};
use crate::qcow2::format::header::Header;

/// The references to clusters of an image.
#[derive(Debug, Default)]
pub(in crate::qcow2) struct References {
    counts: BTreeMap<HostCluster, u64>,
    /// The cluster behind the last one that anything refers to.
    pub(in crate::qcow2) end: HostCluster,
}

impl References {
    /// Counts all references to `clusters`, from anything: tables, the header, snapshots. More than two are two.
    pub(in crate::qcow2) async fn count(
        storage: &dyn Storage,
        header: &Header,
        clusters: &BTreeSet<HostCluster>,
    ) -> Result<Self, ImageError> {
        let image = Image::open(storage, header, CheckOptions::default()).await?;
        let mut references = Self::default();
        for window in image.windows() {
            let pass = image.count(&window, What { most: 2, ..What::ALL }, false, &mut Findings::new(0)).await?;
            for cluster in window.clone() {
                if pass.counts.of(cluster)? > 0 {
                    references.end = HostCluster(cluster) + ClusterCount::ONE;
                }
            }
            for cluster in clusters.range(HostCluster(window.start)..HostCluster(window.end)) {
                references.counts.insert(*cluster, pass.counts.of(cluster.0)?);
            }
        }
        Ok(references)
    }

    /// Returns how often a cluster is referred to, if it was counted and is in the file.
    pub(in crate::qcow2) fn of(&self, cluster: HostCluster) -> Option<u64> {
        self.counts.get(&cluster).copied()
    }
}
