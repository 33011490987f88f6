//! Compressing contents for an image that has compressed clusters.
//!
//! Law: no I/O, and no image: the processor's part can be done by as many threads as there are, each with a
//! [`Compressor`] of its own, and in any order. What comes out is written by
//! [`Disk::write_compressed`](crate::Disk::write_compressed).
//!
//! A cluster is stored compressed only if that saves at least one byte, as in QEMU; others are stored as they are. A
//! cluster of zeros needs no contents. Deflate streams have a window of 4 KiB and no header, or QEMU cannot read them.

use std::fmt;

use flate2::{Compress as Deflate, FlushCompress, Status};
use limosa_page::to_u64;
use limosa_storage::{Buffer, IoVector};

use crate::setters::setters;

/// The logarithm of a deflate stream's window.
const WINDOW_BITS: u8 = 12;

/// How clusters are compressed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Compression {
    /// Deflate, without a header, with a window of 4 KiB.
    #[default]
    Zlib,
    /// Zstandard.
    Zstd,
}

impl Compression {
    /// As `-o compression_type` has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
        }
    }

    /// Returns the highest level; the lowest is 1.
    #[must_use]
    pub const fn highest_level(self) -> u8 {
        match self {
            Self::Zlib => 9,
            Self::Zstd => 22,
        }
    }

    /// Returns the level that is used without a choice: images are not larger than QEMU's.
    #[must_use]
    pub const fn default_level(self) -> u8 {
        match self {
            // The lower levels of zlib-rs miss matches of three bytes: images are 2 to 3 % larger than QEMU's.
            Self::Zlib => 9,
            Self::Zstd => 3,
        }
    }
}

/// How the clusters of an image are compressed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compress {
    /// The level of [`Disk::compressor`](crate::Disk::compressor).
    pub level: Option<u8>,
}

setters!(Compress { level: Option<u8> });

/// Compresses clusters for one image; for one thread.
pub struct Compressor {
    compression: Compression,
    /// Bytes of a cluster.
    cluster: usize,
    encoder: Encoder,
    /// Room for what a method makes of a cluster at worst.
    packed: Vec<u8>,
}

enum Encoder {
    Zlib(Box<Deflate>),
    Zstd(zstd::bulk::Compressor<'static>),
}

/// Whole clusters next to each other, ready to be written. The last one may be padded with zeros, if the disk ends in
/// it.
#[derive(Debug)]
#[must_use = "they are not written yet"]
pub struct CompressedClusters {
    pub(crate) compression: Compression,
    /// Bytes of a cluster.
    pub(crate) cluster: usize,
    /// Bytes of the disk, without padding.
    pub(crate) len: u64,
    pub(crate) clusters: Vec<PackedCluster>,
}

/// One cluster.
#[derive(Debug)]
pub(crate) enum PackedCluster {
    /// All zeros.
    Zero,
    /// Compressed.
    Compressed(Buffer),
    /// A whole cluster as it is: it does not become smaller.
    Plain(Buffer),
}

impl Compressor {
    /// A compressor of clusters of `cluster` bytes, of a level from 1 to the highest; `None`: the level is not one.
    pub(crate) fn new(compression: Compression, cluster: usize, level: Option<u8>) -> Option<Self> {
        let level = level.unwrap_or(compression.default_level());
        if level == 0 || level > compression.highest_level() {
            return None;
        }
        let encoder = match compression {
            Compression::Zlib => {
                let level = flate2::Compression::new(level.into());
                Encoder::Zlib(Box::new(Deflate::new_with_window_bits(level, false, WINDOW_BITS)))
            }
            Compression::Zstd => Encoder::Zstd(zstd::bulk::Compressor::new(level.into()).ok()?),
        };
        Some(Self { compression, cluster, encoder, packed: vec![0; worst(cluster)] })
    }

    /// Returns how it compresses.
    #[must_use]
    pub const fn compression(&self) -> Compression {
        self.compression
    }

    /// Returns the bytes that are compressed together: a cluster. Writes are of whole ones, except at the disk's end.
    #[must_use]
    pub const fn unit(&self) -> usize {
        self.cluster
    }

    /// Compresses contents that begin where a cluster does. If they end within one, zeros are added.
    pub fn compress(&mut self, from: &IoVector) -> CompressedClusters {
        let mut clusters = Vec::with_capacity(from.len().div_ceil(self.cluster));
        let mut at = 0;
        while at < from.len() {
            let end = from.len().min(at + self.cluster);
            clusters.push(self.compress_one(&from.slice(at..end)));
            at = end;
        }
        CompressedClusters { compression: self.compression, cluster: self.cluster, len: to_u64(from.len()), clusters }
    }

    fn compress_one(&mut self, from: &IoVector) -> PackedCluster {
        if from.is_zero() {
            return PackedCluster::Zero;
        }
        // A copy: a guest may change its memory meanwhile.
        let mut bytes = from.to_vec();
        bytes.resize(self.cluster, 0);
        let packed = self.encoder.encode(&bytes, &mut self.packed).filter(|length| *length < self.cluster);
        let packed = packed.and_then(|length| self.packed.get(..length));
        packed.map_or_else(
            || PackedCluster::Plain(Buffer::from_slice(&bytes)),
            |packed| PackedCluster::Compressed(Buffer::from_slice(packed)),
        )
    }
}

/// Bytes that an encoder may need for a cluster, as zlib and zstd say, rounded up.
///
/// A whole cluster is encoded also if it does not become smaller: level 1 of zlib-rs 0.6 panics if its output is full.
const fn worst(cluster: usize) -> usize {
    cluster + cluster / 4 + 1024
}

impl Encoder {
    /// Compresses `bytes` to the beginning of `into`; `None`: they do not fit.
    fn encode(&mut self, bytes: &[u8], into: &mut [u8]) -> Option<usize> {
        match self {
            Self::Zlib(stream) => {
                stream.reset();
                let status = stream.compress(bytes, into, FlushCompress::Finish).ok()?;
                (status == Status::StreamEnd).then(|| usize::try_from(stream.total_out()).ok())?
            }
            Self::Zstd(stream) => stream.compress_to_buffer(bytes, into).ok(),
        }
    }
}

impl fmt::Debug for Compressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { compression, cluster, .. } = self;
        f.debug_struct("Compressor").field("compression", compression).field("cluster", cluster).finish_non_exhaustive()
    }
}

impl CompressedClusters {
    /// Returns the bytes of the disk that they are.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes of contents that a write of them stores.
    #[must_use]
    pub fn stored_len(&self) -> u64 {
        let stored = |cluster: &PackedCluster| match cluster {
            PackedCluster::Zero => 0,
            PackedCluster::Compressed(bytes) | PackedCluster::Plain(bytes) => to_u64(bytes.len()),
        };
        self.clusters.iter().map(stored).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn compressor(compression: Compression, cluster: usize) -> Compressor {
        Compressor::new(compression, cluster, None).unwrap()
    }

    #[test]
    fn levels_are_those_of_the_method() {
        for compression in [Compression::Zlib, Compression::Zstd] {
            let highest = compression.highest_level();
            let made = |level| Compressor::new(compression, 4096, level).is_some();
            assert!(made(None) && made(Some(1)) && made(Some(highest)));
            assert!(!made(Some(0)) && !made(Some(highest + 1)));
        }
    }

    #[test]
    fn clusters_are_zeros_or_smaller_or_as_they_are() {
        let mut noise = 1_u64;
        let mut random = || {
            noise = noise.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            noise.to_be_bytes()[0]
        };
        let mut bytes = vec![0; 4096];
        bytes.resize(8192, 7);
        bytes.extend((0..4096).map(|_| random()));
        bytes.extend([1; 100]);
        for compression in [Compression::Zlib, Compression::Zstd] {
            let packed = compressor(compression, 4096).compress(&Buffer::from_slice(&bytes).into());
            assert_eq!(packed.len(), 3 * 4096 + 100);
            let kinds = packed.clusters.iter().map(|cluster| match cluster {
                PackedCluster::Zero => 'z',
                PackedCluster::Compressed(bytes) if bytes.len() < 4096 => 'c',
                PackedCluster::Plain(bytes) if bytes.len() == 4096 => 'p',
                _ => '?',
            });
            assert_eq!(kinds.collect::<String>(), "zcpc");
        }
    }

    #[test]
    fn noise_of_any_length_is_no_trouble_for_any_level() {
        let mut state = 7_u64;
        let noise: Vec<u8> = (0..2 << 20)
            .map(|_| {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                state.to_be_bytes()[0]
            })
            .collect();
        for compression in [Compression::Zlib, Compression::Zstd] {
            for level in 1..=compression.highest_level().min(12) {
                for bits in [9, 12, 16, 21] {
                    let cluster = 1 << bits;
                    let mut compressor = Compressor::new(compression, cluster, Some(level)).unwrap();
                    // With a part that becomes smaller, so that it ends anywhere around the cluster's length.
                    for repeated in [0, cluster / 64, cluster / 16] {
                        let mut bytes = noise[..cluster].to_vec();
                        bytes[..repeated].fill(1);
                        let packed = compressor.compress(&Buffer::from_slice(&bytes).into());
                        assert!(packed.stored_len() <= cluster as u64, "{compression:?} {level} {bits}");
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn what_is_compressed_comes_out_again(bytes in prop::collection::vec(0_u8..4, 1..3000), zlib: bool, bits in 9_u32..12) {
            let compression = if zlib { Compression::Zlib } else { Compression::Zstd };
            let cluster = 1 << bits;
            let packed = compressor(compression, cluster).compress(&Buffer::from_slice(&bytes).into());
            let mut found = Vec::new();
            for part in &packed.clusters {
                found.extend(match part {
                    PackedCluster::Zero => vec![0; cluster],
                    PackedCluster::Plain(bytes) => bytes.to_vec(),
                    PackedCluster::Compressed(bytes) if zlib => {
                        // As QEMU reads it: a distance beyond this window is an error.
                        let mut stream = flate2::Decompress::new_with_window_bits(false, WINDOW_BITS);
                        let mut out = vec![0; cluster];
                        stream.decompress(&bytes.to_vec(), &mut out, flate2::FlushDecompress::Finish).unwrap();
                        prop_assert_eq!(stream.total_out(), cluster as u64);
                        out
                    }
                    PackedCluster::Compressed(bytes) => zstd::bulk::decompress(&bytes.to_vec(), cluster).unwrap(),
                });
            }
            prop_assert!(found[..bytes.len()] == bytes && found[bytes.len()..].iter().all(|byte| *byte == 0));
        }
    }
}
